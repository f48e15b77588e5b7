"""What a user asks for, resolved: on which GPU, for which specs and batches, within which budget."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..codegen import targets
from ..codegen.targets import Gpu
from ..runtime import conv_tiles
from ..runtime.conv_tiles import ConvSpec
from ..runtime.errors import SpecError
from ..runtime.lookup import batch_grid
from ..runtime.spec import DTYPE_BYTES, Spec
from . import device
from .errors import GpuMismatchError, NoGpuError, UsageError
from .models import DEFAULT_TENSOR_PARALLEL, Model, conv_channels, specs, split
from .shapes import shape_for

MAX_EFFECTIVE_BATCH: Final = 65536
DEFAULT_STATE_DTYPES: Final = ("fp32", "bf16")
MEMORY_SHARE: Final = 0.8
"""Share of a GPU's memory that state and rings may take: weights of the benchmark's copies need room."""
LAYER_BUFFERS: Final = 2
"""Layer buffers that must fit at once, so that a launch never finds its own state in the L2."""


@dataclass(frozen=True)
class Target:
    """The GPU to work for, and whether it is here to be measured on."""

    gpu: Gpu
    measured: bool
    note: str
    """One sentence for the user: what was found and what follows from it."""


@dataclass(frozen=True)
class Work:
    """One spec with the effective batches (sequences x heads on one GPU) to tune it for."""

    spec: Spec
    effective_batches: tuple[int, ...]
    layers: tuple[str, ...]
    """Whose layer this is, e.g. ``nemotron-3-nano-4b tp1``."""

    @property
    def specs(self) -> tuple[Spec, ...]:
        """See :func:`timed_specs`."""
        return timed_specs(self.spec)


CONV_BATCHES: Final = (32, 128, 512, 2048, 8192)
"""Effective batches of the convolution tuned where none is asked for. The first one's row serves down
to a sequence of a layer split over eight GPUs, which touches too little for a cold measurement."""
CONV_SPACING: Final = 4
"""Of those that are asked for, factor between two that are tuned: tiles are few, and change slowly."""


@dataclass(frozen=True)
class ConvWork:
    """A convolution with the shapes to tune it for, in ascending effective batches."""

    spec: ConvSpec
    shapes: tuple[tuple[int, int], ...]
    """Sequences and channels on one GPU."""


def timed_specs(spec: Spec) -> tuple[Spec, ...]:
    """What is timed for ``spec``: itself, and of a step the baseline without a ring it is compared with.

    Of what materialises states there is none: engines without a ring have nothing to fold.
    """
    return (spec,) if spec.op == "materialize" else (spec, spec.native)


def curves(work: Iterable[Work]) -> dict[Spec, tuple[int, ...]]:
    """Effective batches, ascending, of everything that is timed for ``work``.

    Specs whose rings alone differ share the baseline without one, at the batches of all of them.
    """
    found: dict[Spec, tuple[int, ...]] = {}
    for item in work:
        for spec in item.specs:
            found[spec] = tuple(sorted({*found.get(spec, ()), *item.effective_batches}))
    return found


@dataclass(frozen=True)
class Budget:
    """A bound on a tune; None leaves a side unbounded."""

    minutes: float | None = None
    trials: int | None = None

    def until_s(self, began_s: float) -> float:
        """When its time is over for work that began at ``began_s``, both monotonic; inf where it has none."""
        return math.inf if self.minutes is None else began_s + 60 * self.minutes

    @classmethod
    def parse(cls, text: str) -> Budget:
        """A budget from ``10``, ``10m``, ``90s``, ``1.5h`` (a bare number is minutes) or ``500trials``.

        Raises:
            UsageError: Not such a text, or not above zero.
        """
        match = _BUDGET.fullmatch(text.strip().lower())
        value = float(match["value"]) if match else 0.0
        unit = (match["unit"] or "m")[0] if match else ""
        if not 0 < value < math.inf or (unit == "t" and not value.is_integer()):
            raise UsageError(
                f"'{text}' is not a budget",
                where="--budget",
                hint="give minutes (10), a time (90s, 10m, 1.5h) or a number of trials (500t)",
            )
        if unit == "t":
            return cls(trials=int(value))
        return cls(minutes=value * {"s": 1 / 60, "m": 1.0, "h": 60.0}[unit])


_BUDGET = re.compile(r"(?P<value>\d+(\.\d+)?)\s*(?P<unit>s|sec|m|min|minutes|h|hours|t|trials)?")


@dataclass(frozen=True)
class Job:
    """All that the pipeline needs to know of a request."""

    target: Target
    work: tuple[Work, ...]
    budget: Budget
    store: Path | str
    """A journal file, or the URL of a database."""
    output: Path
    notes: tuple[str, ...] = ()
    """What the user should know before anything runs, e.g. that groups are replicated."""
    batch_invariant: bool = False
    """All batches of a spec are to be served by plans of one numerics class."""
    convolutions: tuple[ConvWork, ...] = ()
    """Of the layers whose specs are in ``work``; timed or left to the rule."""
    partial: bool = False
    """Batches or splits were asked for: the layers' cells are not all that a tune of them has."""


