"""Setting the epsilon of batch norms in an ONNX model."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.onnx_models import Builder, run
from tvm_fuse.onnx.epsilon import set_epsilons
from tvm_fuse.onnx.parts import put_together, take_apart


def make_model(**epsilons):
    b = Builder()
    y = b.input("x", (1, 3, 6, 6))
    for name, epsilon in epsilons.items():
        y = b.batch_norm(b.conv(y, 3, pad=1), epsilon, name=name, momentum=0.8)
    return b.build([y])


def attributes(model):
    return {
        node.name: {entry.name: entry.f for entry in node.attribute}
        for node in model.graph.node
        if node.op_type == "BatchNormalization"
    }


@pytest.mark.parametrize("stated", [1e-5, None], ids=["stated", "default"])
def test_named_batch_norms_get_another_epsilon(stated):
    parts = take_apart(make_model(one=stated, two=1e-4))
    before = parts.structure.SerializeToString()
    changed = set_epsilons(parts, {"one": 1e-3})
    assert attributes(put_together(changed)) == {
        "one": {"epsilon": np.float32(1e-3), "momentum": np.float32(0.8)},
        "two": {"epsilon": np.float32(1e-4), "momentum": np.float32(0.8)},
    }
    assert parts.structure.SerializeToString() == before
    assert changed.arrays is parts.arrays


def test_nothing_to_set_changes_nothing():
    parts = take_apart(make_model(one=1e-5))
    assert set_epsilons(parts, {}) is parts


def test_the_model_computes_with_it():
    given, wanted = make_model(one=1e-5), make_model(one=0.25)
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 3, 6, 6)).astype("float32")}
    changed = put_together(set_epsilons(take_apart(given), {"one": 0.25}))
    assert np.array_equal(run(changed, feeds)[0], run(wanted, feeds)[0])
    assert not np.array_equal(run(given, feeds)[0], run(wanted, feeds)[0])
