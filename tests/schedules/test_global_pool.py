from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.relay


def build_and_run(op, shape, layout, target, epilogue):
    from tvm_fuse.relay.base import relay, tvm
    from tvm_fuse.relay.build import Runner, build_fused
    from tvm_fuse.relay.target import resolve_target

    data = relay.var("x", shape=shape)
    body = getattr(relay.nn, op)(data, layout=layout)
    body = relay.nn.relu(body) if epilogue else body
    resolved = resolve_target(target)
    artifact = build_fused(tvm.IRModule.from_expr(relay.Function([data], body)), resolved)
    array = np.random.default_rng(0).standard_normal(shape).astype("float32")
    return array, Runner(artifact, resolved).run({"x": array}, ["y"])["y"], artifact


@pytest.mark.parametrize("epilogue", [False, True], ids=["alone", "relu"])
@pytest.mark.parametrize("op", ["global_avg_pool2d", "global_max_pool2d"])
@pytest.mark.parametrize("shape", [(1, 4, 3, 96, 8), (2, 3, 7, 5, 16), (1, 1, 1, 1, 4)], ids=str)
def test_blocked_layout_by_value(op, shape, epilogue):
    array, got, artifact = build_and_run(op, shape, f"NCHW{shape[-1]}c", "llvm", epilogue)
    pool = np.mean if "avg" in op else np.max
    want = pool(array.astype("float64"), axis=(2, 3), keepdims=True)
    want = np.maximum(want, 0) if epilogue else want
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert len(artifact.calls) == 1


def test_plain_layout_falls_back_to_tvm():
    array, got, _ = build_and_run("global_avg_pool2d", (1, 6, 5, 5), "NCHW", "llvm", False)
    np.testing.assert_allclose(got, array.mean(axis=(2, 3), keepdims=True), rtol=1e-5, atol=1e-6)


def test_only_targets_with_our_key_use_it(monkeypatch):
    from tvm_fuse.relay import cpu_strategy as strategy

    used = []
    original = strategy._schedule_global_pool
    monkeypatch.setattr(strategy, "_schedule_global_pool", lambda *args: used.append(1) or original(*args))
    build_and_run("global_avg_pool2d", (1, 4, 3, 5, 8), "NCHW8c", "llvm -keys=cpu", False)
    assert not used
    build_and_run("global_avg_pool2d", (1, 4, 3, 5, 8), "NCHW8c", "llvm", False)
    assert used
