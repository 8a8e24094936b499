"""The graph of a CUDA build, resolved to kernel launches on tensors, workspaces and numbers.

TVM's graph executor calls one host function an operator, which launches kernels::

    def fused_global_avg_pool(p0: Buffer, out: Buffer):
        sum = allocate([8], "float32", "global")       a workspace
        fused_global_avg_pool_kernel(sum, p0.data)
        fused_global_avg_pool_kernel_1(out.data, sum)

Nothing is guessed: host code that does more than that is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tvm_fuse.core.errors import InternalError, ModelError
from tvm_fuse.cuda.bundle import DTYPES, Call, Operand, Operator, Tensor, Workspace
from tvm_fuse.relay.base import tvm
from tvm_fuse.relay.kernels import KernelBuild

__all__ = ["GraphPlan", "read_graph_plan"]

#: As cudaMalloc aligns; kernels may read vectors from the start of any tensor.
_ALIGNMENT_BYTES = 256

_HOST_HINT = "such operators run with TVM's own runtime only"


@dataclass(frozen=True)
class GraphPlan:
    """The graph of a build.

    Args:
        operators: In the order of execution.
        tensors: All values, and the storage each lies in.
        storages: Bytes of each storage.
        workspaces: Scratch memory of the operators.
        arguments: Name of each input or parameter -> its tensor.
        outputs: Tensors of the outputs, in order.
    """

    operators: tuple[Operator, ...]
    tensors: tuple[Tensor, ...]
    storages: tuple[int, ...]
    workspaces: tuple[Workspace, ...]
    arguments: Mapping[str, int]
    outputs: tuple[int, ...]


def read_graph_plan(build: KernelBuild) -> GraphPlan:
    """Read the graph of a build.

    Args:
        build: A model built for CUDA.

    Returns:
        The plan.

    Raises:
        ModelError: An operator needs more of the host than launches.
        InternalError: The graph is none that we know.
    """
    graph = json.loads(build.artifact.library.get_graph_json())
    tensors = _read_tensors(graph)
    rows, nodes = graph["node_row_ptr"], graph["nodes"]
    hosts = _HostFunctions(build)
    workspaces: dict[Workspace, int] = {}
    operators = []
    fixed = {tensors[rows[index]].storage for index in graph["arg_nodes"]}
    for index, node in enumerate(nodes):
        if node["op"] != "tvm_op":
            continue
        inputs = [rows[source] + entry for source, entry, _ in node["inputs"]]
        results = list(range(rows[index], rows[index + 1]))
        function = node["attrs"]["func_name"]
        if function == "__nop":
            _require(tensors[inputs[0]].storage == tensors[results[0]].storage, f"{node['name']} moves data")
            continue
        for result in results:
            _require(tensors[result].storage not in fixed, f"{node['name']} overwrites an input")
        host = hosts.read(function)
        _require(host.parameters == len(inputs) + len(results), f"{function} takes other tensors")
        numbers = [workspaces.setdefault(space, len(workspaces)) for space in host.workspaces]
        places = {"tensor": [*inputs, *results], "workspace": numbers}
        operators.append(Operator(function, tuple(_resolve(call, places) for call in host.calls)))
    return GraphPlan(
        tuple(operators),
        tensors,
        _storage_sizes(tensors),
        tuple(workspaces),
        {nodes[index]["name"]: rows[index] for index in graph["arg_nodes"]},
        tuple(rows[node] + entry for node, entry, *_ in graph["heads"]),
    )


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise InternalError(f"TVM's graph is not as expected: {problem}")


def _read_tensors(graph: Mapping[str, Any]) -> tuple[Tensor, ...]:
    attrs = {name: values[1] for name, values in graph["attrs"].items()}
    dtypes = ("bool" if dtype == "uint1" else dtype for dtype in attrs["dltype"])
    columns = attrs["shape"], dtypes, attrs["storage_id"]
    tensors = tuple(Tensor(tuple(shape), dtype, storage) for shape, dtype, storage in zip(*columns))
    for tensor in tensors:
        if tensor.dtype not in DTYPES:
            raise ModelError(
                f"a tensor of dtype {tensor.dtype} cannot be in a bundle; wanted one of {sorted(DTYPES)}"
            )
    return tensors


def _storage_sizes(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    sizes: dict[int, int] = {}
    for tensor in tensors:
        sizes[tensor.storage] = max(sizes.get(tensor.storage, 0), tensor.size_bytes)
    return tuple(sizes.get(storage, 0) for storage in range(max(sizes, default=-1) + 1))


def _resolve(call: Call, places: Mapping[str, list[int]]) -> Call:
    """A host function's call with the operands of one operator, instead of parameters by position."""
    operands = (
        replace(operand, value=places[operand.kind][int(operand.value)])
        if operand.kind in places
        else operand
        for operand in call.operands
    )
    return Call(call.symbol, tuple(operands))


