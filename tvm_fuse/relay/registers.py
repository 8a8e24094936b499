"""Measured register pressure: groups that spill when compiled whole are cut in two.

::

    conv2d -> s1 -> s2 -> ... -> s7            one kernel: registers run out, values spill to memory
    conv2d -> s1 -> s2   |   s3 -> ... -> s7   two kernels: the value between them is in memory once
    x1 + ... + x12   |   conv2d                before the anchor as well: twelve operands were loaded ahead
    y = f(x1, ..., x64)   |   g(y, x64, ..., x1)   elementwise: both read the operands, neither keeps them

A group that ``core/pressure.py`` finds suspicious is built alone for the target, compiled by NVRTC and
read: registers, spills, stack, occupancy. It is cut when it spills, or when the occupancy of its anchor
falls off a cliff: below a quarter, and below half of what the anchor's own kernel has. The cheapest cut
whose two kernels are well is taken. Where there is none, or the anchor alone spills already, the group
stays whole, and the decision says so. What a cut costs in bytes is shown, not weighed against the spills:
how often these are executed, the compiler does not tell.

Without NVRTC, or for an architecture that it does not know, the estimate alone decides, and the decision
says so. A target that is not CUDA's has nothing to measure. One compilation takes about a second, of
hundreds of operators ten; groups that are not suspicious cost none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm_fuse.core.errors import MissingDependency, ToolFailed, UsageError
from tvm_fuse.core.graph import Graph
from tvm_fuse.core.group import FusionGroup, make_group
from tvm_fuse.core.plan import FusionPlan
from tvm_fuse.core.pressure import (
    Cut,
    estimate_cut,
    estimate_pressure,
    find_cuts,
    is_suspicious,
    most_registers,
)
from tvm_fuse.core.reason import Code, Decision, Reason, applied, declined
from tvm_fuse.cuda.compile import compile_cuda
from tvm_fuse.cuda.resources import KernelResources, read_resources
from tvm_fuse.relay.base import relay, tvm
from tvm_fuse.relay.kernels import build_kernels
from tvm_fuse.relay.partition_pass import Refiner, make_function
from tvm_fuse.relay.read import ReadFunction
from tvm_fuse.relay.record import PassRecord, record
from tvm_fuse.relay.target import is_cuda

__all__ = ["RULE", "SplitCandidate", "SplitRecord", "measure_group", "refine_on", "split_spilling_groups"]

RULE = "registers"

#: Below both, occupancy has fallen off a cliff: a share of all warps, and of what the anchor alone has.
_LOW_OCCUPANCY, _LOW_SHARE = 0.25, 0.5


@dataclass(frozen=True)
class SplitCandidate:
    """One way to make kernels of a chain.

    Args:
        groups: One group, or the two parts of a cut.
        extra_bytes: Bytes of device memory that it moves more than the whole chain.
        kernels: What the compiled kernels use, in order; empty where they were not measured.
    """

    groups: tuple[FusionGroup, ...]
    extra_bytes: int
    kernels: tuple[KernelResources, ...] = ()

    @property
    def spill_bytes(self) -> int:
        """Bytes of spills of all its kernels."""
        return sum(kernel.spill_bytes for kernel in self.kernels)

    @property
    def occupancy_ratio(self) -> float:
        """Occupancy of its worst kernel."""
        return min((kernel.occupancy_ratio for kernel in self.kernels), default=1.0)

    def __str__(self) -> str:
        names = " | ".join(group.name for group in self.groups)
        used = " | ".join(
            f"{kernel.registers_per_thread} registers, {kernel.spill_bytes} bytes spilled, "
            f"{kernel.stack_bytes} of stack, {kernel.occupancy_ratio:.0%} occupancy"
            for kernel in self.kernels
        )
        return f"{names}: {used or 'not compiled'}; {self.extra_bytes} bytes more"


@dataclass(frozen=True)
class SplitRecord:
    """What was found about one suspicious group.

    Args:
        decision: Whether it was cut, and why; its text shows the whole group and the cut that was taken, or
            the last one tried.
        candidates: The whole group, then the cuts that were tried, in order.
        chosen: Index of the candidate that the plan has.
    """

    decision: Decision
    candidates: tuple[SplitCandidate, ...]
    chosen: int

    @property
    def groups(self) -> tuple[FusionGroup, ...]:
        """The groups of the plan."""
        return self.candidates[self.chosen].groups


def split_spilling_groups(
    read: ReadFunction, plan: FusionPlan, target: Any
) -> tuple[FusionPlan, tuple[SplitRecord, ...]]:
    """Cut the groups of a plan that need too many registers.

    Args:
        read: The function that was planned.
        plan: Its plan.
        target: The ``tvm.target.Target`` it will be built for.

    Returns:
        The plan with such groups in two parts, and a record for each group that was looked at.
    """
    if not is_cuda(target):
        return plan, ()
    graph, known = read.graph, _Measurements(read, target)
    suspicious = (group for group in plan.groups if is_suspicious(graph, group))
    found = {group.result: _examine(graph, group, known) for group in suspicious}
    if not found:
        return plan, ()
    groups: list[FusionGroup] = []
    for group in plan.groups:
        groups.extend(found[group.result].groups if group.result in found else (group,))
    decisions = [_restated(decision, found.values()) for decision in plan.decisions]
    decisions += [item.decision for item in found.values()]
    return replace(plan, groups=tuple(groups), decisions=tuple(decisions)), tuple(found.values())


def refine_on(target: Any) -> Refiner:
    """``split_spilling_groups`` for ``partition_chains``; records what was found as ``SplitChains``."""
    found: list[SplitRecord] = []

    def refine(read: ReadFunction, plan: FusionPlan) -> FusionPlan:
        plan, records = split_spilling_groups(read, plan, target)
        found.extend(records)
        if found:
            cut = sum(item.chosen > 0 for item in found)
            summary = f"{cut} of {len(found)} suspicious groups cut in two"
            decisions = tuple(item.decision for item in found)
            record(PassRecord("SplitChains", summary, cut > 0, decisions, tuple(found)))
        return plan

    return refine


def measure_group(read: ReadFunction, group: FusionGroup, target: Any) -> tuple[KernelResources, ...]:
    """Build a group alone and read what its kernels use.

    Args:
        read: The function that has the group.
        group: The group.
        target: A ``tvm.target.Target`` for CUDA.

    Returns:
        One record a kernel; TVM's own schedules may make several of a group.

    Raises:
        MissingDependency: NVRTC is not there.
        ToolFailed: The group does not build or compile.
    """
    return _measure(make_function(read, group)[0], target)


def _measure(function: Any, target: Any) -> tuple[KernelResources, ...]:
    params = [relay.var(str(param.name_hint), param.type_annotation) for param in function.params]
    module = tvm.IRModule.from_expr(relay.Function(params, relay.Call(function, params)))
    build = build_kernels(relay.transform.InferType()(module), target)
    compiled = compile_cuda(build.artifact.cuda_source, str(target.arch))
    return read_resources(compiled, build.launches)


class _Measurements:
    """What groups use; those with the same operators, shapes and attributes are measured once."""

    def __init__(self, read: ReadFunction, target: Any) -> None:
        self._read, self._target = read, target
        self._known: dict[int, tuple[KernelResources, ...]] = {}

    def __call__(self, groups: Sequence[FusionGroup]) -> tuple[KernelResources, ...]:
        """The kernels of some groups, in order."""
        return tuple(kernel for group in groups for kernel in self._of(group))

    def _of(self, group: FusionGroup) -> tuple[KernelResources, ...]:
        function = make_function(self._read, group)[0]
        key = int(tvm.ir.structural_hash(function))
        if key not in self._known:
            self._known[key] = _measure(function, self._target)
        return self._known[key]


def _examine(graph: Graph, group: FusionGroup, known: _Measurements) -> SplitRecord:
    """Measure a group and, where it is not well, its cuts."""
    try:
        whole = SplitCandidate((group,), 0, known((group,)))
    except (MissingDependency, ToolFailed, UsageError) as error:
        return _estimate(graph, group, error)
    if not _is_suspect(whole):
        return SplitRecord(_applied(group, f"kept whole: {whole}"), (whole,), 0)
    alone = _anchor_alone(graph, group)
    alone = replace(alone, kernels=known(alone.groups))
    reason = _find_fault(group, whole, alone)
    if reason is None:
        return SplitRecord(_applied(group, f"kept whole: {whole}"), (whole,), 0)
    if alone.spill_bytes:
        kept = replace(reason, got=f"{reason.got}; its anchor alone: {alone}")
        return SplitRecord(_declined(group, kept), (whole, alone), 0)
    return _try_cuts(graph, group, known, (whole, alone), reason)


def _try_cuts(
    graph: Graph,
    group: FusionGroup,
    known: _Measurements,
    measured: tuple[SplitCandidate, SplitCandidate],
    reason: Reason,
) -> SplitRecord:
    """Take the cheapest cut whose kernels are well; ``measured`` is the whole group and its anchor alone.

    Each cut of an elementwise group needs fewer registers than the cheaper ones: there bisection finds it.
    """
    whole, alone = measured
    candidates, chosen = [whole], 0
    cuts = find_cuts(graph, group)
    low, high = 0, len(cuts)
    while low < high:
        middle = low if group.anchor is not None else (low + high) // 2
        parts = _parts(cuts[middle], reason)
        candidates.append(SplitCandidate(parts, cuts[middle].extra_bytes, known(parts)))
        if candidates[-1].spill_bytes or _is_cliff(candidates[-1], alone):
            low = middle + 1
        else:
            high, chosen = middle, len(candidates) - 1
    if chosen:
        detail = f"{reason}; cut: {whole}; instead: {candidates[chosen]}"
        return SplitRecord(_applied(group, detail), tuple(candidates), chosen)
    kept = replace(reason, got=f"{reason.got}; no cut of {len(candidates) - 1} does better: {candidates[-1]}")
    return SplitRecord(_declined(group, kept), tuple(candidates), 0)


def _estimate(graph: Graph, group: FusionGroup, why: Exception) -> SplitRecord:
    """Decide without a compiler, or for an architecture that it does not know."""
    whole, registers = SplitCandidate((group,), 0), estimate_pressure(graph, group).registers
    cuts, most = find_cuts(graph, group), most_registers(graph, group)
    estimated = f"estimated {registers} registers of {most}, not measured: {why}"
    if registers <= most or not cuts:
        return SplitRecord(_applied(group, f"kept whole: {estimated}"), (whole,), 0)
    reason = Reason(Code.REGISTERS_SPILL, group.anchor_name, "no spills", estimated)
    fitting = next((cut for cut in cuts if estimate_cut(graph, cut) <= most), cuts[0])
    cut = SplitCandidate(_parts(fitting, reason), fitting.extra_bytes)
    detail = f"{reason}; cut: {whole}; instead: {cut}"
    return SplitRecord(_applied(group, detail), (whole, cut), 1)


def _is_suspect(whole: SplitCandidate) -> bool:
    """Whether a measured group is worth a look at its anchor alone."""
    (group,) = whole.groups
    return whole.spill_bytes > 0 or (group.anchor is not None and whole.occupancy_ratio < _LOW_OCCUPANCY)


def _anchor_alone(graph: Graph, group: FusionGroup) -> SplitCandidate:
    """The kernel that no cut can do without; elementwise operators have none."""
    if group.anchor is None:
        return SplitCandidate((), 0)
    return SplitCandidate((make_group(graph, group.anchor, (group.anchor,), group.anchor),), 0)


def _find_fault(group: FusionGroup, whole: SplitCandidate, alone: SplitCandidate) -> Reason | None:
    """Why a whole chain should be cut; None when it is well."""
    if whole.spill_bytes:
        got = f"{whole.spill_bytes} bytes ({group.name})"
        return Reason(Code.REGISTERS_SPILL, group.anchor_name, "no spills", got)
    if not _is_cliff(whole, alone):
        return None
    wanted = (
        f"{_LOW_OCCUPANCY:.0%} of the warps, or half of the {alone.occupancy_ratio:.0%} of its anchor alone"
    )
    return Reason(Code.OCCUPANCY_DROPS, group.anchor_name, wanted, f"{whole.occupancy_ratio:.0%}")


def _is_cliff(candidate: SplitCandidate, alone: SplitCandidate) -> bool:
    """Whether too few warps are left to hide latency, and far fewer than the anchor's own kernel has."""
    return candidate.occupancy_ratio < min(_LOW_OCCUPANCY, _LOW_SHARE * alone.occupancy_ratio)


def _parts(cut: Cut, reason: Reason) -> tuple[FusionGroup, FusionGroup]:
    """The two groups of a cut, as they stand in the plan."""
    name = f"{cut.first.id}.rest" if cut.first.id else ""
    return replace(cut.first, end=reason), replace(cut.rest, id=name)


def _applied(group: FusionGroup, detail: str) -> Decision:
    return replace(applied(RULE, group.anchor_name, detail), node=group.center)


def _declined(group: FusionGroup, reason: Reason) -> Decision:
    return replace(declined(RULE, group.anchor_name, reason), node=group.center)


def _restated(decision: Decision, found: Iterable[SplitRecord]) -> Decision:
    """A decision about a group that was cut speaks of the part that has its anchor, or its result."""
    for item in found:
        for part in item.groups if item.chosen else ():
            if decision.applied and decision.node == part.center:
                return replace(decision, detail=f"{part.name}; ends: {part.end}")
    return decision
