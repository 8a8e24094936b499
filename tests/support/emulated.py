"""Builds on the CUDA emulator, launched as TVM's host code does: whole graphs, or operator by operator.

Example::

    operators = read_operators(build)
    wanted = run_operators_unfused(operators)
    got = run_operator(build, operators[0], emulator, checks=True)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support.lazy import Lazy
from tvm_fuse.cuda.emulator import EmulatedModule, build_emulator

__all__ = ["Operator", "read_operators", "run_emulated", "run_operator", "run_operators_unfused"]

build_module = Lazy("tvm_fuse.relay.build")
partition_pass = Lazy("tvm_fuse.relay.partition_pass")
relay = Lazy("tvm_fuse.relay.base", "relay")
target = Lazy("tvm_fuse.relay.target")
tvm = Lazy("tvm_fuse.relay.base", "tvm")


def run_emulated(
    build: Any, inputs: Mapping[str, np.ndarray], *, emulator: EmulatedModule | None = None, **options: Any
) -> tuple[list[np.ndarray], set[str]]:
    """Run a graph.

    Args:
        build: What ``build_kernels`` returned.
        inputs: The graph's inputs.
        emulator: Of the build's source; None compiles one.
        **options: For ``EmulatedModule.launch``.

    Returns:
        The outputs, and the names of the kernels that ran.
    """
    emulator = emulator or build_emulator(build.artifact.cuda_source)
    graph = json.loads(build.artifact.library.get_graph_json())
    values, ran = {}, set()
    known = {**read_params(build), **inputs}
    for index, node in enumerate(graph["nodes"]):
        if node["op"] == "null":
            values[index, 0] = np.ascontiguousarray(known[node["name"]])
            continue
        operands = [values[source, entry] for source, entry, _ in node["inputs"]]
        outputs = new_outputs(graph, index)
        name = node["attrs"]["func_name"]
        if name == "__nop":
            outputs = [operands[0].reshape(outputs[0].shape)]
        else:
            ran |= run_host(build, name, emulator, operands, outputs, options)
        values.update({(index, entry): array for entry, array in enumerate(outputs)})
    return [values[source, entry] for source, entry, *_ in graph["heads"]], ran


def read_params(build: Any) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in build.artifact.library.get_params().items()}


def new_outputs(graph: Any, index: int) -> list[np.ndarray]:
    first, count = graph["node_row_ptr"][index], int(graph["nodes"][index]["attrs"]["num_outputs"])
    return [np.empty(*spec_of(graph, first + entry)) for entry in range(count)]


def spec_of(graph: Any, row: int) -> tuple[Any, np.dtype]:
    """Shape and dtype of a value; TVM calls booleans ``uint1``."""
    attrs = graph["attrs"]
    dtype = attrs["dltype"][1][row]
    return attrs["shape"][1][row], np.dtype("bool" if dtype == "uint1" else dtype)


# --- one operator ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operator:
    """One of the distinct operators of a graph, with operands to try it on.

    Args:
        name: Its host function.
        function: What it computes, in Relay.
        operands: Parameters as the graph has them, random numbers for the rest.
        results: Arrays of the results' shapes and dtypes.
    """

    name: str
    function: Any
    operands: tuple[np.ndarray, ...]
    results: tuple[np.ndarray, ...]


def read_operators(build: Any, seed: int = 0) -> list[Operator]:
    """The distinct operators of a build, in order of their first use."""
    graph = json.loads(build.artifact.library.get_graph_json())
    known, rng = read_params(build), np.random.default_rng(seed)

    def find_operands(node: Any) -> Iterator[np.ndarray]:
        for source, entry, _ in node["inputs"]:
            shape, dtype = spec_of(graph, graph["node_row_ptr"][source] + entry)
            name = graph["nodes"][source]["name"]
            yield known[name] if name in known else rng.normal(size=shape).astype(dtype)

    found: dict[str, Operator] = {}
    for index, node in enumerate(graph["nodes"]):
        name = node.get("attrs", {}).get("func_name", "__nop")
        if name != "__nop" and name not in found:
            (function,) = build.artifact.library.function_metadata[name].relay_primfuncs.values()
            results = tuple(new_outputs(graph, index))
            found[name] = Operator(name, function, tuple(find_operands(node)), results)
    return list(found.values())


def run_operator(
    build: Any, operator: Operator, emulator: EmulatedModule, **options: Any
) -> tuple[list[np.ndarray], set[str]]:
    """Run the kernels of one operator; see ``run_emulated``."""
    outputs = [np.empty_like(result) for result in operator.results]
    return outputs, run_host(build, operator.name, emulator, operator.operands, outputs, options)


def run_operators_unfused(operators: Sequence[Operator]) -> list[list[np.ndarray]]:
    """What operators are to compute: on the CPU at opt_level 0, none of their parts fused with another."""
    params, results, inputs = [], [], {}
    for operator in operators:
        names = [f"{operator.name}_{position}" for position in range(len(operator.operands))]
        own = [relay.var(n, shape=a.shape, dtype=str(a.dtype)) for n, a in zip(names, operator.operands)]
        body = relay.bind(operator.function.body, dict(zip(operator.function.params, own)))
        count = len(operator.results)
        results += [body] if count == 1 else [relay.TupleGetItem(body, entry) for entry in range(count)]
        params += own
        inputs.update(zip(names, operator.operands))
    module = tvm.IRModule.from_expr(relay.Function(params, relay.Tuple(results)))
    module = relay.transform.InferType()(partition_pass.dissolve_groups(relay.transform.InferType()(module)))
    cpu = target.resolve_target("llvm -opt-level=0")
    computed = iter(
        build_module.Runner(build_module.build_unfused(module, cpu), cpu).run(inputs, ()).values()
    )
    return [[next(computed) for _ in operator.results] for operator in operators]


# --- host functions ----------------------------------------------------------------------------


def find_host(build: Any, name: str) -> Any:
    return next(
        function
        for module in build.modules
        for symbol, function in module.functions.items()
        if symbol.name_hint == name and len(function.buffer_map)
    )


def run_host(
    build: Any, name: str, emulator: EmulatedModule, operands: Any, outputs: Any, options: Any
) -> set[str]:
    """Do what a host function does: allocate workspaces, and launch kernels one after the other."""
    function = find_host(build, name)
    launches = {launch.symbol: launch for launch in build.launches}
    nodes: list[Any] = []
    tvm.tir.stmt_functor.post_order_visit(function.body, nodes.append)
    buffers = [function.buffer_map[param].data for param in function.params]
    memory = list(zip(buffers, [*operands, *outputs]))
    memory += [
        (node.buffer_var, np.empty([int(extent) for extent in node.extents], node.dtype))
        for node in nodes
        if isinstance(node, tvm.tir.Allocate)
    ]
    written = {id(array) for array in operands}
    calls = [
        node for node in nodes if isinstance(node, tvm.tir.Call) and isinstance(node.op, tvm.ir.GlobalVar)
    ]
    for call in calls:
        launch = launches[str(call.op.name_hint)]
        args = [next(array for var, array in memory if var.same_as(arg)) for arg in call.args]
        fresh = [position for position, array in enumerate(args) if id(array) not in written]
        emulator.launch(
            launch.symbol, launch.grid, launch.block, args,
            outputs=fresh, smem_dynamic_bytes=launch.smem_dynamic_bytes, **options,
        )  # fmt: skip
        written |= {id(array) for array in args}
    return {str(call.op.name_hint) for call in calls}
