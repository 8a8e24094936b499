"""The job of ``tvm-fuse tune``: measure other schedules of a model's kernels, keep the faster ones."""

from __future__ import annotations

import fnmatch
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Callable

from tvm_fuse import __version__
from tvm_fuse.core.cpu import read_cpu
from tvm_fuse.core.errors import MissingDependency, ModelError, UsageError
from tvm_fuse.core.inputs import make_inputs
from tvm_fuse.core.parity import ToleranceChoice, compare
from tvm_fuse.core.tuning.budget import Budget, SearchParameters, scale_search
from tvm_fuse.core.tuning.job import Job, JobState, run_job
from tvm_fuse.core.tuning.log import read_entries
from tvm_fuse.core.tuning.records import (
    TunedRecord,
    load_records,
    prune_records,
    remove_record,
    save_record,
)
from tvm_fuse.core.tuning.task import Task, TaskState
from tvm_fuse.progress import Progress, quietly
from tvm_fuse.relay.build import Runner, build_fused, build_unfused, measure
from tvm_fuse.relay.compat import find_tvm
from tvm_fuse.relay.device import device_of
from tvm_fuse.relay.fuse import FusedModel, FuseOptions, fuse_model
from tvm_fuse.relay.kernel_functions import find_kernels
from tvm_fuse.relay.load import RelayModel
from tvm_fuse.relay.records import apply_records
from tvm_fuse.relay.target import has_cuda_device, is_cuda, resolve_target
from tvm_fuse.relay.tune_kernel import Remote
from tvm_fuse.relay.tune_measure import KernelMeasurer
from tvm_fuse.relay.tune_search import ScheduleSearch
from tvm_fuse.relay.tune_tasks import TunedTask, device_key_of, find_tasks
from tvm_fuse.tuning_report import NetworkScore, TuningReport, make_row

__all__ = ["TuneOptions", "select_tasks", "tune_model"]

#: Where the cost model of the last job of a device is kept, beside its records.
_MODEL_FILE = "cost_model.ubj"


@dataclass(frozen=True)
class TuneOptions(FuseOptions):
    """What the user may choose, beside what ``FuseOptions`` says.

    Args:
        budget: What ends the search.
        tasks: Patterns of kernels to tune, by name or digest; none: all.
        log: The log of the job.
        resume: Go on with a log that is there.
        into: Folder of records that gets the accepted ones; those in it are measured as well.
        remote: Devices behind an RPC tracker; None: this machine.
        timeout_s: Seconds that one candidate may take, built and measured.
        tolerance: For the parity of the whole network.
        seed: Seed of the search and of the data.
        search: How broadly to search; None: as suits this machine.
    """

    budget: Budget = field(default_factory=lambda: Budget(seconds=600.0))
    tasks: tuple[str, ...] = ()
    log: Path = Path("tuning.jsonl")
    resume: bool = False
    into: Path = Path("tuned")
    remote: Remote | None = None
    timeout_s: float = 30.0
    tolerance: ToleranceChoice = None
    seed: int = 0
    search: SearchParameters | None = None


def tune_model(
    model: RelayModel,
    target: Any,
    options: TuneOptions,
    progress: Progress = quietly,
    observe: Callable[[JobState], None] = lambda state: None,
) -> TuningReport:
    """Tune the kernels of a model.

    Args:
        model: The model.
        target: As for ``pipeline.compile``; it runs here, or on the devices of ``options.remote``.
        options: See ``TuneOptions``.
        progress: Called around each step before and after the search.
        observe: Called whenever something was measured.

    Returns:
        What was found. Accepted records are in ``options.into`` by then.

    Raises:
        ModelError: There is nothing to tune.
        UsageError: The log is there and not to be resumed, or is of another device; no kernel fits.
        MissingDependency: XGBoost, the tracker or the device is not there.
    """
    target = resolve_target(target)
    _check_place(target, options.remote)
    _check_log(options)
    fused = fuse_model(model, target, replace(options, records=None), progress)
    device = device_key_of(target)
    stored = load_records(options.into, device).records
    known = {digest: record.schedule for digest, record in stored.items()}
    with progress("finding kernels to tune"):
        kernels = find_kernels(fused.module, target)
        tasks = select_tasks(find_tasks(kernels, target, device_of(target), known), options.tasks)
    if not tasks:
        raise ModelError(
            f"{model.name}: 0 tasks: none of its {len(kernels)} kernels sums anything up",
            "elementwise kernels have nothing to search",
        )
    state = _search(tasks, target, device, options, observe)
    written, removed = _keep(model, state, device, options)
    score = None
    if not state.is_interrupted and options.remote is None and load_records(options.into, device).records:
        score = _score(model, fused, target, options, progress)
    rows = tuple(make_row(one, state) for one in state.tasks)
    return TuningReport(
        tool_version=__version__,
        model=model.name,
        target=str(target),
        device=device,
        tasks=rows,
        trials=state.trials,
        seconds=state.seconds,
        is_interrupted=state.is_interrupted,
        written=written,
        removed=removed,
        score=score,
    )


