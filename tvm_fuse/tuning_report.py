"""What a tuning job came to, as data."""

from __future__ import annotations

from dataclasses import dataclass

from tvm_fuse.core.parity import ParityReport
from tvm_fuse.core.tuning.job import JobState
from tvm_fuse.core.tuning.task import TaskState

__all__ = ["NetworkScore", "TaskRow", "TuningReport", "make_row"]


@dataclass(frozen=True)
class TaskRow:
    """One kernel after tuning.

    Args:
        digest: Of its chain.
        name: Its chain.
        detail: Its result.
        flops: Operations of a call.
        weight: Calls in an inference.
        roofline_s: Seconds of a call at the device's peaks; 0: not known.
        baseline_s: Seconds of the kernel that is built without a record; None: it could not be measured.
        best_s: Seconds of the fastest candidate; None: none works.
        trials: Candidates that were measured.
        failed: How many of them failed.
        compared: Time of the kernel without a record over the best candidate's, measured in turn; None where
            the best one did not seem faster, or failed then.
        is_accepted: Whether that is more than noise, so that a record was written.
        stopped: Why its search ended early; empty where it did not.
        first_error: The first failure.
        comparison_error: Why the comparison with the kernel of the build failed; empty where it did not.
    """

    digest: str
    name: str
    detail: str
    flops: int
    weight: int
    roofline_s: float
    baseline_s: float | None
    best_s: float | None
    trials: int
    failed: int
    compared: float | None
    is_accepted: bool
    stopped: str
    first_error: str
    comparison_error: str = ""


@dataclass(frozen=True)
class NetworkScore:
    """The whole network, and its parity with the unfused model.

    Args:
        untuned_s: Seconds of an inference without records, one a round.
        tuned_s: Seconds with records, in the same rounds.
        records: How many records it uses.
        parity: Of the tuned network.
    """

    untuned_s: tuple[float, ...]
    tuned_s: tuple[float, ...]
    records: int
    parity: ParityReport

    @property
    def speedups(self) -> tuple[float, ...]:
        """Time without records over time with them, round by round."""
        return tuple(before / after for before, after in zip(self.untuned_s, self.tuned_s))


@dataclass(frozen=True)
class TuningReport:
    """What a tuning job came to.

    Args:
        tool_version: Version of tvm-fuse.
        model: Name of the model.
        target: Target string.
        device: Key of the device.
        tasks: The kernels, those with the most operations first.
        trials: Candidates measured, with those of the log.
        seconds: Seconds of this run.
        is_interrupted: Whether Ctrl-C ended it.
        written: Files of the accepted records.
        removed: Digests of records that are no longer faster, and names of damaged files that were removed.
        score: The whole network; None where it cannot run here, or no record is used.
    """

    tool_version: str
    model: str
    target: str
    device: str
    tasks: tuple[TaskRow, ...]
    trials: int
    seconds: float
    is_interrupted: bool
    written: tuple[str, ...]
    removed: tuple[str, ...]
    score: NetworkScore | None

    @property
    def failed(self) -> tuple[TaskRow, ...]:
        """Tasks of which no candidate works."""
        return tuple(row for row in self.tasks if row.trials and row.best_s is None)

    @property
    def is_failure(self) -> bool:
        """Whether nothing works that was tried: no candidate, or not even the kernels of the build."""
        tried = [row for row in self.tasks if row.trials or row.baseline_s is None]
        return not self.is_interrupted and bool(tried) and all(row.best_s is None for row in tried)


def make_row(one: TaskState, state: JobState) -> TaskRow:
    """The row of a task at the end of a job."""
    compared = state.compared.get(one.task.digest)
    ratio = compared[1].baseline_s / compared[1].cost_s if compared and compared[1].cost_s else None
    return TaskRow(
        digest=one.task.digest,
        name=one.task.name,
        detail=one.task.detail,
        flops=one.task.flops,
        weight=one.task.weight,
        roofline_s=one.task.roofline_s,
        baseline_s=one.baseline_s,
        best_s=one.best.cost_s if one.best else None,
        trials=len(one.measured),
        failed=sum(found.cost_s is None for found in one.measured),
        compared=ratio,
        is_accepted=one.task.digest in state.accepted,
        stopped=one.stopped,
        first_error=one.first_error,
        comparison_error=compared[1].error if compared else "",
    )
