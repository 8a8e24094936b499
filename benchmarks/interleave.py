"""Timing in turn on a CPU, and what is made of the times.

Contestants are timed in one process, one after the other, round by round, so that whatever disturbs the
machine disturbs all of them. Their pools of threads are in the way of that: threads wait for more work by
spinning, for some milliseconds, and take the core from whoever comes next. So a turn is::

    sleep 30 ms       until the threads of the one before have gone to sleep
    two warm runs     wake the threads, fill the caches with one's own weights
    four timed runs

Slow models have fewer runs in a turn. Who begins a round changes from round to round. A round in which other
processes (or the hypervisor) took more than a twentieth of the machine is left out, whatever its times: it
does not slow all contestants alike, since those that spin suffer most from a neighbour.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Callable

import numpy as np

__all__ = [
    "Clock",
    "Contestant",
    "Timed",
    "describe_saving",
    "describe_speedup",
    "describe_times",
    "read_others_s",
    "run_rounds",
    "take_turn",
]

REST_S = 0.03
WARM_RUNS, WARM_S = 2, 0.1
TIMED_RUNS, TIMED_S = 4, 0.2

#: The share of the machine that others may take in a round.
_QUIET = 0.05
#: Rounds are made for so many times the budget until enough of them are quiet.
_PATIENCE = 3

#: Name -> for each round the times of a turn, in seconds.
Rounds = Mapping[str, Sequence[Sequence[float]]]


def read_others_s() -> float:
    """CPU seconds that other processes have used so far, and that the hypervisor has kept, on all cores.

    Source: proc_stat(5): user, nice, system, idle, iowait, irq, softirq, steal.
    """
    with open("/proc/stat", encoding="ascii") as file:
        ticks = [int(field) for field in file.readline().split()[1:9]]
    busy = sum(ticks) - ticks[3] - ticks[4]
    return busy / os.sysconf("SC_CLK_TCK") - time.process_time()


@dataclass(frozen=True)
class Contestant:
    """Something to time: its name, and one inference."""

    name: str
    run: Callable[[], object]


@dataclass(frozen=True)
class Clock:
    """Where time comes from; tests have their own."""

    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    others: Callable[[], float] = read_others_s
    cores: int = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Timed:
    """What was timed.

    Args:
        times: Of the rounds that count.
        left_out: Number of rounds that do not: others were busy.
        others_percent: The most that others took of the machine in a round that counts.
    """

    times: Rounds
    left_out: int
    others_percent: float


def take_turn(run: Callable[[], object], clock: Clock = Clock()) -> list[float]:
    """Rest, warm up, and time.

    Args:
        run: One inference.
        clock: Where time comes from.

    Returns:
        Seconds of the timed runs: four, or as many as begin within 0.2 s. There is a second warm run only
        where the first one took less than 0.1 s.
    """

    def runs(most: int, within_s: float) -> list[float]:
        taken: list[float] = []
        while not taken or (len(taken) < most and sum(taken) < within_s):
            start = clock.now()
            run()
            taken.append(clock.now() - start)
        return taken

    clock.sleep(REST_S)
    runs(WARM_RUNS, WARM_S)
    return runs(TIMED_RUNS, TIMED_S)


def run_rounds(
    contestants: Sequence[Contestant],
    budget_s: float,
    least: int = 5,
    most: int = 60,
    clock: Clock = Clock(),
) -> Timed:
    """Let all contestants take their turns until the time is used up.

    Args:
        contestants: What to time.
        budget_s: No round begins after so many seconds, once ``least`` of them were quiet; after three times
            as many, the quietest count.
        least: Rounds that count, at the least.
        most: Rounds that count, at the most.
        clock: Where time comes from.

    Returns:
        The times.
    """
    start, rounds = clock.now(), []
    while True:
        spent = clock.now() - start
        quiet = [one for one in rounds if one[0] <= _QUIET]
        enough = quiet if spent <= _PATIENCE * budget_s else rounds
        if len(quiet) == most or (spent > budget_s and len(enough) >= least):
            break
        rounds.append(_run_round(contestants, len(rounds), clock))
    limit = _QUIET if len(quiet) >= least else sorted(share for share, _ in rounds)[least - 1]
    kept = [one for one in rounds if one[0] <= limit]
    return Timed(
        times={each.name: [turns[each.name] for _, turns in kept] for each in contestants},
        left_out=len(rounds) - len(kept),
        others_percent=round(100 * max(share for share, _ in kept), 1),
    )


def _run_round(
    contestants: Sequence[Contestant], index: int, clock: Clock
) -> tuple[float, dict[str, list[float]]]:
    """The share of the machine that others took, and the turns."""
    start, others = clock.now(), clock.others()
    first = index % len(contestants)
    turns = {each.name: take_turn(each.run, clock) for each in (*contestants[first:], *contestants[:first])}
    share = (clock.others() - others) / ((clock.now() - start) * clock.cores)
    return max(0.0, share), turns


def describe_times(turns: Sequence[Sequence[float]]) -> dict[str, float]:
    """Milliseconds of one contestant: median, quartiles and least of all timed runs."""
    every = [1e3 * seconds for turn in turns for seconds in turn]
    return {**_quartiles(every), "least": _round(min(every))}


def describe_speedup(times: Rounds, base: str, ours: str) -> dict[str, float]:
    """How many times as fast ``ours`` is as ``base``: each round's ratio of medians, median and quartiles."""
    return _quartiles([one / other for one, other in _pairs(times, base, ours)])


def describe_saving(times: Rounds, before: str, after: str) -> dict[str, float]:
    """The percentage of the time of ``before`` that ``after`` saves; as in ``describe_speedup``."""
    return _quartiles([100 * (1 - other / one) for one, other in _pairs(times, before, after)])


def _pairs(times: Rounds, one: str, other: str) -> list[tuple[float, float]]:
    """For each round the medians of two contestants' turns."""
    return [
        (statistics.median(left), statistics.median(right)) for left, right in zip(times[one], times[other])
    ]


def _quartiles(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = np.percentile(values, [25, 50, 75])
    return {"median": _round(middle), "quartile_1": _round(low), "quartile_3": _round(high)}


def _round(value: float) -> float:
    return round(float(value), 4)
