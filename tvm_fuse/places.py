"""Where a fused model runs, and how each place compares it with the unfused one.

``choose_runner`` picks one ``PlaceRunner`` for a target and ``--device``; nothing else in the job asks
where it is.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from tvm_fuse.core.errors import MissingDependency, UsageError
from tvm_fuse.core.inputs import make_inputs
from tvm_fuse.core.manifest import Source
from tvm_fuse.core.parity import ParityReport, ToleranceChoice, compare
from tvm_fuse.cuda.compile import parse_arch
from tvm_fuse.cuda.emulator.compiler import find_compiler
from tvm_fuse.progress import Progress
from tvm_fuse.relay.build import Artifact, Runner, build_fused, build_unfused, measure
from tvm_fuse.relay.export import ExportOptions, export_fused
from tvm_fuse.relay.fuse import FusedModel
from tvm_fuse.relay.load import RelayModel
from tvm_fuse.relay.target import cuda_device_name, has_cuda_device, is_cuda, resolve_target
from tvm_fuse.report import Execution, Latency, Place
from tvm_fuse.runner.process import find_device, run_in_process
from tvm_fuse.runner.report import Timing

__all__ = ["AUTO", "CPU", "EMULATOR", "Job", "Outcome", "Pair", "PlaceRunner", "build_pair", "choose_runner"]

#: The first GPU that can be used, else the CPU.
AUTO = "auto"
#: The CUDA kernels, compiled for the CPU.
EMULATOR = "emulator"
#: The same fused graph, built for the CPU.
CPU = "cpu"

_REPEATS = 50  # measurements by the runner
_THIS_CPU = "this machine's CPU"


@dataclass(frozen=True)
class Pair:
    """Both models, built for one target."""

    target: Any
    unfused: Artifact
    fused: Artifact


@dataclass(frozen=True)
class Job:
    """What is to be run and compared.

    Args:
        model: Names and shapes of inputs and outputs.
        fused: The fused model.
        pair: Both models, built for the target.
        tolerance: For parity; None takes the default of each output's dtype.
        seed: Seed of the inputs.
        latency: Whether to measure as well.
        progress: Called around each step.
    """

    model: RelayModel
    fused: FusedModel
    pair: Pair
    tolerance: ToleranceChoice
    seed: int
    latency: bool
    progress: Progress


@dataclass(frozen=True)
class Outcome:
    """What running came to; ``notes`` is what else the user should know."""

    execution: Execution
    parity: ParityReport
    latency: Latency | None = None
    notes: tuple[str, ...] = ()


class PlaceRunner(Protocol):
    """Runs the fused model of a job somewhere."""

    @property
    def execution(self) -> Execution:
        """Where that is."""

    def run(self, job: Job) -> Outcome:
        """Compare its outputs with the unfused model's, and measure where that means something."""


def choose_runner(target: Any, device: str = AUTO, *, is_checked: bool = False) -> PlaceRunner:
    """Where a fused model runs.

    Args:
        target: The ``tvm.target.Target`` that it is built for.
        device: ``auto``, the number of a GPU, ``emulator`` or ``cpu``; for CUDA targets.
        is_checked: On the emulator, look at every access to memory.

    Raises:
        UsageError: ``device`` is none of these or does not go with the target, or the GPU is older than it.
        MissingDependency: There is no such GPU, or no C++ compiler for the emulator.
    """
    if is_checked and device != EMULATOR:
        raise UsageError("--checked is for the emulator", f"--device {EMULATOR}")
    if not is_cuda(target):
        if device != AUTO:
            raise UsageError(
                f"--device {device} is for CUDA targets; the target is {target.kind.name}",
                "leave it out, or give --target 'cuda -arch=sm_80'",
            )
        return _ByTvm(Execution(Place.CPU, _THIS_CPU))
    if device == EMULATOR:
        find_compiler()  # known before an hour of work
        return _ByBundle(Execution(Place.EMULATOR, "the emulator"), EMULATOR, is_checked)
    if device == CPU:
        return _CpuBuild(f"as --device {CPU} asks")
    if device == AUTO:
        return _choose_automatically(target)
    if not (device.isascii() and device.isdigit()):
        raise UsageError(f"--device {device}: wanted {AUTO}, the number of a GPU, {EMULATOR} or {CPU}")
    return _choose_gpu(target, int(device))


