"""The GPU that is present, asked of the driver directly: no torch, no CUDA toolkit, no context."""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Final

from ..codegen.targets import Gpu

_ATTRIBUTES: Final = {
    "clock_khz": 13,
    "sm_count": 16,
    "memory_clock_khz": 36,
    "memory_bus_bits": 37,
    "l2_bytes": 38,
    "capability_major": 75,
    "capability_minor": 76,
}
"""Numbers of ``CUdevice_attribute`` in the driver's interface."""


def probe() -> Gpu | None:
    """The first visible NVIDIA GPU as its driver describes it, or None without driver or GPU.

    ``CUDA_VISIBLE_DEVICES`` counts. A driver that is there but does not work is taken as none.
    """
    driver = _driver()
    if driver is None or driver.cuInit(0) != 0:
        return None
    count = ctypes.c_int()
    if driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value < 1:
        return None
    device = ctypes.c_int()
    if driver.cuDeviceGet(ctypes.byref(device), 0) != 0:
        return None
    name = ctypes.create_string_buffer(256)
    memory = ctypes.c_size_t()
    values = {key: _attribute(driver, device, number) for key, number in _ATTRIBUTES.items()}
    if (
        driver.cuDeviceGetName(name, len(name), device) != 0
        or driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device) != 0
        or None in values.values()
    ):
        return None
    return describe(name.value.decode(errors="replace"), memory.value, {k: v or 0 for k, v in values.items()})


def describe(name: str, memory_bytes: int, values: dict[str, int]) -> Gpu:
    """A GPU record from the driver's numbers (keys of the attribute table above)."""
    transfers_per_s = 2 * values["memory_clock_khz"] * 1000  # double data rate
    return Gpu(
        name=name,
        aliases=(),
        capability=(values["capability_major"], values["capability_minor"]),
        sm_count=values["sm_count"],
        memory_bytes=memory_bytes,
        memory_gbps=transfers_per_s * values["memory_bus_bits"] // 8 // 10**9,
        l2_bytes=values["l2_bytes"],
        clock_mhz=values["clock_khz"] // 1000,
        source="the driver of this machine",
    )


def _driver() -> Any:
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _attribute(driver: Any, device: ctypes.c_int, number: int) -> int | None:
    value = ctypes.c_int()
    failed: int = driver.cuDeviceGetAttribute(ctypes.byref(value), number, device)
    return None if failed else value.value
