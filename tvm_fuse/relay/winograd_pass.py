"""3x3 convolutions that Winograd's algorithm computes faster get transformed weights, right before a build.

::

    fn (%p0, %p1, Primitive=1) {                     fn (%p0, %p1, Primitive=1) {
      add(nn.contrib_conv2d_NCHWc(%p0, %p1), ...)      add(tvm_fuse.conv2d_winograd(%p0, %p1), ...)
    }(%x, W)                                         }(%x, G W G^T)

Only for targets with the key ``tvm_fuse``, only where the weight is constant and no tuned schedule is used,
and after everything that reads the graph: plans, digests and names are those of the convolution.
``schedules/cpu_winograd.py`` decides.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvm_fuse.core.graph import Graph, Node, TensorInfo
from tvm_fuse.relay.base import relay, tvm
from tvm_fuse.relay.cpu_strategy import blocked_conv
from tvm_fuse.relay.cpu_target import TARGET_KEY, cpu_of
from tvm_fuse.relay.functions import rewrite_functions
from tvm_fuse.relay.kernel_functions import is_marked_function
from tvm_fuse.relay.read import ReadFunction, read_function
from tvm_fuse.relay.rewrite import Replacement, constant, rebuild_function
from tvm_fuse_schedules.cpu_conv2d import BlockedConv
from tvm_fuse_schedules.cpu_winograd import WinogradKernel, make_kernel, plan_winograd

__all__ = ["use_winograd"]

_DIRECT = "nn.contrib_conv2d_NCHWc"
_NAME = "tvm_fuse.conv2d_winograd"


def use_winograd(module: Any, target: Any) -> Any:
    """Transform the weights of the convolutions that become faster.

    Args:
        module: A Relay module in its final layout, chains grouped or not.
        target: The ``tvm.target.Target`` that it is built for.

    Returns:
        The type-inferred module; for targets without our key ``module`` itself.
    """
    if TARGET_KEY not in map(str, target.keys):
        return module
    register_winograd()
    weights = _Weights(target)

    def rewrite(read: ReadFunction) -> Any:
        found = {node.id: _replacement(read, node, weights) for node in read.graph.nodes}
        return rebuild_function(read, {node: new for node, new in found.items() if new is not None})

    return rewrite_functions(module, rewrite)[0]


class _Weights:
    """Weights that were transformed so far: what several layers share is transformed once."""

    def __init__(self, target: Any) -> None:
        self._cpu = cpu_of(target)
        self._made: dict[tuple[int, int], Any] = {}

    def find(self, expr: Any, graph: Graph, node: Node) -> Any | None:
        """The transformed weights of a convolution as a constant; None where the direct sum stays."""
        data, weight = (graph.nodes[source].output for source in node.inputs)
        if {data.dtype, weight.dtype, node.output.dtype} != {"float32"}:
            return None
        if not data.is_static or int(expr.attrs.groups) != 1:
            return None
        kernel = plan_winograd(blocked_conv(expr.attrs, _sizes(data), _sizes(weight)), self._cpu)
        if kernel is None:
            return None
        return lambda array: self._transform(kernel, array)

    def _transform(self, kernel: WinogradKernel, array: np.ndarray) -> Any:
        key = array.__array_interface__["data"][0], kernel.winograd.tile
        if key not in self._made:
            self._made[key] = constant(kernel.winograd.transform_weights(array), "float32")
        return self._made[key]


def _sizes(tensor: TensorInfo) -> tuple[int, ...]:
    return tuple(int(size) for size in tensor.shape)


def _replacement(read: ReadFunction, node: Node, weights: _Weights) -> Replacement | None:
    """How to make the new value of a convolution, or of a call of a group that is built around one."""
    if node.op == _DIRECT:
        return _replace_call(read, node, weights)
    expr = read.expressions[node.id]
    is_group = isinstance(expr, relay.Call) and isinstance(expr.op, relay.Function)
    if is_group and not is_marked_function(expr.op):
        return _replace_group(read, node, weights)
    return None


def _replace_call(read: ReadFunction, node: Node, weights: _Weights) -> Replacement | None:
    expr, known = read.expressions[node.id], read.graph.constant(node.inputs[1])
    transform = None if known is None else weights.find(expr, read.graph, node)
    if transform is None:
        return None
    return lambda new: _winograd(expr, new(node.inputs[0]), transform(known))


def _replace_group(read: ReadFunction, node: Node, weights: _Weights) -> Replacement | None:
    call = read.expressions[node.id]
    inside = read_function(call.op)
    for conv in (each for each in inside.graph.nodes if each.op == _DIRECT):
        place = _place_of(call.op, inside.expressions[conv.inputs[1]])
        if place is None:
            continue
        known = read.graph.constant(node.inputs[place])
        transform = None if known is None else weights.find(inside.expressions[conv.id], inside.graph, conv)
        if transform is not None:
            changed = _Changed(call, inside, conv, place)
            return lambda new: changed.call([new(source) for source in node.inputs], transform(known))
    return None


def _place_of(function: Any, expr: Any) -> int | None:
    """Which parameter of a function an expression is; None where it is another expression."""
    return next((i for i, param in enumerate(function.params) if param.same_as(expr)), None)


@dataclass(frozen=True)
class _Changed:
    """A call of a group, the convolution inside, and which argument its weight is."""

    expr: Any
    inside: ReadFunction
    conv: Node
    place: int

    def call(self, arguments: list[Any], weight: Any) -> Any:
        """The call with transformed weights."""
        function, conv = self.expr.op, self.inside.expressions[self.conv.id]
        params = list(function.params)
        old, shape = params[self.place], weight.data.shape
        param = params[self.place] = relay.Var(str(old.name_hint), relay.TensorType(shape, "float32"))
        winograd = {self.conv.id: lambda new: _winograd(conv, new(self.conv.inputs[0]), param)}
        body = rebuild_function(self.inside, winograd).body
        arguments[self.place] = weight
        made = relay.Function(params, body, attrs=function.attrs)
        return relay.Call(made, arguments, None, None, self.expr.span)


def _winograd(expr: Any, data: Any, weight: Any) -> Any:
    return relay.Call(tvm.ir.Op.get(_NAME), [data, weight], expr.attrs, None, expr.span)


# --- the operator ------------------------------------------------------------------------------------


@functools.cache
def register_winograd() -> None:
    """Register the operator once."""
    tvm.ir.register_op_attr(_NAME, "TOpPattern", relay.op.OpPattern.OUT_ELEMWISE_FUSABLE)
    operator = tvm.ir.Op.get(_NAME)
    operator.set_num_inputs(2)
    operator.add_argument("data", "Tensor", "Images in blocked layout.")
    operator.add_argument("weight", "Tensor", "Transformed weights.")
    operator.set_attrs_type_key("relay.attrs.Conv2DAttrs")
    operator.add_type_rel(_NAME, _infer)
    operator.set_attr("TOpIsStateful", False)
    generic = tvm.target.get_native_generic_func(f"{_NAME}_strategy")
    generic.register(_strategy, [TARGET_KEY])
    tvm.ir.register_op_attr(_NAME, "FTVMStrategy", generic)


def _direct(attrs: Any, data: Any, weight: Any) -> BlockedConv:
    """The convolution that has these transformed weights."""
    _, _, blocks, depth, *lanes = (int(size) for size in weight.shape)
    sizes = tuple(int(size) for size in data.shape)
    return blocked_conv(attrs, sizes, (blocks, depth, *map(int, attrs.kernel_size), *lanes))


def _infer(types: Any, attrs: Any) -> Any:
    data, weight = types[:2]
    return relay.TensorType(_direct(attrs, data, weight).result, data.dtype)


def _strategy(attrs: Any, inputs: Any, out_type: Any, target: Any) -> Any:
    tile = int(inputs[1].shape[0]) + 1 - int(attrs.kernel_size[0])
    kernel = make_kernel(_direct(attrs, *inputs), tile, cpu_of(target))
    strategy = relay.op.OpStrategy()
    strategy.add_implementation(
        lambda attrs, inputs, out_type: [kernel.compute(*inputs)],
        lambda attrs, outs, target: kernel.schedule(outs[0]),
        name=_NAME,
    )
    return strategy
