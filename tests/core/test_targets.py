"""Peaks of devices: consistent in themselves, and each with its source."""

from __future__ import annotations

import pytest

from tvm_fuse.core.cpu import CpuFacts
from tvm_fuse.core.errors import UsageError
from tvm_fuse.core.gpu import find_gpu
from tvm_fuse.core.targets import DEVICES, cpu_device, device_of_arch, find_device

#: Float32 lanes of an SM: NVIDIA's CUDA C++ Programming Guide, arithmetic instructions.
LANES = {"sm_75": 64, "sm_80": 64, "sm_86": 128, "sm_89": 128, "sm_90": 128}


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_peaks_are_those_of_the_clock(device):
    """Multiprocessors x lanes x two operations x clock."""
    expected = device.sms * LANES[device.arch] * 2 * device.clock_hz
    assert device.fp32_flops_per_s == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_orders_of_magnitude(device):
    """A slip by a factor of a thousand, or bits for bytes, in any column."""
    find_gpu(device.arch)
    assert 5 < device.ridge_flops_per_byte < 150
    assert 1.5 < device.l2_bytes_per_s / device.dram_bytes_per_s < 50
    assert 1e6 < device.l2_bytes < 1e8
    assert 1e-6 < device.launch_s < 1e-5
    assert "NVIDIA" in device.source
    assert "(20" in device.source


def test_ridge_points():
    ridges = {name: round(device.ridge_flops_per_byte, 1) for name, device in DEVICES.items()}
    assert ridges["t4"] == 25.3  # 8.1e12 / 320e9, by hand
    assert ridges["a100"] == 12.5
    assert ridges["h200"] < ridges["h100"]  # the same chip with faster memory


@pytest.mark.parametrize(
    ("name", "found"), [("a100", "a100"), ("A100", "a100"), ("sm_80", "a100"), ("sm_90a", "h200")]
)
def test_found(name, found):
    assert find_device(name) is DEVICES[found]


@pytest.mark.parametrize("name", ["sm_61", "v100", ""])
def test_not_found(name):
    with pytest.raises(UsageError, match="t4, a100"):
        find_device(name)
    assert device_of_arch(name) is None


def test_cpu():
    """Two cores, 8 lanes, two units, multiply and add, 3 GHz: 192 GFLOP/s."""
    device = cpu_device(CpuFacts("haswell", cores=2, float_lanes=8, has_fma=True, clock_hz=3e9))
    assert device.fp32_flops_per_s == 192e9
    assert (device.sms, device.arch) == (2, "haswell")
    without = cpu_device(CpuFacts("nehalem", cores=2, float_lanes=4, has_fma=False, clock_hz=3e9))
    assert without.fp32_flops_per_s == 48e9
