"""Every layer in every layout that Relay can write: the batch norm folds by value, or a code says why not.

Values are those of the NumPy evaluator in ``tests/support``, in float64, so that what TVM has no schedule for
on a CPU is checked as well; one test checks the evaluator against TVM.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.support.graphs import shape_in
from tests.support.numerics import max_error
from tests.support.relay_folds import check, check_refused, values
from tests.support.relay_graphs import Net, count_operators, feeds, infer, plain_build, relay, run
from tvm_fuse.core.reason import Code

pytestmark = pytest.mark.relay

C = 4  # in and out, so that the wrong channel axis of a kernel fits as well
SIZES = {"N": 2, "C": C, "D": 4, "H": 5, "W": 6}
TAPS = {"D": 2, "H": 3, "W": 2}


# --- layers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """A convolution with its layouts; ``runs`` tells whether TVM has a schedule for it on a CPU."""

    op: str
    data: str
    kernel: str
    groups: int = 1
    out: int = C
    runs: bool = True
    out_layout: str = ""
    attrs: dict[str, Any] = field(default_factory=dict)

    @property
    def result(self):
        return self.out_layout or self.data

    @property
    def spatial(self):
        return [letter for letter in "DHW" if letter in self.data]

    def make(self, net):
        x = net.input(f"x{len(net.inputs)}", shape_in(self.data, SIZES))
        per_group = {"O": self.out, "I": C // self.groups}
        if "transpose" in self.op:
            per_group = {"O": self.out // self.groups, "I": C}
        weight = net.weight(*shape_in(self.kernel, {**TAPS, **per_group}), fan_in=C * 3 ** len(self.spatial))
        taps = tuple(TAPS[letter] for letter in self.spatial)
        operator = getattr(relay.nn, self.op)
        attrs = {"out_layout": self.result} if self.op.startswith("contrib") else {}
        return operator(
            x, weight, channels=self.out, kernel_size=taps, groups=self.groups, data_layout=self.data,
            kernel_layout=self.kernel, **attrs, **self.attrs,
        )  # fmt: skip


UNEVEN = {1: (1, 2), 2: (2, 0, 1, 3), 3: (1, 2, 0, 0, 1, 3)}


def uneven(op, data, kernel, rank, **more):
    """With dilation, strides and padding that differ by axis and side."""
    attrs = {"padding": UNEVEN[rank], "dilation": (2, 1, 2)[:rank], "strides": (1, 2, 1)[:rank]}
    return Layer(op, data, kernel, attrs=attrs, **more)


def transposed(op, data, kernel, rank, **more):
    attrs = {"padding": UNEVEN[rank], "strides": (2, 1, 2)[:rank]}
    return Layer(op, data, kernel, attrs=attrs, **more)


LAYERS = {
    "conv1d": uneven("conv1d", "NCW", "OIW", 1),
    "conv1d, groups": uneven("conv1d", "NCW", "OIW", 1, groups=2, out=6),
    "conv1d, depthwise": uneven("conv1d", "NCW", "OIW", 1, groups=4),
    "conv1d, multiplier": uneven("conv1d", "NCW", "OIW", 1, groups=4, out=8),
    "conv1d, NWC": uneven("conv1d", "NWC", "WIO", 1),
    "conv1d, NWC, groups": uneven("conv1d", "NWC", "WIO", 1, groups=2, out=6),
    "conv1d, NWC, depthwise": uneven("conv1d", "NWC", "WIO", 1, groups=4),
    "conv2d": uneven("conv2d", "NCHW", "OIHW", 2),
    "conv2d, groups": uneven("conv2d", "NCHW", "OIHW", 2, groups=2, out=6),
    "conv2d, depthwise": uneven("conv2d", "NCHW", "OIHW", 2, groups=4),
    "conv2d, multiplier": uneven("conv2d", "NCHW", "OIHW", 2, groups=4, out=8),
    "conv2d, HWIO": uneven("conv2d", "NCHW", "HWIO", 2, runs=False),
    "conv2d, OHWI": uneven("conv2d", "NCHW", "OHWI", 2, runs=False),
    "conv2d, HWOI": uneven("conv2d", "NCHW", "HWOI", 2, runs=False),
    "conv2d, NHWC": uneven("conv2d", "NHWC", "HWIO", 2),
    "conv2d, NHWC, groups": uneven("conv2d", "NHWC", "HWIO", 2, groups=2, out=6),
    "conv2d, NHWC, depthwise": uneven("conv2d", "NHWC", "HWOI", 2, groups=4),
    "conv2d, NHWC, depthwise, HWIO": uneven("conv2d", "NHWC", "HWIO", 2, groups=4, runs=False),
    "conv2d, NHWC, multiplier": uneven("conv2d", "NHWC", "HWIO", 2, groups=4, out=8),
    "conv2d, NHWC, OHWI": uneven("conv2d", "NHWC", "OHWI", 2, runs=False),
    "conv2d, NHWC, OHWI, groups": uneven("conv2d", "NHWC", "OHWI", 2, groups=2, out=6, runs=False),
    "conv2d, NHWC, OIHW": uneven("conv2d", "NHWC", "OIHW", 2, runs=False),
    "conv2d, HWCN": uneven("conv2d", "HWCN", "HWIO", 2),
    "conv3d": uneven("conv3d", "NCDHW", "OIDHW", 3),
    "conv3d, groups": uneven("conv3d", "NCDHW", "OIDHW", 3, groups=2, out=6),
    "conv3d, depthwise": uneven("conv3d", "NCDHW", "OIDHW", 3, groups=4),
    "conv3d, NDHWC": uneven("conv3d", "NDHWC", "DHWIO", 3),
    "conv1d_transpose": transposed("conv1d_transpose", "NCW", "IOW", 1),
    "conv1d_transpose, groups": transposed("conv1d_transpose", "NCW", "IOW", 1, groups=2),
    "conv1d_transpose, depthwise": transposed("conv1d_transpose", "NCW", "IOW", 1, groups=4),
    "conv2d_transpose": transposed("conv2d_transpose", "NCHW", "IOHW", 2),
    "conv2d_transpose, groups": transposed("conv2d_transpose", "NCHW", "IOHW", 2, groups=2, out=8),
    "conv2d_transpose, depthwise": transposed("conv2d_transpose", "NCHW", "IOHW", 2, groups=4),
    "conv2d_transpose, multiplier": transposed("conv2d_transpose", "NCHW", "IOHW", 2, groups=4, out=8),
    "conv2d_transpose, NHWC": transposed("conv2d_transpose", "NHWC", "HWIO", 2),
    "conv2d_transpose, NHWC, HWOI": transposed("conv2d_transpose", "NHWC", "HWOI", 2),
    "conv2d_transpose, NHWC, OIHW": transposed("conv2d_transpose", "NHWC", "OIHW", 2),
    "conv3d_transpose": transposed("conv3d_transpose", "NCDHW", "IODHW", 3),
    "conv3d_transpose, NDHWC": transposed("conv3d_transpose", "NDHWC", "DHWOI", 3),
    "conv3d_transpose, NDHWC, DHWIO": transposed("conv3d_transpose", "NDHWC", "DHWIO", 3),
}


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", LAYERS)
def test_layer(name, bias):
    net, layer = Net(), LAYERS[name]
    axis = layer.data.index("C")
    y = layer.make(net)
    y = relay.nn.bias_add(y, net.const(layer.out), axis - len(layer.data)) if bias else y
    is_last = axis == len(layer.data) - 1  # -1 is the one negative axis that a batch norm may have
    check(net.module(relay.nn.relu(net.batch_norm(y, axis=-1 if is_last and bias else axis))))


@pytest.mark.parametrize("name", ["conv2d", "conv2d, NHWC", "conv2d_transpose", "conv3d"])
def test_a_fold_along_the_wrong_axis_is_noticed(name, monkeypatch):
    """In and out are of one size: only the values tell, and they do."""
    from tvm_fuse.core import backward
    from tvm_fuse.core.weights import scale_inputs

    monkeypatch.setattr(backward, "scale_outputs", scale_inputs)
    net, layer = Net(), LAYERS[name]
    module = net.module(net.batch_norm(layer.make(net), axis=layer.data.index("C")))
    with pytest.raises(AssertionError, match="the values differ"):
        check(module)


def test_layers_against_tvm():
    """The evaluator agrees with TVM on what the layers compute, where TVM runs them."""
    net = Net()
    names = [name for name in LAYERS if LAYERS[name].runs]
    module = net.module(*(LAYERS[name].make(net) for name in names))
    inputs = feeds(module)
    want = values(module, inputs)
    for name, got, exact in zip(names, run(plain_build(module, opt_level=1), inputs), want):
        assert max_error(got, exact) < 1e-5, name


MISREAD = {
    "conv1d, IOW": Layer("conv1d", "NCW", "IOW"),
    "conv1d, NWC, WOI": Layer("conv1d", "NWC", "WOI"),
    "conv3d, IODHW": Layer("conv3d", "NCDHW", "IODHW"),
    "conv3d, NDHWC, DHWOI": Layer("conv3d", "NDHWC", "DHWOI"),
    "conv1d_transpose, OIW": Layer("conv1d_transpose", "NCW", "OIW"),
    "conv2d_transpose, OIHW": Layer("conv2d_transpose", "NCHW", "OIHW"),
    "conv3d_transpose, OIDHW": Layer("conv3d_transpose", "NCDHW", "OIDHW"),
}


@pytest.mark.parametrize("name", MISREAD)
def test_a_kernel_layout_that_tvm_ignores(name):
    """TVM computes as if the layout were another one (opt_level 0 at least): hands off."""
    net, layer = Net(), MISREAD[name]
    module = net.module(net.batch_norm(layer.make(net), axis=layer.data.index("C")))
    reason = check_refused(module, Code.BN_PRODUCER_UNSUPPORTED)
    assert reason.got == f"nn.{layer.op} with {layer.kernel} weights"


def test_tvm_ignores_the_kernel_layout_of_a_conv1d():
    """Should this fail one day, the table in ``relay/read.py`` is out of date."""
    outputs = []
    for kernel in ("OIW", "IOW"):
        net = Net()
        module = net.module(Layer("conv1d", "NCW", kernel).make(net))
        outputs += run(plain_build(module), feeds(module))
    assert np.array_equal(*outputs)


# --- layers in the layouts that AlterOpLayout makes ------------------------------------------------

PACKED = {
    "conv2d": Layer("contrib_conv2d_nchwc", "NCHW4c", "OIHW4i4o", out=8),
    "conv2d, other block": Layer(
        "contrib_conv2d_nchwc", "NCHW2c", "OIHW2i4o", out_layout="NCHW4c", attrs={"padding": (1, 0, 2, 1)}
    ),
    "depthwise": Layer("contrib_depthwise_conv2d_nchwc", "NCHW4c", "OIHW1i4o", groups=4),
    "depthwise, two blocks": Layer("contrib_depthwise_conv2d_nchwc", "NCHW2c", "OIHW1i2o", groups=4),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_layer_with_a_batch_norm_in_pieces(name):
    net, layer = Net(), PACKED[name]
    y = layer.make(net)
    block = int(layer.result[4:-1])
    gamma, beta, mean, var = (v.reshape(1, -1, 1, 1, block) for v in net.norm_values(layer.out))
    y = (y - relay.const(mean)) * relay.const(gamma / np.sqrt(var + 1e-3)) + relay.const(beta)
    module = net.module(relay.nn.relu(y))
    folded = check(module, folds=0, adds=1)
    assert set(count_operators(folded)) == {f"nn.{layer.op[:-5]}NCHWc", "add", "nn.relu"}
    inputs = feeds(module)
    got = run(plain_build(folded, opt_level=1), inputs)[0]
    assert max_error(got, values(module, inputs)[0]) < 1e-5


def test_packed_dense():
    net = Net()
    x = net.input("x", (3, C))
    y = relay.nn.contrib_dense_pack(x, net.weight(2, C, 2, fan_in=C), "NC2n")
    module = net.module(net.batch_norm(y))
    folded = check(module)
    inputs = feeds(module)
    assert max_error(run(plain_build(folded), inputs)[0], values(module, inputs)[0]) < 1e-5


def test_concatenation_of_packed_layers():
    net = Net()
    parts = [Layer("contrib_conv2d_nchwc", "NCHW4c", "OIHW4i4o", out=out).make(net) for out in (4, 8)]
    scale = relay.const(net.rng.normal(size=(1, 3, 1, 1, 4)).astype("float32"))
    y = relay.concatenate(parts, 1) * scale
    folded = check(net.module(y + relay.const(1.0)), folds=0, adds=2)
    assert not count_operators(folded)["multiply"]


# --- matrix products -------------------------------------------------------------------------------

PRODUCTS = {
    "dense": lambda net: relay.nn.dense(net.input("x", (C, C)), net.const(C, C)),
    "dense, units": lambda net: relay.nn.dense(net.input("x", (C, C)), net.const(C, C), units=C),
    "dense, rank 3": lambda net: relay.nn.dense(net.input("x", (C, C, C)), net.const(C, C)),
    "matmul": lambda net: relay.nn.matmul(net.input("x", (C, C)), net.const(C, C)),
    "matmul, both transposed": lambda net: relay.nn.matmul(
        net.input("x", (C, C)), net.const(C, C), transpose_a=True, transpose_b=True
    ),
    "matmul, data transposed": lambda net: relay.nn.matmul(
        net.input("x", (C, C)), net.const(C, C), transpose_a=True
    ),
    "batch_matmul": lambda net: relay.nn.batch_matmul(net.input("x", (C, C, C)), net.const(C, C, C)),
    "batch_matmul, one weight": lambda net: relay.nn.batch_matmul(
        net.input("x", (C, C, C)), net.const(1, C, C), transpose_b=False
    ),
    "batch_matmul, data transposed": lambda net: relay.nn.batch_matmul(
        net.input("x", (C, C, C)), net.const(C, C, C), transpose_a=True, transpose_b=False
    ),
}


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_product(name, bias):
    net = Net()
    y = PRODUCTS[name](net)
    y = relay.nn.bias_add(y, net.const(C), -1) if bias else y
    check(net.module(net.batch_norm(y, axis=-1)))


@pytest.mark.parametrize("name", PRODUCTS)
def test_product_after_a_batch_norm(name):
    """The batch norm runs along the axis that is summed over."""
    plain = PRODUCTS[name](Net())
    attrs = plain.attrs
    net = Net()
    x = net.input("x", [int(size) for size in infer(plain.args[0]).shape])
    is_transposed = "transpose_a" in attrs.keys() and attrs.transpose_a
    axis = len(infer(x).shape) - 2 if is_transposed else -1
    y = relay.Call(plain.op, [net.batch_norm(x, axis=axis), plain.args[1]], attrs)
    check(net.module(y))


@pytest.mark.parametrize("name", PRODUCTS)
def test_product_with_a_batch_norm_along_another_axis(name):
    net = Net()
    y = PRODUCTS[name](net)
    check_refused(net.module(net.batch_norm(y, axis=0)), Code.BN_AXIS_NOT_CHANNEL)


def test_a_constant_on_the_left_is_no_weight():
    net = Net()
    y = relay.nn.matmul(net.const(C, C), net.input("x", (C, C)))
    check_refused(net.module(net.batch_norm(y, axis=1)), Code.WEIGHT_NOT_CONSTANT)
