"""Epsilon alignment, compared as a number."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_fuse.core.epsilon import (
    EpsilonCheck,
    EpsilonOrigin,
    ExpectedEpsilon,
    check_epsilon,
    check_epsilon_dtype,
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


def test_name_with_pattern_characters_matches_itself():
    assert set(resolve_expected(("bn[0]", "bn0"), {}, {"bn[0]": 1e-3})) == {"bn[0]", "bn0"}


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
