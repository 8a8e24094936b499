"""The loop of a tuning job: choose a task, propose candidates, measure them, log them, learn.

What a job knows is a function of its log, so that one that was killed goes on as if it had not been: counts,
best times and the choice of the next task are read from it, and the seed of each round follows from the
task and the number of its candidates. Who proposes and who measures are given (``Searcher``, ``Measurer``).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Callable, Protocol

from tvm_fuse.core.errors import UsageError
from tvm_fuse.core.tuning.budget import Budget
from tvm_fuse.core.tuning.log import append_entries, read_entries
from tvm_fuse.core.tuning.task import Measurement, Task, TaskState, choose_task

__all__ = ["FASTER", "Comparison", "Job", "JobState", "Measurer", "Phase", "Searcher", "run_job"]

_SCHEMA = {"name": "tvm-fuse/tuning-log", "version": 1}

#: A task is given up after so many rounds without a single candidate that works.
_FAILED_ROUNDS = 2
#: A candidate replaces the kernel of the build when it takes at most this share of its time.
FASTER = 0.98
#: So many of the fastest candidates are compared, until one is faster.
_FINALISTS = 3


@dataclass(frozen=True)
class Comparison:
    """A candidate and the kernel of the build, measured in turn: seconds of a call, or what failed."""

    baseline_s: float
    cost_s: float
    error: str = ""

    @property
    def is_faster(self) -> bool:
        """Whether the candidate is faster by more than noise."""
        return not self.error and self.cost_s <= FASTER * self.baseline_s


class Phase(str, Enum):
    """What a job is doing."""

    #: Timing the kernels that are built without tuning.
    TIMING = "timing"
    SEARCHING = "searching"
    #: Measuring the best candidates in turn with the kernels of the build.
    COMPARING = "comparing"


class Searcher(Protocol):
    """Proposes schedules of a task."""

    def propose(self, task: Task, count: int, measured: Sequence[Measurement], seed: int) -> Sequence[str]:
        """At most ``count`` schedules that were not measured yet; none when there are no more."""

    def learn(self, task: Task, results: Sequence[Measurement]) -> None:
        """Take in what was measured."""


class Measurer(Protocol):
    """Builds, checks and times kernels; a failure is part of the result, never an exception."""

    def baseline(self, task: Task) -> Measurement:
        """The kernel that the build makes without tuning."""

    def measure(self, task: Task, schedules: Sequence[str]) -> Sequence[Measurement]:
        """Candidates, each checked against the reference; results in the same order."""

    def compare(self, task: Task, schedule: str) -> Comparison:
        """A candidate and the kernel of the build, in turn."""


@dataclass
class JobState:
    """How far a job is.

    Args:
        tasks: State of every task.
        seconds: Seconds of searching in this run.
        done: Candidates measured in this run.
        is_interrupted: Whether Ctrl-C ended the search.
        phase: What is going on.
        current: The task that was measured last.
        compared: Digest -> the last candidate that was compared with the kernel of the build, since it
            seemed faster, and the comparison.
    """

    tasks: tuple[TaskState, ...]
    seconds: float = 0.0
    done: int = 0
    is_interrupted: bool = False
    phase: Phase = Phase.TIMING
    current: Task | None = None
    compared: dict[str, tuple[Measurement, Comparison]] = field(default_factory=dict)

    @property
    def trials(self) -> int:
        """Candidates measured, in this run and before."""
        return sum(len(state.measured) for state in self.tasks)

    @property
    def accepted(self) -> dict[str, tuple[Measurement, Comparison]]:
        """Those of the compared that are faster."""
        return {digest: found for digest, found in self.compared.items() if found[1].is_faster}

    @property
    def network_s(self) -> float:
        """Seconds that all tasks together take in an inference, at the best."""
        return sum(state.task.weight * state.best_s for state in self.tasks)


@dataclass(frozen=True)
class Job:
    """What a job works with.

    Args:
        tasks: What is tuned.
        searcher: Who proposes.
        measurer: Who measures.
        log: The log file; its entries are taken in first.
        identity: What must be the same in a log that is resumed, such as the device.
        budget: What ends it.
        per_round: Candidates of one round.
        seed: Seed of the search.
        observe: Called after everything that was measured.
        clock: Seconds, monotonic.
    """

    tasks: Sequence[Task]
    searcher: Searcher
    measurer: Measurer
    log: Path
    identity: Mapping[str, Any]
    budget: Budget
    per_round: int
    seed: int = 0
    observe: Callable[[JobState], None] = lambda state: None
    clock: Callable[[], float] = time.monotonic


def run_job(job: Job) -> JobState:
    """Tune until the budget is spent, all tasks have stopped, or Ctrl-C.

    Args:
        job: The job.

    Returns:
        Where it ended, with what was accepted. A second Ctrl-C, while the best candidates are compared
        with the kernels of the build, ends that as well; what was compared by then is in the result.

    Raises:
        UsageError: The log is of another device, or cannot be written.
    """
    state = JobState(tuple(TaskState(task) for task in job.tasks))
    _restore(job, state)
    start = job.clock()
    try:
        for one in state.tasks:
            _measure_baseline(job, state, one)
        state.phase = Phase.SEARCHING
        job.observe(state)
        while not job.budget.is_spent(state.trials, job.clock() - start):
            chosen = choose_task(state.tasks)
            if chosen is None:
                break
            _round(job, state, chosen)
            state.seconds = job.clock() - start
            job.observe(state)
    except KeyboardInterrupt:
        state.is_interrupted = True
    state.seconds, state.phase = job.clock() - start, Phase.COMPARING
    try:
        _accept(job, state)
    except KeyboardInterrupt:
        state.is_interrupted = True
    return state


def _measure_baseline(job: Job, state: JobState, one: TaskState) -> None:
    if one.baseline_s is not None or one.stopped:
        return
    state.current = one.task
    found = job.measurer.baseline(one.task)
    what = {"name": one.task.name, "chain": one.task.chain}  # with its layouts, which are decided by now
    append_entries(job.log, [{**_entry("baseline", one.task, found), **what}])
    _take_baseline(one, found)
    job.observe(state)


def _take_baseline(one: TaskState, found: Measurement) -> None:
    one.baseline_s = found.cost_s
    if found.cost_s is None:
        one.stopped = f"the kernel that is built without tuning cannot be measured: {found.error}"


def _round(job: Job, state: JobState, one: TaskState) -> None:
    """Measure one round of a task; nothing of it counts before it is in the log."""
    state.current = one.task
    count = job.per_round
    if job.budget.trials is not None:
        count = min(count, job.budget.trials - state.trials)
    tried = {found.schedule for found in one.measured}
    known = [schedule for schedule in one.task.known if schedule not in tried][:count]
    proposed = job.searcher.propose(one.task, count - len(known), one.measured, _seed(job.seed, one))
    candidates = [*known, *(schedule for schedule in proposed if schedule not in tried)]
    if not candidates:
        one.stopped = "all candidates were measured"
        return
    results = list(job.measurer.measure(one.task, candidates))
    append_entries(job.log, [_entry("measured", one.task, found, len(one.history)) for found in results])
    state.done += len(results)
    _take_round(one, results)
    job.searcher.learn(one.task, results)


def _take_round(one: TaskState, results: Sequence[Measurement]) -> None:
    one.add_round(results)
    if one.best is None and len(one.history) >= _FAILED_ROUNDS:
        one.stopped = f"no candidate of {len(one.measured)} works; the first error: {one.first_error}"


def _seed(seed: int, one: TaskState) -> int:
    text = f"{seed} {one.task.digest} {len(one.measured)}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % (1 << 30) + 1


def _accept(job: Job, state: JobState) -> None:
    """Compare the best candidates with the kernels of the build: one measurement alone may be luck."""
    for one in state.tasks:
        for candidate in one.faster[:_FINALISTS]:
            found = job.measurer.compare(one.task, candidate.schedule)
            state.compared[one.task.digest], state.current = (candidate, found), one.task
            job.observe(state)
            if found.is_faster:
                break


# --- log -----------------------------------------------------------------------------------------


def _entry(kind: str, task: Task, found: Measurement, round_index: int = 0) -> dict[str, Any]:
    return {
        "kind": kind,
        "digest": task.digest,
        "workload_key": task.workload_key,
        "round": round_index,
        "schedule": found.schedule,
        "cost_s": found.cost_s,
        "error": found.error,
        "max_abs": found.max_abs,
        "needed": found.needed,
    }


def _restore(job: Job, state: JobState) -> None:
    """Take in the log, in its order; a new one gets its first line."""
    entries = read_entries(job.log).entries
    first = {"kind": "job", "schema": _SCHEMA, **job.identity}
    for entry in entries:
        if entry.get("kind") == "job" and any(entry.get(key) != value for key, value in first.items()):
            raise UsageError(
                f"{job.log}: this log is of another job: wanted {_identity(first)}, got {_identity(entry)}",
                "name another --log",
            )
    if not any(entry.get("kind") == "job" for entry in entries):
        append_entries(job.log, [first])
    by_key = {one.task.workload_key: one for one in state.tasks}
    rounds: dict[tuple[str, int], list[Measurement]] = {}
    for entry in entries:
        one = by_key.get(str(entry.get("workload_key")))
        if one is None:
            continue
        found = Measurement(*(entry[key] for key in ("schedule", "cost_s", "error", "max_abs", "needed")))
        if entry["kind"] == "baseline" and found.cost_s is not None:
            _take_baseline(one, found)
        elif entry["kind"] == "measured":
            rounds.setdefault((one.task.workload_key, int(entry["round"])), []).append(found)
    for (key, _), results in rounds.items():
        _take_round(by_key[key], _without_repeats(by_key[key], results))
        job.searcher.learn(by_key[key].task, results)


def _without_repeats(one: TaskState, results: Sequence[Measurement]) -> list[Measurement]:
    """Two jobs on one log may have measured the same candidate; it counts once."""
    tried = {found.schedule for found in one.measured}
    fresh = {found.schedule: found for found in reversed(results) if found.schedule not in tried}
    return list(reversed(fresh.values()))


def _identity(entry: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in entry.items() if key not in ("kind", "schema"))
