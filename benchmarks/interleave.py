"""Timing in turn on a CPU, and what is made of the times.

Contestants are timed in one process, one after the other, round by round, so that whatever disturbs the
machine disturbs all of them. Their pools of threads are in the way of that: threads wait for more work by
spinning, for some milliseconds, and take the core from whoever comes next. So a turn is::

    sleep 30 ms       until the threads of the one before have gone to sleep
    two warm runs     wake the threads, fill the caches with one's own weights
    four timed runs

Slow models have fewer runs in a turn. Who begins a round changes from round to round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Callable

import numpy as np

__all__ = ["Contestant", "describe_saving", "describe_speedup", "describe_times", "run_rounds", "take_turn"]

REST_S = 0.03
WARM_RUNS, WARM_S = 2, 0.1
TIMED_RUNS, TIMED_S = 4, 0.2

#: Name -> for each round the times of a turn, in seconds.
Rounds = Mapping[str, Sequence[Sequence[float]]]


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


def take_turn(run: Callable[[], object], clock: Clock = Clock()) -> list[float]:  # noqa: B008
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
    clock: Clock = Clock(),  # noqa: B008
) -> dict[str, list[list[float]]]:
    """Let all contestants take their turns until the time is used up.

    Args:
        contestants: What to time.
        budget_s: No round begins after so many seconds, once there are ``least``.
        least, most: Rounds.
        clock: Where time comes from.

    Returns:
        Name -> for each round the times of a turn, in seconds.
    """
    end = clock.now() + budget_s
    times: dict[str, list[list[float]]] = {contestant.name: [] for contestant in contestants}
    for index in range(most):
        if index >= least and clock.now() > end:
            break
        first = index % len(contestants)
        for contestant in (*contestants[first:], *contestants[:first]):
            times[contestant.name].append(take_turn(contestant.run, clock))
    return times


def describe_times(turns: Sequence[Sequence[float]]) -> dict[str, float]:
    """Milliseconds of one contestant: median, quartiles and least of all timed runs."""
    every = [1e3 * seconds for turn in turns for seconds in turn]
    return {**_quartiles(statistics.median(every), every), "least": _round(min(every))}


def describe_speedup(times: Rounds, base: str, ours: str) -> dict[str, float]:
    """How many times as fast ``ours`` is as ``base``: the ratio of the medians of all runs.

    The quartiles are those of the ratios that each round alone gives.
    """
    ratio = _median(times, base) / _median(times, ours)
    return _quartiles(ratio, [one / other for one, other in _pairs(times, base, ours)])


def describe_saving(times: Rounds, before: str, after: str) -> dict[str, float]:
    """The percentage of the time of ``before`` that ``after`` saves; quartiles as in ``describe_speedup``."""
    saving = 100 * (1 - _median(times, after) / _median(times, before))
    return _quartiles(saving, [100 * (1 - other / one) for one, other in _pairs(times, before, after)])


def _median(times: Rounds, name: str) -> float:
    return statistics.median(seconds for turn in times[name] for seconds in turn)


def _pairs(times: Rounds, one: str, other: str) -> list[tuple[float, float]]:
    """For each round the medians of two contestants' turns."""
    return [
        (statistics.median(left), statistics.median(right)) for left, right in zip(times[one], times[other])
    ]


def _quartiles(middle: float, values: Sequence[float]) -> dict[str, float]:
    low, high = np.percentile(values, [25, 75])
    return {"median": _round(middle), "quartile_1": _round(low), "quartile_3": _round(high)}


def _round(value: float) -> float:
    return round(float(value), 4)
