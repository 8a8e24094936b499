"""Relay function -> IR-neutral Graph.

Node ids follow the order in which a post-order walk first leaves an expression, so inputs have
smaller ids. Calls of function literals (fused groups, BYOC regions) are single opaque nodes:
what is inside is somebody's decision already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm_fuse.core.graph import Graph, Kind, Node
from tvm_fuse.relay.base import relay, tvm
from tvm_fuse.relay.objects import handle_of, items_of, kept, tensors_of
from tvm_fuse.relay.operators import classify_operator
from tvm_fuse.relay.view import view_array

__all__ = ["COMPOSITE_PREFIX", "ReadFunction", "children", "composite_name", "read_function", "source_name"]

#: ``Composite`` attribute of the groups that this project makes.
COMPOSITE_PREFIX = "tvm_fuse."


@dataclass(frozen=True)
class ReadFunction:
    """A Relay function and its graph; ``expressions[i]`` is the expression of node ``i``."""

    function: Any
    graph: Graph
    expressions: tuple[Any, ...]


def read_function(function: Any) -> ReadFunction:
    """Read a type-inferred Relay function.

    Args:
        function: A ``relay.Function`` whose expressions have checked types.

    Returns:
        Its graph; outputs are the fields of the returned tuple, or the one returned value. Constants
        are views of TVM's memory.
    """
    body = function.body
    walked = _post_order(body)
    seen = {handle_of(expr) for expr, _ in walked}
    walked = [(param, []) for param in function.params if handle_of(param) not in seen] + walked
    index = {handle_of(expr): position for position, (expr, _) in enumerate(walked)}
    nodes = []
    constants = {}
    batch_norms = 0
    for position, (expr, operands) in enumerate(walked):
        kind, op, attrs = _classify(expr, operands)
        name = source_name(expr)
        if kind is Kind.BATCH_NORM:
            name = name or f"batch_norm_{batch_norms}"
            batch_norms += 1
        if kind is Kind.CONSTANT:
            constants[position] = view_array(expr.data)
        inputs = tuple(index[handle_of(operand)] for operand in operands)
        nodes.append(Node(position, kind, op, inputs, tensors_of(expr.checked_type), attrs, name))
    returned = body.fields if isinstance(body, relay.Tuple) else [body]
    outputs = tuple(index[handle_of(expr)] for expr in returned)
    graph = Graph(tuple(nodes), outputs, constants)
    return ReadFunction(function, graph, tuple(expr for expr, _ in walked))


def children(expr: Any) -> list[Any]:
    """The expressions whose values ``expr`` uses, in order."""
    if isinstance(expr, relay.Call):
        callee, operands = expr.op, list(items_of(expr.args))
        return operands if _is_known_callee(callee) else [callee, *operands]
    if isinstance(expr, relay.Tuple):
        return list(items_of(expr.fields))
    if isinstance(expr, relay.TupleGetItem):
        return [expr.tuple_value]
    if isinstance(expr, relay.If):
        return [expr.cond, expr.true_branch, expr.false_branch]
    if isinstance(expr, relay.Let):
        return [expr.value, expr.body]
    return []


def _is_known_callee(callee: Any) -> bool:
    return isinstance(callee, (tvm.ir.Op, relay.Function, relay.GlobalVar))


def _post_order(body: Any) -> list[tuple[Any, list[Any]]]:
    """All expressions below ``body`` with their children, inputs first; a stack, so depth does not matter."""
    order: list[tuple[Any, list[Any]]] = []
    done: set[int] = set()
    stack: list[tuple[Any, list[Any] | None]] = [(body, None)]
    while stack:
        expr, below = stack.pop()
        if handle_of(expr) in done:
            continue
        if below is not None:
            done.add(handle_of(expr))
            order.append((expr, below))
            continue
        below = children(expr)
        stack.append((expr, below))
        stack.extend((child, None) for child in reversed(below) if handle_of(child) not in done)
    return order


# --- reading through TVM's foreign-function interface ---------------------------------------------
# Every attribute is a call into TVM, some microseconds each, and a model is read a dozen times in one
# job. What belongs to an object that does not change is kept, with the object.


def composite_name(expr: Any) -> str:
    """The ``Composite`` name of a called function literal, else an empty string."""
    if isinstance(expr, relay.Call) and isinstance(expr.op, relay.Function) and expr.op.attrs:
        return str(expr.op.attrs["Composite"]) if "Composite" in expr.op.attrs else ""
    return ""


def source_name(expr: Any) -> str:
    """Where an expression came from: the name in its span, or its own name hint."""
    if isinstance(expr, relay.Var):
        return str(expr.name_hint)
    span = getattr(expr, "span", None)
    return "" if span is None else _span_name(span)


@kept
def _span_name(span: Any) -> str:
    while isinstance(span, relay.SequentialSpan):
        if not len(span.spans):
            return ""
        span = span.spans[0]
    # The text parser puts a line and column of its own there, under one name for all operators.
    return "" if span.line else str(span.source_name.name)


def _classify(expr: Any, operands: list[Any]) -> tuple[Kind, str, Any]:
    """Kind, operator name and attributes of an expression."""
    if isinstance(expr, relay.Var):
        return Kind.INPUT, "input", None
    if isinstance(expr, relay.Constant):
        return Kind.CONSTANT, "constant", None
    if isinstance(expr, relay.Tuple):
        return Kind.TUPLE, "tuple", None
    if isinstance(expr, relay.TupleGetItem):
        return Kind.GET_ITEM, "get_item", int(expr.index)
    if isinstance(expr, relay.Call) and isinstance(expr.op, tvm.ir.Op):
        return classify_operator(expr, operands)
    return Kind.OTHER, composite_name(expr) or type(expr).__name__.lower(), None
