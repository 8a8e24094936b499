"""The job of ``tvm-fuse plan``: what would become one kernel, what that saves, and why not more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tvm_fuse import __version__
from tvm_fuse.core.accept import compare_group
from tvm_fuse.core.errors import ExpectationFailed
from tvm_fuse.core.plan_file import PlanFile, diff
from tvm_fuse.core.reason import Decision, Reason
from tvm_fuse.progress import Progress, quietly
from tvm_fuse.relay.device import device_of
from tvm_fuse.relay.fuse import FusedModel, FuseOptions, PlannedGraph, fuse_model
from tvm_fuse.relay.load import RelayModel
from tvm_fuse.relay.target import resolve_target
from tvm_fuse.report import Steering, steering_of

__all__ = ["GroupRow", "PlanReport", "check_fused", "check_same_plan", "plan_model", "report_plan"]


@dataclass(frozen=True)
class GroupRow:
    """One kernel of a plan.

    Args:
        id: ``chain0``, ``chain1``, ... as ``--only`` and ``--skip`` take it.
        name: Family and steps.
        anchor: Where its anchor (or last operator) came from.
        operators: Names of its operators, in order.
        result: Dtype and shape of its result, or of each.
        flops: Operations of one inference.
        saved_bytes: Bytes of device memory that one kernel for each operator would move more.
        saved_s: Seconds that those would take more, estimated at the device's peaks; None where these are
            not known.
        end: Why it ends where it does.
    """

    id: str
    name: str
    anchor: str
    operators: tuple[str, ...]
    result: str
    flops: int
    saved_bytes: int
    saved_s: float | None
    end: Reason | None


@dataclass(frozen=True)
class PlanReport:
    """A fusion plan for people and scripts.

    Args:
        tool_version: Version of tvm-fuse.
        model: Name of the model.
        target: Target string.
        device: Whose peaks the estimates take; empty where none are known.
        steering: What the user asked for.
        digest: SHA-256 of the text of the plan file.
        fused: Anchors (convolutions and matrix products) that are fused with something.
        groups: The kernels.
        not_fused: Decisions about the other anchors.
        side_by_side: Decisions about layers, and elementwise kernels, that read one value.
        not_joined: Why kernels are not part of a larger one, a gate's or an attention's: one for each.
        left: Decisions about other operators in no group, which are left to TVM.
        folded: Batch norms that were folded.
        not_folded: Decisions about the others.
        file: The plan as a file.
    """

    tool_version: str
    model: str
    target: str
    device: str
    steering: Steering
    digest: str
    fused: int
    groups: tuple[GroupRow, ...]
    not_fused: tuple[Decision, ...]
    side_by_side: tuple[Decision, ...]
    not_joined: tuple[Decision, ...]
    left: tuple[Decision, ...]
    folded: int
    not_folded: tuple[Decision, ...]
    file: PlanFile = field(repr=False)

    @property
    def anchors(self) -> int:
        """Convolutions and matrix products of the model."""
        return self.fused + len(self.not_fused)


def plan_model(
    model: RelayModel, target: object, options: FuseOptions | None = None, progress: Progress = quietly
) -> tuple[FusedModel, PlanReport]:
    """Fold and plan a model.

    Args:
        model: The model.
        target: As for ``pipeline.compile``.
        options: See ``FuseOptions``.
        progress: Called around each step.

    Returns:
        The fused model, not built, and the report on its plan.

    Raises:
        TvmFuseError: As of ``fuse_model``.
    """
    resolved = resolve_target(target)
    fused = fuse_model(model, resolved, options, progress)
    return fused, report_plan(model.name, fused, resolved, options or FuseOptions())


def report_plan(name: str, fused: FusedModel, target: object, options: FuseOptions) -> PlanReport:
    """The report on the plan of a fused model; arguments as of ``plan_model``."""
    device = device_of(target)
    planned = fused.planned
    declined = tuple(decision for decision in planned.plan.decisions if not decision.applied)
    return PlanReport(
        tool_version=__version__,
        model=name,
        target=str(target),
        device=device.name if device else "",
        steering=steering_of(options),
        digest=planned.digest,
        fused=sum(group.layers for group in planned.plan.groups),
        groups=tuple(_rows(planned, target)),
        not_fused=tuple(decision for decision in declined if decision.rule == "chain"),
        side_by_side=fused.records["CombineParallel"].decisions,
        not_joined=tuple({decision.reason: decision for decision in planned.plan.not_joined}.values()),
        left=tuple(decision for decision in declined if decision.rule != "chain"),
        folded=len(fused.records["FoldBatchNorm"].details),
        not_folded=tuple(d for d in fused.records["FoldBatchNorm"].decisions if not d.applied),
        file=planned.file,
    )


def _rows(planned: PlannedGraph, target: object) -> Iterable[GroupRow]:
    device, graph = device_of(target), planned.graph
    again = Counter(node for group in planned.plan.groups for node in group.recomputed)
    for group in planned.plan.groups:
        costs = compare_group(graph, group, again)
        yield GroupRow(
            id=group.id,
            name=group.name,
            anchor=group.anchor_name,
            operators=group.operators,
            result=", ".join(str(graph.nodes[result].output) for result in group.results),
            flops=costs.together.flops,
            saved_bytes=sum(cost.dram_bytes for cost in costs.apart) - costs.together.dram_bytes,
            saved_s=costs.saved_s(device) if device else None,
            end=group.end,
        )


# --- gates for CI --------------------------------------------------------------------------------


def check_fused(fused: int, not_fused: Iterable[Decision], wanted: int) -> None:
    """The gate ``--expect-fused``.

    Args:
        fused: Anchors that are fused.
        not_fused: Decisions about the others.
        wanted: How many must be fused at least.

    Raises:
        ExpectationFailed: There are fewer; the message names each anchor that is not, and why.
    """
    if fused >= wanted:
        return
    lines = "".join(f"\n  {decision.at}: {decision.reason}" for decision in not_fused)
    raise ExpectationFailed(
        f"--expect-fused: wanted at least {wanted} fused convolutions and dense layers, got {fused}{lines}",
        "`tvm-fuse explain` says more about each",
    )


def check_same_plan(got: PlanFile, wanted: PlanFile, where: str) -> None:
    """The gate ``--expect-plan``.

    Args:
        got: The plan that was made.
        wanted: The plan to expect.
        where: Name of the file, for the error.

    Raises:
        ExpectationFailed: The plans differ; the message is their difference.
    """
    difference = diff(wanted, got)
    if difference.is_empty:
        return
    lines = "".join(f"\n  {line}" for line in difference.lines)
    raise ExpectationFailed(
        f"--expect-plan: wanted the plan of {where}, got another one (- expected, + made):{lines}",
        "where it is meant to change, write the file again with --save-plan",
    )
