"""Constants of the score from measured times, and how well the score ranks.

The squared differences of logarithms are minimised, so that a kernel of 5 us counts as much as one of 500 us;
beyond 30 % a difference counts by its size only, since some kernels do what the score does not know. A weak
pull to the constants before keeps those in place that the samples say nothing about.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tvm_fuse.core.dtypes import Array
from tvm_fuse.core.tuning.score import Card, KernelProfile, ScoreConstants, predict_s

__all__ = ["LEAST_SAMPLES", "Fit", "Quality", "Sample", "fit_constants", "rate_score"]

#: Fewer samples say too little.
LEAST_SAMPLES = 24

_FITTED = ("scale", "overlap", "latency_clocks", "local_clocks", "launch_s")
_ROBUST = 0.3  # of a logarithm
_PULL = 0.01  # weight of a constant's logarithm, as of a sample that is so far off
_ROUNDS = 25
_STEP = 1e-4
_LARGEST_STEP = 0.5
_FOLDS = 4


@dataclass(frozen=True)
class Sample:
    """A measured kernel: the task that it is a candidate of, what it does, its seconds."""

    task: str
    profiles: tuple[KernelProfile, ...]
    seconds: float


@dataclass(frozen=True)
class Quality:
    """How well a score ranks the candidates of tasks.

    Args:
        rank_correlation: Spearman's, the mean over tasks; nan without a task of three candidates.
        regrets: k -> time of the fastest of the k best by score over that of the fastest, geometric mean over
            tasks; 1 is perfect.
        error: Median factor between prediction and time.
    """

    rank_correlation: float
    regrets: Mapping[int, float]
    error: float


@dataclass(frozen=True)
class Fit:
    """New constants, and what they are worth.

    Args:
        constants: Fitted to all samples.
        before: Of the constants before.
        after: Of constants that were fitted without the task in question.
        samples: How many there were.
    """

    constants: ScoreConstants
    before: Quality
    after: Quality
    samples: int


def fit_constants(samples: Sequence[Sample], card: Card, start: ScoreConstants) -> Fit | None:
    """Fit the constants of the score.

    Args:
        samples: Measured candidates.
        card: Where they were measured.
        start: The constants before.

    Returns:
        The fit; None where there are fewer than ``LEAST_SAMPLES``.
    """
    if len(samples) < LEAST_SAMPLES:
        return None
    tasks = list(dict.fromkeys(sample.task for sample in samples))
    held_out: dict[int, float] = {}
    for fold in range(_FOLDS):
        left_out = set(tasks[fold::_FOLDS])
        known = [sample for sample in samples if sample.task not in left_out]
        constants = _minimise(known, card, start) if known else start
        for index, sample in enumerate(samples):
            if sample.task in left_out:
                held_out[index] = predict_s(sample.profiles, card, constants)
    after = [held_out[index] for index in range(len(samples))]
    before = [predict_s(sample.profiles, card, start) for sample in samples]
    fitted = _minimise(samples, card, start)
    return Fit(fitted, rate_score(samples, before), rate_score(samples, after), len(samples))


def _minimise(samples: Sequence[Sample], card: Card, start: ScoreConstants) -> ScoreConstants:
    """Gauss and Newton's method in logarithms, with Huber's weights."""
    origin = np.log([getattr(start, name) for name in _FITTED])
    measured = np.log([sample.seconds for sample in samples])

    def residuals(point: Array) -> Array:
        constants = replace(start, **dict(zip(_FITTED, map(float, np.exp(point)))))
        predicted = [predict_s(one.profiles, card, constants) for one in samples]
        return np.asarray(np.log(predicted) - measured)

    point, pull = origin.copy(), _PULL * np.sqrt(len(samples))
    for _ in range(_ROUNDS):
        here = residuals(point)
        columns = [(residuals(point + _STEP * unit) - here) / _STEP for unit in np.eye(len(origin))]
        weights = np.minimum(1.0, _ROBUST / np.maximum(np.abs(here), 1e-12))
        matrix = np.stack(columns, axis=1)
        left = matrix.T @ (weights[:, None] * matrix) + pull**2 * np.eye(len(origin))
        right = matrix.T @ (weights * here) + pull**2 * (point - origin)
        step = np.clip(np.linalg.solve(left, right), -_LARGEST_STEP, _LARGEST_STEP)
        point = point - step
        if float(np.abs(step).max()) < _STEP:
            break
    return replace(start, **dict(zip(_FITTED, map(float, np.exp(point)))))


def rate_score(
    samples: Sequence[Sample], predicted_s: Sequence[float], most: Sequence[int] = (1, 4)
) -> Quality:
    """How well predictions rank.

    Args:
        samples: Measured candidates.
        predicted_s: Their predicted seconds, in the same order.
        most: The k of the regrets.
    """
    by_task: dict[str, list[tuple[float, float]]] = {}
    for sample, predicted in zip(samples, predicted_s):
        by_task.setdefault(sample.task, []).append((predicted, sample.seconds))
    correlations = [_spearman(pairs) for pairs in by_task.values() if len(pairs) > 2]
    known = [one for one in correlations if not math.isnan(one)]
    regrets = {k: _geometric([_regret(pairs, k) for pairs in by_task.values()]) for k in most}
    errors = [abs(math.log(predicted / one.seconds)) for one, predicted in zip(samples, predicted_s)]
    return Quality(
        float(np.mean(known)) if known else math.nan,
        regrets,
        float(np.exp(np.median(errors))) if errors else math.nan,
    )


def _regret(pairs: Sequence[tuple[float, float]], k: int) -> float:
    chosen = sorted(pairs)[:k]
    return min(seconds for _, seconds in chosen) / min(seconds for _, seconds in pairs)


def _spearman(pairs: Sequence[tuple[float, float]]) -> float:
    ranks = [_ranks(column) for column in zip(*pairs)]
    if any(float(np.ptp(column)) == 0.0 for column in ranks):
        return math.nan
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _ranks(values: Sequence[float]) -> Array:
    """Ranks from 0; equal values share the mean of theirs."""
    array = np.asarray(values)
    return np.asarray([np.mean(np.flatnonzero(np.sort(array) == value)) for value in array])


def _geometric(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values)))) if values else math.nan
