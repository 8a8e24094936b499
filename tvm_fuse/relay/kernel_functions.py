"""The kernels of a planned module, each once: what is built, after folding, layouts and grouping.

A kernel that is tuned, or has a record, is *marked*: the parameters of its function are called ``tuned0``,
``tuned1``, ... These names reach the strategies, which see single operators and nothing else of a kernel.
A marked kernel gets TVM's plain computation, the best start for a search; one without a mark the computation
that our schedule of it reads.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Callable

from tvm_fuse.core.graph import Graph, Kind
from tvm_fuse.core.tuning.digest import chain_digest, describe_chain
from tvm_fuse.relay.base import relay, tvm
from tvm_fuse.relay.functions import rewrite_functions
from tvm_fuse.relay.read import COMPOSITE_PREFIX, ReadFunction, read_function
from tvm_fuse.relay.rewrite import Replacement, rebuild_function

__all__ = [
    "KernelFunction",
    "find_kernels",
    "is_marked",
    "is_marked_function",
    "mark_function",
    "mark_kernels",
]

_MARK = "tuned"
_MARKED = re.compile(rf"{_MARK}\d+")


@dataclass(frozen=True)
class KernelFunction:
    """A primitive function of a module.

    Args:
        digest: Of its chain.
        name: For people.
        chain: The lines that the digest was made of.
        weight: How often ``main`` calls it.
        function: The ``relay.Function``.
        graph: Its graph.
    """

    digest: str
    name: str
    chain: tuple[str, ...]
    weight: int
    function: Any = field(compare=False, repr=False)
    graph: Graph = field(compare=False, repr=False)


def find_kernels(module: Any, target: Any) -> tuple[KernelFunction, ...]:
    """The primitive functions of a module, each once.

    Args:
        module: What ``FuseChains`` returned.
        target: Its target.

    Returns:
        One for each chain, in the order of their first calls.
    """
    found: dict[str, KernelFunction] = {}
    for call in _calls(_fuse_rest(module, target)["main"]):
        kernel = _read_kernel(call.op)
        before = found.get(kernel.digest)
        weight = 1 if before is None else before.weight + 1
        found[kernel.digest] = KernelFunction(
            kernel.digest, kernel.name, kernel.chain, weight, kernel.function, kernel.graph
        )
    return tuple(found.values())


def mark_kernels(module: Any, target: Any, digests: Collection[str]) -> Any:
    """Mark the kernels of some chains.

    Args:
        module: What ``FuseChains`` returned.
        target: Its target.
        digests: Of the chains.

    Returns:
        The type-inferred module, with what TVM's FuseOps makes of the rest.
    """

    def rewrite(read: ReadFunction) -> Any:
        calls = [node for node in read.graph.nodes if _is_call_of_kernel(read.expressions[node.id])]
        chosen = [node for node in calls if _read_kernel(read.expressions[node.id].op).digest in digests]
        return rebuild_function(read, {node.id: _marked(read, node.id, node.inputs) for node in chosen})

    return rewrite_functions(_fuse_rest(module, target), rewrite)[0]


def _marked(read: ReadFunction, node: int, inputs: tuple[int, ...]) -> Replacement:
    expr = read.expressions[node]

    def construct(new: Callable[[int], Any]) -> Any:
        arguments = [new(source) for source in inputs]
        return relay.Call(mark_function(expr.op), arguments, None, None, expr.span)

    return construct


def mark_function(function: Any) -> Any:
    """A primitive function with the names of a marked kernel."""
    names = (f"{_MARK}{index}" for index in range(len(function.params)))
    params = [relay.Var(name, old.checked_type) for name, old in zip(names, function.params)]
    body = relay.bind(function.body, dict(zip(function.params, params)))
    marked = relay.Function(params, body, function.ret_type, function.type_params, function.attrs)
    return relay.transform.InferType()(tvm.IRModule.from_expr(marked))["main"]


def is_marked_function(function: Any) -> bool:
    """Whether a primitive function was marked."""
    return any(_MARKED.fullmatch(str(param.name_hint)) for param in function.params)


def is_marked(tensors: Any) -> bool:
    """Whether tensors are computed in a marked kernel: whether one of its operands is among their sources."""
    pending, seen = list(tensors), set()
    while pending:
        tensor = pending.pop()
        if tensor.op.handle.value in seen:
            continue
        seen.add(tensor.op.handle.value)
        if isinstance(tensor.op, tvm.te.PlaceholderOp) and _MARKED.fullmatch(str(tensor.op.name)):
            return True
        pending.extend(tensor.op.input_tensors)
    return False


def _fuse_rest(module: Any, target: Any) -> Any:
    with target, tvm.transform.PassContext(opt_level=3):
        infer = relay.transform.InferType()
        return infer(relay.transform.FuseOps()(infer(module)))


def _calls(main: Any) -> list[Any]:
    found: list[Any] = []
    relay.analysis.post_order_visit(main, found.append)
    return [expr for expr in found if _is_call_of_kernel(expr)]


def _is_call_of_kernel(expr: Any) -> bool:
    is_call = isinstance(expr, relay.Call) and isinstance(expr.op, relay.Function)
    return is_call and expr.op.attrs is not None and "Primitive" in expr.op.attrs


def _read_kernel(function: Any) -> KernelFunction:
    read = read_function(function)
    attributes = {
        node.id: _write_attributes(read.expressions[node.id].attrs)
        for node in read.graph.nodes
        if node.attrs is None and isinstance(read.expressions[node.id], relay.Call)
    }
    chain = describe_chain(read.graph, attributes)
    name = str(function.attrs["Composite"]) if "Composite" in function.attrs else ""
    if not name.startswith(COMPOSITE_PREFIX):
        operators = (node.op for node in read.graph.nodes if node.kind not in (Kind.INPUT, Kind.CONSTANT))
        name = "_".join(operator.rpartition(".")[2] for operator in operators)
    else:
        name = name[len(COMPOSITE_PREFIX) :]
    return KernelFunction(chain_digest(chain), name, chain, 1, function, read.graph)


def _write_attributes(attributes: Any) -> str:
    """Attributes as text, the same in every process."""
    if attributes is None or not hasattr(attributes, "keys"):
        return ""
    return ", ".join(f"{key}={attributes[key]}" for key in sorted(map(str, attributes.keys())))
