"""Epsilon alignment, compared as a number."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_fuse.core.epsilon import (
    EpsilonCheck,
    EpsilonConfig,
    EpsilonImpact,
    EpsilonOrigin,
    ExpectedEpsilon,
    check_epsilon,
    check_epsilon_dtype,
    measure_impact,
    resolve_expected,
)
from tvm_fuse.core.errors import UsageError
from tvm_fuse.core.reason import Code

SOURCE = EpsilonOrigin.SOURCE_ATTRIBUTE
IN_FLOAT32 = float(np.float32(1e-5))  # 9.999999747378752e-06, as ONNX stores it


@pytest.mark.parametrize(
    ("in_graph", "expected", "matches"),
    [
        (1e-5, 1e-5, True),
        (1e-5, IN_FLOAT32, True),
        (IN_FLOAT32, 1e-5, True),
        (1e-3, 1e-5, False),
        (1e-5, 1.00001e-5, False),
        (0.0, 0.0, True),
        (0.0, 1e-12, False),
        (1e-12, 0.0, False),
        (float("nan"), 1e-5, False),
    ],
)
@pytest.mark.parametrize("align", [False, True])
def test_check(in_graph, expected, matches, align):
    check = check_epsilon("bn1", in_graph, ExpectedEpsilon(expected, SOURCE), align=align)
    assert check.matches is matches
    assert (check.name, check.expected, check.origin) == ("bn1", expected, SOURCE)
    wanted = expected if align and not matches else in_graph
    assert check.used == pytest.approx(wanted, rel=0, abs=0, nan_ok=True)


@pytest.mark.parametrize("align", [False, True])
def test_without_an_expectation_the_graph_is_believed(align):
    check = check_epsilon("bn1", 1e-4, None, align=align)
    assert check == EpsilonCheck("bn1", 1e-4, 1e-4, EpsilonOrigin.GRAPH, 1e-4)
    assert check.matches


NAMES = ("stem.bn", "layer1.0.bn1", "layer1.0.bn2", "layer2.0.bn1")


def values(expected):
    return {name: (each.value, each.origin) for name, each in expected.items()}


def test_source_speaks_for_the_batch_norms_of_the_graph_only():
    source = {"stem.bn": ExpectedEpsilon(1e-3, SOURCE), "gone.bn": ExpectedEpsilon(1e-2, SOURCE)}
    assert values(resolve_expected(NAMES, source, {})) == {"stem.bn": (1e-3, SOURCE)}


def test_user_wins_over_the_source():
    source = {name: ExpectedEpsilon(1e-5, EpsilonOrigin.SOURCE_DEFAULT) for name in NAMES}
    expected = values(resolve_expected(NAMES, source, {"layer1.*": 1e-3}))
    assert expected["stem.bn"] == (1e-5, EpsilonOrigin.SOURCE_DEFAULT)
    assert expected["layer1.0.bn1"] == expected["layer1.0.bn2"] == (1e-3, EpsilonOrigin.USER)


@pytest.mark.parametrize(
    ("pattern", "count"), [("*", 4), ("stem.bn", 1), ("layer?.0.bn1", 2), ("*.bn[12]", 3), ("STEM.bn", 0)]
)
def test_patterns(pattern, count):
    if not count:
        with pytest.raises(UsageError, match="no batch norm has that name"):
            resolve_expected(NAMES, {}, {pattern: 1e-3})
        return
    assert len(resolve_expected(NAMES, {}, {pattern: 1e-3})) == count


@pytest.mark.parametrize("values", [{"stem.bn": 1e-3, "*": 1e-5}, {"*": 1e-5, "stem.bn": 1e-3}], ids=str)
def test_a_name_wins_over_a_pattern(values):
    expected = resolve_expected(NAMES, {}, values)
    assert {name: each.value for name, each in expected.items()} == dict.fromkeys(NAMES, 1e-5) | {
        "stem.bn": 1e-3
    }


def test_of_patterns_the_later_wins():
    assert resolve_expected(NAMES, {}, {"*": 1e-5, "layer1.*": 1e-3})["layer1.0.bn1"].value == 1e-3
    assert resolve_expected(NAMES, {}, {"layer1.*": 1e-3, "*": 1e-5})["layer1.0.bn1"].value == 1e-5


def test_the_config_wins_over_the_source_and_the_user_over_both():
    source = {name: ExpectedEpsilon(1e-5, SOURCE) for name in NAMES}
    config = EpsilonConfig({"layer*": 1e-3})
    assert values(resolve_expected(NAMES, source, {"layer2.*": 1e-2}, config)) == {
        "stem.bn": (1e-5, SOURCE),
        "layer1.0.bn1": (1e-3, EpsilonOrigin.CONFIG),
        "layer1.0.bn2": (1e-3, EpsilonOrigin.CONFIG),
        "layer2.0.bn1": (1e-2, EpsilonOrigin.USER),
    }


def test_a_name_of_the_config_that_fits_nothing_is_an_error():
    config = EpsilonConfig({"stem.bn": 1e-3, "gone": 1e-3}, source="train.yaml")
    with pytest.raises(
        UsageError, match=r"train\.yaml: epsilon for 'gone': no batch norm has that name; .*stem\.bn"
    ):
        resolve_expected(NAMES, {}, {}, config)


def test_layers_that_the_graph_does_not_have_are_ignored_as_long_as_one_is_there():
    config = EpsilonConfig({"bn1": 1e-3, "gone": 1e-2}, names_layers=True, source="model.json")
    names = ("bn1", "model/bn1/FusedBatchNormV3", "bn10", "model/bn10/FusedBatchNormV3", "xbn1")
    assert values(resolve_expected(names, {}, {}, config)) == {
        "bn1": (1e-3, EpsilonOrigin.CONFIG),
        "model/bn1/FusedBatchNormV3": (1e-3, EpsilonOrigin.CONFIG),
    }
    with pytest.raises(
        UsageError, match=r"model\.json: none of its 2 batch norms \(bn1, gone\) .* has 4: stem"
    ):
        resolve_expected(NAMES, {}, {}, config)


def test_names_of_layers_are_no_patterns():
    config = EpsilonConfig({"*": 1e-3}, names_layers=True)
    with pytest.raises(UsageError, match="none of its 1 batch norms"):
        resolve_expected(NAMES, {}, {}, config)


def test_name_with_pattern_characters_matches_itself():
    assert set(resolve_expected(("bn[0]", "bn0"), {}, {"bn[0]": 1e-3})) == {"bn[0]", "bn0"}


def test_a_name_wins_over_another_name_that_is_a_pattern_of_it():
    """As all names at once are given when a folded model is verified."""
    given = {"bn0": 1e-5, "bn[0]": 1e-3}
    assert {name: e.value for name, e in resolve_expected(("bn[0]", "bn0"), {}, given).items()} == given


@pytest.mark.parametrize("value", [-1e-5, float("nan"), float("inf")])
def test_invalid_values(value):
    with pytest.raises(UsageError, match="wanted a finite number >= 0"):
        resolve_expected(NAMES, {}, {"*": value})


def test_error_of_a_model_without_batch_norms_says_so():
    with pytest.raises(UsageError, match="the model has 0: none"):
        resolve_expected((), {}, {"*": 1e-3})


def test_b004_b005_the_difference_that_outputs_hardly_show():
    """1e-5 for 1e-3 moves a unit-variance layer by 5e-4, yet is 100 times the value."""
    check = check_epsilon("bn", 1e-5, ExpectedEpsilon(1e-3, SOURCE), align=False)
    assert abs((1 + 1e-5) ** -0.5 - (1 + 1e-3) ** -0.5) < 6e-4
    assert not check.matches


# --- epsilon in the dtype of the parameters ------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "epsilon", "is_lost"),
    [
        ("float16", 1e-5, False),
        ("float16", 1e-7, False),
        ("float16", 2.0**-24, False),
        ("float16", 2.0**-25, True),  # half of the smallest number: to even, which is zero
        ("float16", 2.0**-25 * 1.001, False),
        ("float16", 1e-8, True),
        ("bfloat16", 1e-12, False),
        ("bfloat16", 2.0**-134, True),
        ("float32", 1e-12, False),
        ("float32", 1e-46, True),
        ("float64", 1e-46, False),
        ("float16", 0.0, False),
        ("float16", -1.0, False),
        ("float16", float("nan"), False),
        ("int8", 1e-5, False),
    ],
)
def test_epsilon_that_a_dtype_rounds_to_zero(dtype, epsilon, is_lost):
    reason = check_epsilon_dtype("bn1", epsilon, dtype)
    assert (reason is not None) is is_lost
    if reason is not None:
        assert (reason.code, reason.at) == (Code.BN_EPSILON_UNDERFLOW, "bn1")
        assert dtype in reason.wanted
        assert reason.got == f"{epsilon:g}"


# --- what a wrong epsilon does -------------------------------------------------------------------


def array(*values):
    return np.array(values, float)


def test_impact_of_one_channel_by_hand():
    """gamma -2, variance 3, epsilon 1 for 6: scale from -1 to -2/3; sqrt(3) comes out as -1.732 or -1.155."""
    (channel,) = measure_impact(array(-2), array(3), 1.0, 6.0).worst
    assert (channel.channel, channel.variance) == (0, 3.0)
    assert channel.scale_change == pytest.approx(-1 / 3, rel=1e-15)
    assert channel.output_change == pytest.approx(3**0.5 / 3, rel=1e-15)


@pytest.mark.parametrize(("in_graph", "expected"), [(1e-5, 1e-3), (1e-3, 1e-5), (0.0, 1e-3), (1e-3, 0.0)])
def test_impact_is_what_the_batch_norm_makes_of_one_standard_deviation(in_graph, expected):
    rng = np.random.default_rng(0)
    gamma, variance = rng.normal(size=7), 10.0 ** rng.uniform(-6, 1, 7)
    scales = [gamma / np.sqrt(variance + epsilon) for epsilon in (in_graph, expected)]
    outputs = [scale * np.sqrt(variance) for scale in scales]
    change = np.abs(outputs[0] - outputs[1])
    impact = measure_impact(gamma, variance, in_graph, expected)
    order = np.argsort(-change)[:3]
    assert [channel.channel for channel in impact.worst] == list(order)
    for channel, index in zip(impact.worst, order):
        assert channel.output_change == pytest.approx(change[index], rel=1e-9)
        assert channel.scale_change == pytest.approx(scales[1][index] / scales[0][index] - 1, rel=1e-9)
    assert impact.largest == pytest.approx(change.max(), rel=1e-9)


def test_impact_of_channels_without_a_signal_is_in_their_scale():
    """No output changes where the variance or gamma is zero; the larger change of scale comes first."""
    impact = measure_impact(array(0, 1, 0, 1), array(1, 0, 1e-4, 0), 1e-5, 1e-3)
    assert [channel.channel for channel in impact.worst] == [1, 3, 2]
    assert impact.largest == 0
    assert impact.worst[0].scale_change == pytest.approx(-0.9)


@pytest.mark.parametrize(
    ("gamma", "variance", "in_graph", "expected"),
    [
        ([1, 1], [1, np.nan], 1e-5, 1e-3),
        ([1, 1], [1, np.inf], 1e-5, 1e-3),
        ([1, np.inf], [1, 1], 1e-5, 1e-3),
        ([1, 1], [1, -1e-6], 1e-5, 1e-3),
        ([1, 1], [1, 0], 0.0, 1e-3),
        ([1, 1], [1, 0], 1e-3, 0.0),
        ([1, 1], [1, 1], np.nan, 1e-3),
        ([1, 1], [1, 1], np.inf, 1e-3),
        ([], [], 1e-5, 1e-3),
    ],
)
@pytest.mark.filterwarnings("error")
def test_impact_of_broken_numbers_cannot_be_told(gamma, variance, in_graph, expected):
    assert measure_impact(array(*gamma), array(*variance), in_graph, expected) is None


def test_impact_of_the_same_epsilon_is_none_at_all():
    assert measure_impact(array(1), array(1), 1e-5, 1e-5).largest == 0


def test_impact_in_words():
    impact = measure_impact(array(1, 1), array(1e-4, 1), 1e-5, 1e-3)
    assert isinstance(impact, EpsilonImpact)
    assert str(impact) == (
        "the output at one standard deviation changes by "
        "0.652 in channel 0 (variance 0.0001, scale -68.4 %), "
        "0.000495 in channel 1 (variance 1, scale -0.0495 %)"
    )
