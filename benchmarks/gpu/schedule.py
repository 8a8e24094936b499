"""Jobs against a time budget: what is worth most first, what fails named, what is left out as well."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.gpu.suite import Job

__all__ = ["Outcome", "Record", "run_jobs"]

#: Nothing worth having fits into less, seconds.
_LEAST_S = 5.0


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Args:
        result: What its process wrote; with ``error`` or without ``passed`` it failed.
        seconds: How long it took.
        timed_out: Whether it was stopped.
    """

    result: dict[str, Any]
    seconds: float
    timed_out: bool = False


@dataclass
class Record:
    """What has been found so far."""

    jobs: list[dict[str, Any]] = field(default_factory=list)
    not_measured: list[dict[str, str]] = field(default_factory=list)
    _news: list[tuple[str, str]] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        """Names of the jobs that failed."""
        return [job["name"] for job in self.jobs if job["status"] != "passed"]

    def take_news(self) -> list[tuple[str, str]]:
        """Name and status of what was added since this was asked last."""
        news, self._news = self._news, []
        return news

    def skip(self, job: Job, why: str) -> None:
        """A job that says nothing, and why."""
        self.not_measured.append({"name": job.name, "why": why})
        self._news.append((job.name, "not measured"))

    def add(self, job: Job, outcome: Outcome) -> None:
        """A job that ended."""
        status = "passed" if outcome.result.get("passed") else "failed"
        if "error" in outcome.result:
            status = "error"
        row = {"name": job.name, "kind": job.kind, "status": status, "seconds": round(outcome.seconds, 1)}
        self._news.append((job.name, status))
        entry = job.entries[0]
        self.jobs.append({**row, "subject": entry.subject, "batch": entry.batch, **outcome.result})


def run_jobs(
    jobs: Iterable[Job],
    execute: Callable[[Job, float], Outcome],
    budget_s: float,
    save: Callable[[Record], None],
    clock: Callable[[], float] = time.monotonic,
) -> Record:
    """Run jobs in order until the budget is spent.

    Args:
        jobs: What is worth most first.
        execute: Runs a job for so many seconds at the most.
        budget_s: For all of them, seconds.
        save: Called after each job.
        clock: Seconds.

    Returns:
        What was found. An entry whose check failed is not measured.
    """
    end = clock() + budget_s
    record, wrong = Record(), set()
    for job in jobs:
        left_s = end - clock()
        entries = tuple(entry for entry in job.entries if entry.folder not in wrong)
        if left_s < _LEAST_S:
            record.skip(job, "the time budget was spent")
        elif not entries or entries[0] != job.entries[0]:
            record.skip(job, f"{job.entries[0].folder} failed its check")
        else:
            for entry in set(job.entries) - set(entries):
                record.skip(
                    replace(job, name=f"{entry.form} of {job.name!r}"), f"{entry.folder} failed its check"
                )
            outcome = execute(replace(job, entries=entries), min(job.limit_s, left_s))
            if outcome.timed_out and left_s <= job.limit_s:
                record.skip(job, f"stopped after {outcome.seconds:.0f} s: the time budget was spent")
            else:
                record.add(job, outcome)
            if job.kind == "check" and not outcome.result.get("passed") and not outcome.timed_out:
                wrong.add(job.entries[0].folder)
        save(record)
    return record
