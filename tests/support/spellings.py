"""Random batch norms, written as separate operators in random spellings (needs Hypothesis)."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from tests.support.graphs import Norm

__all__ = ["Spelling", "norms"]

NUMBER = st.floats(-8, 8, width=32).filter(lambda number: number == 0 or abs(number) > 1e-3)
VARIANCE = st.floats(2**-10, 8, width=32)
ROOTS = {
    "rsqrt": lambda g, total: g.rsqrt(total),
    "1 / sqrt": lambda g, total: g.divide(1.0, g.sqrt(total)),
    "reciprocal": lambda g, total: g.reciprocal(g.sqrt(total)),
    "power": lambda g, total: g.power(total, -0.5),
    "1 / power": lambda g, total: g.reciprocal(g.power(total, 0.5)),
}


class Spelling:
    """Writes a batch norm; every choice is drawn when it is needed."""

    def __init__(self, draw, g, norm, epsilon, axis, rank):
        self.draw, self.g, self.norm, self.epsilon = draw, g, norm, epsilon
        self.axis, self.rank = axis, rank

    def either(self, *choices):
        return self.draw(st.sampled_from(choices))

    def swap(self, method, a, b):
        """A commutative operator with its operands in either order."""
        return method(*((a, b) if self.either(True, False) else (b, a)))

    def constant(self, role):
        """One of the vectors, stored or moved into place."""
        g, vector = self.g, getattr(self.norm, role)
        shape = [vector.size if index == self.axis else 1 for index in range(self.rank)]
        how = self.either("stored", "full rank", "reshape", "expand_dims", "cast", "transpose")
        if how == "full rank":
            return g.const(vector.reshape(shape))
        if how == "reshape":
            return g.reshape(vector, *shape)
        if how == "expand_dims":
            return g.expand_dims(vector, 1, self.rank - self.axis - 1)
        if how == "cast":
            return g.cast(vector.astype("float32").reshape(shape), "float64")
        if how == "transpose":
            flipped = g.const(vector.reshape(shape[::-1]))
            return g.transpose(flipped, *reversed(range(self.rank)))
        return g.const(vector.reshape(shape[self.axis :]))

    def total(self):
        epsilon = self.either(self.epsilon, np.full((1,), self.epsilon), np.full((1, 1), self.epsilon))
        return self.swap(self.g.add, self.constant("variance"), self.g.const(epsilon))

    def inverse(self):
        return ROOTS[self.either(*ROOTS)](self.g, self.total())

    def scale(self):
        g = self.g
        if self.either(True, False):
            return g.divide(self.constant("gamma"), g.sqrt(self.total()))
        return self.swap(g.multiply, self.constant("gamma"), self.inverse())

    def centred(self, x):
        if self.either(True, False):
            return self.g.subtract(x, self.constant("mean"))
        return self.swap(self.g.add, x, self.g.negative(self.constant("mean")))

    def scaled(self, x):
        """x * r * gamma, in any order."""
        g = self.g
        order = self.either("together", "gamma first", "gamma last")
        if order == "together":
            return self.swap(g.multiply, x, self.scale())
        if order == "gamma first":
            x = self.swap(g.multiply, x, self.constant("gamma"))
        x = g.divide(x, g.sqrt(self.total())) if self.either(True, False) else g.multiply(self.inverse(), x)
        return self.swap(g.multiply, x, self.constant("gamma")) if order == "gamma last" else x

    def write(self, x):
        g = self.g
        if self.either(True, False):
            return self.swap(g.add, self.scaled(self.centred(x)), self.constant("beta"))
        s = self.scale()
        share = self.swap(g.multiply, self.constant("mean"), s if self.either(True, False) else self.scale())
        y = self.swap(g.multiply, x, s)
        how = self.either("+ (b - m * s)", "- (m * s - b)", "+ (-(m * s) + b)")
        if how == "+ (b - m * s)":
            return self.swap(g.add, y, g.subtract(self.constant("beta"), share))
        if how == "- (m * s - b)":
            return g.subtract(y, g.subtract(share, self.constant("beta")))
        return self.swap(g.add, y, self.swap(g.add, g.negative(share), self.constant("beta")))


@st.composite
def norms(draw, channels):
    drawn = [st.lists(numbers, min_size=channels, max_size=channels) for numbers in (*[NUMBER] * 3, VARIANCE)]
    return Norm(*(np.array(draw(vector)) for vector in drawn))
