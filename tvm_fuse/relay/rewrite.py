"""Rebuild a Relay function with some of its values replaced.

One walk over the nodes in topological order, without recursion: what did not change keeps its
identity (and its checked type), what lies above a change is rebuilt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Callable

import numpy as np

from tvm_fuse.core.errors import InternalError
from tvm_fuse.core.graph import Node
from tvm_fuse.relay.base import relay, tvm
from tvm_fuse.relay.read import ReadFunction, children

__all__ = ["Replacement", "constant", "rebuild_expression", "rebuild_function", "renamed"]

#: Given the new expression of any earlier node (by id), make the new expression of this one.
Replacement = Callable[[Callable[[int], Any]], Any]


def rebuild_function(
    read: ReadFunction, replacements: Mapping[int, Replacement], order: Iterable[int] | None = None
) -> Any:
    """Apply replacements to a function.

    Args:
        read: The function as it was read.
        replacements: Node id -> how to make its new value.
        order: Ids of the nodes to make, each after what its new value needs; None takes all, as they are.

    Returns:
        A new ``relay.Function`` with the same parameters and attributes, or the same object
        when there is nothing to replace. Types are not inferred.
    """
    if not replacements:
        return read.function
    rebuilt: dict[int, Any] = {}
    nodes = read.graph.nodes
    for node in nodes if order is None else map(nodes.__getitem__, order):
        old = read.expressions[node.id]
        if node.id in replacements:
            rebuilt[node.id] = replacements[node.id](rebuilt.__getitem__)
        elif all(rebuilt[source] is read.expressions[source] for source in node.inputs):
            rebuilt[node.id] = old
        else:
            rebuilt[node.id] = rebuild_expression(old, [rebuilt[source] for source in node.inputs])
    function = read.function
    body = function.body
    if isinstance(body, relay.Tuple):
        new_body = relay.Tuple([rebuilt[source] for source in read.graph.outputs])
    else:
        new_body = rebuilt[read.graph.outputs[0]]
    return relay.Function(
        function.params, new_body, function.ret_type, function.type_params, function.attrs, function.span
    )


def rebuild_expression(expr: Any, operands: list[Any]) -> Any:
    """The same operation on other operands (``children`` order); ``expr`` itself when they are the same."""
    old = children(expr)
    if all(new.same_as(was) for new, was in zip(operands, old)):
        return expr
    if isinstance(expr, relay.Call):
        callee, arguments = (expr.op, operands) if len(old) == len(expr.args) else (operands[0], operands[1:])
        return relay.Call(callee, arguments, expr.attrs, None, expr.span)
    if isinstance(expr, relay.Tuple):
        return relay.Tuple(operands, expr.span)
    if isinstance(expr, relay.TupleGetItem):
        return relay.TupleGetItem(operands[0], expr.index, expr.span)
    if isinstance(expr, relay.If):
        return relay.If(*operands, expr.span)
    if isinstance(expr, relay.Let):
        return relay.Let(expr.var, *operands, expr.span)
    raise InternalError(f"cannot rebuild {type(expr).__name__}")


def constant(array: np.ndarray, dtype: str) -> Any:
    """A Relay constant; bfloat16 is given as its bits, in ``uint16``."""
    if dtype != "bfloat16":
        return relay.const(array, dtype)
    return relay.Constant(tvm.nd.empty(array.shape, dtype).copyfrom(array))


def renamed(read: ReadFunction, node: Node, name: str) -> Replacement:
    """A replacement of a call by itself, with a span that says where it came from."""
    expr = read.expressions[node.id]

    def construct(new: Callable[[int], Any]) -> Any:
        span = relay.Span(relay.SourceName(name), 0, 0, 0, 0)
        return relay.Call(expr.op, [new(source) for source in node.inputs], expr.attrs, None, span)

    return construct
