"""The public ops of layers, with what holds for all of them; a family's are in a module of its name.

Ops have no gradient. Tensors that require one are refused under grad mode; decode under
``torch.no_grad()`` or ``torch.inference_mode()``.

Under ``torch.compile`` pass caches as separate tensors, strided as they like, or as views of disjoint
regions of one pool. Views of different dtypes that interleave in one byte pool are refused there by
torch; eager calls and CUDA graphs take them.

Row contract: ``slot_index`` names each row's slot, -1 (any negative number) or ``null_slot`` marks
padding. No slot may occur twice among the live rows of one call: each would overwrite what the other wrote.
A slot that does, and slots, cursors and ``query_start`` out of range raise ArgumentError on a CPU, before
anything is written; on a GPU they are not looked at, and the slot is left undefined. A step must not be run
twice on the same slots without the ``commit`` in between. A row that is given no token by ``query_start`` is
padding too, whatever slot it names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from .caches import Cache, Snapshot, bytes_per_slot, make_cache, ring_capacity
from .cursors import commit, drained, reset
from .gdn import gdn_materialize, gdn_native_step, gdn_native_verify, gdn_step
from .mamba2 import mamba2_materialize, mamba2_native_step, mamba2_native_verify, mamba2_step
from .operators import NAMESPACE, cuda_index, late
from .spec import Spec

__all__ = [
    "NAMESPACE",
    "Cache",
    "Snapshot",
    "bytes_per_slot",
    "commit",
    "drained",
    "gdn_materialize",
    "gdn_native_step",
    "gdn_native_verify",
    "gdn_step",
    "make_cache",
    "mamba2_materialize",
    "mamba2_native_step",
    "mamba2_native_verify",
    "mamba2_step",
    "reset",
    "ring_capacity",
    "warmup",
]

_compile_ahead: Final = late("compile_ahead")


def warmup(
    spec: Spec,
    effective_batches: Sequence[int],
    device: torch.device | str = "cuda",
    index_dtype: torch.dtype = torch.int32,
    aligned: bool = True,
) -> int:
    """Compile everything that calls of ``spec`` and the cursor ops will need, ahead of a capture.

    Args:
        spec: Of steps, of the native ops (``spec.native``) or of what materialises states
            (``spec.materialize``). One of rows of several tokens serves calls with and without
            ``query_start``.
        effective_batches: Sequences x heads of the captures.
        device: CUDA device.
        index_dtype: dtype of slot_index and of accepted counts; of source, destination and prefix.
        aligned: Pointers and strides of the captures are multiples of 16 bytes. Call once more with
            False for a pool where they are not.

    Returns:
        Number of plans compiled (or loaded from Triton's cache).

    Raises:
        DispatchError: Strict mode, and no table has a row.
        CompileError: A kernel does not compile.
        ToolchainError: There is no CUDA device, no triton or no C compiler.
    """
    compiled: int = _compile_ahead(spec, effective_batches, cuda_index(device), index_dtype, aligned)
    return compiled