def _choose_automatically(target: Any) -> PlaceRunner:
    try:
        return _choose_gpu(target, 0)
    except MissingDependency:
        return _CpuBuild("no GPU is visible")
    except UsageError as error:
        return _CpuBuild(error.message)


def _choose_gpu(target: Any, ordinal: int) -> PlaceRunner:
    """By TVM where its runtime sees the GPU, else by the runner where the driver does."""
    if has_cuda_device(ordinal):
        return _ByTvm(Execution(Place.GPU_BY_TVM, cuda_device_name(ordinal)), ordinal)
    info = find_device(ordinal)
    if parse_arch(str(target.arch)) > parse_arch(info.arch):
        raise UsageError(
            f"GPU {ordinal} ({info.name}) is {info.arch}, which runs no code for {target.arch}",
            f"--target 'cuda -arch={info.arch}'",
        )
    return _ByBundle(Execution(Place.GPU_BY_RUNNER, info.name), str(ordinal))


# --- the places ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ByTvm:
    """Both models in TVM's graph executor, on the device that they were built for."""

    execution: Execution
    ordinal: int = 0

    def run(self, job: Job) -> Outcome:
        inputs = make_inputs(job.model.inputs, job.seed)
        with job.progress("running both models"):
            runners = tuple(
                Runner(artifact, job.pair.target, self.ordinal)
                for artifact in (job.pair.unfused, job.pair.fused)
            )
            want, got = (runner.run(inputs, job.model.outputs) for runner in runners)
        parity = compare(want, got, tolerance=job.tolerance, seed=job.seed)
        if not job.latency:
            return Outcome(self.execution, parity)
        with job.progress("measuring both models"):
            return Outcome(self.execution, parity, Latency(*measure(runners)))


@dataclass(frozen=True)
class _CpuBuild:
    """The same fused graph, built for the CPU; its times would say nothing about a GPU."""

    why: str

    @property
    def execution(self) -> Execution:
        """The CPU, instead of a GPU."""
        return Execution(Place.CPU_BUILD, _THIS_CPU)

    def run(self, job: Job) -> Outcome:
        pair = build_pair(job.fused, resolve_target("llvm"), job.progress, "for the CPU")
        notes = (
            f"{len(job.pair.fused.cuda_kernels)} CUDA kernels were generated and not run: {self.why}; "
            f"--device {EMULATOR} runs them on the CPU",
            "parity was checked with the same fused graph built for this machine's CPU",
        )
        outcome = _ByTvm(self.execution).run(replace(job, pair=pair, latency=False))
        return replace(outcome, notes=notes)


@dataclass(frozen=True)
class _ByBundle:
    """The fused model as a bundle, run by ``tvm_fuse.runner``; its golden outputs are the unfused model's."""

    execution: Execution
    device: str
    is_checked: bool = False

    def run(self, job: Job) -> Outcome:
        options = ExportOptions(seed=job.seed, tolerance=job.tolerance)
        source = Source(job.model.name, "")
        repeats = _REPEATS if job.latency and self.execution.place is Place.GPU_BY_RUNNER else 0
        with tempfile.TemporaryDirectory(prefix="tvm_fuse_run_") as scratch:
            folder = Path(scratch, "bundle")
            export_fused(job.model, job.fused, source, folder, job.pair.target, options, job.progress)
            with job.progress(f"running the kernels on {self.execution.device}"):
                ran = run_in_process(folder, device=self.device, repeats=repeats, is_checked=self.is_checked)
        by_launches = [timing for timing in ran.timings if not timing.is_graph]
        latency = Latency((), by_launches[0].times_s) if by_launches else None
        graphs = tuple(_describe_graph(timing) for timing in ran.timings if timing.is_graph)
        return Outcome(self.execution, ran.parity, latency, (*ran.notes, *graphs))


def _describe_graph(timing: Timing) -> str:
    return f"as a CUDA graph, one inference of the fused model takes {timing.median_s * 1e3:.3f} ms (median)"


def build_pair(fused: FusedModel, target: Any, progress: Progress, where: str = "") -> Pair:
    """Build a fused model and its reference for a target."""
    with progress(f"building the fused model {where}".rstrip()):
        schedules = fused.tuned.schedules_for(target)
        fused_artifact = build_fused(fused.module, target, schedules=schedules)
    with progress(f"building the unfused model {where}".rstrip()):
        return Pair(target, build_unfused(fused.reference, target), fused_artifact)
