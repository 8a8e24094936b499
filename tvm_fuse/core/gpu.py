"""NVIDIA GPUs as numbers: the limits of an architecture, the occupancy of a kernel.

Limits: CUDA C++ Programming Guide 12.9, "Technical Specifications per Compute Capability"; lanes: its
table "Throughput of Native Arithmetic Instructions". What the guide leaves out (units of allocation,
shared memory that the driver reserves in each block) and the rule itself: NVIDIA's occupancy calculator,
``cuda_occupancy.h`` of CUDA 12.9. Its limit by named barriers is left out: it binds only kernels with
three or more, and TVM's use one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from tvm_fuse.core.errors import UsageError

__all__ = [
    "GPUS",
    "WARP_THREADS",
    "GpuSpec",
    "Limit",
    "Occupancy",
    "blocks_per_sm",
    "find_gpu",
]

#: Threads that execute together, on every architecture.
WARP_THREADS = 32

#: Each multiprocessor (SM) has this many schedulers; a warp takes registers of one of them.
_SM_PARTS = 4

#: More blocks than any SM holds.
_UNLIMITED = 1 << 30

_KIB = 1024


@dataclass(frozen=True)
class GpuSpec:
    """Limits of one architecture.

    Args:
        arch: Such as ``sm_80``.
        threads_per_sm: Most threads resident on an SM.
        blocks_per_sm: Most blocks resident on an SM.
        smem_per_sm_bytes: Shared memory of an SM.
        smem_per_block_bytes: Most shared memory of a block, static and dynamic.
        smem_reserved_bytes: What the driver adds to each block's shared memory.
        smem_unit_bytes: Shared memory is given out in multiples of this.
        threads_per_block: Most threads of a block.
        registers_per_sm: 32-bit registers of an SM.
        registers_per_block: Most registers of a block.
        registers_per_thread: Most registers of a thread.
        registers_unit: A warp gets registers in multiples of this.
        fp32_lanes: Float32 multiply-adds that an SM begins in a clock.
        schedulers: Warp instructions that an SM issues in a clock.
    """

    arch: str
    threads_per_sm: int
    blocks_per_sm: int
    smem_per_sm_bytes: int
    smem_per_block_bytes: int
    smem_reserved_bytes: int
    smem_unit_bytes: int
    threads_per_block: int = 1024
    registers_per_sm: int = 64 * 1024
    registers_per_block: int = 64 * 1024
    registers_per_thread: int = 255
    registers_unit: int = 256
    fp32_lanes: int = 128
    schedulers: int = _SM_PARTS

    @property
    def warps_per_sm(self) -> int:
        """Most warps resident on an SM."""
        return self.threads_per_sm // WARP_THREADS


def _volta(arch: str, threads: int, blocks: int, smem_kib: int) -> GpuSpec:
    """Compute capability 7.x: a block may have all shared memory, and nothing is reserved."""
    return GpuSpec(arch, threads, blocks, smem_kib * _KIB, smem_kib * _KIB, 0, 256, fp32_lanes=64)


def _ampere(arch: str, threads: int, blocks: int, smem_kib: int, lanes: int = 128) -> GpuSpec:
    """Compute capability 8.0 and newer: the driver reserves 1 KiB in each block."""
    smem_bytes = smem_kib * _KIB
    return GpuSpec(arch, threads, blocks, smem_bytes, smem_bytes - _KIB, _KIB, 128, fp32_lanes=lanes)


#: Architecture -> its limits.
GPUS = {
    spec.arch: spec
    for spec in (
        _volta("sm_70", 2048, 32, 96),
        _volta("sm_75", 1024, 16, 64),
        _ampere("sm_80", 2048, 32, 164, lanes=64),
        _ampere("sm_86", 1536, 16, 100),
        _ampere("sm_87", 1536, 16, 164),
        _ampere("sm_89", 1536, 24, 100),
        _ampere("sm_90", 2048, 32, 228),
        _ampere("sm_100", 2048, 32, 228),
        _ampere("sm_120", 1536, 24, 100),
    )
}


def find_gpu(arch: str) -> GpuSpec:
    """The limits of an architecture.

    Args:
        arch: Such as ``sm_80``; the suffix of ``sm_90a`` does not change limits.

    Returns:
        Its limits.

    Raises:
        UsageError: It is not in the table.
    """
    found = GPUS.get(re.sub(r"[af]$", "", arch))
    if found is None:
        raise UsageError(
            f"no limits are known for GPU architecture {arch!r}; wanted one of {', '.join(GPUS)}",
            "name the architecture of the GPU, as in --target 'cuda -arch=sm_80'",
        )
    return found


class Limit(str, Enum):
    """What keeps further blocks off an SM."""

    THREADS = "threads"
    REGISTERS = "registers"
    SHARED_MEMORY = "shared memory"
    BLOCKS = "blocks"


@dataclass(frozen=True)
class Occupancy:
    """How many blocks of a kernel fit on one SM.

    Args:
        blocks_per_sm: Resident blocks; 0: the kernel cannot be launched.
        occupancy_ratio: Resident warps over the most that an SM holds, 0 to 1.
        limited_by: Every limit that allows no more blocks.
    """

    blocks_per_sm: int
    occupancy_ratio: float
    limited_by: tuple[Limit, ...]


def blocks_per_sm(gpu: GpuSpec, threads: int, registers: int, smem_bytes: int) -> Occupancy:
    """The occupancy of a kernel.

    Args:
        gpu: Where it runs.
        threads: Threads of a block, 1 or more.
        registers: Registers of a thread.
        smem_bytes: Shared memory of a block, static and dynamic, without what the driver reserves.

    Returns:
        Resident blocks, and what limits them.

    Raises:
        ValueError: A number is out of its domain.
    """
    if threads < 1 or registers < 0 or smem_bytes < 0:
        raise ValueError(f"impossible kernel: {threads=}, {registers=}, {smem_bytes=}")
    warps = _divide_up(threads, WARP_THREADS)
    limits = {
        Limit.THREADS: gpu.warps_per_sm // warps if threads <= gpu.threads_per_block else 0,
        Limit.REGISTERS: _blocks_by_registers(gpu, warps, registers),
        Limit.SHARED_MEMORY: _blocks_by_smem(gpu, smem_bytes),
        Limit.BLOCKS: gpu.blocks_per_sm,
    }
    blocks = min(limits.values())
    binding = tuple(limit for limit, most in limits.items() if most == blocks)
    return Occupancy(blocks, blocks * warps / gpu.warps_per_sm, binding)


def _blocks_by_registers(gpu: GpuSpec, warps: int, registers: int) -> int:
    per_warp = _round_up(registers * WARP_THREADS, gpu.registers_unit)
    if (
        registers > gpu.registers_per_thread
        or per_warp * _round_up(warps, _SM_PARTS) > gpu.registers_per_block
    ):
        return 0
    if per_warp == 0:
        return _UNLIMITED
    warps_per_part = gpu.registers_per_sm // _SM_PARTS // per_warp
    return warps_per_part * _SM_PARTS // warps


def _blocks_by_smem(gpu: GpuSpec, smem_bytes: int) -> int:
    if smem_bytes > gpu.smem_per_block_bytes:
        return 0
    allocated_bytes = _round_up(smem_bytes + gpu.smem_reserved_bytes, gpu.smem_unit_bytes)
    return gpu.smem_per_sm_bytes // allocated_bytes if allocated_bytes else _UNLIMITED


def _divide_up(value: int, unit: int) -> int:
    return -(-value // unit)


def _round_up(value: int, unit: int) -> int:
    return _divide_up(value, unit) * unit
