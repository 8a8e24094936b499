"""Combined layers: the numbers of every case on the CPU and on the CUDA emulator, and what is left of it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.emulated import run_emulated
from tests.support.lazy import Lazy
from tests.support.relay_graphs import (
    CUDA,
    LLVM,
    Net,
    count_operators,
    feeds,
    infer,
    plain_build,
    relay,
    run,
    run_unfused,
    target,
    tvm,
)
from tvm_fuse.core.plan_options import PlanOptions
from tvm_fuse.core.reason import Code, Reason

combine = Lazy("tvm_fuse.relay.combine_pass")
kernels = Lazy("tvm_fuse.relay.kernels")
record = Lazy("tvm_fuse.relay.record")
transform = Lazy("tvm_fuse.transform")

pytestmark = pytest.mark.relay


def silu(x):
    return relay.multiply(x, relay.sigmoid(x))


def biased(net, x, channels, kernel=1):
    return relay.nn.bias_add(net.conv2d(x, channels, kernel), net.const(channels))


def make_inception(net):
    """Three 1x1 branches; the first goes to the concatenation at once."""
    x = net.input("x", (1, 16, 7, 7))
    one, two, three = (relay.nn.relu(biased(net, x, channels)) for channels in (8, 6, 3))
    pooled = relay.nn.max_pool2d(x, (3, 3), (1, 1), padding=(1, 1))
    parts = one, relay.nn.relu(biased(net, two, 8, 3)), biased(net, three, 5, 5), biased(net, pooled, 4)
    return relay.concatenate(parts, 1)


def make_parts(net):
    """Two branches that are all of a concatenation, in the other order."""
    x = net.input("x", (1, 16, 7, 7))
    one, two = (silu(net.conv2d(x, channels)) for channels in (6, 3))
    return relay.nn.relu(relay.concatenate([two, one], 1))


def make_some_parts(net):
    """Two branches that are some of a concatenation."""
    x = net.input("x", (1, 16, 7, 7))
    one, two = (relay.nn.relu(net.conv2d(x, channels, 1)) for channels in (6, 3))
    return relay.concatenate([relay.tanh(x), one, two], 1)


def make_csp(net):
    """The two halves of a stage, of which one is a layer longer."""
    x = net.input("x", (1, 16, 7, 7))
    one, two = (silu(biased(net, x, 8)) for _ in range(2))
    return relay.concatenate([silu(net.conv2d(one, 8)), two], 1)


def make_attention(net):
    """Query, key and value, as ONNX importers write them: three reshapes of one input."""
    x = net.input("x", (1, 6, 16))

    def project(axes):
        y = net.dense(relay.reshape(x, (6, 16)), 16)
        y = relay.add(relay.reshape(y, (1, 6, 16)), net.const(16))
        return relay.transpose(relay.reshape(y, (1, 6, 4, 4)), axes)

    query, key, value = project((0, 2, 1, 3)), project((0, 2, 1, 3)), project((0, 2, 3, 1))
    query, key, value = (relay.reshape(y, infer(y).shape[1:]) for y in (query, key, value))
    scores = relay.nn.softmax(relay.multiply(relay.nn.batch_matmul(query, key), relay.const(0.5)))
    return relay.nn.batch_matmul(scores, value)


def make_products(net):
    """Products of a batch with constants, without a transpose of them."""
    x = net.input("x", (2, 3, 8))
    products = [
        relay.nn.batch_matmul(x, net.const(2, 8, n), transpose_b=False, transpose_a=False) for n in (4, 5)
    ]
    return [relay.transpose(relay.tanh(product), (0, 2, 1)) for product in products]


def make_nhwc(net):
    x = net.input("x", (1, 7, 7, 8))
    branches = [net.conv2d(x, n, 1, layout="NHWC") for n in (6, 3)]
    branches = [relay.nn.relu(relay.add(y, net.const(n))) for y, n in zip(branches, (6, 3))]
    return [net.conv2d(y, 4, 3, layout="NHWC") for y in branches]


def make_slopes(net):
    x = net.input("x", (1, 8, 7, 7))
    branches = [relay.nn.prelu(net.conv2d(x, n, 1), net.const(n)) for n in (6, 3)]
    return [net.conv2d(y, 4, 3) for y in branches]


#: Graph -> its layers before, and combined.
CASES = {
    "inception": (make_inception, 6, 4),
    "parts": (make_parts, 2, 1),
    "some parts": (make_some_parts, 2, 1),
    "csp": (make_csp, 3, 2),
    "attention": (make_attention, 5, 3),
    "products": (make_products, 2, 1),
    "nhwc": (make_nhwc, 4, 3),
    "slopes": (make_slopes, 4, 3),
}


def make(case):
    net = Net()
    results = CASES[case][0](net)
    return net.module(*(results if isinstance(results, list) else [results]))


def count_layers(module):
    counted = count_operators(module)
    return sum(n for name, n in counted.items() if "conv2d" in name or "dense" in name or "matmul" in name)


def check(got, wanted):
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module", params=CASES)
def case(request):
    """A module, and the same with everything combined that may be."""
    module = make(request.param)
    return module, combine.combine_parallel(module), CASES[request.param]


def test_layers(case):
    module, combined, (_, before, after) = case
    assert (count_layers(module), count_layers(combined)) == (before, after)


def test_numbers_on_a_cpu(case):
    module, combined, _ = case
    inputs = feeds(module)
    check(run(plain_build(combined), inputs), run_unfused(module, inputs))


def test_twice_is_once(case):
    _, combined, _ = case
    again = combine.combine_parallel(combined)
    assert not record.last_report()["CombineParallel"].changed
    assert tvm.ir.structural_equal(again, combined)


@pytest.mark.cuda_codegen
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("attention", "some parts") else pytest.param(name, marks=pytest.mark.slow)
        for name in CASES
    ],
)
def test_numbers_and_launches_on_cuda(name):
    """With the cost model, and fewer launches than apart; all these cases pay."""
    module, on = make(name), target.resolve_target(CUDA)
    chosen = combine.combine_parallel(module, on)
    assert tvm.ir.structural_equal(chosen, combine.combine_parallel(module))
    apart, together = (kernels.build_kernels(transform.FuseChains(on)(form), on) for form in (module, chosen))
    assert sum(together.calls.values()) < sum(apart.calls.values())
    inputs = feeds(module)
    check(run_emulated(together, inputs)[0], run_unfused(module, inputs))


def test_parts_of_a_concatenation_need_no_slices():
    assert "strided_slice" not in count_operators(combine.combine_parallel(make("parts")))
    assert "concatenate" not in count_operators(combine.combine_parallel(make("parts")))
    assert "strided_slice" not in count_operators(combine.combine_parallel(make("some parts")))


def test_the_pass_of_tvm_finds_the_same():
    """TVM's own pass as a witness for the layers; it combines no activation here."""
    net = Net()
    x = net.input("x", (1, 8, 7, 7))
    branches = [relay.nn.relu(biased(net, x, n)) for n in (4, 4, 8)]
    module = net.module(*(net.conv2d(y, 4, 3) for y in branches))
    theirs = relay.transform.CombineParallelConv2D(min_num_branches=2)(module)
    ours = combine.combine_parallel(module)
    kinds = "nn.conv2d", "strided_slice"
    assert [count_operators(ours)[k] for k in kinds] == [count_operators(theirs)[k] for k in kinds]
    inputs = feeds(module)
    check(run_unfused(ours, inputs), run_unfused(relay.transform.InferType()(theirs), inputs))


