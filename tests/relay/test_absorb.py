"""Twins of inner operators: what TVM's passes and builds make of them, and the way back."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from tests.support.joined import Joined
from tests.support.lazy import Lazy
from tests.support.relay_graphs import LLVM, count_operators, plain_build, relay, run, tvm
from tvm_fuse.core.errors import InternalError

absorb = Lazy("tvm_fuse.relay.absorb")

pytestmark = pytest.mark.relay


def make_gate(inner=True):
    """Two 1x1 convolutions, the first an inner one unless told otherwise."""
    rng, group = np.random.default_rng(0), Joined()
    x, w1, w2 = (
        rng.normal(size=shape).astype("float32") for shape in ((2, 12, 1, 1), (4, 12, 1, 1), (12, 4, 1, 1))
    )
    attrs = {"kernel_size": (1, 1)}
    first = relay.nn.conv2d(group.input("x", x), group.const(w1), channels=4, **attrs)
    first = group.inner(first) if inner else first
    second = relay.nn.conv2d(relay.nn.relu(first), group.const(w2), channels=12, **attrs)
    wanted = np.maximum(x[:, :, 0, 0] @ w1[:, :, 0, 0].T, 0) @ w2[:, :, 0, 0].T
    return group, second, wanted[:, :, None, None]


@pytest.mark.parametrize("opt_level", range(5))
def test_builds_for_a_cpu_at_every_level(opt_level):
    group, result, wanted = make_gate()
    library = plain_build(group.module(result), LLVM, opt_level)
    np.testing.assert_allclose(run(library, group.values)[0], wanted, rtol=1e-5, atol=1e-5)


def test_two_plain_products_in_a_primitive_function_are_refused_by_tvm():
    group, result, _ = make_gate(inner=False)
    with pytest.raises(tvm.TVMError, match="two complicated ops"):
        plain_build(group.module(result), LLVM, 0)


@pytest.mark.parametrize(
    "name",
    ["FoldConstant", "AlterOpLayout", "FuseOps", "SimplifyInference", "CanonicalizeOps", "FoldScaleAxis"],
)
def test_passes_of_tvm_leave_twins_alone(name):
    group, result, _ = make_gate()
    module = group.module(result)
    with tvm.target.Target(LLVM), tvm.transform.PassContext(opt_level=4):
        after = getattr(relay.transform, name)()(module)
    assert count_operators(after)["tvm_fuse.inner.nn.conv2d"] == 1


def test_constants_are_folded_through_a_twin():
    absorb.register_twins()
    twin = absorb.lower_absorbed(relay.mean(relay.const(np.float32([1, 2, 6])), axis=[0]))
    module = relay.transform.FoldConstant()(tvm.IRModule.from_expr(twin))
    assert float(module["main"].body.data.numpy()) == 3


def test_restored_is_what_was_lowered():
    x = relay.var("x", shape=(1, 3, 8, 8))
    call = relay.nn.max_pool2d(x, (2, 2), strides=(2, 2))
    lowered = absorb.lower_absorbed(call)
    assert lowered.op.name == "tvm_fuse.inner.nn.max_pool2d"
    assert tvm.ir.structural_equal(absorb.restore_absorbed(lowered), call, map_free_vars=True)
    assert absorb.restore_absorbed(call) is call
    assert absorb.restore_absorbed(x) is x


def test_an_operator_without_a_twin_is_a_bug():
    with pytest.raises(InternalError, match=r"nn\.relu cannot be inside a joined kernel; these can: max"):
        absorb.lower_absorbed(relay.nn.relu(relay.var("x", shape=(1,))))


def test_saved_and_loaded():
    group, result, _ = make_gate()
    module = group.module(result)
    assert tvm.ir.structural_equal(tvm.ir.load_json(tvm.ir.save_json(module)), module)


def test_loading_without_registration_is_refused_by_tvm(tmp_path):
    group, result, _ = make_gate()
    file = tmp_path / "module.json"
    file.write_text(tvm.ir.save_json(group.module(result)))
    code = (
        "import sys, pathlib\nfrom tvm_fuse.relay.base import tvm\n"
        "tvm.ir.load_json(pathlib.Path(sys.argv[1]).read_text())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True)
    assert done.returncode != 0
    assert "tvm_fuse.inner.nn.conv2d is not registered" in done.stderr
