"""Seeded inputs."""

from __future__ import annotations

import numpy as np

from tvm_fuse.core.graph import TensorSpec
from tvm_fuse.core.inputs import make_inputs


def test_inputs_are_seeded_and_of_their_dtypes():
    specs = [
        TensorSpec("x", (2, 3), "float32"),
        TensorSpec("h", (2,), "float16"),
        TensorSpec("i", (50,), "int64"),
        TensorSpec("b", (50,), "bool"),
        TensorSpec("s", (), "float32"),
        TensorSpec("e", (0, 3), "float32"),
    ]
    first, again, other = (make_inputs(specs, seed) for seed in (0, 0, 1))
    for spec in specs:
        assert (first[spec.name].dtype.name, first[spec.name].shape) == (spec.dtype, spec.shape)
        assert np.array_equal(first[spec.name], again[spec.name])
    assert not np.array_equal(first["x"], other["x"])
    assert set(first["i"].tolist()) == {0, 1}
    assert make_inputs([], 0) == {}
