"""Batch norms fold into every kind of convolution, by value; a wrong axis would fit, and so shows."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.lazy import Lazy
from tests.support.relay_graphs import Net, count_operators, feeds, plain_build, relay, run, run_unfused, tvm
from tvm_fuse.core.reason import Code

transform = Lazy("tvm_fuse.transform")
record = Lazy("tvm_fuse.relay.record")

pytestmark = pytest.mark.relay

C = 4  # in and out, so that the transposed axis fits as well
SPATIAL = {1: (7,), 2: (5, 6), 3: (4, 5, 3)}


def convolution(net, x, rank, *, transposed=False, groups=1, out=C, kernel_layout=None, **attrs):
    """A convolution with a 3-wide kernel; weights in the operator's default layout unless given."""
    space = "DHW"[-rank:] if rank > 1 else "W"
    name = f"conv{rank}d_transpose" if transposed else f"conv{rank}d"
    layout = kernel_layout or ("IO" if transposed else "OI") + space
    sizes = {"O": out // groups, "I": C} if transposed else {"O": out, "I": C // groups}
    shape = [sizes.get(letter, 3) for letter in layout]
    weight = net.weight(*shape, fan_in=C * 3**rank // groups)
    operator = getattr(relay.nn, name)
    return operator(
        x, weight, channels=out, kernel_size=(3,) * rank, groups=groups, kernel_layout=layout, **attrs
    )


CASES = {
    "conv1d": dict(rank=1, padding=(1, 0)),
    "conv1d, groups": dict(rank=1, groups=2, out=8, dilation=(2,)),
    "conv2d, asymmetric padding": dict(rank=2, padding=(0, 1, 2, 0)),
    "conv3d": dict(rank=3),
    "conv3d, groups": dict(rank=3, groups=2, padding=(1, 1, 1)),
    "conv1d_transpose": dict(rank=1, transposed=True, strides=(2,), output_padding=(1,)),
    "conv2d_transpose": dict(rank=2, transposed=True, strides=(2, 2), padding=(1, 1), output_padding=(1, 1)),
    "conv2d_transpose, groups": dict(rank=2, transposed=True, groups=2),
    "conv2d_transpose, groups, wider": dict(rank=2, transposed=True, groups=2, out=8),
    "conv2d_transpose, depthwise": dict(rank=2, transposed=True, groups=4),
    "conv3d_transpose": dict(rank=3, transposed=True),
}


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_folds_and_fuses_by_value(case, bias):
    net = Net()
    y = convolution(net, net.input("x", (1, C, *SPATIAL[case["rank"]])), **case)
    y = relay.nn.bias_add(y, net.const(case.get("out", C))) if bias else y
    module = net.module(relay.nn.relu(net.batch_norm(y)))
    inputs = feeds(module)
    want = run_unfused(module, inputs)[0]

    fused = transform.PartitionChains()(transform.FoldBatchNorm()(module))
    assert "nn.batch_norm" not in count_operators(fused)
    (group,) = record.last_report()["PartitionChains"].details
    assert group.name.endswith("_bias_relu")
    np.testing.assert_allclose(run(plain_build(fused), inputs)[0], want, rtol=1e-5, atol=1e-5)


def transposed_ones(groups, out_per_group):
    """The graph of B011: ones everywhere, scales 1, 2, 3, ..."""
    net = Net()
    channels = groups * out_per_group
    weight = relay.const(np.ones((4, out_per_group, 1, 1), "float32"))
    y = relay.nn.conv2d_transpose(
        net.input("x", (1, 4, 1, 1)),
        weight,
        channels=channels,
        kernel_size=(1, 1),
        groups=groups,
        kernel_layout="IOHW",
    )
    vectors = [np.arange(1, channels + 1), np.zeros(channels), np.zeros(channels), np.ones(channels)]
    constants = [relay.const(vector.astype("float32")) for vector in vectors]
    return net.module(relay.nn.batch_norm(y, *constants, epsilon=0.0)[0])


@pytest.mark.parametrize(
    ("groups", "out_per_group", "want"),
    [
        (2, 2, [2, 4, 6, 8]),
        (2, 4, [2, 4, 6, 8, 10, 12, 14, 16]),
        (1, 4, [4, 8, 12, 16]),
        (4, 1, [1, 2, 3, 4]),
    ],
)
def test_b011_transposed_convolution_with_groups(groups, out_per_group, want):
    folded = transform.FoldBatchNorm()(transposed_ones(groups, out_per_group))
    assert len(record.last_report()["FoldBatchNorm"].details) == 1
    got = run(plain_build(folded), {"x": np.ones((1, 4, 1, 1), "float32")})[0]
    np.testing.assert_array_equal(got.ravel(), want)


def test_b013_transposed_weight_whose_first_axis_is_not_the_output():
    net = Net()
    weight = net.weight(3, 6, 3, 3, fan_in=27)
    y = relay.nn.conv2d_transpose(
        net.input("x", (1, 3, 28, 28)), weight, channels=6, kernel_size=(3, 3), strides=(2, 2),
        padding=(1, 1), output_padding=(1, 1), kernel_layout="IOHW",
    )  # fmt: skip
    module = net.module(net.batch_norm(y))
    assert [int(dim) for dim in module["main"].ret_type.shape] == [1, 6, 56, 56]
    folded = transform.FoldBatchNorm()(module)
    inputs = feeds(module)
    np.testing.assert_allclose(
        run(plain_build(folded), inputs)[0], run_unfused(module, inputs)[0], rtol=1e-5, atol=1e-5
    )


def test_a_batch_norm_along_another_axis_of_a_conv1d_stays():
    net = Net()
    y = convolution(net, net.input("x", (1, C, 4)), 1, padding=(1, 1))
    module = net.module(net.batch_norm(y, axis=2))
    assert tvm.ir.structural_equal(transform.FoldBatchNorm()(module), module)
    (decision,) = record.last_report()["FoldBatchNorm"].decisions
    assert decision.reason.code is Code.BN_AXIS_NOT_CHANNEL


def test_a_transposed_kernel_that_tvm_itself_misreads_is_left_alone():
    net = Net()
    y = convolution(net, net.input("x", (1, C, 5, 5)), 2, transposed=True, kernel_layout="OIHW")
    module = net.module(net.batch_norm(y))
    assert tvm.ir.structural_equal(transform.FoldBatchNorm()(module), module)
    (decision,) = record.last_report()["FoldBatchNorm"].decisions
    assert decision.reason.code is Code.BN_PRODUCER_UNSUPPORTED


@pytest.mark.parametrize("spelling", ["rsqrt", "divide", "power", "std", "two in a row"])
def test_b049_a_batch_norm_in_pieces_folds(spelling):
    net = Net()
    gamma, beta, mean, var = (relay.const(v.reshape(C, 1, 1)) for v in net.norm_values(C))
    epsilon = relay.const(1e-3)
    y = relay.nn.conv2d(
        net.input("x", (1, C, 5, 6)), net.weight(C, C, 3, 3, fan_in=9 * C), channels=C, kernel_size=(3, 3)
    )
    pieces = {
        "rsqrt": lambda: (y - mean) * (gamma * relay.rsqrt(var + epsilon)) + beta,
        "divide": lambda: (y - mean) / relay.sqrt(var + epsilon) * gamma + beta,
        "power": lambda: beta + gamma * relay.power(var + epsilon, relay.const(-0.5)) * (y - mean),
        "std": lambda: y / var - mean,
        "two in a row": lambda: net.batch_norm((net.batch_norm(y) - mean) * gamma),
    }
    module = net.module(relay.nn.relu(pieces[spelling]()))
    inputs = feeds(module)
    fused = transform.PartitionChains()(transform.FoldBatchNorm()(module))
    assert set(count_operators(fused)) == {"nn.conv2d", "add", "nn.relu"}
    name = "FoldScaleShift" if spelling == "std" else "FoldBatchNorm"  # all others are batch norms again
    assert record.last_report()[name].details
    np.testing.assert_allclose(
        run(plain_build(fused), inputs)[0], run_unfused(module, inputs)[0], rtol=1e-5, atol=1e-5
    )
