"""How long a CUDA kernel takes, by arithmetic alone: what its code does, over what a card can do.

A ``KernelProfile`` counts what one thread of a kernel does and what its warps ask of memory; ``predict_s``
turns it into seconds. A multiprocessor has four pipes (multiply-adds, shared memory, the first cache,
instruction issue); the slowest one limits a block, and a share of the others' time comes on top. Blocks come
in waves, each load phase shows one memory latency unless other blocks hide it, and neither device memory nor
the second cache is faster than its peak.

It is a filter, not a measurement: the constants are estimates until ``fit`` has seen times of the card, and
even then it is good for throwing out what cannot be fast.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tvm_fuse.core.errors import UsageError
from tvm_fuse.core.gpu import WARP_THREADS, GpuSpec, blocks_per_sm, find_gpu
from tvm_fuse.core.targets import DEVICES, Device

__all__ = ["Card", "KernelProfile", "ScoreConstants", "find_card", "predict_s", "with_resources"]

_SECTOR_BYTES = 32
#: Clocks from one multiply-add to the next that needs its result, times the schedulers of an SM: so many
#: independent ones keep all lanes busy. Volta and later: 4 clocks.
_DEPENDENT_CLOCKS = 4
_MOST_PARALLEL = 8
#: How often a spill in the code is executed, which the compiler does not tell.
_SPILL_TRIPS = 8
_WORD_BYTES = 4


@dataclass(frozen=True)
class Card:
    """A product, and the limits of its architecture; nothing is asked of a device."""

    name: str
    device: Device
    gpu: GpuSpec


def find_card(arch: str, name: str | None = None) -> Card:
    """The card that schedules are drafted for.

    Args:
        arch: Architecture of the target, such as ``sm_80``.
        name: Short name in ``core.targets.DEVICES``; None takes the one that stands for the architecture.

    Returns:
        The card.

    Raises:
        UsageError: It is not known, or of another architecture.
    """
    gpu = find_gpu(arch)
    fitting = {short: device for short, device in DEVICES.items() if device.arch == gpu.arch}
    chosen = name.lower() if name is not None else next(iter(fitting), "")
    if chosen not in fitting:
        got = f"card {name!r}" if name is not None else f"architecture {arch}"
        known = ", ".join(f"{short} ({device.arch})" for short, device in DEVICES.items())
        raise UsageError(f"{got}: wanted a card of {gpu.arch}; known are {known}")
    return Card(chosen, fitting[chosen], gpu)


@dataclass(frozen=True)
class KernelProfile:
    """What one launch of a kernel does; counts are of one thread unless they say otherwise.

    Args:
        blocks: Blocks of the grid.
        threads: Threads of a block.
        smem_bytes: Shared memory of a block.
        registers: Registers of a thread.
        fma: Float32 multiply-adds, other float operations as half of one.
        special: Clocks that divisions and functions take beyond that.
        integer: Integer instructions of addresses.
        shared_accesses: Accesses to shared memory.
        shared_ways: Of a warp: these, each as often as its bank conflicts repeat it.
        global_accesses: Accesses to device memory.
        sectors: Of a warp: 32-byte sectors that they touch.
        local_accesses: Accesses to arrays that do not fit registers.
        phases: How often all warps of a block wait for loads.
        barriers: Barriers.
        footprint_bytes: Of the whole kernel: bytes of the tensors it touches.
        parallel: Independent sums.
        spill_bytes: Bytes of spills in the code, as the compiler reports them.
    """

    blocks: int
    threads: int
    smem_bytes: int
    registers: int
    fma: float
    special: float
    integer: float
    shared_accesses: float
    shared_ways: float
    global_accesses: float
    sectors: float
    local_accesses: float
    phases: float
    barriers: float
    footprint_bytes: float
    parallel: int
    spill_bytes: int = 0

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return -(-self.threads // WARP_THREADS)


@dataclass(frozen=True)
class ScoreConstants:
    """What the score assumes beside published numbers; ``fit`` changes it to what was measured.

    Args:
        scale: Factor on everything but the launch.
        overlap: Share of the pipes that do not limit a block which comes on top.
        latency_clocks: Clocks of one exposed load from memory.
        local_clocks: Clocks of the first cache that a warp's access to local memory takes.
        launch_s: Seconds that a launch costs besides its work.
        barrier_clocks: Clocks of a barrier.
        l1_bytes_per_clock: Bytes that an SM gets from its first cache in a clock.
    """

    scale: float = 1.0
    overlap: float = 0.25
    latency_clocks: float = 700.0
    local_clocks: float = 1.0
    launch_s: float = 2e-6
    barrier_clocks: float = 40.0
    l1_bytes_per_clock: float = 64.0


def with_resources(
    profile: KernelProfile, registers: int, spill_bytes: int, stack_bytes: int
) -> KernelProfile:
    """A profile with what the compiler says instead of estimates.

    Args:
        profile: The profile.
        registers: Registers of a thread.
        spill_bytes: Bytes of spills in the code.
        stack_bytes: Bytes of a thread's stack frame: sums lie there where they do not fit registers.
    """
    local = 0.0 if stack_bytes == 0 else profile.local_accesses or 2 * profile.fma
    return replace(profile, registers=registers, spill_bytes=spill_bytes, local_accesses=local)


def predict_s(profiles: Iterable[KernelProfile], card: Card, constants: ScoreConstants) -> float:
    """Seconds of an operator.

    Args:
        profiles: Its kernels.
        card: Where they run.
        constants: The assumptions.

    Returns:
        Their sum; inf where one cannot be launched.
    """
    return sum(_predict_kernel(profile, card, constants) for profile in profiles)


def _predict_kernel(profile: KernelProfile, card: Card, constants: ScoreConstants) -> float:
    fit = blocks_per_sm(card.gpu, profile.threads, profile.registers, profile.smem_bytes)
    if fit.blocks_per_sm == 0:
        return math.inf
    device, gpu = card.device, card.gpu
    busy = _busy_clocks(profile, gpu, constants)
    latency = constants.latency_clocks * max(1.0, profile.phases)
    latency += constants.barrier_clocks * profile.barriers
    per_sm = -(-profile.blocks // device.sms)  # of the busiest
    resident = min(fit.blocks_per_sm, per_sm)
    needed = _DEPENDENT_CLOCKS * gpu.fp32_lanes / WARP_THREADS / min(_MOST_PARALLEL, max(1, profile.parallel))
    filled = min(1.0, resident * profile.warps / max(needed, 1.0))
    clocks = max(per_sm * busy / filled, -(-per_sm // resident) * (busy + latency))
    l2_bytes = profile.blocks * profile.warps * profile.sectors * _SECTOR_BYTES
    work_s = max(
        clocks / device.clock_hz,
        profile.footprint_bytes / device.dram_bytes_per_s,
        l2_bytes / device.l2_bytes_per_s,
    )
    return constants.scale * work_s + constants.launch_s


def _busy_clocks(profile: KernelProfile, gpu: GpuSpec, constants: ScoreConstants) -> float:
    """Clocks that a block keeps an SM's pipes busy."""
    local = profile.local_accesses + profile.spill_bytes / _WORD_BYTES * _SPILL_TRIPS
    instructions = profile.fma + profile.special + profile.integer + local
    instructions += profile.shared_accesses + 2 * profile.global_accesses
    pipes = (
        (profile.fma + profile.special) * WARP_THREADS / gpu.fp32_lanes,
        profile.shared_ways + constants.local_clocks * local,
        profile.sectors * _SECTOR_BYTES / constants.l1_bytes_per_clock,
        instructions / gpu.schedulers,
    )
    slowest = max(pipes)
    return profile.warps * (slowest + constants.overlap * (sum(pipes) - slowest))
