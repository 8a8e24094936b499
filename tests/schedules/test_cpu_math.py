"""exp, log, sigmoid, tanh and erf on a CPU: their errors over the range of float32, and no call of libm."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from scipy import special

from tests.support.lazy import Lazy
from tests.support.relay_graphs import Net, relay, tvm

build = Lazy("tvm_fuse.relay.build")
cpu_math = Lazy("tvm_fuse_schedules.cpu_math")
layout_pass = Lazy("tvm_fuse.relay.layout_pass")
partition_pass = Lazy("tvm_fuse.relay.partition_pass")
target = Lazy("tvm_fuse.relay.target")

pytestmark = pytest.mark.relay

EXACT = {"erf": special.erf, "exp": np.exp, "log": np.log, "sigmoid": special.expit, "tanh": np.tanh}
#: With and without multiply-adds, of 16, 8 and 4 lanes.
CPUS = {"cascadelake": 16, "haswell": 8, "x86-64": 4}
SMALLEST_NORMAL = 2.0**-126
#: Where something changes: signs of zero, subnormal numbers, overflow, the bounds of clamps.
EDGES = [
    0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 1e-40, SMALLEST_NORMAL,
    3.4e38, -3.4e38, 88.37, 88.38, 88.72, 88.73, -87.33, -87.34, -88.37, -103.9, -104.1, 4.1, -4.1,
    9.9, -9.9, 9.011,
]  # fmt: skip


def every(stride):
    """Each stride-th float32 by its bits, and the edges; a multiple of 16 of them."""
    bits = np.arange(0, 2**32, stride, dtype=np.uint64).astype(np.uint32)
    values = np.concatenate([np.array(EDGES, np.float32), bits.view(np.float32)])
    return values[: len(values) // 16 * 16]


def compute(expression, x, mcpu, is_vector=True):
    """A function of a float32 expression, of each element, and the assembly."""
    te = tvm.te
    data = te.placeholder(x.shape, "float32")
    result = te.compute(x.shape, lambda *index: expression(data(*index)))
    schedule = te.create_schedule(result.op)
    lane = schedule[result].split(result.op.axis[0], 16)[1]
    if is_vector:
        schedule[result].vectorize(lane)
    library = tvm.build(schedule, [data, result], f"llvm -mcpu={mcpu}")
    out = tvm.nd.empty(x.shape)
    library(tvm.nd.array(x), out)
    return out.numpy(), library.get_source("asm")


def worst_ulp(name, x, got):
    """The largest error in units of the last place, and where; infinite where a special value is wrong."""
    with np.errstate(all="ignore"):
        want = EXACT[name](x.astype(np.float64))
        rounded = want.astype(np.float32)
    is_special = ~np.isfinite(rounded)
    wrong = is_special & ~((np.isnan(rounded) & np.isnan(got)) | (rounded == got))
    error = np.abs(np.where(is_special, 0, got) - np.where(is_special, 0, want))
    if name == "sigmoid":
        error = np.where((np.abs(want) < SMALLEST_NORMAL) & (got == 0), 0, error)
    ulp = error / np.spacing(np.abs(np.where(is_special, 0, rounded))).astype(np.float64)
    ulp = np.where(wrong | np.isnan(ulp), np.inf, ulp)
    return ulp.max(), x[ulp.argmax()]


def this_cpu_runs(mcpu):
    from tvm_fuse.core.cpu import read_cpu

    return read_cpu().float_lanes >= CPUS[mcpu]


def libm_calls(assembly):
    """Calls of functions of libm, directly or through the table of addresses."""
    names = ("exp", "log", "tanh", "erf", "floor", "round", "pow")
    words = assembly.replace("@", " ").replace("*", " ").split()
    return sorted({word for word in words if word in {f"{name}{end}" for name in names for end in ("", "f")}})


@pytest.mark.parametrize("mcpu", CPUS)
@pytest.mark.parametrize("name", sorted(EXACT))
def test_the_error_is_within_the_bound_over_all_of_float32(name, mcpu):
    if not this_cpu_runs(mcpu):
        pytest.skip(f"this CPU does not run code for {mcpu}")
    x = every(2003)
    got, assembly = compute(functools.partial(cpu_math.call, name), x, mcpu)
    error, where = worst_ulp(name, x, got)
    assert error <= cpu_math.BOUNDS[name], f"{name}({where!r}) is off by {error} ulp"
    assert libm_calls(assembly) == []


@pytest.mark.slow
@pytest.mark.parametrize("mcpu", CPUS)
@pytest.mark.parametrize("name", sorted(EXACT))
def test_the_error_is_within_the_bound_for_every_hundredth_number(name, mcpu):
    if not this_cpu_runs(mcpu):
        pytest.skip(f"this CPU does not run code for {mcpu}")
    x = every(97)
    error, where = worst_ulp(name, x, compute(functools.partial(cpu_math.call, name), x, mcpu)[0])
    assert error <= cpu_math.BOUNDS[name], f"{name}({where!r}) is off by {error} ulp"


@pytest.mark.parametrize("name", sorted(EXACT))
def test_the_bound_is_no_wider_than_needed(name):
    x = every(2003)
    got, _ = compute(functools.partial(cpu_math.call, name), x, "x86-64")
    assert worst_ulp(name, x, got)[0] > cpu_math.BOUNDS[name] / 4


@pytest.mark.parametrize(
    ("name", "field", "wrong"),
    [
        ("exp", "_EXP", (0.0015, 0.0083688506, 0.0416684, 0.1666652, 0.49999994, 1.0, 1.0)),
        ("exp", "_EXP_RANGE", (-87.0, 89.0)),
        ("exp", "_EXP_RANGE", (-104.0, 88.0)),
        ("exp", "_LOG_2", (0.6931471824645996, 0.0)),
        ("sigmoid", "_SIGMOID_RANGE", (-88.0, 88.0)),
        ("tanh", "_TANH_BOUND", 7.0),
        ("erf", "_ERF_BOUND", 3.5),
        ("log", "_SMALLEST_NORMAL", 0.0),
    ],
)
def test_a_wrong_constant_is_seen(name, field, wrong, monkeypatch):
    monkeypatch.setattr(f"tvm_fuse_schedules.cpu_math.{field}", wrong)
    x = every(2003)
    error, _ = worst_ulp(name, x, compute(functools.partial(cpu_math.call, name), x, "x86-64")[0])
    assert error > cpu_math.BOUNDS[name]


def test_a_wrong_special_value_is_seen():
    x = np.array([math.nan, math.inf, -math.inf, 0], np.float32)
    for name in EXACT:
        with np.errstate(all="ignore"):
            right = EXACT[name](x.astype(np.float64)).astype(np.float32)
        assert worst_ulp(name, x, right)[0] <= 0.5
        for index in range(len(x)):
            wrong = right.copy()
            wrong[index] = 7
            assert worst_ulp(name, x, wrong)[0] > cpu_math.BOUNDS[name]


@pytest.mark.parametrize("name", ["tanh", "erf"])
@pytest.mark.parametrize("mcpu", CPUS)
def test_never_beyond_one_and_one_where_it_is_large(name, mcpu):
    if not this_cpu_runs(mcpu):
        pytest.skip(f"this CPU does not run code for {mcpu}")
    x = np.concatenate([np.linspace(3, 12, 4096), [1e30, np.inf]] * 8).astype(np.float32)
    got, _ = compute(functools.partial(cpu_math.call, name), x, mcpu)
    assert got.max() == 1
    assert np.all(got[x > 10] == 1)
    assert np.all(compute(functools.partial(cpu_math.call, name), -x, mcpu)[0] == -got)


def test_a_scalar_is_computed_in_the_same_way():
    x = every(200_003)
    for name in EXACT:
        function = functools.partial(cpu_math.call, name)
        vector, scalar = (compute(function, x, "x86-64", is_vector)[0] for is_vector in (True, False))
        np.testing.assert_array_equal(vector, scalar)


# --- functions of functions ---------------------------------------------------------------------------


def softplus(x):
    return cpu_math.call("log", cpu_math.call("exp", x) + 1.0)


def test_tanh_of_softplus_needs_no_logarithm():
    x = every(2003)
    got, assembly = compute(lambda x: cpu_math.call("tanh", softplus(x)), x, "x86-64")
    with np.errstate(all="ignore"):
        want = np.tanh(np.logaddexp(0, x.astype(np.float64)))
    np.testing.assert_allclose(got, want, rtol=4e-7, atol=1e-45)
    assert libm_calls(assembly) == []


def test_tanh_of_something_like_softplus_is_not_taken_for_it():
    x = np.linspace(-5, 5, 1024).astype(np.float32)
    got, _ = compute(
        lambda x: cpu_math.call("tanh", cpu_math.call("log", cpu_math.call("exp", x) + 2.0)), x, "x86-64"
    )
    np.testing.assert_allclose(got, np.tanh(np.log(np.exp(x.astype(np.float64)) + 2)), rtol=1e-6)


def nested(depth):
    def value(x):
        for _ in range(depth):
            x = cpu_math.call("sigmoid", x)
        return x

    return value


@pytest.mark.parametrize(("depth", "calls"), [(1, []), (2, []), (3, ["expf"]), (6, ["expf"]), (40, ["expf"])])
def test_a_third_function_around_two_is_the_library_s(depth, calls):
    x = np.linspace(-5, 5, 1024).astype(np.float32)
    got, assembly = compute(nested(depth), x, "x86-64")
    want = x.astype(np.float64)
    for _ in range(depth):
        want = special.expit(want)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert libm_calls(assembly) == calls


# --- in a network -------------------------------------------------------------------------------------

ACTIVATIONS = {
    "swish": lambda x: x * relay.sigmoid(x),
    "gelu": lambda x: x * (relay.erf(x * relay.const(0.5**0.5)) + relay.const(1.0)) * relay.const(0.5),
    "tanh": lambda x: relay.tanh(x),
    "softplus": lambda x: relay.log(relay.exp(x) + relay.const(1.0)),
    "mish": lambda x: x * relay.tanh(relay.log(relay.exp(x) + relay.const(1.0))),
    "elu": lambda x: relay.nn.relu(relay.const(1.0) - relay.exp(x)) * relay.const(-0.7) + relay.nn.relu(x),
}


def assembly_of(make, text, dtype="float32", has_conv=True):
    net = Net()
    x = net.input("x", (1, 16, 14, 14), dtype)
    value = x
    if has_conv:
        weight = relay.const(np.ones((32, 16, 1, 1), dtype))
        value = relay.nn.conv2d(x, weight, channels=32, kernel_size=(1, 1))
    module = net.module(make(value))
    resolved = target.resolve_target(text)
    laid_out = layout_pass.decide_layout(module, resolved)
    artifact = build.build_fused(partition_pass.partition_chains(laid_out, resolved), resolved)
    return artifact.library.get_lib().get_source("asm")


@pytest.mark.parametrize("mcpu", CPUS)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_after_a_convolution_calls_nothing(name, mcpu):
    assert libm_calls(assembly_of(ACTIVATIONS[name], f"llvm -mcpu={mcpu}")) == []


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_alone_calls_nothing(name):
    assembly = assembly_of(ACTIVATIONS[name], "llvm -mcpu=haswell", has_conv=False)
    assert libm_calls(assembly) == []
    assert "ymm" in assembly


@pytest.mark.parametrize(
    ("text", "dtype"),
    [("llvm -mcpu=haswell -keys=cpu", "float32"), ("llvm -mcpu=haswell", "float64")],
    ids=["another target", "another dtype"],
)
@pytest.mark.parametrize("name", ["sigmoid", "exp", "log", "tanh"])
def test_all_else_stays_tvm_s(name, text, dtype):
    assembly = assembly_of(lambda x: getattr(relay, name)(relay.cast(x, dtype)), text)
    assert libm_calls(assembly) == [("log" if name == "log" else "exp") + ("f" if dtype == "float32" else "")]


def test_the_reference_is_tvm_s_own():
    net = Net()
    module = net.module(relay.sigmoid(net.input("x", (64,))))
    reference = build.build_unfused(module, target.resolve_target("llvm -mcpu=haswell"))
    assert libm_calls(reference.library.get_lib().get_source("asm")) == ["expf"]
