"""The main job: audit, fold, decide layouts, group, build, run, compare, report.

Built from the public passes' own functions and nothing else, so that what the command does can
be done in a ``tvm.transform.Sequential`` as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tvm_fuse import __version__
from tvm_fuse.core.errors import ParityFailed
from tvm_fuse.core.inputs import make_inputs
from tvm_fuse.core.parity import ParityReport, Tolerance, compare
from tvm_fuse.core.reason import Decision
from tvm_fuse.progress import Progress, quietly
from tvm_fuse.relay.build import Artifact, Runner, build_fused, build_unfused, measure
from tvm_fuse.relay.compat import find_tvm
from tvm_fuse.relay.fuse import FuseOptions, fuse_model
from tvm_fuse.relay.load import RelayModel, model_from_module
from tvm_fuse.relay.target import has_cuda_device, is_cuda, resolve_target
from tvm_fuse.report import Cost, FusedKernel, Latency, Report

__all__ = ["Compiled", "Options", "compile", "compile_model"]


@dataclass(frozen=True)
class Options(FuseOptions):
    """What the user may choose, beside what ``FuseOptions`` says.

    Args:
        tolerance: For parity; None takes the default of each output's dtype.
        seed: Seed of the parity inputs.
        parity: Run the fused and the unfused model and compare.
        latency: Also measure both.
    """

    tolerance: Tolerance | None = None
    seed: int = 0
    parity: bool = True
    latency: bool = True


@dataclass(frozen=True)
class Compiled:
    """A fused model.

    Args:
        module: The Relay module that was built: folded, in final layouts, grouped.
        library: What ``relay.build`` returned.
        cuda_source: CUDA C of all kernels; empty on other targets.
        report: What was done and what it bought.
    """

    module: Any = field(repr=False)
    library: Any = field(repr=False)
    cuda_source: str = field(repr=False)
    report: Report


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
        ToolFailed: TVM failed to build.
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
    fused = fuse_model(model, target, options, progress)
    checked, records = fused.checked, fused.records
    pair = _build_pair(fused.reference, fused.module, target, progress)
    runnable = pair
    notes: tuple[str, ...] = ()
    if is_cuda(target) and not has_cuda_device():
        notes = (
            f"{len(pair.fused.cuda_kernels)} CUDA kernels were generated and not run: no GPU is visible",
        )
        if options.parity:
            notes += ("parity was checked with the same fused graph built for this machine's CPU",)
            cpu = resolve_target("llvm")
            runnable = _build_pair(fused.reference, fused.module, cpu, progress, "for the CPU")
        options = replace(options, latency=False)
    parity, latency = _compare(model, runnable, options, progress) if options.parity else (None, None)
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
            FusedKernel(group.name, group.anchor_name, group.operators, group.end)
            for group in records["PartitionChains"].details
        ),
        not_fused=_declined(records["PartitionChains"].decisions),
        unfused=Cost(len(pair.unfused.calls), pair.unfused.traffic_bytes),
        fused=Cost(len(pair.fused.calls), pair.fused.traffic_bytes),
        parity=parity,
        latency=latency,
        notes=notes,
        scale_shifts=records["FoldScaleShift"].details,
        warnings=checked.warnings,
    )
    return Compiled(fused.module, pair.fused.library, pair.fused.cuda_source, report)


# --- steps -----------------------------------------------------------------------------------


def _declined(decisions: tuple[Decision, ...]) -> tuple[Decision, ...]:
    return tuple(decision for decision in decisions if not decision.applied)


@dataclass(frozen=True)
class _Pair:
    """Both models, built for one target."""

    target: Any
    unfused: Artifact
    fused: Artifact


def _build_pair(reference: Any, fused: Any, target: Any, progress: Progress, where: str = "") -> _Pair:
    with progress(f"building the fused model {where}".rstrip()):
        fused_artifact = build_fused(fused, target)
    with progress(f"building the unfused model {where}".rstrip()):
        return _Pair(target, build_unfused(reference, target), fused_artifact)


def _compare(
    model: RelayModel, pair: _Pair, options: Options, progress: Progress
) -> tuple[ParityReport, Latency | None]:
    """Run both models on the same seeded inputs, compare all outputs, and measure when asked to."""
    inputs = make_inputs(model.inputs, options.seed)
    with progress("running both models"):
        runners = Runner(pair.unfused, pair.target), Runner(pair.fused, pair.target)
        want, got = (runner.run(inputs, model.outputs) for runner in runners)
    parity = compare(want, got, tolerance=options.tolerance, seed=options.seed)
    if not options.latency:
        return parity, None
    with progress("measuring both models"):
        return parity, Latency(*measure(runners))


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
