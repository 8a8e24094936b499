"""Batch norms in pieces, as exporters write them in ONNX."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from onnx import helper

from tests.support.onnx_models import Builder

C, SIZE = 4, 5
SHAPE = (2, 3, SIZE, SIZE)
EPSILON = 1e-3
NORM = {
    "gamma": np.array([0.5, -1.25, 1.5, 0.75]),
    "beta": np.array([0.1, 0.4, -0.3, 0.2]),
    "mean": np.array([-0.5, 0.25, 0.3, -0.1]),
    "variance": np.array([0.3, 1.5, 2.0, 0.02]),
}
ONES, ZEROS = np.ones(C), np.zeros(C)


# --- where the constants are -----------------------------------------------------------------------


def stored(b, vector, *shape):
    return b.const(vector.reshape(shape))


def unsqueezed(b, vector):
    axes = [1, 2]
    if b.opset < 13:
        return b.op("Unsqueeze", b.const(vector), axes=axes)
    return b.op("Unsqueeze", b.const(vector), b.const(np.array(axes)))


def expanded(b, vector):
    return b.op("Expand", stored(b, vector, C, 1, 1), b.const(np.array([C, SIZE, SIZE])))


def cast(b, vector):
    wide = b.const(vector.reshape(C, 1, 1).astype(b.dtype).astype("float16"))
    return b.op("Cast", wide, to=helper.np_dtype_to_tensor_dtype(b.dtype))


PLACES = {
    "column": lambda b, v: stored(b, v, C, 1, 1),
    "full rank": lambda b, v: stored(b, v, 1, C, 1, 1),
    "unsqueezed": unsqueezed,
    "reshaped": lambda b, v: b.op("Reshape", b.const(v), b.const(np.array([1, -1, 1, 1]))),
    "transposed": lambda b, v: b.op("Transpose", stored(b, v, C, 1, 1, 1), perm=[1, 0, 2, 3]),
    "expanded": expanded,
    "identity": lambda b, v: b.op("Identity", stored(b, v, C, 1, 1)),
}


def parameters(b, place=unsqueezed, epsilon=EPSILON, **changes):
    """The constants of a batch norm as values of the graph."""
    values = {role: place(b, vector) for role, vector in {**NORM, **changes}.items()}
    return SimpleNamespace(**values, epsilon=b.const(np.array(epsilon)))


# --- spellings -------------------------------------------------------------------------------------


def deviation(b, p):
    return b.op("Sqrt", b.op("Add", p.variance, p.epsilon))


def inverse(b, p):
    return b.op("Reciprocal", deviation(b, p))


def centred(b, x, p):
    return b.op("Sub", x, p.mean)


def affine(b, y, p):
    return b.op("Add", b.op("Mul", y, p.gamma), p.beta, name="last")


def tensorflow(b, x, p):
    """tf2onnx: the mean's share goes into the shift."""
    scale = b.op("Mul", inverse(b, p), p.gamma)
    return b.op("Add", b.op("Mul", x, scale), b.op("Sub", p.beta, b.op("Mul", p.mean, scale)), name="last")


def tensorflow_without_gamma(b, x, p):
    scale = inverse(b, p)
    return b.op("Add", b.op("Mul", x, scale), b.op("Sub", p.beta, b.op("Mul", p.mean, scale)), name="last")


def power(b, x, p):
    root = b.op("Pow", b.op("Add", p.variance, p.epsilon), b.const(np.array(-0.5)))
    return affine(b, b.op("Mul", centred(b, x, p), root), p)


def half_power(b, x, p):
    root = b.op("Pow", b.op("Add", p.epsilon, p.variance), b.const(np.array([0.5])))
    return affine(b, b.op("Div", centred(b, x, p), root), p)


def scale_first(b, x, p):
    scale = b.op("Div", p.gamma, deviation(b, p))
    return b.op("Add", p.beta, b.op("Mul", scale, centred(b, x, p)), name="last")


def one_over(b, x, p):
    return affine(b, b.op("Mul", centred(b, x, p), b.op("Div", b.const(np.array(1.0)), deviation(b, p))), p)


def negated_mean(b, x, p):
    return affine(b, b.op("Div", b.op("Add", x, b.op("Neg", p.mean)), deviation(b, p)), p)


#: Name -> operators, and the parameters that are not those of the norm.
SPELLINGS = {
    "PyTorch": (lambda b, x, p: affine(b, b.op("Div", centred(b, x, p), deviation(b, p)), p), {}),
    "TensorFlow": (tensorflow, {}),
    "TensorFlow without gamma": (tensorflow_without_gamma, {"gamma": ONES}),
    "reciprocal": (lambda b, x, p: affine(b, b.op("Mul", centred(b, x, p), inverse(b, p)), p), {}),
    "power -0.5": (power, {}),
    "power 0.5": (half_power, {}),
    "gamma / sqrt": (scale_first, {}),
    "1 / sqrt": (one_over, {}),
    "x + (-mean)": (negated_mean, {}),
    "without gamma": (
        lambda b, x, p: b.op("Add", b.op("Div", centred(b, x, p), deviation(b, p)), p.beta, name="last"),
        {"gamma": ONES},
    ),
    "without beta": (
        lambda b, x, p: b.op("Mul", b.op("Div", centred(b, x, p), deviation(b, p)), p.gamma, name="last"),
        {"beta": ZEROS},
    ),
    "not affine": (
        lambda b, x, p: b.op("Div", centred(b, x, p), deviation(b, p), name="last"),
        {"gamma": ONES, "beta": ZEROS},
    ),
}


def pieces(spelling="PyTorch", place=unsqueezed, shape=SHAPE, **options):
    """Conv, a batch norm in pieces, Relu."""
    b = Builder(**options)
    y = b.conv(b.input("x", shape), C, pad=1, name="conv")
    y = SPELLINGS[spelling][0](b, y, parameters(b, place))
    return b.build([b.relu(y, name="relu")])