# --- host functions --------------------------------------------------------------------------


@dataclass(frozen=True)
class _HostFunction:
    """What a host function does: operands are positions of its parameters and workspaces."""

    parameters: int
    workspaces: tuple[Workspace, ...]
    calls: tuple[Call, ...]


@dataclass
class _HostFunctions:
    """The host functions of a build, each read when it is first called."""

    build: KernelBuild
    found: dict[str, _HostFunction] = field(default_factory=dict)

    def read(self, name: str) -> _HostFunction:
        if name not in self.found:
            self.found[name] = _read_host(name, self._find(name), set(self._symbols()))
        return self.found[name]

    def _find(self, name: str) -> Any:
        for module in self.build.modules:
            for symbol, function in module.functions.items():
                if symbol.name_hint == name and isinstance(function, tvm.tir.PrimFunc):
                    return function
        raise ModelError(f"operator {name} is not computed by CUDA kernels", _HOST_HINT)

    def _symbols(self) -> Iterator[str]:
        return (launch.symbol for launch in self.build.launches)


def _read_host(name: str, function: Any, kernels: set[str]) -> _HostFunction:
    operands = {
        function.buffer_map[parameter].data: Operand("tensor", position)
        for position, parameter in enumerate(function.params)
        if parameter in function.buffer_map
    }
    workspaces: list[Workspace] = []
    calls = []
    for statement in _straight_line(name, function.body):
        if isinstance(statement, tvm.tir.Allocate):
            operands[statement.buffer_var] = Operand("workspace", len(workspaces))
            workspaces.append(_next_workspace(name, statement, workspaces))
            continue
        symbol = str(statement.op.name_hint)
        if symbol not in kernels:
            raise ModelError(f"operator {name}: the launch of {symbol} is computed on the host", _HOST_HINT)
        calls.append(
            Call(symbol, tuple(_read_operand(name, argument, operands) for argument in statement.args))
        )
    return _HostFunction(len(function.params), tuple(workspaces), tuple(calls))


def _straight_line(name: str, statement: Any) -> Iterator[Any]:
    """The allocations and launches of a host function, in order."""
    tir = tvm.tir
    if isinstance(statement, tir.SeqStmt):
        for inner in statement.seq:
            yield from _straight_line(name, inner)
    elif isinstance(statement, tir.Allocate):
        yield statement
        yield from _straight_line(name, statement.body)
    elif isinstance(statement, (tir.AttrStmt, tir.DeclBuffer)):
        yield from _straight_line(name, statement.body)
    elif _is_launch(statement):
        yield statement.value
    elif not (isinstance(statement, tir.Evaluate) and isinstance(statement.value, tir.IntImm)):
        raise ModelError(
            f"operator {name}: its host code does more than launch kernels ({type(statement).__name__})",
            _HOST_HINT,
        )


def _is_launch(statement: Any) -> bool:
    value = statement.value if isinstance(statement, tvm.tir.Evaluate) else None
    return isinstance(value, tvm.tir.Call) and isinstance(value.op, tvm.ir.GlobalVar)


def _next_workspace(name: str, allocate: Any, before: list[Workspace]) -> Workspace:
    extents = [tvm.arith.Analyzer().simplify(extent) for extent in allocate.extents]
    if not all(isinstance(extent, tvm.tir.IntImm) for extent in extents):
        raise ModelError(f"operator {name}: the size of a workspace is computed on the host", _HOST_HINT)
    kind = tvm.DataType(allocate.dtype)
    size_bytes = math.prod(int(extent) for extent in extents) * ((kind.bits * kind.lanes + 7) // 8)
    end = before[-1].offset_bytes + before[-1].size_bytes if before else 0
    return Workspace(-(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES, size_bytes)


def _read_operand(name: str, argument: Any, operands: Mapping[Any, Operand]) -> Operand:
    if isinstance(argument, tvm.tir.Var) and argument in operands:
        return operands[argument]
    argument = tvm.arith.Analyzer().simplify(argument)
    if isinstance(argument, tvm.tir.IntImm):
        return Operand("immediate", int(argument.value))
    if isinstance(argument, tvm.tir.FloatImm) and np.isfinite(argument.value):
        return Operand("immediate", float(argument.value))
    raise ModelError(f"operator {name}: a kernel's argument is computed on the host: {argument}", _HOST_HINT)
