"""The GPU database: every product of the product list, found by any of its names."""

from __future__ import annotations

import dataclasses

import pytest

from replayssm_tune.codegen.targets import GPUS, LIMITS, GpuError, find, match_device, triton_target
from replayssm_tune.runtime.errors import ReplayError

NAMES = ["A100", "H100", "H100 PCIe", "H100 NVL", "H200", "H20", "GH200", "L40S", "B200", "B300", "GB200"]


@pytest.mark.parametrize("name", [*NAMES, "RTX PRO 6000"])
def test_known_gpus(name):
    gpu = find(name)
    assert find(f"NVIDIA {name.lower()}") is gpu
    assert find(f" {name.replace(' ', '-')} ") is gpu


def test_names_are_unique():
    plain = [find(name) for gpu in GPUS for name in (gpu.name, *gpu.aliases)]
    owners = [gpu for gpu in GPUS for _ in (gpu.name, *gpu.aliases)]
    assert plain == owners
    assert find("H100").name == "H100 SXM"


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_facts_are_complete_and_plausible(gpu):
    assert gpu.source
    assert gpu.limits.source
    assert 1 << 30 < gpu.memory_bytes < 300 << 30
    assert 800 <= gpu.memory_gbps <= 8000
    assert 32 << 20 <= gpu.l2_bytes <= 128 << 20
    assert 1000 < gpu.clock_mhz < 3000
    assert gpu.shared_bytes_per_block < gpu.shared_bytes_per_sm
    assert gpu.registers_per_sm == 65536
    assert gpu.max_warps_per_sm in (48, 64)
    assert gpu.info.sm_count == gpu.sm_count


def test_shared_memory_by_capability():
    kib = {
        c: (v.shared_bytes_per_sm // 1024, v.shared_bytes_per_block // 1024) for (_, c), v in LIMITS.items()
    }
    assert kib[8, 0] == (164, 163)
    assert kib[9, 0] == kib[10, 0] == kib[10, 3] == (228, 227)
    assert kib[8, 9] == kib[12, 0] == (100, 99)


@pytest.mark.parametrize(
    ("name", "proposed"),
    [("H1000", "H100 SXM"), ("H10", "H100"), ("H100 SMX", "H100 SXM"), ("RTX 6000 PRO", "RTX PRO 6000")],
)
def test_an_unknown_name_gets_a_proposal(name, proposed):
    with pytest.raises(GpuError, match=f"GPU '{name}' is not known; did you mean .*{proposed}"):
        find(name)


@pytest.mark.parametrize(
    "name",
    [
        "xyzzy", "MI300X", "AMD Instinct MI325X", "MI200", "gfx942", "Radeon PRO W7900", "Gaudi 3",
        "Arc B580", "Intel Max 1100", "BR100", "V100", "T4", "",
    ],
)  # fmt: skip
def test_names_that_are_no_slip_get_the_list_and_no_guess(name):
    with pytest.raises(ReplayError) as error:
        find(name)
    assert error.value.what == f"GPU '{name}' is not known"
    assert error.value.hint.startswith("known are NVIDIA GPUs only: A100 SXM 80GB, ")
    assert all(gpu.name in error.value.hint for gpu in GPUS)


@pytest.mark.parametrize(
    ("capability", "sm_count", "name", "expected"),
    [
        ((9, 0), 132, "NVIDIA H100 80GB HBM3", "H100 SXM"),
        ((9, 0), 132, "NVIDIA H100 NVL", "H100 NVL"),
        ((9, 0), 132, "NVIDIA H200", "H200"),
        ((9, 0), 132, "NVIDIA H200 NVL", "H200"),
        ((9, 0), 132, "GRID H200-141C", "H200"),
        ((9, 0), 132, "NVIDIA GH200 480GB", "GH200"),
        ((9, 0), 114, "NVIDIA H100 PCIe", "H100 PCIe"),
        ((9, 0), 114, "OEM part", "H100 PCIe"),
        ((9, 0), 78, "NVIDIA H20", "H20"),
        ((8, 0), 108, "NVIDIA A100-SXM4-80GB", "A100 SXM 80GB"),
        ((8, 0), 108, "NVIDIA A100-SXM4-40GB", "A100 SXM 40GB"),
        ((8, 0), 108, "NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ((10, 3), 148, "NVIDIA B300 SXM6 AC", "B300"),
        ((12, 0), 188, "NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ((9, 0), 132, "OEM part", None),
        ((9, 0), 60, "NVIDIA H200 MIG 3g.71gb", None),
        ((7, 0), 80, "Tesla V100", None),
    ],
)
def test_match_device(capability, sm_count, name, expected):
    gpu = match_device(capability, sm_count, name)
    assert (gpu and gpu.name) == expected


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_every_gpu_matches_itself(gpu):
    for name in (gpu.name, *gpu.aliases):
        assert match_device(gpu.capability, gpu.sm_count, f"NVIDIA {name}") is gpu


def test_triton_targets():
    arch = {gpu.name: triton_target(gpu).arch for gpu in GPUS}
    assert (arch["A100 SXM 80GB"], arch["L40S"], arch["H200"]) == (80, 89, 90)
    assert (arch["B200"], arch["B300"], arch["RTX PRO 6000"]) == (100, 103, 120)
    assert dataclasses.astuple(triton_target(find("H100"))) == ("cuda", 90, 32)


def test_another_vendor_is_named_as_the_place_to_add():
    with pytest.raises(GpuError, match="vendor 'acme'; add it here"):
        triton_target(dataclasses.replace(find("H100"), vendor="acme"))
