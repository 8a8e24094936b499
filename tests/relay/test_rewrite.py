"""Rebuilding: only what lies above a change is new."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.lazy import Lazy
from tests.support.relay_graphs import Net, relay, texts, tvm
from tvm_fuse.core.graph import Kind

reader = Lazy("tvm_fuse.relay.read")
rewrite = Lazy("tvm_fuse.relay.rewrite")
functions = Lazy("tvm_fuse.relay.functions")

pytestmark = pytest.mark.relay


@pytest.fixture
def net():
    return Net()


def replace(read, op, make):
    """Replace every node of an operator by ``make(operands)``."""
    nodes = [node for node in read.graph.nodes if node.op == op]
    table = {node.id: lambda new, node=node: make([new(source) for source in node.inputs]) for node in nodes}
    return rewrite.rebuild_function(read, table)


def read(net, *results):
    return reader.read_function(net.module(*results)["main"])


def test_nothing_to_replace_is_the_same_object(net):
    got = read(net, relay.nn.relu(net.input("x", (1, 2))))
    assert rewrite.rebuild_function(got, {}).same_as(got.function)


def test_only_what_lies_above_is_new(net):
    x = net.input("x", (1, 2))
    below = relay.exp(x)
    got = read(net, relay.tanh(relay.nn.relu(below)), relay.sqrt(below))
    new = replace(got, "nn.relu", lambda operands: relay.sigmoid(operands[0]))
    old = got.function.body
    assert new.body.fields[1].same_as(old.fields[1])
    assert new.body.fields[0].args[0].args[0].same_as(old.fields[0].args[0].args[0])
    assert str(new.body.fields[0].args[0].op.name) == "sigmoid"


def test_replacement_may_drop_a_node(net):
    x = net.input("x", (1, 2))
    got = read(net, relay.tanh(relay.copy(relay.exp(x))))
    new = replace(got, "copy", lambda operands: operands[0])
    assert "copy" not in texts(tvm.IRModule.from_expr(new))


def test_attributes_spans_and_parameters_stay(net):
    x = net.input("x", (1, 4, 4, 4))
    conv = net.conv2d(relay.exp(x), 4, strides=(2, 2))
    span = relay.Span(relay.SourceName("conv"), 0, 0, 0, 0)
    got = read(net, relay.Call(conv.op, conv.args, conv.attrs, None, span))
    got = reader.ReadFunction(got.function.with_attr("mine", 1), got.graph, got.expressions)
    new = replace(got, "exp", lambda operands: relay.tanh(operands[0]))
    assert [int(value) for value in new.body.attrs.strides] == [2, 2]
    assert str(new.body.span.source_name.name) == "conv"
    assert new.attrs["mine"] == 1
    assert new.params[0].same_as(got.function.params[0])


@pytest.mark.parametrize("count", [1, 2])
def test_tuples_stay_tuples(net, count):
    y = relay.exp(net.input("x", (1, 2)))
    module = tvm.IRModule.from_expr(relay.Function(net.inputs, relay.Tuple([y] * count)))
    got = reader.read_function(relay.transform.InferType()(module)["main"])
    new = replace(got, "exp", lambda operands: relay.tanh(operands[0]))
    assert len(new.body.fields) == count
    assert new.body.fields[0].same_as(new.body.fields[-1])


def test_control_flow_is_rebuilt(net):
    x, condition = net.input("x", (1, 2)), net.input("c", (), "bool")
    variable = relay.var("v")
    got = read(net,
               relay.If(condition, relay.Let(variable, relay.exp(x), relay.tanh(variable)), x))  # fmt: skip
    new = replace(got, "exp", lambda operands: relay.sqrt(operands[0]))
    assert str(new.body.true_branch.value.op.name) == "sqrt"
    assert new.body.false_branch.same_as(got.function.body.false_branch)


def test_calls_of_closures_are_rebuilt(net):
    """A called value is the first operand."""
    x = net.input("x", (1, 2))
    function = relay.var(
        "f", type_annotation=relay.FuncType([relay.TensorType((1, 2))], relay.TensorType((1, 2)))
    )
    call = relay.Call(function, [relay.exp(x)])
    assert [type(child).__name__ for child in reader.children(call)] == ["Var", "Call"]
    new = rewrite.rebuild_expression(call, [function, x])
    assert new.op.same_as(function)
    assert new.args[0].same_as(x)


def test_deep_graph_needs_no_recursion(net):
    y = relay.exp(net.input("x", (1, 2)))
    for _ in range(5000):
        y = relay.nn.relu(y)
    got = read(net, y)
    new = replace(got, "exp", lambda operands: relay.tanh(operands[0]))
    module = relay.transform.InferType()(tvm.IRModule.from_expr(new))
    assert len(reader.read_function(module["main"]).graph.nodes) == 5002


# --- all functions of a module -------------------------------------------------------------------


def two_functions():
    module = tvm.IRModule()
    for name in ("main", "helper"):
        x = relay.var("x", shape=(1, 2))
        module[name] = relay.Function([x], relay.exp(x))
    return relay.transform.InferType()(module)


def to_tanh(read):
    return replace(read, "exp", lambda operands: relay.tanh(operands[0]))


def test_every_function_is_rewritten():
    module, changed = functions.rewrite_functions(two_functions(), to_tanh)
    assert changed
    assert {str(module[name].body.op.name) for name in ("main", "helper")} == {"tanh"}


def test_functions_that_call_each_other():
    """A called function needs its return type to be known before its caller is looked at."""
    module = two_functions()
    x = relay.var("x", shape=(1, 2))
    call = relay.Call(module.get_global_var("helper"), [relay.exp(x)])
    module["main"] = relay.Function([x], relay.exp(call))
    new, changed = functions.rewrite_functions(module, to_tanh)
    assert changed
    assert str(new["main"].body.op.name) == str(new["helper"].body.op.name) == "tanh"
    assert str(new["main"].body.args[0].args[0].op.name) == "tanh"


def test_module_of_the_caller_is_not_changed():
    module = two_functions()
    functions.rewrite_functions(module, to_tanh)
    assert str(module["main"].body.op.name) == "exp"


def test_no_change_is_reported():
    module = two_functions()
    new, changed = functions.rewrite_functions(module, lambda read: read.function)
    assert not changed
    assert tvm.ir.structural_equal(new, module)


@pytest.mark.parametrize("attr", ["Primitive", "Compiler", "Composite"])
def test_functions_of_others_stay(attr):
    module = two_functions()
    value = tvm.tir.IntImm("int32", 1) if attr == "Primitive" else "other"
    module["helper"] = module["helper"].with_attr(attr, value)
    new, _ = functions.rewrite_functions(module, to_tanh)
    assert str(new["helper"].body.op.name) == "exp"
    assert str(new["main"].body.op.name) == "tanh"


def test_attributes_of_module_and_function_stay():
    module = two_functions().with_attr("mine", tvm.runtime.String("yes"))
    module["main"] = module["main"].with_attr("note", "kept")
    new, _ = functions.rewrite_functions(module, to_tanh)
    assert str(new.attrs["mine"]) == "yes"
    assert str(new["main"].attrs["note"]) == "kept"


def test_tensor_ir_functions_stay():
    module = two_functions()
    module["kernel"] = tvm.tir.PrimFunc([], tvm.tir.Evaluate(0))
    new, changed = functions.rewrite_functions(module, to_tanh)
    assert changed
    assert isinstance(new["kernel"], tvm.tir.PrimFunc)


def test_constants_of_any_kind_are_read():
    module = tvm.IRModule.from_expr(relay.const(np.float16(1.5), "float16"))
    seen = []
    functions.rewrite_functions(module, lambda read: seen.append(read.graph) or read.function)
    assert [node.kind for node in seen[0].nodes] == [Kind.CONSTANT]
