"""The check of a loaded Relay model before anything is folded (the rules are ``core/audit.py``'s)."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.lazy import Lazy
from tests.support.relay_graphs import Net, relay, tvm
from tvm_fuse.core.epsilon import EpsilonConfig, EpsilonOrigin, ExpectedEpsilon
from tvm_fuse.core.errors import ModelError, UsageError
from tvm_fuse.core.reason import Code

audit = Lazy("tvm_fuse.relay.audit")
load = Lazy("tvm_fuse.relay.load")

pytestmark = pytest.mark.relay


def model_of(*norms):
    """One convolution and batch norm after the other; a norm is its epsilon and changed vectors."""
    net = Net()
    y = net.input("x", (1, 4, 6, 6))
    for epsilon, changes in norms:
        vectors = dict(zip(("gamma", "beta", "mean", "variance"), net.norm_values(4)), **changes)
        constants = [relay.const(np.broadcast_to(v, (4,)).astype("float32")) for v in vectors.values()]
        y = relay.nn.batch_norm(net.conv2d(y, 4), *constants, epsilon=epsilon)[0]
    return load.model_from_module(net.module(y))


def check(model, epsilon=(), config=None, align=False):
    return audit.check_model(model, dict(epsilon), config or EpsilonConfig(), align=align)


def epsilons(module):
    found = []

    def visit(expr):
        if isinstance(expr, relay.Call) and expr.op == relay.op.get("nn.batch_norm"):
            found.append(expr.attrs.epsilon)

    relay.analysis.post_order_visit(module["main"], visit)
    return found


def test_sound_batch_norms_pass_and_the_module_stays():
    model = model_of((1e-3, {}), (1e-5, {}))
    checked = check(model)
    assert [item.name for item in checked.epsilon] == ["batch_norm_0", "batch_norm_1"]
    assert [item.origin for item in checked.epsilon] == [EpsilonOrigin.GRAPH] * 2
    assert checked.warnings == ()
    assert tvm.ir.structural_equal(checked.module, model.module)


def test_what_the_source_says_is_compared():
    model = model_of((1e-3, {}))
    source = {"batch_norm_0": ExpectedEpsilon(1e-5, EpsilonOrigin.SOURCE_ATTRIBUTE)}
    other = load.RelayModel(model.name, model.module, model.inputs, model.outputs, source)
    with pytest.raises(ModelError, match=r"bn-epsilon-mismatch at batch_norm_0: .* \(source attribute\)"):
        check(other)
    lost = {**source, "bn7": source["batch_norm_0"]}
    with pytest.raises(ModelError, match=r"1 batch norm.* did not reach the graph: bn7"):
        check(load.RelayModel(model.name, model.module, model.inputs, model.outputs, lost))


@pytest.mark.parametrize("by", ["user", "config"])
def test_an_epsilon_is_aligned_when_told_to(by):
    given = {"batch_norm_1": 0.25}
    options = {"epsilon": given} if by == "user" else {"config": EpsilonConfig(given)}
    model = model_of((1e-3, {}), (1e-5, {}))
    with pytest.raises(ModelError, match="bn-epsilon-mismatch at batch_norm_1"):
        check(model, **options)
    checked = check(model, align=True, **options)
    assert epsilons(checked.module) == [pytest.approx(1e-3), 0.25]
    assert epsilons(model.module) == [pytest.approx(1e-3), pytest.approx(1e-5)]


def test_a_name_that_fits_nothing():
    with pytest.raises(UsageError, match="'bn7'"):
        check(model_of((1e-3, {})), {"bn7": 1e-3})


def test_all_broken_numbers_are_listed():
    broken = (1e-3, {"gamma": np.array([1, np.nan, 1, 1])}), (1e-3, {}), (1e-3, {"variance": -1.0})
    with pytest.raises(ModelError, match=r"^2 problem\(s\) in the numbers of batch norms") as caught:
        check(model_of(*broken))
    lines = str(caught.value).splitlines()
    assert lines[1].strip().startswith("bn-statistics-not-finite at batch_norm_0")
    assert lines[2].strip().startswith("bn-variance-not-positive at batch_norm_2")


def test_statistics_are_judged_with_the_aligned_epsilon():
    model = model_of((0.0, {"variance": 0.0}))
    with pytest.raises(ModelError, match="bn-variance-not-positive"):
        check(model)
    (warning,) = check(model, {"*": 1e-3}, align=True).warnings
    assert (warning.code, warning.at) == (Code.BN_VARIANCE_ALL_ZERO, "batch_norm_0")
