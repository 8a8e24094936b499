"""PReLUs as TVM's ONNX importer flattens them: the same numbers, and a convolution's chain again."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.lazy import Lazy
from tests.support.onnx_models import Builder
from tests.support.relay_graphs import count_operators, feeds, plain_build, relay, run, tvm
from tvm_fuse.relay import record

prelu_pass = Lazy("tvm_fuse.relay.prelu_pass")

pytestmark = pytest.mark.relay

SHAPE = (2, 4, 5, 3)
RNG = np.random.default_rng(0)

#: Slopes as ONNX broadcasts them -> the operator that they become.
CASES = {
    "a channel": (RNG.normal(size=(4, 1, 1)), "prelu"),
    "the last axis": (RNG.normal(size=3), "prelu"),
    "one for all": (np.array([0.25]), "leaky_relu"),
    "every position": (RNG.normal(size=(4, 5, 3)), "flat"),
    "a row": (RNG.normal(size=(5, 1)), "flat"),
}


def imported(slopes):
    b = Builder()
    y = b.conv(b.input("x", SHAPE), out=4, kernel=3, pad=1)
    y = b.op("PRelu", y, b.const(slopes.astype("float32")))
    module, _ = relay.frontend.from_onnx(b.build([y]), freeze_params=True)
    return relay.transform.InferType()(module)


@pytest.mark.parametrize("case", CASES)
def test_a_flattened_prelu(case):
    slopes, expected = CASES[case]
    module = imported(slopes)
    restored = prelu_pass.restore_prelus(module)
    counts = count_operators(restored)
    found = "flat" if counts["reshape"] else "prelu" if counts["nn.prelu"] else "leaky_relu"
    assert found == expected
    feed = feeds(module)
    for want, got in zip(run(plain_build(module), feed), run(plain_build(restored), feed)):
        assert np.array_equal(got, want)


@pytest.mark.cuda_codegen
@pytest.mark.parametrize(
    ("case", "name"), [("a channel", "conv2d_prelu"), ("one for all", "conv2d_leaky_relu")]
)
def test_it_ends_a_convolution_s_chain(case, name):
    from tvm_fuse import transform

    transform.FuseChains("cuda -arch=sm_80")(imported(CASES[case][0]))
    assert [group.name for group in record.last_report()["PartitionChains"].details] == [name]


def test_a_value_that_is_read_flat_as_well_stays():
    x = relay.var("x", shape=(1, 4, 2))
    flat = relay.nn.prelu(relay.reshape(x, (-1,)), relay.const(np.full(8, 0.5, "float32")), 0)
    both = relay.Tuple([relay.reshape(flat, (1, 4, 2)), relay.nn.relu(flat)])
    module = relay.transform.InferType()(tvm.IRModule.from_expr(relay.Function([x], both)))
    assert count_operators(prelu_pass.restore_prelus(module)) == count_operators(module)
