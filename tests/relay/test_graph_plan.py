"""The graph of a CUDA build as launches: operands, workspaces, storages, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.support.lazy import Lazy
from tests.support.relay_graphs import Net, relay, tvm
from tvm_fuse.core.errors import InternalError, ModelError
from tvm_fuse.cuda.bundle import Operand, Workspace

graph_plan = Lazy("tvm_fuse.relay.graph_plan")
kernels = Lazy("tvm_fuse.relay.kernels")
save = Lazy("tvm_fuse.relay.save")
target = Lazy("tvm_fuse.relay.target")
transform = Lazy("tvm_fuse.transform")

pytestmark = [pytest.mark.relay, pytest.mark.cuda_codegen]

#: The schedules of TVM itself, so that what kernels there are does not depend on ours.
CUDA = "cuda -keys=cuda,gpu -arch=sm_80"


def build(*results, net):
    fused = transform.FuseChains(CUDA)(transform.FoldBatchNorm()(net.module(*results)))
    lifted, _ = save.lift_constants(fused, prefix="w", keep_scalars=True)
    return kernels.build_kernels(lifted, target.resolve_target(CUDA))


def plan(*results, net):
    return graph_plan.read_graph_plan(build(*results, net=net))


def by_name(made, built):
    """For each call its operands under the names that the kernel's parameters have."""
    launches = {launch.symbol: launch for launch in built.launches}
    calls = [call for operator in made.operators for call in operator.calls]
    return [
        {p.name: operand for p, operand in zip(launches[call.symbol].parameters, call.operands)}
        for call in calls
    ]


def test_operands_follow_the_parameters():
    net = Net()
    x, y = net.input("x", (1, 8)), net.input("y", (1, 8))
    built = build(relay.subtract(x, y), net=net)
    made = graph_plan.read_graph_plan(built)
    (call,) = by_name(made, built)
    assert call["p0"] == Operand("tensor", made.arguments["x"])
    assert call["p1"] == Operand("tensor", made.arguments["y"])
    assert call["T_subtract"] == Operand("tensor", made.outputs[0])
    assert [made.tensors[index].shape for index in made.outputs] == [(1, 8)]


def test_one_operator_called_twice_has_its_own_operands():
    net = Net()
    x = net.input("x", (1, 4, 8, 8))
    y = relay.nn.max_pool2d(x, (3, 3), padding=(1, 1))
    z = relay.nn.max_pool2d(y, (3, 3), padding=(1, 1))
    made = plan(z, net=net)
    first, second = made.operators
    assert first.name == second.name
    assert first.calls[0].symbol == second.calls[0].symbol
    assert set(first.calls[0].operands) & set(second.calls[0].operands)  # y
    assert first.calls[0].operands != second.calls[0].operands


def test_storages_hold_the_largest_of_their_tensors():
    net = Net()
    x = net.input("x", (1, 64))
    for size in (64, 16, 64, 16):
        x = net.dense(x, size)
    made = plan(x, net=net)
    for index, size_bytes in enumerate(made.storages):
        assert size_bytes == max(t.size_bytes for t in made.tensors if t.storage == index)
    assert len(made.storages) < len(made.tensors)
    fixed = {made.tensors[index].storage for index in made.arguments.values()}
    assert not fixed & {made.tensors[index].storage for index in made.outputs}


def test_a_reshape_launches_nothing():
    net = Net()
    x = relay.nn.batch_flatten(relay.nn.max_pool2d(net.input("x", (1, 4, 8, 8)), (2, 2), strides=(2, 2)))
    made = plan(x, net=net)
    assert [len(operator.calls) for operator in made.operators] == [1]
    assert made.tensors[made.outputs[0]].shape == (1, 64)


def test_an_output_twice_and_an_input_as_output():
    net = Net()
    x = net.input("x", (1, 8))
    y = relay.exp(x)
    made = plan(y, y, net=net)
    assert made.outputs[0] == made.outputs[1]


def test_workspaces_are_numbered_and_aligned():
    net = Net()
    x = net.input("x", (2, 8, 16, 16))
    y = relay.nn.global_avg_pool2d(x)
    z = relay.sum(relay.nn.relu(relay.nn.batch_flatten(y)), axis=1)
    made = plan(z, net=net)
    assert Workspace(0, 2 * 8 * 4) in made.workspaces
    assert all(space.offset_bytes % 256 == 0 for space in made.workspaces)
    used = [op for operator in made.operators for call in operator.calls for op in call.operands]
    assert {op.value for op in used if op.kind == "workspace"} == set(range(len(made.workspaces)))


