"""Timing in turn: every round measures each contender once, so that what disturbs one disturbs all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Contender", "describe", "run_rounds"]

_LEAST_ROUNDS = 5


@dataclass(frozen=True)
class Contender:
    """Something to time.

    Args:
        name: Its name.
        mode: ``launches`` or ``graph``; contenders are compared within a mode.
        time: Seconds of one execution, measured over ``calls`` of them between two events.
        calls: How many.
    """

    name: str
    mode: str
    time: Callable[[], float]
    calls: int


def run_rounds(
    contenders: Sequence[Contender],
    most: int,
    budget_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[list[float]]:
    """Time each contender once a round.

    Args:
        contenders: What to time; each has run before.
        most: Rounds at the most.
        budget_s: No round begins after this time, seconds, once there are five.
        clock: Seconds.

    Returns:
        For each contender its times in seconds, one a round.
    """
    end = clock() + budget_s
    times: list[list[float]] = [[] for _ in contenders]
    for index in range(most):
        if index >= _LEAST_ROUNDS and clock() > end:
            break
        for contender, row in zip(contenders, times):
            row.append(contender.time())
    return times


def describe(
    contenders: Sequence[Contender], times: Sequence[Sequence[float]], base: str
) -> list[dict[str, Any]]:
    """Medians and quartiles, and ratios to what everything is compared with.

    Args:
        contenders: What was timed.
        times: From ``run_rounds``.
        base: Name of the contender that the others' times are divided by, round by round, within a mode.

    Returns:
        One row a contender; ``ratio`` above 1 says that it takes longer than the base.
    """
    bases = {each.mode: row for each, row in zip(contenders, times) if each.name == base}
    rows = []
    for contender, row in zip(contenders, times):
        described: dict[str, Any] = {
            "name": contender.name,
            "mode": contender.mode,
            "rounds": len(row),
            "calls": contender.calls,
            "us": _quartiles([seconds * 1e6 for seconds in row], 3),
        }
        if contender.mode in bases:
            ratios = [one / other for one, other in zip(row, bases[contender.mode]) if other > 0]
            described["ratio"] = _quartiles(ratios, 4)
        rows.append(described)
    return rows


def _quartiles(values: Sequence[float], digits: int) -> Mapping[str, float] | None:
    if not values:
        return None
    low, middle, high = (round(float(value), digits) for value in np.percentile(values, [25, 50, 75]))
    return {"median": middle, "quartile_1": low, "quartile_3": high}
