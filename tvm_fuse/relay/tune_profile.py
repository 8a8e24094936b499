"""What CUDA kernels do, read from TVM's IR: the profiles that ``core/tuning/score.py`` turns into seconds.

The IR is lowered without unrolling, which keeps it small; loops that would be unrolled are only marked. What
a warp asks of memory is exact: the index of an access is computed for its 32 lanes, and the sectors or banks
are counted. Loads inside an unrolled region count once an address: the compiler keeps them in registers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np

from tvm_fuse.core.gpu import WARP_THREADS
from tvm_fuse.core.tuning.score import KernelProfile
from tvm_fuse.relay.base import tvm
from tvm_fuse.relay.tune_walk import WORD_BYTES, Access, Kernel, walk_kernels

__all__ = ["profile_functions", "small_lowering"]

tir = tvm.tir

_SECTOR_BYTES, _BANKS = 32, 32
#: Accesses of a group whose lanes are looked at.
_LOOKED_AT = 8
#: Registers of a thread beside its sums, and the most that the hardware gives it.
_OTHER_REGISTERS, _MOST_REGISTERS = 40, 255
_REGISTER_FILE = 64 * 1024
#: Without shared memory the compiler moves the loads of so many steps of a loop together.
_STEPS_TOGETHER = 4
_BARRIERS_OF_PHASE = 2

_BINARY: dict[Any, Callable[[Any, Any], Any]] = {
    tir.Add: lambda a, b: a + b,
    tir.Sub: lambda a, b: a - b,
    tir.Mul: lambda a, b: a * b,
    tir.FloorDiv: lambda a, b: a // b,
    tir.Div: lambda a, b: a // b,
    tir.FloorMod: lambda a, b: a % b,
    tir.Mod: lambda a, b: a % b,
    tir.Min: np.minimum,
    tir.Max: np.maximum,
}
_SHIFTS: dict[str, Callable[[Any, Any], Any]] = {
    "tir.shift_right": lambda a, b: a >> b,
    "tir.shift_left": lambda a, b: a << b,
    "tir.bitwise_and": lambda a, b: a & b,
}


@contextmanager
def small_lowering() -> Iterator[None]:
    """Lets TVM lower kernels with their loops kept, those to be unrolled marked as such."""
    config = {
        "tir.add_lower_pass": [(1, _without_explicit_unrolling)],
        "tir.UnrollLoop": {"explicit_unroll": False},
        "tir.disable_assert": True,
    }
    with tvm.transform.PassContext(opt_level=3, config=config):
        yield


@tir.transform.prim_func_pass(opt_level=0, name="tvm_fuse.WithoutExplicitUnrolling")
def _without_explicit_unrolling(function: Any, module: Any, context: Any) -> Any:
    def without(statement: Any) -> Any:
        return statement.body if statement.attr_key == "pragma_unroll_explicit" else None

    return function.with_body(tir.stmt_functor.ir_transform(function.body, None, without, ["tir.AttrStmt"]))


def profile_functions(module: Any) -> tuple[KernelProfile, ...]:
    """The kernels of lowered functions.

    Args:
        module: What ``tvm.lower`` made inside ``small_lowering``.

    Returns:
        One profile a launch, in the order of the code.
    """
    return tuple(map(_profile, walk_kernels(module)))


# --- indices -----------------------------------------------------------------------------------------


def _evaluate(index: Any, values: dict[Any, Any]) -> Any:
    """An index for given values of variables, numbers or arrays; 0 for what is not known."""
    kind = type(index)
    if kind is tir.IntImm:
        return int(index.value)
    if kind in (tir.Var, tir.SizeVar):
        return values.get(index, 0)
    if kind in _BINARY:
        return _BINARY[kind](_evaluate(index.a, values), _evaluate(index.b, values))
    if kind is tir.Ramp:
        return _evaluate(index.base, values)
    if kind in (tir.Cast, tir.Broadcast):
        return _evaluate(index.value, values)
    if kind is tir.Select:
        return _evaluate(index.true_value, values)
    if kind is tir.Call and str(index.op.name) in _SHIFTS:
        return _SHIFTS[str(index.op.name)](*(_evaluate(argument, values) for argument in index.args))
    return 0


def _lanes(kernel: Kernel) -> dict[Any, Any]:
    """The thread variables of a block's first warp."""
    x, y = (kernel.extents.get(f"threadIdx.{axis}", 1) for axis in "xy")
    lane = np.minimum(np.arange(WARP_THREADS), kernel.size_of("threadIdx") - 1)
    numbers = {"threadIdx.x": lane % x, "threadIdx.y": lane // x % y, "threadIdx.z": lane // x // y}
    return {var: value for tag, value in numbers.items() for var in kernel.threads.get(tag, ())}


def _ways(access: Access, values: dict[Any, Any]) -> int:
    """How many sectors, or passes over the banks, one access of a warp takes."""
    start = (
        np.broadcast_to(np.asarray(_evaluate(access.index, values)), (WARP_THREADS,)) * access.element_bytes
    )
    offsets = np.arange(0, access.size_bytes, min(WORD_BYTES, access.size_bytes))
    touched = start[:, None] + offsets
    if access.scope == "global":
        return len(np.unique(touched // _SECTOR_BYTES))
    words = np.unique(touched // WORD_BYTES)
    return max(int(np.bincount(words % _BANKS).max()), math.ceil(len(words) / _BANKS))


def _mean_ways(accesses: Sequence[Access], lanes: dict[Any, Any]) -> float:
    """Over some accesses, in the first step of all loops and in the middle ones."""
    found = []
    for access in accesses[:_LOOKED_AT]:
        for share in (0.0, 0.5):
            values = {**lanes, **{loop.var: int(loop.extent * share) for loop in access.loops}}
            found.append(_ways(access, values))
    return sum(found) / len(found)


def _addresses(access: Access) -> Any:
    """What one thread touches in one pass through the unrolled region."""
    outer, inner = access.loops[: access.cut], access.loops[access.cut :]
    values: dict[Any, Any] = {loop.var: loop.extent // 2 for loop in outer}
    grids = np.meshgrid(*(np.arange(loop.extent) for loop in inner), indexing="ij")
    values.update((loop.var, grid.ravel()) for loop, grid in zip(inner, grids))
    size = math.prod(loop.extent for loop in inner)
    return np.broadcast_to(np.asarray(_evaluate(access.index, values)), (size,))


# --- counting ----------------------------------------------------------------------------------------


@dataclass
class _Traffic:
    """Accesses of a thread, and what they cost a warp."""

    accesses: float = 0.0
    ways: float = 0.0


def _profile(kernel: Kernel) -> KernelProfile:
    lanes, traffic = _lanes(kernel), {"global": _Traffic(), "shared": _Traffic()}
    for group in _groups(kernel.accesses):
        found, first = list(map(_addresses, group)), group[0]
        # Loads of one address are one load; stores are what they are.
        each = sum(map(len, found)) if first.is_store else len(np.unique(np.concatenate(found)))
        counts = traffic[first.scope]
        counts.accesses += first.trips * each
        counts.ways += first.trips * each * _mean_ways(group, lanes)
    threads = kernel.size_of("threadIdx")
    most = min(_MOST_REGISTERS, _REGISTER_FILE // (-(-threads // WARP_THREADS) * WARP_THREADS) // 8 * 8)
    wanted = _OTHER_REGISTERS + kernel.local_words
    phases = _phases(kernel.accesses)
    return KernelProfile(
        blocks=kernel.size_of("blockIdx"),
        threads=threads,
        smem_bytes=kernel.smem_bytes,
        registers=min(most, wanted),
        fma=kernel.operations / 2,
        special=kernel.special,
        integer=kernel.integer,
        shared_accesses=traffic["shared"].accesses,
        shared_ways=traffic["shared"].ways,
        global_accesses=traffic["global"].accesses,
        sectors=traffic["global"].ways,
        local_accesses=_local_accesses(kernel, wanted),
        phases=phases,
        barriers=_BARRIERS_OF_PHASE * phases if kernel.smem_bytes else 0.0,
        footprint_bytes=_footprint(kernel.accesses),
        parallel=max(1, kernel.local_words),
        spill_bytes=max(0, wanted - most) * WORD_BYTES if wanted <= _MOST_REGISTERS else 0,
    )


def _groups(accesses: Iterable[Access]) -> Iterable[list[Access]]:
    """Accesses that may share registers: loads of one buffer in one region; each store by itself."""
    groups: dict[Any, list[Access]] = {}
    for number, access in enumerate(accesses):
        if access.scope not in ("global", "shared"):
            continue
        region = tuple(hash(loop.var) for loop in access.loops[: access.cut])
        key = number if access.is_store else (hash(access.buffer.data), access.dtype, region)
        groups.setdefault(key, []).append(access)
    return groups.values()


def _local_accesses(kernel: Kernel, registers: int) -> float:
    """Accesses to arrays that are no registers: too large, or indexed by a loop that is not unrolled."""
    local = [access for access in kernel.accesses if access.scope == "local"]
    if registers > _MOST_REGISTERS:
        return float(sum(math.prod(loop.extent for loop in access.loops) for access in local))
    return float(
        sum(
            math.prod(loop.extent for loop in access.loops)
            for access in local
            if _variables(access.index)
            & {hash(one.var) for one in access.loops[: access.cut] if one.extent > 1}
        )
    )


def _variables(index: Any) -> set[int]:
    found: list[Any] = []
    tir.stmt_functor.post_order_visit(index, found.append)
    return {hash(node) for node in found if isinstance(node, tir.Var)}


def _phases(accesses: Sequence[Access]) -> float:
    """How often a block waits for memory: once a fill of shared memory, else once a few steps that load."""
    shared_loads = [access for access in accesses if access.scope == "shared" and not access.is_store]
    if not shared_loads:
        loads = (access.trips for access in accesses if access.scope == "global" and not access.is_store)
        return max(1.0, max(loads, default=1) / _STEPS_TOGETHER)
    fills = [access for access in accesses if access.scope == "shared" and access.is_store]
    return float(max((_common_trips(fill, shared_loads[-1]) for fill in fills), default=1))


def _common_trips(one: Access, other: Access) -> int:
    trips = 1
    for mine, theirs in zip(one.loops, other.loops):
        if not mine.var.same_as(theirs.var):
            break
        trips *= mine.extent
    return trips


def _footprint(accesses: Iterable[Access]) -> float:
    """Bytes of the tensors in device memory that a kernel touches."""
    sizes = {
        hash(access.buffer.data): math.prod(int(size) for size in access.buffer.shape) * access.element_bytes
        for access in accesses
        if access.scope == "global"
    }
    return float(sum(sizes.values()))
