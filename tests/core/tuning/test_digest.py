"""Digests of chains: what counts, and what does not."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_fuse.core.graph import ConvAttrs, Graph, Kind, Node, TensorInfo
from tvm_fuse.core.tuning.digest import chain_digest, describe_chain, device_key


def chain(*, channels=8, dtype="float32", stride=1, activation="nn.relu", scale=2.0, name="a", layout="NCHW"):
    info = TensorInfo((1, channels, 4, 4), dtype)
    attrs = ConvAttrs((stride, stride), (0, 0, 0, 0), (1, 1), 1, channels, layout, "OIHW", layout)
    nodes = (
        Node(0, Kind.INPUT, "input", (), (info,), None, name),
        Node(1, Kind.INPUT, "input", (), (TensorInfo((channels, channels, 1, 1), dtype),), None, "w"),
        Node(2, Kind.CONV2D, "nn.conv2d", (0, 1), (info,), attrs, name),
        Node(3, Kind.CONSTANT, "constant", (), (TensorInfo((), dtype),), None, ""),
        Node(4, Kind.MULTIPLY, "multiply", (2, 3), (info,), None, ""),
        Node(5, Kind.ELEMENTWISE, activation, (4,), (info,), None, ""),
    )
    return Graph(nodes, (5,), {3: np.array(scale, dtype)})


def digest(attributes=None, **options):
    return chain_digest(describe_chain(chain(**options), attributes or {}))


def test_names_do_not_count():
    assert digest() == digest(name="another")
    assert len(digest()) == 12
    int(digest(), 16)


@pytest.mark.parametrize(
    "options",
    [
        {"channels": 16},
        {"dtype": "float16"},
        {"stride": 2},
        {"layout": "NHWC"},
        {"activation": "sigmoid"},
        {"scale": 3.0},
        {"attributes": {5: "alpha=0.1"}},
    ],
    ids=str,
)
def test_what_counts(options):
    assert digest(**options) != digest()


def test_device_keys():
    assert device_key("cuda", "sm_80") == "cuda-sm_80"
    assert device_key("llvm", "cascadelake", 2) == "llvm-cascadelake-2cores"
    assert device_key("llvm", "") == "llvm-generic"
    assert "/" not in device_key("llvm", "../x", 1)