def select_tasks(tasks: Sequence[TunedTask], patterns: Sequence[str]) -> tuple[TunedTask, ...]:
    """The tasks whose name or digest fits a pattern; all where there are no patterns.

    Raises:
        UsageError: A pattern fits none.
    """
    for pattern in patterns:
        if not any(_fits(one.task, pattern) for one in tasks):
            names = ", ".join(dict.fromkeys(one.task.name for one in tasks))
            raise UsageError(
                f"--tasks {pattern}: wanted a kernel's name or digest, got none; there are {names}"
            )
    return tuple(one for one in tasks if not patterns or any(_fits(one.task, p) for p in patterns))


def _fits(task: Task, pattern: str) -> bool:
    return fnmatch.fnmatchcase(task.name, pattern) or fnmatch.fnmatchcase(task.digest, pattern)


def _check_place(target: Any, remote: Remote | None) -> None:
    if remote is not None:
        return
    if is_cuda(target) and not has_cuda_device():
        raise MissingDependency(
            f"tuning for {target.kind.name} measures on a GPU, and TVM's runtime sees none",
            "tune where the GPU is, or over --rpc",
        )
    is_here = target.kind.name == "llvm" and str(target.attrs.get("mcpu", "")) in ("", read_cpu().name)
    if not is_cuda(target) and not is_here:
        raise UsageError(
            f"target {target}: wanted this machine's CPU ({read_cpu().name}), or a device behind --rpc",
            "--target llvm, or --rpc HOST:PORT --key KEY",
        )


def _check_log(options: TuneOptions) -> None:
    if not options.log.absolute().parent.is_dir():
        raise UsageError(f"--log {options.log}: the folder {options.log.absolute().parent} is not there")
    if not options.resume and read_entries(options.log).entries:
        raise UsageError(
            f"--log {options.log}: a job has written to it", "--resume goes on with it; or name another --log"
        )


def _search(
    tasks: Sequence[TunedTask],
    target: Any,
    device: str,
    options: TuneOptions,
    observe: Callable[[JobState], None],
) -> JobState:
    parameters = options.search or scale_search(read_cpu().cores)
    file = options.into / device / _MODEL_FILE
    search = ScheduleSearch(tasks, target, parameters, model=file)
    with KernelMeasurer(
        tasks, target, timeout_s=options.timeout_s, remote=options.remote, seed=options.seed
    ) as measurer:
        state = run_job(
            Job(
                tasks=[one.task for one in tasks],
                searcher=search,
                measurer=measurer,
                log=options.log,
                identity={"device": device, "target": str(target), "seed": options.seed},
                budget=options.budget,
                per_round=parameters.per_round,
                seed=options.seed,
                observe=observe,
            )
        )
    if not state.is_interrupted and state.done:
        search.save(file)
    return state


def _keep(
    model: RelayModel, state: JobState, device: str, options: TuneOptions
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Write the accepted records; those that were measured again and are not faster go away."""
    written, removed = [], []
    for one in state.tasks:
        accepted = state.accepted.get(one.task.digest)
        if accepted is not None:
            found, times = accepted
            record = TunedRecord(
                digest=one.task.digest,
                device=device,
                name=one.task.name,
                chain=one.task.chain,
                workload_key=one.task.workload_key,
                schedule=found.schedule,
                cost_s=times.cost_s,
                baseline_s=times.baseline_s,
                max_abs=found.max_abs,
                needed=found.needed,
                provenance=_provenance(model, one, options),
            )
            written.append(str(save_record(options.into, record)))
        elif _is_outdated(one, state):
            remove_record(options.into, device, one.task.digest)
            removed.append(one.task.digest)
    if not state.is_interrupted:
        removed += prune_records(options.into, device)
    return tuple(written), tuple(removed)


def _is_outdated(one: TaskState, state: JobState) -> bool:
    """Whether the record that a task had was measured again, and no candidate is faster than without it."""
    tried = {found.schedule for found in one.measured}
    return not state.is_interrupted and bool(one.task.known) and all(text in tried for text in one.task.known)


def _provenance(model: RelayModel, one: TaskState, options: TuneOptions) -> Mapping[str, Any]:
    return {
        "tool": f"tvm-fuse {__version__}",
        "tvm": find_tvm().version,
        "model": model.name,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "python": platform.python_version(),
        "trials": len(one.measured),
        "seed": options.seed,
        "log": options.log.name,
        "measured": "over RPC" if options.remote else "on the device itself",
    }


def _score(
    model: RelayModel, fused: FusedModel, target: Any, options: TuneOptions, progress: Progress
) -> NetworkScore | None:
    """Both builds in turn, and the tuned one against the unfused model."""
    tuned = apply_records(fused.module, target, options.into)
    schedules = tuned.schedules_for(target)
    if not schedules:
        return None
    inputs = make_inputs(model.inputs, options.seed)
    with progress("building the network without and with its records"):
        runners = (
            Runner(build_fused(fused.module, target), target),
            Runner(build_fused(fused.module, target, schedules=schedules), target),
        )
        reference = Runner(build_unfused(fused.reference, target), target)
    with progress("measuring the network"):
        want = reference.run(inputs, model.outputs)
        _, got = (runner.run(inputs, model.outputs) for runner in runners)
        untuned_s, tuned_s = measure(runners)
    parity = compare(want, got, tolerance=options.tolerance, seed=options.seed)
    return NetworkScore(untuned_s, tuned_s, len(tuned.records), parity)
