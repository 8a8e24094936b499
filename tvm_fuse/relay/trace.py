"""What every operator of a graph computes, on the CPU: the reference of a bundle's trace.

FuseOps makes the operators; here they are taken apart again, so that what is compared are CUDA kernels
with plain operators, and not one fused kernel with another::

    main(x) = f2(f1(x))    ->    main(x) = (f2(f1(x)), f1(x) at some positions, f2(f1(x)) at some positions)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from tvm_fuse.core.dtypes import Array
from tvm_fuse.core.errors import InternalError
from tvm_fuse.cuda.trace import Probe, sample_positions
from tvm_fuse.relay.base import relay, tvm
from tvm_fuse.relay.build import Runner, build_unfused
from tvm_fuse.relay.kernels import KernelBuild
from tvm_fuse.relay.partition_pass import dissolve_groups
from tvm_fuse.relay.read import read_function
from tvm_fuse.relay.target import resolve_target

__all__ = ["trace_operators"]


def trace_operators(
    module: Any,
    build: KernelBuild,
    target: Any,
    parameters: Mapping[str, Array],
    inputs: Mapping[str, Array],
    names: tuple[str, ...],
) -> tuple[dict[str, Array], tuple[Probe, ...]]:
    """Compute the outputs of a graph, and some elements of every operator's result.

    Args:
        module: What was built, with its weights as parameters of ``main``.
        build: What was made of it for CUDA.
        target: For which target.
        parameters: Weights by name.
        inputs: Inputs by name.
        names: Names of the outputs, in order.

    Returns:
        The outputs by name, and the probes in the order of the build's operators.

    Raises:
        InternalError: The build has other operators.
        ToolFailed: TVM cannot build the graph for the CPU.
    """
    with target, tvm.transform.PassContext(opt_level=3):
        fused = relay.transform.InferType()(relay.transform.FuseOps()(relay.transform.InferType()(module)))
    results = _read_results(build.artifact.library.get_graph_json())
    traced = _with_samples(fused, results)
    known = {str(param.name_hint) for param in traced["main"].params}
    values = {name: tvm.nd.array(array) for name, array in parameters.items() if name in known}
    traced["main"] = relay.build_module.bind_params_by_name(traced["main"], values)
    cpu = resolve_target("llvm")
    runner = Runner(build_unfused(relay.transform.InferType()(traced), cpu), cpu)
    feeds = {name: array for name, array in inputs.items() if name in known}
    got = list(runner.run(feeds, names).values())
    samples = iter(got[len(names) :])
    probes: list[Probe] = []
    operators = 0
    for tensors, is_nop in results:
        taken = [next(samples).astype(np.float64) for _ in tensors]
        if not is_nop:
            probes += [Probe(operators, tensor, values) for tensor, values in zip(tensors, taken)]
            operators += 1
    return dict(zip(names, got)), tuple(probes)


def _read_results(graph_json: str) -> list[tuple[list[int], bool]]:
    """For every operator of a built graph its results' tensors, and whether it does nothing."""
    graph = json.loads(graph_json)
    rows = graph["node_row_ptr"]
    return [
        (list(range(rows[index], rows[index + 1])), node["attrs"]["func_name"] == "__nop")
        for index, node in enumerate(graph["nodes"])
        if node["op"] == "tvm_op"
    ]


def _with_samples(fused: Any, results: list[tuple[list[int], bool]]) -> Any:
    """The graph with the samples as further outputs, and its operators taken apart."""
    main = fused["main"]
    read = read_function(main)
    calls = [expr for expr in read.expressions if _is_operator(expr)]
    if len(calls) != len(results):
        raise InternalError(f"the graph has {len(calls)} operators, its build {len(results)}")
    samples = [
        _sample(result) for call, (tensors, _) in zip(calls, results) for result in _split(call, tensors)
    ]
    outputs = main.body.fields if isinstance(main.body, relay.Tuple) else [main.body]
    traced = tvm.IRModule.from_expr(relay.Function(main.params, relay.Tuple([*outputs, *samples])))
    # Samples are no primitive functions, which DefuseOps does not mind.
    return relay.transform.DefuseOps()(dissolve_groups(relay.transform.InferType()(traced)))


def _is_operator(expr: Any) -> bool:
    return isinstance(expr, relay.Call) and isinstance(expr.op, relay.Function)


def _split(call: Any, tensors: list[int]) -> list[Any]:
    """The results of an operator, each by itself."""
    fields = call.checked_type.fields if isinstance(call.checked_type, tvm.ir.TupleType) else None
    if len(tensors) != (1 if fields is None else len(fields)):
        raise InternalError(
            f"an operator of type {call.checked_type} has {len(tensors)} results in its build"
        )
    if fields is None:
        return [(call, call.checked_type)]
    return [(relay.TupleGetItem(call, index), kind) for index, kind in enumerate(fields)]


def _sample(result: tuple[Any, Any]) -> Any:
    expr, kind = result
    size = int(np.prod([int(dim) for dim in kind.shape], dtype=np.int64))
    flat = relay.reshape(expr, (size,))
    return relay.take(flat, relay.const(sample_positions(size), "int64"))
