"""The comparison of outputs, and that it fails when it must."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tvm_fuse.core.parity import (
    TOLERANCES,
    GivenTolerance,
    Tolerance,
    choose_tolerance,
    compare,
    default_tolerance,
)

INF, NAN = float("inf"), float("nan")
pytestmark = pytest.mark.filterwarnings("error")


def row(reference, candidate, **options):
    report = compare({"y": np.asarray(reference)}, {"y": np.asarray(candidate)}, **options)
    (only,) = report.rows
    assert report.passed is only.passed
    return only


WHOLE = Tolerance(0.5, 0.25, "by hand")


@pytest.mark.parametrize(
    ("choice", "dtype", "atol", "rtol", "why"),
    [
        (None, "float16", 1e-2, 1e-2, "float16: "),
        (GivenTolerance(), "float32", 1e-5, 1e-5, "float32: "),
        (WHOLE, "int32", 0.5, 0.25, "by hand"),
        (GivenTolerance(atol=1e-3), "float16", 1e-3, 1e-2, "given; rtol of float16: "),
        (GivenTolerance(rtol=0.0), "float16", 1e-2, 0.0, "given; atol of float16: "),
        (GivenTolerance(atol=1e-3), "int64", 1e-3, 0.0, "given; rtol of exact dtype"),
        (GivenTolerance(0.0, 0.5), "float32", 0.0, 0.5, "given"),
    ],
)
def test_what_is_not_given_is_the_default_of_the_dtype(choice, dtype, atol, rtol, why):
    chosen = choose_tolerance(choice, dtype)
    assert (chosen.atol, chosen.rtol) == (atol, rtol)
    assert chosen.why.startswith(why)


def test_each_output_has_its_own_half_of_a_given_tolerance():
    outputs = {"half": np.ones(2, "float16"), "single": np.ones(2, "float32")}
    moved = {name: array + np.asarray(0.004, array.dtype) for name, array in outputs.items()}
    report = compare(outputs, moved, tolerance=GivenTolerance(atol=0.0))
    assert [row.passed for row in report.rows] == [True, False]


PAIRS = [
    ("equal", 1.0, 1.0, True),
    ("within", 1.0, 1.0 + 1e-6, True),
    ("outside", 1.0, 1.0 + 1e-4, False),
    ("absolute near zero", 0.0, 0.9e-5, True),
    ("zero against too much", 0.0, 1.1e-5, False),
    ("signed zeros", 0.0, -0.0, True),
    ("relative when large", 1e6, 1e6 + 9, True),
    ("too far when large", 1e6, 1e6 + 11, False),
    ("nan and nan", NAN, NAN, True),
    ("nan and number", NAN, 1.0, False),
    ("number and nan", 1.0, NAN, False),
    ("equal infinities", INF, INF, True),
    ("opposite infinities", INF, -INF, False),
    ("inf and number", INF, 1e30, False),
    ("number and inf", 1e30, INF, False),
    ("inf and nan", INF, NAN, False),
]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("reference", "got", "passes"), [pytest.param(*case, id=name) for name, *case in PAIRS]
)
@pytest.mark.parametrize("shape", [(), (1,), (2, 3)], ids=str)
def test_pairs(reference, got, passes, shape, dtype):
    """In a 0-d array, alone, and as the one odd element among good ones."""
    ref = np.ones(shape, dtype)
    cand = ref.copy()
    at = (-1,) * len(shape)
    ref[at], cand[at] = reference, got
    result = row(ref, cand)
    assert result.passed is passes
    assert result.failing == (0 if passes else 1)
    assert result.elements == ref.size
    assert (result.needed <= 1) is passes
    assert not np.isnan([result.max_abs, result.max_rel, result.mean_abs, result.needed]).any()
    if not passes:
        assert result.worst_index == tuple(size - 1 for size in shape)


def test_one_bad_element_is_not_averaged_away():
    ref = np.zeros(1_000_000, np.float32)
    got = ref.copy()
    got[123_456] = 1.0
    result = row(ref, got)
    assert not result.passed
    assert (result.failing, result.max_abs, result.worst_index) == (1, 1.0, (123_456,))
    assert (result.worst_got, result.worst_reference) == (1.0, 0.0)
    assert result.mean_abs == pytest.approx(1e-6)


def test_empty_outputs():
    result = row(np.zeros((0, 3), np.float32), np.zeros((0, 3), np.float32))
    assert result.passed
    assert (result.elements, result.max_abs, result.mean_abs, result.needed) == (0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("reference", "candidate"),
    [
        (np.zeros((1, 4), "float32"), np.zeros((4,), "float32")),
        (np.zeros((2, 3), "float32"), np.zeros((3, 2), "float32")),
        (np.zeros(0, "float32"), np.zeros((0, 1), "float32")),
        (np.zeros(3, "float32"), np.zeros(3, "float16")),
        (np.zeros(3, "float32"), np.zeros(3, "int32")),
        (np.zeros(3, "complex64"), np.zeros(3, "complex64")),
        (np.array(["a"]), np.array(["a"])),
    ],
    ids=["rank", "shape", "empty", "dtype", "kind", "complex", "text"],
)
def test_outputs_that_cannot_be_compared(reference, candidate):
    result = row(reference, candidate)
    assert not result.passed
    assert result.problem
    assert result.needed == INF


@pytest.mark.parametrize(
    ("dtype", "reference", "candidate", "failing"),
    [
        ("int32", [1, 2, 3], [1, 2, 3], 0),
        ("int32", [1, 2, 3], [1, 2, 4], 1),
        ("int64", [2**60, 5], [2**60 + 1, 5], 1),
        ("int64", [-(2**63), 2**63 - 1], [-(2**63), 2**63 - 1], 0),
        ("uint64", [2**64 - 1], [2**64 - 2], 1),
        ("uint8", [0, 255], [255, 0], 2),
        ("bool", [True, False], [True, False], 0),
        ("bool", [True, False], [False, False], 1),
    ],
)
def test_integers_and_booleans_must_be_equal(dtype, reference, candidate, failing):
    result = row(np.array(reference, dtype), np.array(candidate, dtype))
    assert result.failing == failing
    assert result.tolerance.why == "exact dtype"
    assert (result.max_abs >= 1) is bool(failing)
    assert result.needed == (INF if failing else 0.0)


def test_a_difference_that_float64_loses_counts_as_one():
    assert row(np.array([2**60]), np.array([2**60 + 1])).max_abs == 1.0


@pytest.mark.parametrize(
    ("reference", "candidate"),
    [(1.7e308, -1.7e308), (1e-310, 1.0), (5e-324, 1e300)],
    ids=["difference overflows", "subnormal reference", "ratio overflows"],
)
def test_extreme_numbers_fail_without_a_warning(reference, candidate):
    result = row([reference], [candidate], tolerance=Tolerance(1e-300, 1e-5, "tight"))
    assert not result.passed


def test_infinite_tolerance_does_not_pass_a_nan():
    assert row([1.0, 2.0], [9.0, 2.0], tolerance=Tolerance(INF, 0.0, "anything")).passed
    assert not row([1.0, NAN], [1.0, 2.0], tolerance=Tolerance(INF, 0.0, "anything")).passed


def test_no_output_at_all_does_not_pass():
    assert not compare({}, {}).passed


def test_missing_and_extra_outputs_do_not_pass():
    ones = np.ones(2)
    report = compare({"a": ones, "b": ones}, {"b": ones, "c": ones}, seed=7)
    assert [each.output for each in report.rows] == ["b"]
    assert (report.missing, report.extra, report.seed) == (("a",), ("c",), 7)
    assert report.rows[0].passed
    assert not report.passed


def test_every_output_is_checked():
    good, bad = np.zeros(3, np.float32), np.full(3, 1e-3, np.float32)
    report = compare({"a": good, "b": good}, {"a": good, "b": bad})
    assert [each.passed for each in report.rows] == [True, False]
    assert not report.passed


@pytest.mark.parametrize(("dtype", "size"), [("float16", 1e-2), ("float32", 1e-5), ("float64", 1e-5)])
def test_default_tolerance_by_dtype(dtype, size):
    assert (TOLERANCES[dtype].atol, TOLERANCES[dtype].rtol) == (size, size)
    assert default_tolerance(dtype) is TOLERANCES[dtype]
    assert row(np.ones(2, dtype), np.ones(2, dtype)).tolerance is TOLERANCES[dtype]
    assert TOLERANCES[dtype].why


def test_a_user_tolerance_replaces_the_default():
    tolerance = Tolerance(0.5, 0.0, "by hand")
    assert row([1.0], [1.4], tolerance=tolerance).passed
    assert not row([1.0], [1.6], tolerance=tolerance).passed


def test_needed_is_the_factor_that_just_passes():
    ref, got = np.array([3.0, -7.0, 100.0]), np.array([3.001, -7.2, 100.5])
    tolerance = Tolerance(1e-5, 1e-5, "base")
    needed = row(ref, got, tolerance=tolerance).needed
    assert row(ref, got, tolerance=tolerance.scaled(needed * (1 + 1e-9))).passed
    assert not row(ref, got, tolerance=tolerance.scaled(needed * (1 - 1e-6))).passed
    assert "base" in tolerance.scaled(2).why


def test_failing_row_is_not_rescued_by_zero_failing():
    result = row([1.0], [1.0])
    assert not replace(result, problem="shape").passed


def test_b010_folded_with_the_wrong_statistics_is_far_outside():
    """A model exported in training mode normalizes with the statistics of the batch."""
    x = np.random.default_rng(0).normal(2.0, 3.0, (1, 4, 8, 8)).astype(np.float32)
    stored = (x - 0.5) / np.sqrt(2.0 + 1e-5, dtype=np.float32)
    batch = (x - x.mean((0, 2, 3), keepdims=True)) / np.sqrt(x.var((0, 2, 3), keepdims=True) + 1e-5)
    result = row(stored, batch.astype(np.float32))
    assert result.failing > 0.99 * result.elements
    assert result.needed > 1e3


def test_b024_second_output_of_a_shared_conv():
    """8.5 with the batch norm and 5.0 without; folding in place made both 8.5."""
    report = compare(
        {"bn": np.array([8.5]), "plain": np.array([5.0])}, {"bn": np.array([8.5]), "plain": np.array([8.5])}
    )
    assert [each.passed for each in report.rows] == [True, False]
    assert not report.passed


def test_b114_a_few_ulp_at_magnitude_14_pass_and_say_how_far():
    """3.8e-6 absolute, 2.8e-7 relative: 4 ULP of float32."""
    result = row(np.array([13.8, -14.1], "float32"), np.array([13.8 + 3.8e-6, -14.1], "float32"))
    assert result.passed
    assert result.max_abs == pytest.approx(3.8e-6, rel=0.01)
    assert result.max_rel == pytest.approx(2.8e-7, rel=0.05)
    assert 0 < result.needed < 0.03
    assert (result.tolerance.atol, result.tolerance.rtol) == (1e-5, 1e-5)


def test_b116_many_small_differences_are_not_summed():
    """6e-8 on 3.2 million values sums to 0.19; reported are the largest, the mean and the count."""
    ref = np.ones((2, 32, 224, 224), np.float32)
    got = ref.copy()
    got[:] = np.nextafter(np.float32(1), np.float32(0))
    result = row(ref, got)
    assert result.passed
    assert result.elements == 3_211_264
    assert result.max_abs == pytest.approx(5.96e-8, rel=0.01)
    assert result.mean_abs == pytest.approx(5.96e-8, rel=0.01)


@pytest.mark.parametrize(("largest", "weak"), [(9e-6, True), (1e-5, True), (2e-5, False), (np.nan, False)])
def test_a_reference_below_the_tolerance_proves_little(largest, weak):
    ref = np.array([0.0, largest, -1e-7])
    report = compare({"y": ref}, {"y": ref.copy()}, tolerance=Tolerance(1e-5, 1e-5, "test"))
    assert report.passed
    assert report.rows[0].proves_little is weak
