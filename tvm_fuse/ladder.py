"""The job of ``tvm-fuse ladder``: a model fused bit by bit, each rung built, checked and timed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Callable

from tvm_fuse import __version__
from tvm_fuse.core.errors import MissingDependency
from tvm_fuse.core.graph import Array
from tvm_fuse.core.inputs import make_inputs
from tvm_fuse.core.parity import ParityReport, ToleranceChoice, compare
from tvm_fuse.core.plan import FusionPlan
from tvm_fuse.core.plan_file import PlanFile, make_plan_file
from tvm_fuse.core.rungs import Rung, partial_plan, rungs_by_chain, rungs_by_step
from tvm_fuse.progress import Progress, quietly
from tvm_fuse.relay.build import Artifact, Runner, build_fused, build_unfused, measure
from tvm_fuse.relay.fuse import FusedModel, FuseOptions, fuse_model
from tvm_fuse.relay.load import RelayModel
from tvm_fuse.relay.partition_pass import partition_chains, target_kind
from tvm_fuse.relay.target import has_cuda_device, is_cuda, resolve_target
from tvm_fuse.report import quartiles

__all__ = ["Climb", "Ladder", "LadderOptions", "Measured", "climb_model"]

#: A rung is slower when three quarters of the rounds say so, by more than this share.
_NOISE = 0.02

#: Makes the module of a plan: laid-out module, target, plan.
CarryOut = Callable[[Any, Any, FusionPlan], Any]


@dataclass(frozen=True)
class LadderOptions(FuseOptions):
    """What the user may choose, beside what ``FuseOptions`` says.

    Args:
        by: ``step`` or ``chain``.
        slices: Rungs of a ladder by chain.
        repeats: Rounds of each measurement.
        tolerance: For parity; None takes the default of each output's dtype.
        seed: Seed of the inputs.
    """

    by: str = "step"
    slices: int = 8
    repeats: int = 30
    tolerance: ToleranceChoice = None
    seed: int = 0


@dataclass(frozen=True)
class Measured:
    """One rung.

    Args:
        name: What it adds.
        added: Ids of the groups that it adds.
        kernels: Operators that TVM calls in one inference.
        passed: Whether its outputs are those of the unfused model.
        max_abs: Largest difference of an output.
        needed: Share of the tolerance that was needed; inf where no tolerance would do.
        median_s: Seconds of one inference.
        speedup: Time of the rung before over its own, measured in turn: median and quartiles; empty for
            the first.
        plan: What was fused; None for the unfused model.
    """

    name: str
    added: tuple[str, ...]
    kernels: int
    passed: bool
    max_abs: float
    needed: float
    median_s: float
    speedup: Mapping[str, float]
    plan: FusionPlan | None = field(default=None, repr=False, compare=False)

    @property
    def is_slower(self) -> bool:
        """Whether it is clearly slower than the rung before."""
        return bool(self.speedup) and self.speedup["quartile_3"] < 1 - _NOISE


@dataclass(frozen=True)
class Ladder:
    """All rungs that were climbed.

    Args:
        model: Name of the model.
        target: Target string.
        by: ``step`` or ``chain``.
        rungs: In order.
        wrong: The first rung whose outputs are wrong; empty when none is.
        culprit: The one group that makes them wrong, as far as it was searched for.
        slower: Rungs that are clearly slower than the one before.
        best: The fastest rung whose outputs are right.
        is_complete: Whether all rungs were climbed.
        best_plan: The plan of the best rung that has one.
    """

    model: str
    target: str
    by: str
    rungs: tuple[Measured, ...]
    wrong: str
    culprit: str
    slower: tuple[str, ...]
    best: str
    is_complete: bool
    best_plan: PlanFile | None = field(default=None, repr=False)


def climb_model(
    model: RelayModel,
    target: Any,
    options: LadderOptions,
    progress: Progress = quietly,
    tell: Callable[[Measured], None] = lambda rung: None,
    carry_out: CarryOut | None = None,
) -> Ladder:
    """Fuse a model bit by bit.

    Args:
        model: The model.
        target: As for ``pipeline.compile``; it must run on this machine.
        options: See ``LadderOptions``.
        progress: Called around each step.
        tell: Gets each rung when it is done.
        carry_out: Makes the module of each plan; None takes ``partition_chains``.

    Returns:
        The rungs; all that were done when the user interrupts (``KeyboardInterrupt``).

    Raises:
        MissingDependency: There is no GPU for a CUDA target.
        TvmFuseError: As of ``fuse_model``, and of a build.
    """
    resolved = resolve_target(target)
    if is_cuda(resolved) and not has_cuda_device():
        raise MissingDependency(
            f"a ladder is measured, and there is no GPU for {resolved}",
            "climb on the CPU: --target llvm",
        )
    fused = fuse_model(model, resolved, options, progress)
    climb = Climb(model, fused, resolved, options, progress, carry_out or _partition)
    rungs: list[Measured] = []
    is_complete = False
    culprit = ""
    try:
        for rung in climb.rungs():
            rungs.append(climb.measure(rung))
            tell(rungs[-1])
        wrong = next((rung for rung in rungs if not rung.passed), None)
        culprit = climb.find_culprit(rungs, wrong) if wrong else ""
        is_complete = True
    except KeyboardInterrupt:
        if not rungs:
            raise
    return _sum_up(model.name, climb, rungs, culprit, is_complete)


def _partition(module: Any, target: Any, plan: FusionPlan) -> Any:
    return partition_chains(module, target, plan=lambda graph: plan)


@dataclass
class Climb:
    """A ladder being climbed; the rung before stays loaded, to be timed beside the next one."""

    model: RelayModel
    fused: FusedModel
    target: Any
    options: LadderOptions
    progress: Progress
    carry_out: CarryOut
    before: Runner | None = None
    reference: Mapping[str, Array] = field(default_factory=dict)

    def rungs(self) -> tuple[Rung | None, ...]:
        """None, which is the unfused model, then the rungs of the plan."""
        graph, plan = self.fused.planned.graph, self.fused.planned.plan
        if self.options.by == "step":
            return (None, *rungs_by_step(graph, plan))
        return (None, *rungs_by_chain(graph, plan, self.options.slices))

    def measure(self, rung: Rung | None) -> Measured:
        """Build one rung, compare its outputs, and time it in turn with the one before."""
        name = "unfused" if rung is None else rung.name
        with self.progress(f"building {name}"):
            artifact = self._build(rung)
        runner = Runner(artifact, self.target)
        parity = self._compare(runner)
        with self.progress(f"measuring {name}"):
            pair = [runner] if self.before is None else [self.before, runner]
            times = measure(pair, most=self.options.repeats)
        ratios = [before / after for before, after in zip(times[0], times[-1])]
        self.before = runner
        return Measured(
            name=name,
            added=() if rung is None else rung.added,
            kernels=len(artifact.calls),
            passed=parity.passed,
            max_abs=max((row.max_abs for row in parity.rows), default=0.0),
            needed=max((row.needed for row in parity.rows), default=0.0),
            median_s=statistics.median(times[-1]),
            speedup=quartiles(ratios) if len(pair) > 1 else {},
            plan=None if rung is None else rung.plan,
        )

    def _build(self, rung: Rung | None) -> Artifact:
        if rung is None:
            return build_unfused(self.fused.reference, self.target)
        return build_fused(self.carry_out(self.fused.laid_out, self.target, rung.plan), self.target)

    def _compare(self, runner: Runner) -> ParityReport:
        inputs = make_inputs(self.model.inputs, self.options.seed)
        got = runner.run(inputs, self.model.outputs)
        self.reference = self.reference or got
        return compare(self.reference, got, tolerance=self.options.tolerance, seed=self.options.seed)

    def find_culprit(self, rungs: Sequence[Measured], wrong: Measured) -> str:
        """The group that makes a rung wrong, by halving what the rung adds; each half is one build."""
        if wrong.plan is None or not wrong.added:
            return ""
        suspects = [group for group in wrong.plan.groups if group.id in wrong.added]
        before = rungs[rungs.index(wrong) - 1].plan
        good = [group for group in before.groups if group.id not in wrong.added] if before else []
        while len(suspects) > 1:
            half, rest = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
            with self.progress(f"looking for the wrong group among {len(suspects)}"):
                plan = partial_plan(self.fused.planned.graph, sorted([*good, *half], key=lambda g: g.nodes))
                artifact = self._build(Rung("suspects", plan, ()))
                is_wrong = not self._compare(Runner(artifact, self.target)).passed
            good, suspects = (good, half) if is_wrong else ([*good, *half], rest)
        return str(suspects[0]) if suspects else ""


def _sum_up(name: str, climb: Climb, rungs: list[Measured], culprit: str, is_complete: bool) -> Ladder:
    """Which rung is best: by the product of the speed-ups, which were measured in turn; medians drift."""
    speeds, speed = [], 1.0
    for rung in rungs:
        speed *= rung.speedup.get("median", 1.0)
        speeds.append(speed)
    right = [index for index, rung in enumerate(rungs) if rung.passed]
    best = rungs[max(right, key=lambda index: speeds[index])] if right else None
    planned = [index for index in right if rungs[index].plan is not None]
    plan = rungs[max(planned, key=lambda index: speeds[index])].plan if planned else None
    return Ladder(
        model=name,
        target=str(climb.target),
        by=climb.options.by,
        rungs=tuple(rungs),
        wrong=next((rung.name for rung in rungs if not rung.passed), ""),
        culprit=culprit,
        slower=tuple(rung.name for rung in rungs if rung.is_slower),
        best=best.name if best else "",
        is_complete=is_complete,
        best_plan=None if plan is None else _file(climb, plan),
    )


def _file(climb: Climb, plan: FusionPlan) -> PlanFile:
    options = replace(climb.options.plan, target=target_kind(climb.target))
    graph = climb.fused.planned.graph
    return make_plan_file(graph, plan, str(climb.target), options, f"tvm-fuse {__version__}")
