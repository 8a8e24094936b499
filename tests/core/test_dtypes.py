"""Rounding to each dtype against exact fractions, ties to even, and what each dtype can hold."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from tests.support.numerics import from_bfloat16
from tvm_fuse.core.dtypes import FLOATS, narrow, size_bytes, widen

#: name -> significant bits, exponent of the smallest normal number, exponent of the largest number
FORMATS = {"float16": (11, -14, 15), "bfloat16": (8, -126, 127), "float32": (24, -126, 127)}


def rounded(number, name):
    """The number of a format that is nearest, ties to even; infinite beyond the largest by half a step."""
    bits, smallest, largest = FORMATS[name]
    exact = abs(Fraction(number))
    exponent = smallest
    while exact >= Fraction(2) ** (exponent + 1):
        exponent += 1
    step = Fraction(2) ** (exponent - bits + 1)
    count, rest = divmod(exact, step)
    if rest > step / 2 or (rest == step / 2 and count % 2):
        count += 1
    if count * step >= Fraction(2) ** (largest + 1):
        return float("inf") if number > 0 else float("-inf")
    return float(count * step) * (1 if number > 0 else -1)


def near(name):
    """Numbers around every kind of place where rounding can go wrong."""
    bits, smallest, largest = FORMATS[name]
    step = 2.0 ** (1 - bits)
    for base in (1.0, 1 + step, 2 - step, 2.0**smallest, 2.0 ** (smallest + 3) * (1 + step), 2.0**largest):
        for offset in (0.0, 0.5, 1.0, 1.5):  # ties below and above an even number
            for nudge in (0.0, 2.0**-20, -(2.0**-20), 2.0**-30, -(2.0**-30)):
                if abs(nudge) < 2.0 ** (1 - bits):
                    yield base * (1 + step * offset + nudge * step)
    unit = 2.0 ** (smallest - bits + 1)  # subnormals
    for count in (0.25, 0.5, 0.5 + 2.0**-30, 1.0, 1.5, 2.5, 3.5, 2.0 ** (bits - 1) - 0.5):
        yield count * unit
    yield from (FLOATS[name].largest, FLOATS[name].largest * (1 + step / 4), 2.0 ** (largest + 1), 1e300)
    yield from np.random.default_rng(0).normal(size=200)
    yield from np.ldexp(np.random.default_rng(1).normal(size=200), np.arange(200) - 140)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.filterwarnings("error")
def test_narrow_rounds_once_to_nearest_ties_to_even(name, sign):
    numbers = np.array([sign * number for number in near(name)])
    got = widen(narrow(numbers, name), name)
    np.testing.assert_array_equal(got, [rounded(number, name) for number in numbers])


#: number -> bfloat16 bits, by hand
BITS = [
    pytest.param(1.0, 0x3F80, id="1"),
    pytest.param(-2.0, 0xC000, id="-2"),
    pytest.param(0.0, 0x0000, id="0"),
    pytest.param(-0.0, 0x8000, id="-0"),
    pytest.param(1 + 2.0**-8, 0x3F80, id="tie to the even one below"),
    pytest.param(1 + 3 * 2.0**-8, 0x3F82, id="tie to the even one above"),
    pytest.param(1 + 2.0**-8 + 2.0**-30, 0x3F81, id="above a tie by less than float32 holds"),
    pytest.param(1 + 3 * 2.0**-8 - 2.0**-30, 0x3F81, id="below a tie by less than float32 holds"),
    pytest.param(2.0**-133, 0x0001, id="smallest"),
    pytest.param(2.0**-134, 0x0000, id="half of the smallest"),
    pytest.param(2.0**-134 * (1 + 2.0**-40), 0x0001, id="over half of the smallest"),
    pytest.param(2.0**-126 - 2.0**-133, 0x007F, id="largest subnormal"),
    pytest.param(2.0**-126 - 2.0**-134, 0x0080, id="tie between subnormal and normal"),
    pytest.param(2.0**127 * (2 - 2.0**-7), 0x7F7F, id="largest"),
    pytest.param(2.0**127 * (2 - 2.0**-8), 0x7F80, id="tie to infinity"),
    pytest.param(2.0**127 * (2 - 2.0**-8 - 2.0**-40), 0x7F7F, id="just below the tie to infinity"),
    pytest.param(np.inf, 0x7F80, id="inf"),
    pytest.param(-np.inf, 0xFF80, id="-inf"),
    pytest.param(5e-324, 0x0000, id="smallest of float64"),
    pytest.param(-1.7e308, 0xFF80, id="-1.7e308"),
]


@pytest.mark.parametrize(("number", "bits"), BITS)
def test_bfloat16_bits(number, bits):
    got = narrow(np.array([number]), "bfloat16")
    assert (got.dtype, got.tolist()) == (np.uint16, [bits])


#: NaNs of which only the lowest bit of the fraction is set; such a one is a signaling NaN.
ODD_NANS = {
    "float16": np.uint16(0x7C01),
    "bfloat16": np.uint16(0x7F81),
    "float32": np.uint32(0x7F800001),
    "float64": np.uint64(0x7FF0000000000001),
}


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.filterwarnings("error")
def test_nan_stays_nan(name):
    assert np.isnan(widen(narrow(np.array([np.nan, 1.0]), name), name)).tolist() == [True, False]
    bits = np.array([ODD_NANS[name]])
    stored = bits if name == "bfloat16" else bits.view(name)
    exact = widen(stored, name)
    for other in FLOATS:
        assert np.isnan(widen(narrow(exact, other), other)).tolist() == [True]


def test_every_bfloat16_survives_widen_and_narrow():
    bits = np.arange(2**16, dtype=np.uint16)
    wide = widen(bits, "bfloat16")
    np.testing.assert_array_equal(wide, from_bfloat16(bits))
    numbers = ~np.isnan(wide)
    np.testing.assert_array_equal(narrow(wide, "bfloat16")[numbers], bits[numbers])


def test_every_float16_survives_widen_and_narrow():
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    numbers = halves[~np.isnan(halves)]
    np.testing.assert_array_equal(narrow(widen(numbers, "float16"), "float16"), numbers)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_shapes_stay(dtype):
    for shape in ((), (0,), (2, 3, 1)):
        narrowed = narrow(np.ones(shape), dtype)
        assert narrowed.shape == widen(narrowed, dtype).shape == shape
        assert isinstance(narrowed, np.ndarray)
        assert isinstance(widen(narrowed, dtype), np.ndarray)


def test_widen_takes_a_bfloat16_that_is_an_array_of_numbers():
    np.testing.assert_array_equal(widen(np.array([1.5], np.float32), "bfloat16"), [1.5])


@pytest.mark.parametrize("name", FLOATS)
def test_limits(name):
    limits = FLOATS[name]
    at, beyond = np.array([limits.largest, limits.smallest]), np.array([limits.largest, limits.smallest / 2])
    np.testing.assert_array_equal(widen(narrow(at, name), name), at)
    with np.errstate(over="ignore"):
        beyond[0] *= 1 + 2 * limits.roundoff
    np.testing.assert_array_equal(widen(narrow(beyond, name), name), [np.inf, 0.0])
    if name in FORMATS:
        exact = np.random.default_rng(2).uniform(1, 2, 2000)
        errors = np.abs(widen(narrow(exact, name), name) - exact) / exact
        assert limits.roundoff / 4 < errors.max() <= limits.roundoff
        tie = 1 + limits.roundoff
        assert widen(narrow(np.array([tie]), name), name) == 1.0


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float32", 4), ("bfloat16", 2), ("float64", 8), ("int8", 1), ("uint1", 1), ("int4", 1), ("bool", 1)],
)
def test_size(dtype, size):
    assert size_bytes(dtype) == size
