"""Whole models on the CUDA emulator, kernel by kernel as TVM's host code launches them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.support.lazy import Lazy
from tvm_fuse.cuda.emulator import EmulatedModule, build_emulator

__all__ = ["run_emulated"]

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
    params = {name: array.numpy() for name, array in build.artifact.library.get_params().items()}
    launches = {launch.symbol: launch for launch in build.launches}
    hosts = host_functions(build.modules)
    values, ran = {}, set()
    for index, node in enumerate(graph["nodes"]):
        if node["op"] == "null":
            values[index, 0] = np.ascontiguousarray({**params, **inputs}[node["name"]])
            continue
        operands = [values[source, entry] for source, entry, _ in node["inputs"]]
        outputs = new_outputs(graph, index, int(node["attrs"]["num_outputs"]))
        name = node["attrs"]["func_name"]
        if name == "__nop":
            outputs = [operands[0].reshape(outputs[0].shape)]
        else:
            ran |= run_host(emulator, launches, hosts[name], operands, outputs, options)
        values.update({(index, entry): array for entry, array in enumerate(outputs)})
    return [values[source, entry] for source, entry, _ in graph["heads"]], ran


def new_outputs(graph: Any, index: int, count: int) -> list[np.ndarray]:
    first = graph["node_row_ptr"][index]
    shapes, dtypes = graph["attrs"]["shape"][1], graph["attrs"]["dltype"][1]
    return [np.empty(shapes[first + entry], dtypes[first + entry]) for entry in range(count)]


def host_functions(modules: Any) -> dict[str, Any]:
    return {
        str(symbol.name_hint): function
        for module in modules
        for symbol, function in module.functions.items()
        if len(function.buffer_map)
    }


def run_host(
    emulator: EmulatedModule, launches: Any, function: Any, operands: Any, outputs: Any, options: Any
) -> set[str]:
    """Do what a host function does: allocate workspaces, and launch kernels one after the other."""
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
