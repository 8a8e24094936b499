"""Fitting: constants that made the times come back, and better ranks where there is something to learn."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from tests.core.tuning.test_score import TILED
from tvm_fuse.core.tuning.fit import LEAST_SAMPLES, Sample, fit_constants, rate_score
from tvm_fuse.core.tuning.score import ScoreConstants, find_card, predict_s

CARD = find_card("sm_80")
TRUE = ScoreConstants(scale=1.6, overlap=0.6, latency_clocks=1500.0, local_clocks=4.0, launch_s=4e-6)


def make_samples(noise=0.0, tasks=8, each=8, seed=0):
    """Kernels of random size, timed by the true constants."""
    rng = random.Random(seed)
    samples = []
    for task in range(tasks):
        size = 10 ** rng.uniform(-1, 1)
        for _ in range(each):
            profile = replace(
                TILED,
                blocks=rng.choice([8, 64, 392, 2000]),
                fma=4616.0 * size * rng.uniform(0.8, 1.5),
                integer=2000 * size * rng.uniform(0.1, 6),
                shared_ways=2000 * size * rng.uniform(0.5, 4),
                sectors=1000 * size * rng.uniform(0.3, 5),
                local_accesses=rng.choice([0.0, 0.0, 9000 * size]),
                phases=float(rng.choice([1, 4, 16, 64])),
            )
            seconds = predict_s([profile], CARD, TRUE) * math.exp(rng.gauss(0, noise))
            samples.append(Sample(f"task{task}", (profile,), seconds))
    return samples


def test_the_constants_behind_the_times_are_found():
    fit = fit_constants(make_samples(), CARD, ScoreConstants())
    assert fit.samples == 64
    for name in ("scale", "overlap", "latency_clocks", "local_clocks", "launch_s"):
        assert getattr(fit.constants, name) == pytest.approx(getattr(TRUE, name), rel=0.25), name
    assert fit.after.error < 1.05 < fit.before.error
    assert fit.after.rank_correlation >= fit.before.rank_correlation
    assert fit.after.regrets[1] <= fit.before.regrets[1]


def test_noise_and_an_outlier_do_not_lead_astray():
    samples = make_samples(noise=0.1)
    samples[3] = replace(samples[3], seconds=1000 * samples[3].seconds)
    fit = fit_constants(samples, CARD, ScoreConstants())
    assert fit.constants.scale == pytest.approx(TRUE.scale, rel=0.4)
    assert fit.after.error < 1.2


def test_what_the_samples_say_nothing_about_stays():
    samples = [
        replace(one, profiles=(replace(one.profiles[0], local_accesses=0.0),)) for one in make_samples()
    ]
    assert fit_constants(samples, CARD, ScoreConstants()).constants.local_clocks == pytest.approx(1.0)


def test_too_few_samples():
    assert fit_constants(make_samples()[: LEAST_SAMPLES - 1], CARD, ScoreConstants()) is None


def test_one_task_is_enough():
    assert fit_constants(make_samples(tasks=1, each=30), CARD, ScoreConstants()).samples == 30


def rate(measured, predicted):
    return rate_score([Sample("t", (), seconds) for seconds in measured], predicted)


def test_quality_by_hand():
    perfect = rate([1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 4.0, 6.0, 8.0, 10.0])
    assert (perfect.rank_correlation, perfect.error) == (pytest.approx(1.0), pytest.approx(2.0))
    assert perfect.regrets == {1: 1.0, 4: 1.0}
    reversed_ = rate([1.0, 2.0, 3.0, 4.0, 5.0], [5.0, 4.0, 3.0, 2.0, 1.0])
    assert reversed_.rank_correlation == pytest.approx(-1.0)
    assert reversed_.regrets == {1: pytest.approx(5.0), 4: pytest.approx(2.0)}


def test_equal_predictions_have_no_rank():
    assert math.isnan(rate([1.0, 2.0, 3.0], [1.0, 1.0, 1.0]).rank_correlation)
    assert math.isnan(rate([1.0, 2.0], [1.0, 2.0]).rank_correlation)
