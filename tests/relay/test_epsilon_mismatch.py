"""The one reason code that only a front end produces: an epsilon that differs from its source's."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_fuse.core.errors import ModelError, UsageError
from tvm_fuse.core.reason import Code

pytestmark = pytest.mark.relay


def make_module(epsilon):
    from tvm_fuse.relay.base import relay, tvm

    x = relay.var("x", shape=(1, 3, 4, 4))
    vectors = [relay.const(np.full(3, value, "float32")) for value in (1, 0, 0, 1)]
    return tvm.IRModule.from_expr(relay.nn.batch_norm(x, *vectors, epsilon=epsilon)[0])


def test_epsilon_that_differs_fails_and_is_recorded():
    import tvm_fuse

    with pytest.raises(ModelError) as caught:
        tvm_fuse.transform.AlignEpsilon({"batch_norm_0": 1e-3})(make_module(1e-5))
    assert "0.001" in str(caught.value)
    assert "1e-05" in str(caught.value)
    (decision,) = tvm_fuse.last_report()["AlignEpsilon"].decisions
    assert (decision.at, decision.reason.code) == ("batch_norm_0", Code.BN_EPSILON_MISMATCH)


@pytest.mark.parametrize("name", ["batch_norm_0", "*"])
def test_epsilon_is_aligned_when_told_to(name):
    import tvm_fuse
    from tvm_fuse.relay.base import tvm

    aligned = tvm_fuse.transform.AlignEpsilon({name: 1e-3}, align=True)(make_module(1e-5))
    wanted = tvm.relay.transform.InferType()(make_module(1e-3))
    assert tvm.ir.structural_equal(aligned, wanted)
    (check,) = tvm_fuse.last_report()["AlignEpsilon"].details
    assert (check.in_graph, check.used) == (1e-5, 1e-3)


def test_a_name_that_fits_no_batch_norm_is_an_error():
    import tvm_fuse

    with pytest.raises(UsageError):
        tvm_fuse.transform.AlignEpsilon({"bn1": 1e-3})(make_module(1e-5))