def resolve_target(
    claimed: str | None, static: bool, probe: Callable[[], Gpu | None] | None = None
) -> Target:
    """The GPU to work for. ``claimed`` is checked against the one that is present.

    Args:
        claimed: ``--gpu``: a name of the database, or None to take the GPU that is found.
        static: Measure nothing, even if the GPU is here.
        probe: Asks the machine for its GPU; None asks the driver.

    Raises:
        UsageError: Nobody knows the claimed GPU.
        GpuMismatchError: Another GPU is present.
        NoGpuError: None is claimed and none is present.
    """
    try:
        wanted = None if claimed is None else targets.find(claimed)
    except targets.GpuError as error:
        raise UsageError(error.what, where="--gpu", hint=error.hint) from error
    present = (probe or device.probe)()
    if present is None:
        if wanted is None:
            raise NoGpuError(
                "no GPU found on this machine",
                where="--gpu",
                hint="name the GPU to work for, e.g. --gpu H100: without one the result is static",
            )
        reason = "as asked" if static else "no GPU here"
        return Target(wanted, False, f"static mode for {wanted.name} ({reason}): nothing is timed")
    here = targets.match_device(present.capability, present.sm_count, present.name) or present
    if wanted is not None and not _is_claimed(claimed or "", wanted, here):
        if static:
            return Target(
                wanted, False, f"static mode for {wanted.name} (a {here.name} is here): nothing is timed"
            )
        raise GpuMismatchError(
            f"--gpu claims {wanted.name}, but this machine has {present.name} "
            f"(compute capability {present.capability[0]}.{present.capability[1]}, {present.sm_count} SMs)",
            where="--gpu",
            hint=f"leave --gpu out to tune for {here.name}, "
            f"or add --static to analyse {wanted.name} without measuring",
        )
    if (here.vendor, here.capability) not in targets.LIMITS:
        raise UsageError(
            f"compute capability {here.capability[0]}.{here.capability[1]} of {here.name} is not supported",
            where="the GPU of this machine",
            hint="name a supported GPU with --gpu and add --static",
        )
    if static:
        return Target(here, False, f"static mode for {here.name} (as asked): nothing is timed")
    return Target(here, True, f"measuring on {present.name}")


def _is_claimed(claimed: str, wanted: Gpu, here: Gpu) -> bool:
    """Whether the GPU here is the one claimed; a family name (``H100``) covers its members (NVL)."""
    if here.name == wanted.name:
        return True
    return set(re.findall(r"[a-z0-9]+", claimed.lower())) <= set(re.findall(r"[a-z0-9]+", here.name.lower()))


