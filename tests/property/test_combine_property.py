"""Random sets of layers side by side: combined or not, the numbers, outputs and their order stay the same."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.lazy import Lazy
from tests.support.relay_graphs import Net, count_operators, feeds, relay, run_unfused, tvm

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

combine = Lazy("tvm_fuse.relay.combine_pass")

pytestmark = [pytest.mark.relay, pytest.mark.slow]

SETTINGS = settings(derandomize=True, max_examples=25, deadline=None, database=None)

ACTIVATIONS = {
    "none": lambda y: y,
    "relu": lambda y: relay.nn.relu(y),
    "silu": lambda y: relay.multiply(y, relay.sigmoid(y)),
    "clip": lambda y: relay.clip(y, 0.0, 1.0),
    "half": lambda y: relay.multiply(relay.const(0.5), y),
}
READERS = ("output", "layer", "transpose", "parts", "both")
BRANCH = st.tuples(
    st.sampled_from([1, 2, 5]),  # channels
    st.booleans(),  # a bias
    st.sampled_from(sorted(ACTIVATIONS)),
    st.sampled_from(READERS),
    st.booleans(),  # the weights of the branch before
)


def build(branches, is_dense):
    net = Net()
    x = net.input("x", (2, 6) if is_dense else (1, 6, 4, 4))
    outputs, parts, weight = [], [], None
    for channels, has_bias, activation, reader, shares in branches:
        if weight is None or not shares:
            weight = net.weight(channels, 6, *(() if is_dense else (1, 1)), fan_in=6)
        channels = int(weight.data.shape[0])
        y = relay.nn.dense(x, weight) if is_dense else net.conv2d(x, channels, 1, weight=weight)
        if has_bias:
            y = relay.nn.bias_add(y, net.const(channels))
        y = ACTIVATIONS[activation](y)
        if reader in ("parts", "both"):
            parts.append(y)
        if reader in ("output", "both"):
            outputs.append(y)
        if reader == "layer":
            outputs.append(net.dense(y, 2) if is_dense else net.conv2d(y, 2))
        if reader == "transpose":
            outputs.append(relay.transpose(y))
    if parts:
        outputs.insert(0, relay.concatenate(parts[::-1], 1))
    return net.module(*outputs)


@SETTINGS
@given(st.lists(BRANCH, min_size=2, max_size=4), st.booleans())
def test_numbers(branches, is_dense):
    module = build(branches, is_dense)
    combined = combine.combine_parallel(module)
    layers = "nn.dense" if is_dense else "nn.conv2d"
    assert count_operators(combined)[layers] < count_operators(module)[layers]
    inputs = feeds(module)
    wanted, got = run_unfused(module, inputs), run_unfused(combined, inputs)
    assert len(wanted) == len(got)
    for one, other in zip(wanted, got):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5)
    assert tvm.ir.structural_equal(combine.combine_parallel(combined), combined)
