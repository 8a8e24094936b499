"""Dense layers on a CPU: every shape by value, against NumPy, on AVX-512 and AVX2."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_fuse.core.reason import Code
from tvm_fuse_schedules.cpu_tiles import Cpu

pytestmark = pytest.mark.relay

AVX512 = Cpu(lanes=16, registers=32, threads=2)
LANES = {"cascadelake": 16, "haswell": 8}

#: rows, depth, channels
SHAPES = {
    "one row": (1, 128, 1000),
    "one row, shared by threads": (1, 640, 256),
    "eight rows": (8, 96, 1000),
    "prime rows": (13, 64, 48),
    "prime depth": (3, 67, 32),
    "more rows than a tile": (37, 128, 80),
    "rows a page apart": (16, 1024, 64),
    "many rows": (197, 96, 96),
    "one of depth": (5, 1, 16),
    "half a vector": (2, 40, 12),
    "thirteen channels": (4, 24, 13),
    "ten classes": (1, 84, 10),
    "prime channels": (2, 24, 37),
}


def make(shape, epilogue, dtype="float32", before=lambda relay, x: x, data=None):
    from tvm_fuse.relay.base import relay, tvm

    rows, depth, channels = shape
    random = np.random.default_rng(0)
    arrays = {"x": random.standard_normal(data or (rows, depth)).astype(dtype)}
    weights = (random.standard_normal((channels, depth)) / np.sqrt(depth)).astype(dtype)
    bias = random.standard_normal(channels).astype(dtype)
    body = relay.nn.dense(
        before(relay, relay.var("x", shape=arrays["x"].shape, dtype=dtype)), relay.const(weights, dtype)
    )
    want = weights.astype("float64")
    if epilogue != "none":
        body = relay.nn.bias_add(body, relay.const(bias, dtype))
    if epilogue == "residual":
        arrays["r"] = random.standard_normal((rows, channels)).astype(dtype)
        body = relay.nn.relu(body + relay.var("r", shape=(rows, channels)))
    elif epilogue == "cast":
        body = relay.cast(body, "float16")

    def reference(values):
        result = values.reshape(rows, depth) @ want.T + (0 if epilogue == "none" else bias)
        return np.maximum(result + arrays["r"], 0) if epilogue == "residual" else result

    return tvm.IRModule.from_expr(body), arrays, reference


def build(module, target):
    from tvm_fuse.relay.build import build_fused
    from tvm_fuse.relay.layout_pass import decide_layout
    from tvm_fuse.relay.partition_pass import partition_chains
    from tvm_fuse.relay.record import last_report

    grouped = partition_chains(decide_layout(module, target), target)
    return build_fused(grouped, target), last_report()["PartitionChains"]


def run(artifact, target, arrays):
    from tvm_fuse.relay.build import Runner

    return Runner(artifact, target).run(arrays, ["y"])["y"]


@pytest.fixture
def planned(monkeypatch):
    """The kernels of ours that a build asked for."""
    from tvm_fuse.relay.base import tvm  # noqa: F401
    from tvm_fuse_schedules import cpu_dense

    made, plan = [], cpu_dense.plan_dense
    monkeypatch.setattr(cpu_dense, "plan_dense", lambda *args: made.append(plan(*args)) or made[-1])
    return made


@pytest.mark.parametrize("mcpu", LANES)
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_by_value(name, mcpu, planned):
    from tvm_fuse.core.cpu import read_cpu
    from tvm_fuse.relay.target import resolve_target

    if read_cpu().float_lanes < LANES[mcpu]:
        pytest.skip(f"this CPU does not run code for {mcpu}")
    target = resolve_target(f"llvm -mcpu={mcpu}")
    module, arrays, reference = make(SHAPES[name], "bias")
    artifact, _ = build(module, target)
    np.testing.assert_allclose(run(artifact, target, arrays), reference(arrays["x"]), rtol=1e-5, atol=1e-5)
    assert len(artifact.calls) == 1
    assert planned


@pytest.mark.parametrize("epilogue", ["none", "bias", "residual", "cast"])
@pytest.mark.parametrize("rows", [1, 13])
def test_what_follows_by_value(rows, epilogue):
    from tvm_fuse.relay.target import resolve_target

    target = resolve_target("llvm")
    module, arrays, reference = make((rows, 40, 48), epilogue)
    artifact, _ = build(module, target)
    tolerance = 1e-2 if epilogue == "cast" else 1e-5
    got = run(artifact, target, arrays).astype("float64")
    np.testing.assert_allclose(got, reference(arrays["x"]), rtol=tolerance, atol=tolerance)


def flatten(relay, x):
    return relay.nn.batch_flatten(relay.layout_transform(x, "NCHW16c", "NCHW"))


BEFORE = {
    "pixels of a pool": ((3, 8, 1, 1, 16), flatten),
    "one image": ((1, 24, 1, 1, 16), flatten),
    "relu": ((13, 64), lambda r, x: r.nn.relu(x)),
    "reshape and scale": ((2, 5, 8), lambda r, x: r.reshape(x, (2, 40)) * r.const(2.0)),
}


@pytest.mark.parametrize("name", BEFORE)
def test_what_is_before_joins(name):
    from tvm_fuse.relay.target import resolve_target

    data, before = BEFORE[name]
    target = resolve_target("llvm")
    shape = (data[0], int(np.prod(data[1:])), 32)
    module, arrays, reference = make(shape, "bias", before=before, data=data)
    artifact, record = build(module, target)
    values = arrays["x"].reshape(shape[:2])
    values = np.maximum(values, 0) if name == "relu" else values * 2 if "scale" in name else values
    np.testing.assert_allclose(run(artifact, target, arrays), reference(values), rtol=1e-5, atol=1e-5)
    assert record.details[0].prologue
    assert len(artifact.calls) == 1


@pytest.mark.parametrize("layout", ["NC32n", "NC64n"])
def test_blocks_of_several_vectors_are_left_to_tvm(layout, planned):
    from tvm_fuse.relay.base import relay, tvm
    from tvm_fuse.relay.build import build_fused
    from tvm_fuse.relay.target import resolve_target

    target, lanes = resolve_target("llvm"), int(layout[2:-1])
    weights = np.random.default_rng(0).standard_normal((2, 24, lanes)).astype("float32")
    x = relay.var("x", shape=(4, 24))
    body = relay.nn.contrib_dense_pack(relay.nn.relu(x), relay.const(weights), layout, None, "float32")
    data = np.random.default_rng(1).standard_normal((4, 24)).astype("float32")
    got = run(build_fused(tvm.IRModule.from_expr(body), target), target, {"x": data})
    want = np.maximum(data, 0) @ weights.transpose(1, 0, 2).reshape(24, 2 * lanes)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert not planned


def test_nothing_joins_before_another_dtype(planned):
    from tvm_fuse.relay.target import resolve_target

    target = resolve_target("llvm")
    module, arrays, reference = make((4, 64, 32), "bias", "float64", lambda relay, x: relay.nn.relu(x))
    artifact, record = build(module, target)
    np.testing.assert_allclose(
        run(artifact, target, arrays), reference(np.maximum(arrays["x"], 0)), rtol=1e-10, atol=1e-10
    )
    assert not record.details[0].prologue
    assert not planned
    assert Code.TARGET_CANNOT_JOIN in [made.reason.code for made in record.decisions if made.reason]


def test_threads_share_what_comes_from_memory_and_a_tile_fits():
    from tvm_fuse.relay.base import tvm  # noqa: F401
    from tvm_fuse_schedules.cpu_dense import plan_dense

    assert plan_dense((1, 1280), (125, 1280, 8), AVX512).tile.is_parallel
    assert not plan_dense((1, 64), (4, 64, 16), AVX512).tile.is_parallel
    for rows in (1, 2, 7, 8, 22, 33, 197):
        tile = plan_dense((rows, 768), (48, 768, 16), AVX512).tile
        assert tile.blocks * tile.pixels + tile.blocks + (tile.pixels if tile.blocks > 1 else 0) <= 32
