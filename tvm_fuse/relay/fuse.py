"""From a loaded model to a fused one: the one way that `run`, `kernels` and `export` go."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tvm_fuse import __version__
from tvm_fuse.core.epsilon import EpsilonConfig
from tvm_fuse.core.errors import UsageError
from tvm_fuse.core.graph import Graph
from tvm_fuse.core.plan import FusionPlan
from tvm_fuse.core.plan_file import PlanFile, make_plan_file, save, to_json
from tvm_fuse.core.plan_options import PlanOptions
from tvm_fuse.core.replay import replay
from tvm_fuse.progress import Progress, quietly
from tvm_fuse.relay.audit import CheckedModel, check_model
from tvm_fuse.relay.combine_pass import combine_parallel
from tvm_fuse.relay.fold_pass import fold_batch_norms
from tvm_fuse.relay.layout_pass import decide_layout
from tvm_fuse.relay.load import RelayModel
from tvm_fuse.relay.partition_pass import Planner, Refiner, partition_chains, target_kind
from tvm_fuse.relay.read import ReadFunction
from tvm_fuse.relay.record import PassReport, last_report
from tvm_fuse.relay.records import NOT_TUNED, SHIPPED_RECORDS, TunedKernels, apply_records
from tvm_fuse.relay.registers import refine_on

__all__ = ["FuseOptions", "FusedModel", "PlannedGraph", "fuse_model"]


@dataclass(frozen=True)
class FuseOptions:
    """What the user may choose about folding and fusing.

    Args:
        epsilon: Batch norm name or glob pattern -> the epsilon the model was trained with.
        epsilon_config: The same from a training config (``tvm_fuse.epsilon_config.read_epsilon_config``);
            ``epsilon`` comes before it.
        align_epsilon: Replace an epsilon that differs from the expected one, instead of failing.
        combine: Make one layer of layers that read one value, for CUDA and where it pays.
        plan: What to fuse; its target is that of ``fuse_model``.
        plan_file: A plan to carry out as it is, instead of making one.
        is_measured: Compile the groups that may need too many registers, and cut those that do.
        save_plan: Where to write the plan, before anything is built.
        records: Folder of tuned records; None uses none.
        drafts: Use records that nobody measured, too.

    Raises:
        UsageError: Both a plan and options for making one were given.
    """

    epsilon: Mapping[str, float] = field(default_factory=dict)
    epsilon_config: EpsilonConfig = field(default_factory=EpsilonConfig)
    align_epsilon: bool = False
    combine: bool = True
    plan: PlanOptions = field(default_factory=PlanOptions)
    plan_file: PlanFile | None = None
    is_measured: bool = True
    save_plan: Path | None = None
    records: Path | None = SHIPPED_RECORDS
    drafts: bool = False

    def __post_init__(self) -> None:
        if self.plan_file is not None and self.plan != PlanOptions():
            raise UsageError(
                "a plan file says what to fuse: wanted no options for a plan beside it, got both",
                "edit the file, or leave one of them out",
            )


@dataclass(frozen=True)
class PlannedGraph:
    """The graph of ``main``, folded and in its final layout, its plan, and the file of both."""

    graph: Graph
    plan: FusionPlan
    file: PlanFile

    @property
    def digest(self) -> str:
        """SHA-256 of the text of the plan file."""
        return hashlib.sha256(to_json(self.file).encode()).hexdigest()


@dataclass(frozen=True)
class FusedModel:
    """A model on its way to a build.

    Args:
        checked: The model as it came, epsilons aligned when that was asked for.
        laid_out: Folded, in the layouts of the target, nothing grouped yet.
        module: The same with its chains grouped: what is built.
        records: What each pass did.
        planned: What became one kernel.
        tuned: Tuned schedules for some of the kernels.
    """

    checked: CheckedModel
    laid_out: Any = field(compare=False, repr=False)
    module: Any = field(compare=False, repr=False)
    records: PassReport
    planned: PlannedGraph
    tuned: TunedKernels = NOT_TUNED

    @property
    def reference(self) -> Any:
        """The module that the fused one is compared with: nothing folded, nothing fused."""
        return self.checked.module


def fuse_model(
    model: RelayModel, target: Any, options: FuseOptions | None = None, progress: Progress = quietly
) -> FusedModel:
    """Check a model, fold its batch norms, decide its layouts and group its chains.

    Args:
        model: The model.
        target: The ``tvm.target.Target`` that it is built for.
        options: See ``FuseOptions``.
        progress: Called around each step.

    Raises:
        ModelError: An epsilon is not the expected one, statistics cannot be right, or a plan file is stale
            or not legal.
        UsageError: A name fits no batch norm or no group, or the plan cannot be written.
    """
    options = options or FuseOptions()
    with progress("auditing and folding batch norms"):
        checked = check_model(model, options.epsilon, options.epsilon_config, align=options.align_epsilon)
        folded = fold_batch_norms(checked.module)
    with progress("deciding layouts"):
        laid_out = decide_layout(_combine(folded, target, options), target)
    made: list[tuple[Graph, FusionPlan]] = []
    given = None if options.plan_file is None else _carry_out(options.plan_file, target, made)
    refine = refine_on(target) if options.is_measured else None
    with progress("fusing chains"):
        module = partition_chains(laid_out, target, options.plan, given, _keep(made, refine))
    graph, plan = made[-1]  # of ``main``, the only function of a loaded model
    chosen = replace(options.plan, target=target_kind(target))
    file = options.plan_file or make_plan_file(graph, plan, str(target), chosen, f"tvm-fuse {__version__}")
    if options.save_plan is not None:
        save(options.save_plan, file)
    tuned = NOT_TUNED
    if options.records is not None:
        with progress("looking up tuned records"):
            tuned = apply_records(module, target, options.records, drafts=options.drafts)
    return FusedModel(checked, laid_out, module, last_report(), PlannedGraph(graph, plan, file), tuned)


def _combine(module: Any, target: Any, options: FuseOptions) -> Any:
    """Combine layers, unless the user, the plan file or the target's schedules are against it."""
    is_wanted = options.combine and target_kind(target) == "cuda"
    fuse = (options.plan_file or options.plan).fuse if is_wanted else "none"
    return combine_parallel(module, target, PlanOptions(fuse=fuse, accept=options.plan.accept))


def _carry_out(file: PlanFile, target: Any, made: list[tuple[Graph, FusionPlan]]) -> Planner:
    """Plan as a file says; what was planned is added to ``made``."""

    def plan(graph: Graph) -> FusionPlan:
        made.append((graph, replay(graph, file, str(target))))
        return made[-1][1]

    return plan


def _keep(made: list[tuple[Graph, FusionPlan]], refine: Refiner | None) -> Refiner:
    """Refine as ``refine`` does; what was planned is added to ``made``."""

    def keep(read: ReadFunction, plan: FusionPlan) -> FusionPlan:
        made.append((read.graph, plan if refine is None else refine(read, plan)))
        return made[-1][1]

    return keep