def test_outputs_keep_their_order_and_dtype():
    net = Net(dtype="float16")
    x = net.input("x", (2, 8))
    one, two = net.dense(x, 3), net.dense(x, 5)
    module = net.module(two, one, two)
    combined = combine.combine_parallel(module)
    shapes = [tuple(map(int, field.shape)) for field in combined["main"].ret_type.fields]
    assert shapes == [(2, 5), (2, 3), (2, 5)]
    assert {str(field.dtype) for field in combined["main"].ret_type.fields} == {"float16"}
    assert count_operators(combined)["nn.dense"] == 1


def test_names_tell_where_it_came_from():
    net = Net()
    x = net.input("x", (2, 8))
    layers = []
    for name in ("query", "key"):
        call = net.dense(x, 4)
        span = relay.Span(relay.SourceName(name), 0, 0, 0, 0)
        layers.append(relay.Call(call.op, call.args, call.attrs, None, span))
    combined = combine.combine_parallel(net.module(*layers))
    spans = []

    def visit(expr):
        if isinstance(expr, relay.Call) and expr.op.name == "nn.dense":
            spans.append(str(expr.span.source_name.name))

    relay.analysis.post_order_visit(combined["main"], visit)
    assert spans == ["query + key"]


def test_the_record_has_what_was_done_and_what_was_not():
    net = Net()
    x = net.input("x", (1, 8, 7, 7))
    module = net.module(net.conv2d(x, 4), net.conv2d(x, 4))
    combine.combine_parallel(module, target.resolve_target(CUDA))
    done = record.last_report()["CombineParallel"]
    assert not done.changed
    (decision,) = done.decisions
    assert decision.reason.code is Code.FUSION_COSTS_TIME
    transform.CombineParallel()(module)
    done = record.last_report()["CombineParallel"]
    assert done.changed
    assert done.summary == "2 layers combined into 1"
    assert [len(siblings.layers) for siblings in done.details] == [2]


def test_a_cpu_of_ours_copies_and_combines_nothing():
    """Its schedules read no part on the way in."""
    module = make("csp")
    options = PlanOptions(accept=lambda graph, candidate: refuse_copies(candidate))
    combined = combine.combine_parallel(module, target.resolve_target(LLVM), options)
    assert count_layers(combined) == 3


def refuse_copies(candidate):
    return Reason(Code.FUSION_COSTS_TIME, "", "", "") if candidate.copied else None
