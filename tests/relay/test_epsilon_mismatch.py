"""The one reason code that only a front end produces: an epsilon that differs from its source's."""

from __future__ import annotations

import numpy as np
import pytest

from tvm_fuse.core.epsilon import EpsilonConfig, EpsilonOrigin
from tvm_fuse.core.errors import ModelError, UsageError
from tvm_fuse.core.reason import Code

pytestmark = pytest.mark.relay


def make_module(epsilon, variance=(1, 1, 1)):
    """A variance of None is an input of the model."""
    from tvm_fuse.relay.base import relay, tvm

    x = relay.var("x", shape=(1, 3, 4, 4))
    vectors = [relay.const(np.full(3, value, "float32")) for value in (2, 0, 0)]
    is_input = variance is None
    vectors.append(relay.var("v", shape=(3,)) if is_input else relay.const(np.array(variance, "float32")))
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


def test_b004_the_mismatch_tells_both_values_the_channels_and_the_size():
    import tvm_fuse

    with pytest.raises(ModelError) as caught:
        tvm_fuse.transform.AlignEpsilon({"*": 1e-3})(make_module(1e-5, (1, 1e-4, 0)))
    (check,) = tvm_fuse.last_report()["AlignEpsilon"].details
    assert [channel.channel for channel in check.impact.worst] == [1, 0, 2]
    assert check.impact.largest == pytest.approx(
        2 * (1e-4 / 1.1e-4) ** 0.5 - 2 * (1e-4 / 1.1e-3) ** 0.5, rel=1e-6
    )
    (decision,) = tvm_fuse.last_report()["AlignEpsilon"].decisions
    assert decision.reason.wanted == "epsilon 0.001 (user)"
    assert decision.reason.got == f"1e-05 in the graph; {check.impact}"
    assert "1.3 in channel 1 (variance 0.0001, scale -68.4 %)" in str(caught.value)


def test_parameters_that_are_not_constant_have_no_impact():
    import tvm_fuse

    with pytest.raises(ModelError, match=r"got 1e-05 in the graph\n"):
        tvm_fuse.transform.AlignEpsilon({"*": 1e-3})(make_module(1e-5, None))
    (check,) = tvm_fuse.last_report()["AlignEpsilon"].details
    assert check.impact is None


def test_an_epsilon_of_the_training_config():
    from tvm_fuse.relay.fold_pass import align_epsilon
    from tvm_fuse.relay.record import last_report

    config = EpsilonConfig({"batch_norm_*": 1e-3})
    with pytest.raises(ModelError, match=r"wanted epsilon 0\.001 \(training config\), got 1e-05"):
        align_epsilon(make_module(1e-5), {}, {}, align=False, config=config)
    align_epsilon(make_module(1e-5), {}, {"*": 1e-2}, align=True, config=config)
    (check,) = last_report()["AlignEpsilon"].details
    assert (check.used, check.origin) == (1e-2, EpsilonOrigin.USER)


def test_an_epsilon_as_expected_has_no_impact():
    import tvm_fuse

    tvm_fuse.transform.AlignEpsilon({"*": 1e-5})(make_module(1e-5))
    (check,) = tvm_fuse.last_report()["AlignEpsilon"].details
    assert check.impact is None
