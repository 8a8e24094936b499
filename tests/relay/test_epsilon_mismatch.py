"""The one reason code that only a front end produces: an epsilon that differs from its source's."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_fuse.core.reason import Code

pytestmark = pytest.mark.relay


def test_epsilon_that_differs_is_reported():
    import tvm_fuse
    from tvm_fuse.relay.base import relay, tvm

    x = relay.var("x", shape=(1, 3, 4, 4))
    vectors = [relay.const(np.full(3, value, "float32")) for value in (1, 0, 0, 1)]
    module = tvm.IRModule.from_expr(relay.nn.batch_norm(x, *vectors, epsilon=1e-5)[0])
    tvm_fuse.transform.AlignEpsilon({"batch_norm_0": 1e-3})(module)
    (decision,) = tvm_fuse.last_report()["AlignEpsilon"].decisions
    assert (decision.at, decision.reason.code) == ("batch_norm_0", Code.BN_EPSILON_MISMATCH)
