"""Peaks of devices, for rooflines and for what the cost model says.

Peaks of arithmetic, memory and caches are published ones, from the documents that each row names; nothing
here was measured. A GPU's clock is its boost clock. Three numbers are no vendor's and are assumptions:

- ``launch_s`` of a GPU: 2.5 us, about what a host thread needs to issue one kernel after another, plus the
  gap between two kernels. A CUDA graph needs less, a busy host more.
- ``l2_bytes_per_s`` of a GPU: 32 bytes a clock for each multiprocessor, as in ``cuda_tiles.py``.
- a CPU's memory, and what it costs to call a kernel there (``cpu_device``).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from tvm_fuse.core.cpu import CpuFacts
from tvm_fuse.core.errors import UsageError

__all__ = ["DEVICES", "Device", "cpu_device", "device_of_arch", "find_device"]

_GPU_LAUNCH_S = 2.5e-6
_L2_BYTES_PER_CLOCK = 32
_MIB = 1 << 20

#: Fused multiply-adds a core can begin in one clock: two vector units, as in most server cores since 2014.
_CPU_FMA_UNITS = 2
#: One channel of DDR4-3200 (JEDEC JESD79-4), whatever the machine has.
_CPU_DRAM_BYTES_PER_S = 25.6e9
#: From one operator of the graph executor to the next, its threads woken and joined.
_CPU_LAUNCH_S = 5e-6


@dataclass(frozen=True)
class Device:
    """Peaks of one product.

    Args:
        name: As its vendor sells it.
        arch: Its architecture, such as ``sm_80``; of a CPU its LLVM name.
        sms: Multiprocessors; of a CPU its cores.
        clock_hz: Clock that the peak is reached at.
        fp32_flops_per_s: Float32 operations a second outside tensor cores, a fused multiply-add as two.
        dram_bytes_per_s: Bytes a second to and from device memory.
        l2_bytes: Size of the cache that all multiprocessors share; 0 where it is not known.
        source: Where the published numbers come from.
        launch_s: Seconds that one kernel costs besides its work; an assumption.
        l2_bytes_per_clock: Bytes a multiprocessor gets from the shared cache in a clock; an assumption.
    """

    name: str
    arch: str
    sms: int
    clock_hz: float
    fp32_flops_per_s: float
    dram_bytes_per_s: float
    l2_bytes: int
    source: str
    launch_s: float = _GPU_LAUNCH_S
    l2_bytes_per_clock: int = _L2_BYTES_PER_CLOCK

    @property
    def ridge_flops_per_byte(self) -> float:
        """Below this arithmetic intensity memory is the limit, above it arithmetic."""
        return self.fp32_flops_per_s / self.dram_bytes_per_s

    @property
    def l2_bytes_per_s(self) -> float:
        """Bytes a second from the shared cache to all multiprocessors."""
        return self.sms * self.clock_hz * self.l2_bytes_per_clock


#: Short name -> peaks. The first of an architecture stands for it (``device_of_arch``).
DEVICES = {
    "t4": Device(
        "Tesla T4", "sm_75", 40, 1.59e9, 8.1e12, 320e9, 4 * _MIB,
        "NVIDIA T4 data sheet (2019); SMs, clock, L2: Turing architecture whitepaper (2018)",
    ),
    "a100": Device(
        "A100-SXM4-40GB", "sm_80", 108, 1.41e9, 19.5e12, 1555e9, 40 * _MIB,
        "NVIDIA A100 architecture whitepaper (2020)",
    ),
    "rtx3090": Device(
        "GeForce RTX 3090", "sm_86", 82, 1.695e9, 35.6e12, 936e9, 6 * _MIB,
        "NVIDIA GA102 architecture whitepaper (2020)",
    ),
    "a10": Device(
        "A10", "sm_86", 72, 1.695e9, 31.2e12, 600e9, 6 * _MIB,
        "NVIDIA A10 data sheet (2021); clock from its peak; L2: GA102 architecture whitepaper (2020)",
    ),
    "rtx4090": Device(
        "GeForce RTX 4090", "sm_89", 128, 2.52e9, 82.6e12, 1008e9, 72 * _MIB,
        "NVIDIA Ada architecture whitepaper (2022)",
    ),
    "l4": Device(
        "L4", "sm_89", 58, 2.04e9, 30.3e12, 300e9, 48 * _MIB,
        "NVIDIA L4 data sheet (2023); SMs from its peak; L2: AD104 in the Ada architecture whitepaper (2022)",
    ),
    "h200": Device(
        "H200 SXM", "sm_90", 132, 1.98e9, 66.9e12, 4800e9, 50 * _MIB,
        "NVIDIA H200 data sheet (2023); SMs, clock, L2 of the same chip: H100 architecture whitepaper (2022)",
    ),
    "h100": Device(
        "H100 SXM5", "sm_90", 132, 1.98e9, 66.9e12, 3350e9, 50 * _MIB,
        "NVIDIA H100 data sheet (2023) and architecture whitepaper (2022)",
    ),
}  # fmt: skip


def find_device(name: str) -> Device:
    """A device by its short name, or by its architecture.

    Args:
        name: Such as ``a100`` or ``sm_80``.

    Returns:
        Its peaks.

    Raises:
        UsageError: It is not in the table.
    """
    found = DEVICES.get(name.lower()) or device_of_arch(name)
    if found is None:
        raise UsageError(
            f"no peaks are known for device {name!r}; wanted one of {', '.join(DEVICES)}",
            "name the device whose peaks come closest",
        )
    return found


def device_of_arch(arch: str) -> Device | None:
    """The device that stands for an architecture such as ``sm_80``; None where none is listed."""
    plain = re.sub(r"(?<=\d)[af]$", "", arch)
    return next((device for device in DEVICES.values() if device.arch == plain), None)


def cpu_device(facts: CpuFacts) -> Device:
    """Peaks of a CPU.

    Arithmetic is cores x lanes x units x 2 x clock, from what the kernel tells of the machine and the
    assumption of two multiply-add units a core; memory and the cost of a call are assumptions.

    Args:
        facts: What the kernel tells of it.

    Returns:
        Its peaks.
    """
    per_clock = facts.float_lanes * _CPU_FMA_UNITS * (2 if facts.has_fma else 1)
    return Device(
        name=f"{facts.cores} cores of {facts.name}",
        arch=facts.name,
        sms=facts.cores,
        clock_hz=facts.clock_hz,
        fp32_flops_per_s=math.prod((facts.cores, per_clock, facts.clock_hz)),
        dram_bytes_per_s=_CPU_DRAM_BYTES_PER_S,
        l2_bytes=0,
        source="cores, flags and clock of /proc/cpuinfo; units, memory and calls are assumptions",
        launch_s=_CPU_LAUNCH_S,
    )
