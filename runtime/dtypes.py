"""Short dtype names, as in specs and kernel signatures, and the torch dtypes they stand for."""

from __future__ import annotations

from typing import Final

import torch

TORCH_DTYPES: Final = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "i32": torch.int32,
    "i64": torch.int64,
}
"""torch dtype by short name."""

DTYPE_NAMES: Final = {dtype: name for name, dtype in TORCH_DTYPES.items()}
"""Short name by torch dtype."""
