"""The driver's numbers as a GPU record; the driver itself is only asked where there is one."""

import ctypes

from replayssm_tune.tuner import device

H200 = {
    "clock_khz": 1_980_000,
    "sm_count": 132,
    "memory_clock_khz": 3_201_000,
    "memory_bus_bits": 6144,
    "l2_bytes": 62_914_560,
    "capability_major": 9,
    "capability_minor": 0,
}


class Driver:
    """The driver's interface with one GPU behind it."""

    def __init__(self, count=1, broken=""):
        self.count = count
        self.broken = broken

    def __getattr__(self, name):
        def call(*arguments):
            if name == self.broken:
                return 999
            if name == "cuDeviceGetCount":
                arguments[0]._obj.value = self.count
            elif name == "cuDeviceGetName":
                arguments[0].value = b"NVIDIA H200"
            elif name == "cuDeviceTotalMem_v2":
                arguments[0]._obj.value = 150_000_000_000
            elif name == "cuDeviceGetAttribute":
                keys = {number: key for key, number in device._ATTRIBUTES.items()}
                assert isinstance(arguments[2], ctypes.c_int)
                arguments[0]._obj.value = H200[keys[arguments[1]]]
            return 0

        return call


def test_the_first_gpu_is_described(monkeypatch):
    monkeypatch.setattr(device, "_driver", Driver)
    gpu = device.probe()
    assert gpu is not None
    assert (gpu.name, gpu.capability, gpu.sm_count) == ("NVIDIA H200", (9, 0), 132)
    assert (gpu.memory_bytes, gpu.memory_gbps, gpu.clock_mhz) == (150_000_000_000, 4916, 1980)


def test_no_driver_no_gpu_or_a_broken_driver_is_none(monkeypatch):
    drivers = [
        lambda: None, lambda: Driver(count=0), lambda: Driver(broken="cuInit"),
        lambda: Driver(broken="cuDeviceGetAttribute"), lambda: Driver(broken="cuDeviceGetName"),
    ]  # fmt: skip
    for driver in drivers:
        monkeypatch.setattr(device, "_driver", driver)
        assert device.probe() is None