def test_what_the_host_computes_is_refused():
    net = Net()
    built = build(relay.sort(net.input("x", (1, 5000))), net=net)
    with pytest.raises(ModelError, match=r"operator .*sort.* (host|launch)") as caught:
        graph_plan.read_graph_plan(built)
    assert "TVM's own runtime" in caught.value.hint


def test_dtypes_that_numpy_lacks_are_refused():
    net = Net(dtype="bfloat16")
    net.dtype = "bfloat16"
    x = net.input("x", (1, 8))
    built = build(relay.cast(relay.cast(x, "float32"), "float16"), net=net)
    with pytest.raises(ModelError, match="dtype bfloat16 cannot be in a bundle"):
        graph_plan.read_graph_plan(built)


def test_a_function_of_another_device_is_refused():
    net = Net()
    built = build(relay.exp(net.input("x", (1, 8))), net=net)
    with pytest.raises(ModelError, match="is not computed by CUDA kernels"):
        graph_plan.read_graph_plan(replace(built, modules=()))


# --- host functions by hand --------------------------------------------------------------------------


def read_host(body, parameters=("a",), known=("kernel",)):
    """A host function over float32[8] buffers; ``body`` gets their data variables and makes the body."""
    buffers = [tvm.tir.decl_buffer((8,), "float32", name=name) for name in parameters]
    handles = [tvm.tir.Var(f"{name}_handle", "handle") for name in parameters]
    function = tvm.tir.PrimFunc(
        handles, body(*[b.data for b in buffers]), buffer_map=dict(zip(handles, buffers))
    )
    return graph_plan._read_host("op", function, set(known))


def launch(*arguments, symbol="kernel"):
    return tvm.tir.Evaluate(tvm.tir.Call("int32", tvm.ir.GlobalVar(symbol), list(arguments)))


def test_numbers_are_immediates():
    host = read_host(
        lambda a: launch(
            a, tvm.tir.const(3, "int64"), tvm.tir.const(1, "int32") + 1, tvm.tir.const(0.5, "float32")
        )
    )
    operands = host.calls[0].operands
    assert [operand.value for operand in operands] == [0, 3, 2, 0.5]
    assert [operand.kind for operand in operands] == ["tensor", "immediate", "immediate", "immediate"]


def test_workspaces_of_one_function_do_not_overlap():
    def body(a):
        first, second = (
            tvm.tir.Var(n, tvm.ir.PointerType(tvm.ir.PrimType(d), "global"))
            for n, d in (("w0", "float32"), ("w1", "int8"))
        )
        inner = tvm.tir.SeqStmt([launch(first, a), launch(a, second, first)])
        true = tvm.tir.const(True, "bool")
        return tvm.tir.Allocate(
            first, "float32", [70], true, tvm.tir.Allocate(second, "int8", [5], true, inner)
        )

    host = read_host(body)
    assert host.workspaces == (Workspace(0, 280), Workspace(512, 5))
    assert [op.value for op in host.calls[1].operands if op.kind == "workspace"] == [1, 0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda a: launch(a, symbol="other"), "the launch of other is computed on the host"),
        (lambda a: launch(tvm.tir.Var("n", "int32")), "a kernel's argument is computed on the host: n"),
        (lambda a: launch(tvm.tir.const(np.inf, "float32")), "a kernel's argument is computed on the host"),
        (
            lambda a: tvm.tir.IfThenElse(tvm.tir.Var("n", "int32") > 0, launch(a), None),
            r"does more than launch kernels \(IfThenElse\)",
        ),
        (
            lambda a: tvm.tir.For(tvm.tir.Var("i", "int32"), 0, 3, 0, launch(a)),
            r"does more than launch kernels \(For\)",
        ),
    ],
)
def test_host_code_that_is_refused(body, message):
    with pytest.raises(ModelError, match=f"operator op: .*{message}"):
        read_host(body)


def test_a_reshape_that_moves_data_is_no_reshape():
    net = Net()
    built = build(relay.nn.batch_flatten(relay.nn.max_pool2d(net.input("x", (1, 4, 4, 4)), (2, 2))), net=net)
    document = json.loads(built.artifact.library.get_graph_json())
    document["attrs"]["storage_id"][1][-1] += 1

    class Changed:
        def get_graph_json(self):
            return json.dumps(document)

    with pytest.raises(InternalError, match="moves data"):
        graph_plan.read_graph_plan(replace(built, artifact=replace(built.artifact, library=Changed())))
