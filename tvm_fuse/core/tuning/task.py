"""What is tuned, what was measured, and which task to tune next.

The choice is the task scheduler's of Ansor (OSDI 2020, section 6): the objective is the time of the network,
a sum of ``weight * best``, and the next round goes to the task whose round promises the most. Two things are
ours: ``best`` starts as the time of the kernel that the build makes without tuning, and no task is
expected below the roofline.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

__all__ = ["Measurement", "Task", "TaskState", "choose_task"]

#: The past counts for so much, the outlook for the rest; a task is expected to come within this factor of the
#: speed of the best one of its kind; and so many rounds are looked back. All three as in Ansor.
_PAST, _SIMILAR, _WINDOW = 0.2, 2.0, 3
#: A task below this share of the network gets no round before the others have had many.
_SMALL = 0.01


@dataclass(frozen=True)
class Task:
    """One kernel to tune.

    Args:
        digest: Of its chain (``tuning.digest``).
        name: For people, such as ``conv2d_bias_relu``.
        detail: Its result, for people.
        workload_key: What the code generator calls its computation.
        flops: Operations of one call.
        weight: Calls in one inference.
        roofline_s: Seconds of a call at the device's peaks; 0 where these are not known.
        chain: The lines that the digest was made of.
        known: Schedules that records have for it, measured first.
    """

    digest: str
    name: str
    detail: str
    workload_key: str
    flops: int
    weight: int
    roofline_s: float
    chain: tuple[str, ...] = field(default=(), repr=False)
    known: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Measurement:
    """What became of one candidate.

    Args:
        schedule: The candidate, as text of the code generator.
        cost_s: Seconds of a call; None where it failed.
        error: Why it failed, or empty.
        max_abs: Largest difference from the reference.
        needed: Share of the tolerance that was needed.
    """

    schedule: str
    cost_s: float | None
    error: str = ""
    max_abs: float = 0.0
    needed: float = 0.0


@dataclass
class TaskState:
    """How far the tuning of a task is.

    Args:
        task: The task.
        baseline_s: Seconds of the kernel that is built without tuning.
        measured: All candidates so far.
        history: Seconds of the best kernel after each round.
        stopped: Why no more rounds are made; empty while it goes on.
    """

    task: Task
    baseline_s: float | None = None
    measured: list[Measurement] = field(default_factory=list)
    history: list[float] = field(default_factory=list)
    stopped: str = ""

    @property
    def best(self) -> Measurement | None:
        """The fastest candidate that works."""
        good = [one for one in self.measured if one.cost_s is not None]
        return min(good, key=lambda one: one.cost_s or 0.0, default=None)

    @property
    def faster(self) -> list[Measurement]:
        """The candidates that seem faster than the kernel of the build, the fastest first."""
        limit = self.baseline_s or 0.0
        good = [one for one in self.measured if one.cost_s is not None and one.cost_s < limit]
        return sorted(good, key=lambda one: one.cost_s or 0.0)

    @property
    def best_s(self) -> float:
        """Seconds of the fastest kernel known, tuned or not."""
        times = [time for time in (self.baseline_s, self.best.cost_s if self.best else None) if time]
        return min(times, default=0.0)

    @property
    def first_error(self) -> str:
        """The first failure of a candidate."""
        return next((one.error for one in self.measured if one.error), "")

    def add_round(self, results: Iterable[Measurement]) -> None:
        """Take in one measured round."""
        self.measured.extend(results)
        self.history.append(self.best_s)


def choose_task(states: Sequence[TaskState]) -> TaskState | None:
    """Whose round is next: those without any first, the slowest first; then the most promising.

    Tasks that hardly count in the network wait until the others promise less.

    Args:
        states: All tasks.

    Returns:
        One that goes on; None where none does.
    """
    going = [state for state in states if not state.stopped]
    least = _SMALL * sum(map(_network_s, states))
    fresh = [state for state in going if not state.history and _network_s(state) >= least]
    if fresh:
        return max(fresh, key=_network_s)
    return max(going, key=lambda state: _promise(state, states), default=None)


def _network_s(state: TaskState) -> float:
    """Seconds that the calls of a task take in an inference."""
    return state.task.weight * state.best_s


def _promise(state: TaskState, states: Sequence[TaskState]) -> float:
    """Seconds of an inference that one more round may save."""
    rounds, best = len(state.history), state.best_s
    past = (state.history[-1 - _WINDOW] - best) / _WINDOW if rounds > _WINDOW else 0.0
    similar = [other for other in states if other.task.name == state.task.name and other.best_s]
    speed = max((other.task.flops / other.best_s for other in similar), default=0.0)
    outlook = best - best / max(1, rounds)
    if speed and state.task.flops and len(similar) > 1:
        outlook = min(outlook, _SIMILAR * state.task.flops / speed)
    # A kernel that beats its roofline has its data in a cache, which the roofline does not know.
    floor = state.task.roofline_s if best > state.task.roofline_s else 0.0
    gain = best - max(outlook, floor)
    return state.task.weight * (_PAST * past + (1 - _PAST) * max(0.0, gain))
