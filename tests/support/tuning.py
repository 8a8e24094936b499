"""Tuning jobs without TVM: schedules are numbers, and times follow from them."""

from __future__ import annotations

import random
import time
from pathlib import Path

from tvm_fuse.core.tuning.budget import Budget
from tvm_fuse.core.tuning.job import Comparison, Job
from tvm_fuse.core.tuning.task import Measurement, Task

__all__ = ["FakeMeasurer", "FakeSearcher", "make_job"]


def cost_of(schedule: str) -> float:
    """Seconds of a schedule such as ``a 17``: some are faster than the baseline, which takes 1."""
    return 0.5 + random.Random(schedule).random()


class FakeSearcher:
    """Proposes numbers below ``size``; what it has learned is in the order it was told."""

    def __init__(self, size: int = 10**6) -> None:
        self.size = size
        self.learned: list[str] = []

    def propose(self, task, count, measured, seed):
        """Numbers that follow from the seed and from what was learned."""
        if self.size < 100:
            tried = {one.schedule for one in measured}
            texts = [f"{task.digest} {number}" for number in range(self.size)]
            return [text for text in texts if text not in tried][:count]
        rng = random.Random(f"{seed} {len(self.learned)}")
        return [f"{task.digest} {rng.randrange(self.size)}" for _ in range(count)]

    def learn(self, task, results):
        """Note what was told."""
        self.learned += [one.schedule for one in results]


class FakeMeasurer:
    """Times follow from the schedule.

    Args:
        failing: Which schedules fail.
        no_baseline: Digests of kernels that cannot be measured.
        interrupt_at: Raises ``KeyboardInterrupt`` at this candidate.
        luck: By how much slower a candidate is when it is compared.
        delay_s: Seconds that each candidate takes.
    """

    def __init__(
        self, failing=lambda text: False, no_baseline=(), interrupt_at=None, luck=1.0, delay_s=0.0
    ) -> None:
        self.failing, self.no_baseline, self.interrupt_at = failing, no_baseline, interrupt_at
        self.luck, self.delay_s, self.count = luck, delay_s, 0

    def baseline(self, task):
        """One second."""
        if task.digest in self.no_baseline:
            return Measurement("", None, "no baseline")
        return Measurement("", 1.0)

    def measure(self, task, schedules):
        """As the schedules say."""
        return [self._measure(schedule) for schedule in schedules]

    def _measure(self, schedule):
        self.count += 1
        if self.count == self.interrupt_at:
            raise KeyboardInterrupt
        time.sleep(self.delay_s)
        if self.failing(schedule):
            return Measurement(schedule, None, "boom")
        return Measurement(schedule, cost_of(schedule))

    def compare(self, task, schedule):
        """The same times, but for ``luck``."""
        return Comparison(1.0, cost_of(schedule) * self.luck)


def make_job(log: Path, budget: Budget, *, searcher=None, measurer=None, known=(), identity=None, **options):
    """A job of two kernels, four candidates a round."""
    tasks = [Task(name, "conv2d", "", f"key {name}", 100, 1, 0.0, (), known * (name == "a")) for name in "ab"]
    return Job(
        tasks=tasks,
        searcher=searcher or FakeSearcher(),
        measurer=measurer or FakeMeasurer(),
        log=log,
        identity=identity or {"device": "none"},
        budget=budget,
        per_round=4,
        **options,
    )