def layer_bytes(spec: Spec, effective_batch: int) -> int:
    """Bytes of states and ring that one layer buffer of ``effective_batch`` heads takes.

    The native baseline keeps a state for every token of a step, replay one and a ring. Where states are
    materialised every row has a second one, which it writes.
    """
    states = 2 if spec.op == "materialize" else spec.num_tokens if spec.is_native else 1
    ring = DTYPE_BYTES[spec.ring_dtype] * spec.head_dim + 4
    shared = DTYPE_BYTES[spec.ring_dtype] * spec.state_size
    per_group = -(-effective_batch // spec.heads_per_group)
    tokens = effective_batch * ring + per_group * shared
    return states * spec.state_bytes(effective_batch) + spec.ring_capacity * tokens


def _largest_layer_bytes(spec: Spec, effective_batch: int) -> int:
    """Bytes of a layer buffer that measuring a cell takes: of the spec or of its baseline."""
    return max(layer_bytes(one, effective_batch) for one in timed_specs(spec))


def fits(spec: Spec, effective_batch: int, memory_bytes: int) -> bool:
    """Whether an effective batch can be measured within a GPU's memory."""
    return LAYER_BUFFERS * _largest_layer_bytes(spec, effective_batch) <= MEMORY_SHARE * memory_bytes


def token_dtypes(activations: Sequence[str], rings: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Dtypes of activations and of the ring that goes with them: all pairs of what is asked that can be.

    Args:
        activations: Empty takes bf16.
        rings: A ring has the dtype of the activations or fp32; empty takes the first alone.

    Raises:
        UsageError: A dtype goes with none of the other kind.
    """
    activations = tuple(activations) or (Spec.activation_dtype,)
    pairs = tuple((x, ring) for x in activations for ring in rings or (x,) if ring in (x, "fp32"))
    hint = "a ring has the dtype of the activations, or fp32; without --ring-dtype it has the first"
    for ring in rings:
        if all(ring != other for _, other in pairs):
            what = f"rings of {ring} do not go with activations of {' or '.join(activations)}"
            raise UsageError(what, where="--ring-dtype", hint=hint)
    for activation in activations:
        if all(activation != other for other, _ in pairs):
            what = f"activations of {activation} do not go with rings of {' or '.join(rings)}"
            raise UsageError(what, where="--activation-dtype", hint=hint)
    return pairs


def resolve_work(
    models: Sequence[Model],
    gpu: Gpu,
    *,
    tensor_parallel: Sequence[int] = (),
    activation_dtypes: Sequence[str] = (),
    state_dtypes: Sequence[str] = (),
    ring_dtypes: Sequence[str] = (),
    window: int = 16,
    drafts: Sequence[int] = (0,),
    batches: Sequence[int] = (),
) -> tuple[tuple[Work, ...], tuple[str, ...]]:
    """Specs with their effective batches, each spec once, and notes for the user.

    Args:
        models: Layers at tensor parallel 1.
        gpu: Bounds the batches by its memory.
        tensor_parallel: Splits; empty takes the usual ones that each model can have.
        activation_dtypes: Empty takes bf16.
        state_dtypes: Empty takes fp32, bf16 and the model's own.
        ring_dtypes: See :func:`token_dtypes`.
        window: Ring tokens before a flush.
        drafts: Draft tokens per step, one spec each.
        batches: Sequences per GPU; empty takes the canonical grid, from one sequence of the most
            split layer to :data:`MAX_EFFECTIVE_BATCH`, each point as near as whole groups of heads come.

    Raises:
        SpecError: A split or shape that no kernel can serve.
        UsageError: A batch that does not fit in the GPU's memory, or as :func:`token_dtypes`.
    """
    pairs = token_dtypes(activation_dtypes, ring_dtypes)
    heads_of: dict[Spec, set[int]] = {}
    layers_of: dict[Spec, list[str]] = {}
    notes: list[str] = []
    for model in models:
        for gpus in tensor_parallel or possible_splits(model):
            note = split(model, gpus).note
            if note and note not in notes:
                notes.append(note)
            dtypes = state_dtypes or dict.fromkeys((*DEFAULT_STATE_DTYPES, model.state_dtype))
            for count in drafts:
                for spec, heads in specs(model, (gpus,), dtypes, window, count, pairs):
                    heads_of.setdefault(spec, set()).add(heads)
                    layer = f"{model.name} tp{gpus}"
                    names = layers_of.setdefault(spec, [])
                    if layer not in names:
                        names.append(layer)
    return tuple(
        Work(spec, _effective_batches(spec, heads, batches, gpu), tuple(layers_of[spec]))
        for spec, heads in heads_of.items()
    ), tuple(notes)


def resolve_convolutions(
    models: Sequence[Model],
    *,
    tensor_parallel: Sequence[int] = (),
    activation_dtypes: Sequence[str] = (),
    drafts: Sequence[int] = (0,),
    batches: Sequence[int] = (),
) -> tuple[ConvWork, ...]:
    """The convolutions in front of the models' layers, each once; rings and weights are as the activations.

    What models share is tuned in the channels of the first of them. Widths that no kernel serves are left
    out. Arguments are those of :func:`resolve_work`.

    Raises:
        SpecError: A split that a model cannot have.
    """
    found: dict[ConvSpec, ConvWork] = {}
    for model in models:
        if model.conv_width not in conv_tiles.WIDTHS:
            continue
        splits = tensor_parallel or possible_splits(model)
        channels = sorted({conv_channels(model, gpus) for gpus in splits})
        for dtype, count in itertools.product(activation_dtypes or (Spec.activation_dtype,), drafts):
            spec = ConvSpec(model.conv_width, 1 + count, *(dtype,) * 3)
            if spec not in found:
                found[spec] = ConvWork(spec, _conv_shapes(channels, batches))
    return tuple(found.values())


def _conv_shapes(channels: Sequence[int], batches: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Sequences and channels to tune at; ``channels``, of every split, ascend."""
    shapes = [(rows, count) for rows in batches for count in channels]
    for target in () if batches else CONV_BATCHES:
        # In the least split layer that it takes a sequence of.
        blocks = {count: conv_tiles.effective_batch(1, count) for count in channels}
        count = max((count for count in channels if blocks[count] <= target), default=channels[0])
        shapes.append((max(1, round(target / blocks[count])), count))
    kept: dict[int, tuple[int, int]] = {}
    by_batch = {conv_tiles.effective_batch(*shape): shape for shape in shapes}
    for batch in sorted(by_batch):
        if not kept or batch >= CONV_SPACING * max(kept) or not batches or batch == max(by_batch):
            kept[batch] = by_batch[batch]
    return tuple(kept.values())


def materializing(work: Sequence[Work], gpu: Gpu) -> tuple[Work, ...]:
    """What materialises states of the rings of ``work``: specs of equal rings share it, each is named once.

    Its batches are those of all of them, as far as their second states fit in the memory of ``gpu``.
    """
    shared: dict[Spec, Work] = {}
    for item in work:
        spec = item.spec.materialize
        held = shared.get(spec, Work(spec, (), ()))
        fitting = (b for b in item.effective_batches if fits(spec, b, gpu.memory_bytes))
        shared[spec] = Work(
            spec,
            tuple(sorted({*held.effective_batches, *fitting})),
            tuple(dict.fromkeys((*held.layers, *item.layers))),
        )
    return tuple(item for item in shared.values() if item.effective_batches)


def possible_splits(model: Model) -> tuple[int, ...]:
    """The usual splits without those the model cannot have; one GPU must always do.

    Raises:
        SpecError: It does not.
    """
    split(model, 1)
    possible = []
    for gpus in DEFAULT_TENSOR_PARALLEL:
        try:
            split(model, gpus)
        except SpecError:
            continue
        possible.append(gpus)
    return tuple(possible)


def _effective_batches(spec: Spec, heads: set[int], batches: Sequence[int], gpu: Gpu) -> tuple[int, ...]:
    if not batches:
        grid = batch_grid(min(heads), MAX_EFFECTIVE_BATCH)
        whole = sorted({shape_for(spec, point).effective_batch for point in grid})
        return tuple(point for point in whole if fits(spec, point, gpu.memory_bytes))
    asked = sorted({sequences * count for sequences in batches for count in heads})
    for point in asked:
        if not fits(spec, point, gpu.memory_bytes):
            layer = _largest_layer_bytes(spec, point) / 2**30
            raise UsageError(
                f"effective batch {point} takes {layer:.1f} GiB of state a layer; "
                f"{LAYER_BUFFERS} such layers do not fit in the {gpu.memory_bytes / 2**30:.0f} GiB "
                f"of {gpu.name}",
                where="--batch",
                hint="ask for a smaller batch, a 16-bit state or ring, or a higher --tp"
                + (", or fewer --drafts: the baseline keeps a state for each" if spec.verifies else ""),
            )
    return tuple(asked)
