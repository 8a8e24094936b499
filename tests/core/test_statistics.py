"""Broken channels, all of them, and warnings, each by code, name, channel and value."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.graphs import GraphBuilder, plain_norm, random_norm
from tvm_fuse.core.fold import BatchNorm, audit_statistics
from tvm_fuse.core.reason import Code
from tvm_fuse.core.statistics import GAIN_LIMIT, audit_channels, collect_warnings, warn_statistics

C = 4
TRAINED = random_norm(C)


def make(epsilon=1e-5, **vectors):
    """A trained batch norm, except for what is given."""
    given = {role: np.broadcast_to(np.asarray(value, float), (C,)) for role, value in vectors.items()}
    return BatchNorm(0, "bn3", epsilon, **{**TRAINED._asdict(), **given})


def untrained(**changes):
    return make(**{"mean": 0, "variance": 1, "gamma": 1, "beta": 0, **changes})


def codes(reasons):
    return [reason.code for reason in reasons]


# --- broken channels -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epsilon", "negative"),
    [
        (1e-5, "variance[0] = -0.001 (1 of 4 channels), epsilon = 1e-05"),
        (0.0, "variance[0] = -0.001, variance[2] = 0 (2 of 4 channels), epsilon = 0"),
    ],
)
def test_b062_every_broken_channel_is_listed(epsilon, negative):
    bn = make(epsilon, variance=[-1e-3, np.nan, 0.0, np.inf])
    not_finite, not_positive = audit_channels(bn)
    assert (not_finite.code, not_finite.at) == (Code.BN_STATISTICS_NOT_FINITE, "bn3")
    assert not_finite.got == "variance[1] = nan, variance[3] = inf (2 of 4 channels)"
    assert (not_positive.code, not_positive.at) == (Code.BN_VARIANCE_NOT_POSITIVE, "bn3")
    assert not_positive.got == negative
    assert warn_statistics(bn) == ()


def test_every_role_is_listed():
    bn = make(gamma=[np.nan, 1, 1, 1], beta=[1, -np.inf, 1, 1], mean=np.inf)
    assert [reason.got for reason in audit_channels(bn)] == [
        "gamma[0] = nan (1 of 4 channels)",
        "beta[1] = -inf (1 of 4 channels)",
        "mean[0] = inf, mean[1] = inf, mean[2] = inf, mean[3] = inf (4 of 4 channels)",
    ]


def test_of_many_channels_the_first_four_are_listed():
    bn = BatchNorm(0, "bn", 1e-5, *np.ones((3, 9)), np.full(9, -1.0))
    (reason,) = audit_channels(bn)
    assert "variance[3] = -1, ... (9 of 9 channels)" in reason.got
    assert "variance[4]" not in reason.got


@pytest.mark.parametrize("epsilon", [-1e-5, np.nan, np.inf])
def test_an_invalid_epsilon_is_listed(epsilon):
    assert codes(audit_channels(make(epsilon))) == [Code.BN_EPSILON_INVALID]


@pytest.mark.parametrize(
    "bn",
    [make(), make(variance=0), make(0.0, variance=-1), make(mean=np.nan), make(0.0, variance=0), make(-1.0)],
    ids=["good", "zero", "negative", "nan", "zero epsilon", "negative epsilon"],
)
def test_both_audits_agree(bn):
    assert (audit_channels(bn) == ()) is (audit_statistics(bn) is None)


# --- warnings ------------------------------------------------------------------------------------


def test_a_trained_batch_norm_has_none():
    assert warn_statistics(make()) == ()


def test_b120_default_statistics_warn():
    (reason,) = warn_statistics(untrained())
    assert (reason.code, reason.at) == (Code.BN_STATISTICS_UNTRAINED, "bn3")
    assert reason.got == "mean = 0, variance = 1, gamma = 1, beta = 0 in all 4 channels"


@pytest.mark.parametrize("role", ["mean", "variance", "gamma", "beta"])
def test_one_trained_number_is_enough(role):
    assert (
        warn_statistics(
            untrained(**{role: [1, 1, 1, 0.5] if role in {"variance", "gamma"} else [0, 0, 0, 1]})
        )
        == ()
    )


def test_default_statistics_of_a_batch_norm_without_gamma_and_beta():
    """What the operator does not use counts as 1 and 0, whatever its constants hold."""
    g = GraphBuilder()
    norm = plain_norm(C, gamma=7.0, beta=7.0)
    g.norm(g.input("x", (1, C)), norm, center=False, scale=False, name="bn")
    assert codes(collect_warnings(g.build())) == [Code.BN_STATISTICS_UNTRAINED]


def test_variance_of_zero_in_all_channels():
    (reason,) = warn_statistics(make(1e-5, variance=0))
    assert (reason.code, reason.at) == (Code.BN_VARIANCE_ALL_ZERO, "bn3")
    assert reason.got == "variance = 0 in all 4 channels, epsilon = 1e-05"
    assert warn_statistics(make(1e-5, variance=[0, 0, 0, 1])) == ()


def test_large_gain_names_the_worst_channel():
    (reason,) = warn_statistics(make(1e-12, gamma=[1, -2, 1, 1], variance=[0, 0, 1, 1]))
    assert (reason.code, reason.at) == (Code.BN_GAIN_LARGE, "bn3")
    assert reason.got == ("2e+06 in channel 1 (gamma = -2, variance = 0, epsilon = 1e-12; 2 of 4 channels)")
    assert f"{GAIN_LIMIT:g}" in reason.wanted


@pytest.mark.parametrize(("factor", "count"), [(1.0, 0), (1 + 1e-9, 1), (1e304, 1)])
@pytest.mark.filterwarnings("error")
def test_limit_of_the_gain(factor, count):
    """The limit itself is allowed; a gain too large for float64 is infinite."""
    bn = make(0.0, gamma=[1, 1, 1, -GAIN_LIMIT * factor * 0.5], variance=0.25)
    assert codes(warn_statistics(bn)) == [Code.BN_GAIN_LARGE] * count


def test_several_warnings_about_one_batch_norm():
    assert codes(warn_statistics(make(1e-12, variance=0))) == [Code.BN_VARIANCE_ALL_ZERO, Code.BN_GAIN_LARGE]


def test_a_batch_norm_without_channels_has_none():
    assert warn_statistics(BatchNorm(0, "bn", 1e-5, *np.zeros((4, 0)))) == ()


def test_warnings_of_a_graph_come_in_its_order_and_skip_what_is_not_constant():
    g = GraphBuilder()
    x = g.input("x", (1, C))
    computed = plain_norm(C)._replace(mean=g.input("mean", (C,)))
    for name, norm in {"a": plain_norm(C), "b": computed, "c": random_norm(C), "d": plain_norm(C)}.items():
        x = g.norm(x, norm, name=name)
    reasons = collect_warnings(g.build(x))
    assert [(reason.code, reason.at) for reason in reasons] == [
        (Code.BN_STATISTICS_UNTRAINED, "a"), (Code.BN_STATISTICS_UNTRAINED, "d"),
    ]  # fmt: skip
