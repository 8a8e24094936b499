"""How long a tuning job may take, and search parameters that suit the machine."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Budget", "SearchParameters", "parse_duration", "scale_search"]

_UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0}
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")


@dataclass(frozen=True)
class Budget:
    """What ends a job; None does not.

    Args:
        trials: Candidates measured, those that the log has already included.
        seconds: Seconds of searching in this run.
    """

    trials: int | None = None
    seconds: float | None = None

    def is_spent(self, trials: int, seconds: float) -> bool:
        """Whether a job that measured so many candidates, in so many seconds, has to end."""
        return (self.trials is not None and trials >= self.trials) or (
            self.seconds is not None and seconds >= self.seconds
        )

    def remaining_s(self, trials: int, done: int, seconds: float) -> float | None:
        """Seconds to go.

        Args:
            trials: Candidates measured so far, with those of the log.
            done: Of these, the ones of this run.
            seconds: Seconds of this run.

        Returns:
            What is left of the time, or what the remaining trials would take at the rate so far; the
            smaller one; None where nothing is known yet.
        """
        left = [] if self.seconds is None else [max(0.0, self.seconds - seconds)]
        if self.trials is not None and done:
            left.append(max(0, self.trials - trials) * seconds / done)
        return min(left, default=None)


def parse_duration(text: str) -> float:
    """Seconds of a duration such as ``30m``, ``90s`` or ``1h30m``.

    Raises:
        ValueError: It is none, or zero.
    """
    found = _DURATION.fullmatch(text.strip())
    seconds = sum(float(n) * _UNITS_S[unit] for n, unit in zip(found.groups(), "hms") if n) if found else 0.0
    if seconds <= 0:
        raise ValueError(f"{text!r}: wanted a duration such as 30m, 90s or 1h30m")
    return seconds


@dataclass(frozen=True)
class SearchParameters:
    """How broadly to search before a round is measured.

    Args:
        population: Schedules that the evolutionary search keeps.
        iterations: Its generations.
        sampled: Random schedules that it starts from, at least.
        per_round: Candidates that are measured in one round.
    """

    population: int
    iterations: int
    sampled: int
    per_round: int


#: Cores -> parameters. AutoScheduler's defaults (the last row) keep two cores busy for a minute a round.
_BY_CORES = (
    (4, SearchParameters(256, 2, 20, 16)),
    (16, SearchParameters(512, 3, 32, 32)),
    (1 << 30, SearchParameters(2048, 4, 50, 64)),
)


def scale_search(cores: int) -> SearchParameters:
    """Search parameters for a machine, so that searching takes no longer than measuring."""
    return next(parameters for most, parameters in _BY_CORES if cores <= most)
