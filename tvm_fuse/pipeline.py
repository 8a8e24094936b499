"""The main job: audit, fold, decide layouts, group, build, run, compare, report.

Built from the public passes' own functions and nothing else, so that what the command does can
be done in a ``tvm.transform.Sequential`` as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tvm_fuse import __version__
from tvm_fuse.core.errors import ParityFailed
from tvm_fuse.core.parity import ParityReport, ToleranceChoice
from tvm_fuse.core.plan_file import PlanFile
from tvm_fuse.core.reason import Decision
from tvm_fuse.places import AUTO, Job, Pair, build_pair, choose_runner
from tvm_fuse.progress import Progress, quietly
from tvm_fuse.relay.compat import find_tvm
from tvm_fuse.relay.fuse import FuseOptions, fuse_model
from tvm_fuse.relay.load import RelayModel, model_from_module
from tvm_fuse.relay.records import describe_records
from tvm_fuse.relay.target import resolve_target
from tvm_fuse.report import Cost, FusedKernel, Report, steering_of

__all__ = ["Compiled", "Options", "compile", "compile_model"]


@dataclass(frozen=True)
class Options(FuseOptions):
    """What the user may choose, beside what ``FuseOptions`` says.

    Args:
        tolerance: For parity; None takes the default of each output's dtype.
        seed: Seed of the parity inputs.
        parity: Run the fused and the unfused model and compare.
        latency: Also measure both.
        device: Where a model for CUDA runs: ``auto``, the number of a GPU, ``emulator`` or ``cpu``
            (see ``tvm_fuse.places``).
        checked: On the emulator, look at every access to memory.
    """

    tolerance: ToleranceChoice = None
    seed: int = 0
    parity: bool = True
    latency: bool = True
    device: str = AUTO
    checked: bool = False


@dataclass(frozen=True)
class Compiled:
    """A fused model.

    Args:
        module: The Relay module that was built: folded, in final layouts, grouped.
        library: What ``relay.build`` returned.
        cuda_source: CUDA C of all kernels; empty on other targets.
        report: What was done and what it bought.
        plan: The fusion plan, which a later run can carry out again (``Options.plan_file``).
    """

    module: Any = field(repr=False)
    library: Any = field(repr=False)
    cuda_source: str = field(repr=False)
    report: Report
    plan: PlanFile = field(repr=False)


def compile(
    mod: Any, params: Mapping[str, Any] | None = None, target: Any = None, *, options: Options | None = None
) -> Compiled:
    """Fold, fuse, build and check a Relay module.

    Args:
        mod: A Relay ``IRModule`` with a ``main`` of static shapes.
        params: Parameter name -> array; bound as constants.
        target: None or ``"llvm"`` (this machine's CPU), ``"cuda -arch=sm_80"``, any TVM target.
        options: See ``Options``.

    Returns:
        The fused model and its report.

    Raises:
        ModelError: The model cannot be compiled, its statistics are broken, or an epsilon
            differs from the expected one.
        ParityFailed: The outputs differ from the unfused model's.
        MissingDependency: There is no such device.
        ToolFailed: TVM failed to build, or a kernel failed.
        UsageError: An argument is wrong.
    """
    compiled = compile_model(model_from_module(mod, params), target, options or Options())
    parity = compiled.report.parity
    if parity is not None and not parity.passed:
        raise ParityFailed(_summarize_failure(parity), "see report.parity, or pass Options(tolerance=...)")
    return compiled


def compile_model(model: RelayModel, target: Any, options: Options, progress: Progress = quietly) -> Compiled:
    """The main job on a loaded model; a failed parity is in the report, not raised."""
    target = resolve_target(target)
    runner = choose_runner(target, options.device, is_checked=options.checked)
    fused = fuse_model(model, target, options, progress)
    checked, records = fused.checked, fused.records
    pair = build_pair(fused, target, progress)
    outcome = None
    if options.parity:
        outcome = runner.run(
            Job(model, fused, pair, options.tolerance, options.seed, options.latency, progress)
        )
    report = Report(
        tool_version=__version__,
        tvm=f"TVM {find_tvm().version}",
        model=model.name,
        target=str(target),
        inputs=tuple(str(spec) for spec in model.inputs),
        epsilon=checked.epsilon,
        folds=records["FoldBatchNorm"].details,
        not_folded=_declined(records["FoldBatchNorm"].decisions),
        chains=tuple(
            FusedKernel(group.name, group.anchor_name, group.operators, group.end, group.layers)
            for group in fused.planned.plan.groups
            if group.is_layer
        ),
        not_fused=_declined(d for d in records["PartitionChains"].decisions if d.rule == "chain"),
        unfused=Cost(len(pair.unfused.calls), pair.unfused.traffic_bytes),
        fused=Cost(len(pair.fused.calls), pair.fused.traffic_bytes),
        parity=outcome.parity if outcome else None,
        latency=outcome.latency if outcome else None,
        notes=(*(outcome.notes if outcome else _not_run(pair)), *describe_records(fused.tuned)),
        scale_shifts=records["FoldScaleShift"].details,
        warnings=checked.warnings,
        execution=outcome.execution if outcome else None,
        steering=steering_of(options),
        plan_digest=fused.planned.digest,
    )
    return Compiled(fused.module, pair.fused.library, pair.fused.cuda_source, report, fused.planned.file)


# --- steps -----------------------------------------------------------------------------------


def _declined(decisions: Iterable[Decision]) -> tuple[Decision, ...]:
    return tuple(decision for decision in decisions if not decision.applied)


def _not_run(pair: Pair) -> tuple[str, ...]:
    count = len(pair.fused.cuda_kernels)
    return (f"{count} CUDA kernels were generated and not run",) if count else ()


def _summarize_failure(parity: ParityReport) -> str:
    parts = [
        f"{row.output}: {row.problem or f'{row.failing} of {row.elements} values'}"
        for row in parity.rows
        if not row.passed
    ]
    parts += [f"{name}: missing" for name in parity.missing] + [
        f"{name}: unexpected" for name in parity.extra
    ]
    return f"the fused model differs from the unfused one: {'; '.join(parts) or 'there is no output'}"
