"""Known GPUs: what the compiler, the analytical model and the report need to know of each.

Limits of a multiprocessor follow from the compute capability; counts, memory and clocks belong to
the product. Another vendor's GPU is added here, with a branch in :func:`triton_target`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from dataclasses import dataclass
from typing import Final

from ..runtime.errors import ReplayError
from ..runtime.table import GpuInfo

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB


class GpuError(ReplayError, ValueError):
    """A GPU that the database does not know."""


@dataclass(frozen=True)
class Limits:
    """Resources of one multiprocessor, by compute capability."""

    shared_bytes_per_sm: int
    shared_bytes_per_block: int
    """The most a program may ask for (opt-in), bytes."""
    registers_per_sm: int
    """32-bit registers."""
    max_warps_per_sm: int
    source: str


@dataclass(frozen=True)
class TritonTarget:
    """What Triton compiles for: the arguments of its ``GPUTarget``."""

    backend: str
    arch: int
    warp_size: int


@dataclass(frozen=True)
class Gpu:
    """One product.

    Peak rates are the vendor's; the practical roof is measured.
    """

    name: str
    aliases: tuple[str, ...]
    """Other names: those drivers report, those people type."""
    capability: tuple[int, int]
    sm_count: int
    memory_bytes: int
    memory_gbps: int
    """Peak memory bandwidth, 10^9 bytes a second."""
    l2_bytes: int
    clock_mhz: int
    """Highest clock of the multiprocessors; the source says where it is approximate."""
    source: str
    """Where the figures come from."""
    vendor: str = "nvidia"

    @property
    def limits(self) -> Limits:
        """Limits of one multiprocessor."""
        return LIMITS[self.vendor, self.capability]

    @property
    def shared_bytes_per_sm(self) -> int:
        """Shared memory of one multiprocessor, bytes."""
        return self.limits.shared_bytes_per_sm

    @property
    def shared_bytes_per_block(self) -> int:
        """The most shared memory a program may ask for, bytes."""
        return self.limits.shared_bytes_per_block

    @property
    def registers_per_sm(self) -> int:
        """32-bit registers of one multiprocessor."""
        return self.limits.registers_per_sm

    @property
    def max_warps_per_sm(self) -> int:
        """Warps that one multiprocessor holds at a time."""
        return self.limits.max_warps_per_sm

    @property
    def info(self) -> GpuInfo:
        """The part of the facts that tables and look-ups use."""
        names = (field.name for field in dataclasses.fields(GpuInfo))
        return GpuInfo(**{name: getattr(self, name) for name in names})


_GUIDE: Final = (
    "NVIDIA CUDA C++ Programming Guide, technical specifications per compute capability; "
    "the same figures in NVIDIA CCCL, libcudacxx/include/cuda/__device/arch_traits.h"
)


def _limits(shared_kib: int, warps: int) -> Limits:
    # The driver keeps 1 KiB of a block's share for itself.
    return Limits(shared_kib * KIB, (shared_kib - 1) * KIB, 65536, warps, _GUIDE)


LIMITS: Final = {
    ("nvidia", (8, 0)): _limits(164, 64),
    ("nvidia", (8, 9)): _limits(100, 48),
    ("nvidia", (9, 0)): _limits(228, 64),
    ("nvidia", (10, 0)): _limits(228, 64),
    ("nvidia", (10, 3)): _limits(228, 64),
    ("nvidia", (12, 0)): _limits(100, 48),
}
"""By vendor and compute capability."""

_A100 = "NVIDIA A100 Tensor Core GPU datasheet and architecture white paper"
_H100 = "NVIDIA H100 Tensor Core GPU datasheet and Hopper architecture white paper"
_BLACKWELL = "NVIDIA DGX B200 and B300 datasheets for bandwidth (8 TB/s a GPU)"
_DEVICE = "SM count, memory and L2 as the CUDA driver reports them"

GPUS: Final = (
    Gpu(
        "A100 SXM 80GB", ("A100", "A100 80GB", "A100 SXM", "A100-SXM4-80GB", "A100-SXM-80GB"),
        (8, 0), 108, 80 * GIB, 2039, 40 * MIB, 1410, _A100,
    ),
    Gpu(
        "A100 SXM 40GB", ("A100 40GB", "A100-SXM4-40GB", "A100-SXM-40GB"),
        (8, 0), 108, 40 * GIB, 1555, 40 * MIB, 1410, _A100,
    ),
    Gpu(
        "A100 PCIe 80GB", ("A100 PCIe", "A100-PCIE-80GB", "A100 80GB PCIe"),
        (8, 0), 108, 80 * GIB, 1935, 40 * MIB, 1410, _A100,
    ),
    Gpu(
        "A100 PCIe 40GB", ("A100-PCIE-40GB", "A100 40GB PCIe"),
        (8, 0), 108, 40 * GIB, 1555, 40 * MIB, 1410, _A100,
    ),
    Gpu(
        "H100 SXM", ("H100", "H100 80GB HBM3", "H100 SXM5", "H100 SXM 80GB"),
        (9, 0), 132, 81090 * MIB, 3350, 50 * MIB, 1980, f"{_H100}; {_DEVICE}",
    ),
    Gpu(
        "H100 PCIe", ("H100 PCIe 80GB", "H100 80GB PCIe"),
        (9, 0), 114, 80 * GIB, 2000, 50 * MIB, 1755, f"{_H100}; product brief PB-11133",
    ),
    Gpu(
        "H100 NVL", ("H100 NVL 94GB",),
        (9, 0), 132, 99456909312, 3938, 50 * MIB, 1785, f"NVIDIA H100 NVL product brief; {_DEVICE}",
    ),
    Gpu(
        "H200", ("H200 SXM", "H200 141GB HBM3e", "H200 NVL", "H200 SXM 141GB"),
        (9, 0), 132, 143156 * MIB, 4800, 60 * MIB, 1980, f"NVIDIA H200 datasheet; {_DEVICE}",
    ),
    Gpu(
        "H20", ("H20 96GB", "HGX H20"),
        (9, 0), 78, 97285 * MIB, 4000, 60 * MIB, 1980,
        f"NVIDIA HGX H20 figures as vendors publish them (4.0 TB/s, 60 MB L2); {_DEVICE}",
    ),
    Gpu(
        "GH200", ("GH200 96GB", "GH200 480GB", "GH200 Grace Hopper"),
        (9, 0), 132, 96 * GIB, 4000, 60 * MIB, 1980,
        "NVIDIA GH200 Grace Hopper Superchip datasheet (96 GB HBM3, 4 TB/s); L2 of the full GH100",
    ),
    Gpu(
        "L40S", ("L40S 48GB",),
        (8, 9), 142, 45589 * MIB, 864, 96 * MIB, 2520,
        f"NVIDIA L40S datasheet and Ada architecture white paper; {_DEVICE}",
    ),
    Gpu(
        "B200", ("B200 SXM", "B200 180GB", "HGX B200"),
        (10, 0), 148, 182642 * MIB, 8000, 126 * MIB, 1965, f"{_BLACKWELL}; {_DEVICE}; clock approximate",
    ),
    Gpu(
        "B300", ("B300 SXM6 AC", "B300 SXM", "HGX B300"),
        (10, 3), 148, 275000 * MIB, 8000, 126 * MIB, 1920,
        f"{_BLACKWELL}; {_DEVICE}; L2 taken from B200, of the same layout; clock approximate",
    ),
    Gpu(
        "GB200", ("GB200 NVL72", "GB200 Grace Blackwell"),
        (10, 0), 152, 184 * GIB, 8000, 126 * MIB, 2062,
        f"NVIDIA GB200 NVL72 datasheet; {_DEVICE}; L2 taken from B200, of the same layout; clock approximate",
    ),
    Gpu(
        "RTX PRO 6000",
        (
            "RTX PRO 6000 Blackwell", "RTX PRO 6000 Blackwell Server Edition",
            "RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        ),
        (12, 0), 188, 97250 * MIB, 1792, 128 * MIB, 2600,
        f"NVIDIA RTX PRO 6000 Blackwell datasheet (Server Edition: 1597 GB/s); {_DEVICE}; clock approximate",
    ),
)  # fmt: skip
"""All known GPUs."""


def find(name: str) -> Gpu:
    """The GPU called ``name``; case, spaces and the vendor's name do not matter.

    Raises:
        GpuError: No GPU of that name; the message names the known ones, and first what is nearly that name.
    """
    known = _by_name()
    gpu = known.get(_plain(name))
    if gpu is not None:
        return gpu
    # A digit more or less, or words in another order, is a slip; names that only share digits are
    # other products.
    close = [known[match] for match in difflib.get_close_matches(_plain(name), known, n=3, cutoff=0.8)]
    words = sorted(_words(name))
    close += [gpu for gpu in GPUS if words in [sorted(_words(other)) for other in (gpu.name, *gpu.aliases)]]
    names = list(dict.fromkeys(gpu.name for gpu in close))
    guess = f"did you mean {' or '.join(names)}? Known" if names else "known"
    vendors = " and ".join(dict.fromkeys(gpu.vendor.upper() for gpu in GPUS))
    raise GpuError(
        f"GPU '{name}' is not known",
        hint=f"{guess} are {vendors} GPUs only: {', '.join(gpu.name for gpu in GPUS)}",
    )


def match_device(capability: tuple[int, int], sm_count: int, name: str, vendor: str = "nvidia") -> Gpu | None:
    """The GPU that a device is, by capability and SM count; its name only decides between several.

    None for an unknown device, for a slice of one with fewer multiprocessors, and where several
    GPUs agree and the name tells nothing.
    """
    alike = [g for g in GPUS if (g.vendor, g.capability, g.sm_count) == (vendor, capability, sm_count)]
    words = set(_words(name))

    def fit(gpu: Gpu) -> tuple[int, int]:
        names = (set(_words(n)) for n in (gpu.name, *gpu.aliases))
        return max((len(words & n), -len(n - words)) for n in names)

    if len(alike) < 2:
        return alike[0] if alike else None
    best = max(alike, key=fit)
    return best if fit(best)[0] else None


def triton_target(gpu: Gpu) -> TritonTarget:
    """What Triton compiles for to run on ``gpu``."""
    if gpu.vendor == "nvidia":
        major, minor = gpu.capability
        return TritonTarget("cuda", 10 * major + minor, 32)
    raise GpuError(f"{gpu.name}: no Triton backend is named for vendor '{gpu.vendor}'; add it here")


@functools.cache
def _by_name() -> dict[str, Gpu]:
    return {_plain(name): gpu for gpu in GPUS for name in (gpu.name, *gpu.aliases)}


def _words(name: str) -> list[str]:
    return [word for word in re.findall(r"[a-z0-9]+", name.lower()) if word != "nvidia"]


def _plain(name: str) -> str:
    return "".join(_words(name))
