"""Pooling by windows in blocked layout on a CPU: every shape by value, against NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytestmark = pytest.mark.relay

#: name -> data, pool_size, strides, padding, dilation, ceil_mode
SHAPES = {
    "3x3, stride 2": ((1, 2, 14, 14, 16), (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), False),
    "3x3, odd": ((1, 3, 13, 11, 8), (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), False),
    "3x3, stride 1": ((2, 1, 9, 9, 16), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), False),
    "2x2": ((1, 2, 8, 8, 16), (2, 2), (2, 2), (0, 0, 0, 0), (1, 1), False),
    "2x2, a row left over": ((1, 1, 7, 9, 4), (2, 2), (2, 2), (0, 0, 0, 0), (1, 1), False),
    "3x3, up to the end": ((1, 1, 12, 10, 16), (3, 3), (2, 2), (0, 0, 0, 0), (1, 1), True),
    "3x3, padded, up to the end": ((1, 1, 12, 10, 16), (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), True),
    "one-sided": ((1, 1, 8, 8, 16), (3, 3), (2, 2), (0, 0, 1, 1), (1, 1), False),
    "5x5": ((1, 1, 13, 13, 16), (5, 5), (1, 1), (2, 2, 2, 2), (1, 1), False),
    "7x7, not unrolled": ((1, 1, 15, 15, 16), (7, 7), (1, 1), (3, 3, 3, 3), (1, 1), False),
    "1x4": ((1, 1, 5, 16, 16), (1, 4), (1, 4), (0, 0, 0, 0), (1, 1), False),
    "prime width": ((1, 1, 3, 37, 16), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), False),
    "dilated": ((1, 1, 11, 11, 16), (3, 3), (1, 1), (2, 2, 2, 2), (2, 2), False),
    "dilated, padded less": ((1, 1, 11, 11, 16), (3, 3), (2, 1), (1, 1, 1, 1), (2, 2), False),
    "many rows, shared by threads": ((1, 2, 64, 66, 16), (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), False),
}
KINDS = ("max", "avg", "avg with padding")


def pool(data, kind, size, strides, padding, dilation, shape):
    """The pooling in float64; what is beyond the padding counts nowhere."""
    result = np.empty(shape)
    for y, x in np.ndindex(*shape[2:4]):
        rows = [y * strides[0] - padding[0] + k * dilation[0] for k in range(size[0])]
        columns = [x * strides[1] - padding[1] + k * dilation[1] for k in range(size[1])]
        height, width = data.shape[2:4]
        inside = [(r, c) for r in rows for c in columns if 0 <= r < height and 0 <= c < width]
        counted = sum(
            -padding[0] <= r < height + padding[2] and -padding[1] <= c < width + padding[3]
            for r in rows
            for c in columns
        )
        values = np.stack([data[:, :, r, c].astype("float64") for r, c in inside])
        number = counted if kind == "avg with padding" else len(inside)
        result[:, :, y, x] = values.max(0) if kind == "max" else values.sum(0) / number
    return result


@pytest.fixture
def planned(monkeypatch):
    """The kernels of ours that a build asked for."""
    from tvm_fuse.relay.base import tvm  # noqa: F401
    from tvm_fuse_schedules import cpu_pool

    made, plan = [], cpu_pool.plan_pool
    monkeypatch.setattr(cpu_pool, "plan_pool", lambda *args: made.append(plan(*args)) or made[-1])
    return made


def build_and_run(case, kind, dtype="float32", relu=True, layout=None):
    from tvm_fuse.relay.base import relay, tvm
    from tvm_fuse.relay.build import Runner, build_fused
    from tvm_fuse.relay.target import resolve_target

    data, size, strides, padding, dilation, ceil_mode = case
    x = relay.var("x", shape=data, dtype=dtype)
    options = {} if kind == "max" else {"count_include_pad": kind == "avg with padding"}
    make = relay.nn.max_pool2d if kind == "max" else relay.nn.avg_pool2d
    layout = layout or f"NCHW{data[-1]}c"
    body = make(x, size, strides, dilation, padding, layout, ceil_mode=ceil_mode, **options)
    module = relay.transform.InferType()(tvm.IRModule.from_expr(relay.nn.relu(body) if relu else body))
    target = resolve_target("llvm")
    artifact = build_fused(module, target)
    array = (np.random.default_rng(0).standard_normal(data) - 1).astype(dtype)
    got = Runner(artifact, target).run({"x": array}, ["y"])["y"]
    assert len(artifact.calls) == 1
    return array, got


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_by_value(name, kind, planned):
    data, size, strides, padding, dilation, ceil_mode = SHAPES[name]
    array, got = build_and_run(SHAPES[name], kind, relu=False)
    step = math.ceil if ceil_mode else math.floor
    height, width = (
        step((data[2 + i] + padding[i] + padding[2 + i] - (size[i] - 1) * dilation[i] - 1) / strides[i]) + 1
        for i in range(2)
    )
    want = pool(array, kind, size, strides, padding, dilation, (*data[:2], height, width, data[4]))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert len(planned) == 1


def test_threads_share_what_is_large():
    from tvm_fuse.relay.base import tvm  # noqa: F401
    from tvm_fuse_schedules.cpu_conv2d import BlockedConv
    from tvm_fuse_schedules.cpu_pool import Pool, plan_pool
    from tvm_fuse_schedules.cpu_tiles import Cpu

    def plan(blocks, size):
        window = BlockedConv((1, blocks, size, size, 16), (blocks, 1, 3, 3, 1, 16), (2, 2), (1,) * 4)
        return plan_pool(Pool(window, is_max=True), Cpu(lanes=16, registers=32, threads=4))

    assert not plan(1, 14).is_parallel
    assert plan(4, 112).is_parallel
    assert plan(1, 112).rows * 4 <= 56


@pytest.mark.parametrize("kind", KINDS)
def test_what_follows_joins(kind, planned):
    case = SHAPES["3x3, stride 1"]
    array, got = build_and_run(case, kind)
    want = np.maximum(pool(array, kind, *case[1:5], got.shape), 0)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert planned


@pytest.mark.parametrize(
    ("data", "dtype", "layout"),
    [
        ((1, 16, 9, 9), "float32", "NCHW"),
        ((1, 9, 9, 16), "float32", "NHWC"),
        ((1, 1, 9, 9, 16), "float64", None),
    ],
    ids=["NCHW", "NHWC", "float64"],
)
def test_the_rest_is_left_to_tvm(data, dtype, layout, planned):
    case = (data, *SHAPES["3x3, stride 1"][1:])
    _, got = build_and_run(case, "max", dtype, layout=layout)
    assert got.shape == data
    assert not planned
