"""exp, log, sigmoid, tanh and erf of float32 in arithmetic that LLVM vectorizes.

TVM lowers these to calls of libm, one number at a time. Here each is a clamp, a polynomial and at most one
division. With ``n`` integer and ``|f| <= log(2) / 2``::

    exp(x)     = 2**n * exp(f)                     x = n * log(2) + f
    log(x)     = n * log(2) + log(m)               x = 2**n * m, sqrt(1/2) <= m < sqrt(2)
    sigmoid(x) = 1 / (1 + exp(-x))
    tanh(x), erf(x) = x * p(x**2) / q(x**2)        never beyond 1 and -1, which large x give exactly

    tanh(log(exp(x) + 1)) = n / (n + 2)            n = exp(x) * (exp(x) + 2); mish is x times it

NaN stays NaN, and infinities have their limits. `BOUNDS` says how exact each is; the tests measure it.

A schedule sees one call of an intrinsic of ours, ``tir.tvm_fuse_exp``, so loops and simplifiers stay as fast
as with TVM's; ``tir.LowerIntrin``, nearly the last pass, writes the arithmetic, for vectors too. TVM's own
intrinsics, and so everybody else's kernels, are left alone. A third function around two others becomes TVM's.

Source: exp and log after Cephes (S. Moshier) ``expf`` and ``logf``, the former with a polynomial of our own
(a minimax fit of ``(exp(f) - 1 - f) / f**2``, relative error 3e-9 of exp); the splitting of ``log`` after
musl's ``logf``; tanh and erf with the coefficients of Eigen's ``ptanh_float`` and ``erf``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tvm import te, tir
from tvm.ir import register_intrin_lowering, register_op_attr

__all__ = [
    "BOUNDS",
    "FUNCTIONS",
    "apply",
    "call",
    "erf",
    "exp",
    "log",
    "register_intrinsics",
    "sigmoid",
    "tanh",
]

_PREFIX = "tir.tvm_fuse_"
#: Beyond it tanh of softplus is 1.
_MISH_BOUND = 20.0
_LOG2_E = 1.44269504088896341
#: log(2) in two parts: the product of the first with an integer below 2**15 is exact.
_LOG_2 = (0.693359375, -2.12194440e-4)
#: 1.5 * 2**23: a float32 near it is an integer, the low bits of its representation.
_ROUNDER = 12582912.0
_ROUNDER_BITS = 0x4B400000
_EXPONENT_BITS, _BIAS = 23, 127
#: Below the first exp rounds to 0, above the second it overflows.
_EXP_RANGE = (-104.0, 89.0)
#: Where exp is 2**n times a normal number with ``-127 <= n <= 128``: 0 and infinity at the ends.
_SIGMOID_RANGE = (-88.0, 89.0)
_EXP = (
    1.3814320554956794e-03,
    8.3688506856560707e-03,
    4.1668400168418884e-02,
    1.6666519641876221e-01,
    4.9999994039535522e-01,
    1.0,
    1.0,
)
_SMALLEST_NORMAL = 2.0**-126
_ONE_BITS, _SQRT_HALF_BITS, _FRACTION = 0x3F800000, 0x3F3504F3, 0x007FFFFF
_LOG = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
#: Where the quotient is above 1 by more than its rounding, so that the clamp of the result gives 1 exactly.
_TANH_BOUND, _ERF_BOUND = 9.9, 4.1
_TANH = (
    (
        -2.76076847742355e-16,
        2.00018790482477e-13,
        -8.60467152213735e-11,
        5.12229709037114e-08,
        1.48572235717979e-05,
        6.37261928875436e-04,
        4.89352455891786e-03,
    ),
    (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03),
)
_ERF = (
    (
        -2.72614225801306e-10,
        2.77068142495902e-08,
        -2.10102402082508e-06,
        -5.69250639462346e-05,
        -7.34990630326855e-04,
        -2.95459980854025e-03,
        -1.60960333262415e-02,
    ),
    (
        -1.45660718464996e-05,
        -2.13374055278905e-04,
        -1.68282697438203e-03,
        -7.37332916720468e-03,
        -1.42647390514189e-02,
    ),
)


def exp(x: Any) -> Any:
    """``e**x``, subnormal results included."""

    def scale(rounded: Any, power: Any) -> Any:
        whole = _bits(rounded) - _int(_ROUNDER_BITS, x)
        half = whole >> _int(1, x)
        return power * _power_of_two(half) * _power_of_two(whole - half)

    return _exp_reduced(_clamp(x, *_EXP_RANGE), scale)


def log(x: Any) -> Any:
    """The natural logarithm, subnormal arguments included; NaN below zero."""

    def of_any(x: Any) -> Any:
        is_small = x < _float(_SMALLEST_NORMAL, x)
        normal = tir.Select(is_small, x * _float(2.0**_EXPONENT_BITS, x), x)
        lost = tir.Select(is_small, _float(_EXPONENT_BITS, x), _float(0, x))
        result = _let(normal, lambda normal: _let(lost, lambda lost: _log_of_normal(normal, lost)))
        below = tir.Select(x < _float(0, x), _float(float("nan"), x), x)
        edge = tir.Select(_equal(x, 0), _float(float("-inf"), x), below)
        return tir.Select(tir.And(x > _float(0, x), x < _float(float("inf"), x)), result, edge)

    return _let(x, of_any)


def sigmoid(x: Any) -> Any:
    """``1 / (1 + e**-x)``; results below 2**-126 may be zero."""

    def result(rounded: Any, power: Any) -> Any:
        return _float(1, x) / (_float(1, x) + power * _power_of_two(_bits(rounded)))

    return _exp_reduced(_clamp(_float(0, x) - x, *_SIGMOID_RANGE), result)


def tanh(x: Any) -> Any:
    """The hyperbolic tangent."""
    return _odd_quotient(x, _TANH_BOUND, *_TANH)


def erf(x: Any) -> Any:
    """The error function."""
    return _odd_quotient(x, _ERF_BOUND, *_ERF)


#: Relay's operator -> its largest error in units of the last place of the exact result, by measurement over
#: the range of float32 (tests/schedules/test_cpu_math.py) on AVX-512, AVX2 and SSE, rounded up. A result of
#: sigmoid below 2**-126 may be 0 instead.
BOUNDS = {"erf": 9, "exp": 2, "log": 1, "sigmoid": 3, "tanh": 7}

#: Relay's operator -> the function of a float32 expression, scalar or vector.
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "erf": erf,
    "exp": exp,
    "log": log,
    "sigmoid": sigmoid,
    "tanh": tanh,
}


@functools.cache
def register_intrinsics() -> None:
    """Tell TVM once of an intrinsic for each function, and what it is lowered to."""
    for name, function in FUNCTIONS.items():
        intrinsic = _PREFIX + name
        register_op_attr(intrinsic, "TCallEffectKind", tir.CallEffectKind.Pure)
        register_op_attr(intrinsic, "TVectorizable", True)
        register_intrin_lowering(intrinsic, "default", f=functools.partial(_lower, name, function))


def call(name: str, x: Any) -> Any:
    """A function of `FUNCTIONS` of a float32 expression, as one call."""
    register_intrinsics()
    return tir.call_intrin("float32", _PREFIX + name, x)


def apply(name: str, data: Any) -> Any:
    """A function of `FUNCTIONS` of each element.

    Args:
        name: The function.
        data: A float32 tensor of any shape.

    Returns:
        A tensor of that shape.
    """
    return te.compute(data.shape, lambda *index: call(name, data(*index)), name=f"T_{name}", tag="elemwise")


def _lower(name: str, function: Callable[[Any], Any], call: Any) -> Any:
    """What an intrinsic of ours stands for."""
    (x,) = call.args
    exponent = _softplus_argument(x) if name == "tanh" else None
    if exponent is not None:
        return _tanh_of_softplus(exponent)
    if _is_deep(x):
        return tir.call_intrin(call.dtype, f"tir.{name}", x)
    return function(x)


def _is_deep(x: Any) -> bool:
    """Whether functions of ours are within one another in an expression.

    A third around two is too much: TVM's code generator simplifies the value of each ``Let`` with all others
    written out. Two take milliseconds, three a fifth of a second, four take seconds.
    """
    return any(_inner_calls(inner.args[0]) for inner in _inner_calls(x))


def _inner_calls(x: Any) -> list[Any]:
    """The calls of our functions in an expression, the innermost first."""
    calls: list[Any] = []

    def leave(node: Any) -> None:
        if _is_call(node, *FUNCTIONS):
            calls.append(node)

    tir.stmt_functor.post_order_visit(x, leave)
    return calls


def _is_call(x: Any, *names: str) -> bool:
    return isinstance(x, tir.Call) and str(getattr(x.op, "name", "")) in [_PREFIX + name for name in names]


def _softplus_argument(x: Any) -> Any | None:
    """The ``y`` of ``log(exp(y) + 1)``."""
    if not (_is_call(x, "log") and isinstance(x.args[0], tir.Add)):
        return None
    terms = (x.args[0].a, x.args[0].b)
    ones = [term for term in terms if _is_one(term)]
    powers = [term.args[0] for term in terms if _is_call(term, "exp")]
    return powers[0] if ones and powers else None


def _is_one(x: Any) -> bool:
    value = x.value if isinstance(x, tir.Broadcast) else x
    return isinstance(value, tir.FloatImm) and float(value.value) == 1


def _tanh_of_softplus(x: Any) -> Any:
    """``n / (n + 2)`` with ``n = w * (w + 2)``, ``w = exp(x)``: mish is ``x`` times it."""

    def quotient(w: Any) -> Any:
        return _let(w * (w + _float(2, w)), lambda n: n / (n + _float(2, n)))

    return _let(exp(tir.Min(_float(_MISH_BOUND, x), x)), quotient)


def _exp_reduced(x: Any, result: Callable[[Any, Any], Any]) -> Any:
    """``result(rounded, power)``: ``exp(x)`` is ``power`` times 2 to the low bits of ``rounded``."""

    def reduce(x: Any, rounded: Any) -> Any:
        whole = rounded - _float(_ROUNDER, x)
        fraction = x - whole * _float(_LOG_2[0], x) - whole * _float(_LOG_2[1], x)
        return _let(fraction, lambda f: _let(_polynomial(f, _EXP), lambda power: result(rounded, power)))

    def round_then(x: Any) -> Any:
        return _let(x * _float(_LOG2_E, x) + _float(_ROUNDER, x), lambda rounded: reduce(x, rounded))

    return _let(x, round_then)


def _log_of_normal(x: Any, lost: Any) -> Any:
    """``log(x) - lost * log(2)`` of a positive normal number."""
    shifted = _bits(x) + _int(_ONE_BITS - _SQRT_HALF_BITS, x)
    whole = (shifted >> _int(_EXPONENT_BITS, x)) - _int(_BIAS, x)
    mantissa = _from_bits((shifted & _int(_FRACTION, x)) + _int(_SQRT_HALF_BITS, x))

    def sum_up(n: Any, f: Any) -> Any:
        small = _polynomial(f, _LOG) * f * (f * f) + n * _float(_LOG_2[1], x) - f * f * _float(0.5, x)
        return f + small + n * _float(_LOG_2[0], x)

    return _let(
        whole.astype(x.dtype) - lost,
        lambda n: _let(mantissa - _float(1, x), lambda f: sum_up(n, f)),
    )


def _odd_quotient(x: Any, bound: float, above: tuple[float, ...], below: tuple[float, ...]) -> Any:
    """``x * (p / q)``; the quotient first, so that a subnormal ``x`` keeps its bits."""

    def quotient(x: Any) -> Any:
        return _let(x * x, lambda square: x * (_polynomial(square, above) / _polynomial(square, below)))

    return _clamp(_let(_clamp(x, -bound, bound), quotient), -1.0, 1.0)


def _polynomial(x: Any, coefficients: tuple[float, ...]) -> Any:
    """By Horner's rule, the highest power first."""
    value = _float(coefficients[0], x)
    for coefficient in coefficients[1:]:
        value = value * x + _float(coefficient, x)
    return value


def _clamp(x: Any, low: float, high: float) -> Any:
    """Between two bounds. NaN stays, since the second operand is what a false comparison gives."""
    return tir.Min(_float(high, x), tir.Max(_float(low, x), x))


def _let(value: Any, body: Callable[[Any], Any]) -> Any:
    name = tir.Var("value", value.dtype)
    return tir.Let(name, value, body(name))


def _equal(x: Any, value: float) -> Any:
    return tir.EQ(x, _float(value, x))


def _float(value: float, like: Any) -> Any:
    return tir.const(value, like.dtype)


def _int(value: int, like: Any) -> Any:
    return tir.const(value, like.dtype.replace("float", "int"))


def _bits(x: Any) -> Any:
    return tir.reinterpret(x.dtype.replace("float", "int"), x)


def _from_bits(x: Any) -> Any:
    return tir.reinterpret(x.dtype.replace("int", "float"), x)


def _power_of_two(n: Any) -> Any:
    """2 to the low bits of an integer, -127 (0) to 128 (infinity)."""
    return _from_bits((n + _int(_BIAS, n)) << _int(_EXPONENT_BITS, n))
