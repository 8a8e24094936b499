"""Build, run and measure Relay modules.

Two builds are compared everywhere: the *fused* one (folded, layouts decided, chains grouped) and
the *unfused* reference, the same importer's graph at opt_level 0 with nothing folded and every
operator a kernel of its own, on a CPU one of TVM's: what we compute otherwise is checked, too.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tvm_fuse.core.errors import ToolFailed
from tvm_fuse.cuda.source import read_kernels
from tvm_fuse.relay.base import relay, tvm
from tvm_fuse.relay.cpu_target import without_our_key
from tvm_fuse.relay.cuda_hook import cuda_compilation
from tvm_fuse.relay.kernel_functions import mark_kernels
from tvm_fuse.relay.layout_pass import PREFIX_PASSES
from tvm_fuse.relay.target import is_cuda
from tvm_fuse.relay.tuned import TunedBuild, TunedSchedule, tuned_schedules
from tvm_fuse.relay.winograd_pass import use_winograd

__all__ = [
    "Artifact",
    "KernelCall",
    "Runner",
    "build_fused",
    "build_unfused",
    "measure",
    "read_calls",
]

#: opt_level of the fused build. Layout and folding are done by then; FuseOps runs at any level.
_FUSED_OPT_LEVEL = 3

#: Rewrites that would make the reference something else than the importer's graph, or only slow.
_NOT_FOR_REFERENCE = ("SimplifyExpr", "SimplifyExprPostAlterOp")

#: The graph executor passes tensors of the shapes it planned; checking each again in every
#: kernel's entry makes more code than the kernels themselves.
_CONFIG = {"tir.disable_assert": True}

_ERROR_LINE = re.compile(r"\b\w*Error\b|[Cc]heck failed")


@dataclass(frozen=True)
class KernelCall:
    """One call of a generated function in the order of execution, with the bytes it moves.

    ``bytes_read`` and ``bytes_written`` count every operand and result once.
    """

    function: str
    bytes_read: int
    bytes_written: int


@dataclass(frozen=True)
class Artifact:
    """A built model.

    Args:
        library: What ``relay.build`` returned; export or run it as usual.
        calls: The kernel calls of one inference.
        cuda_source: CUDA C of all kernels, empty on other targets.
        cuda_kernels: Names of the ``__global__`` functions.
    """

    library: Any = field(compare=False, repr=False)
    calls: tuple[KernelCall, ...]
    cuda_source: str = field(default="", repr=False)
    cuda_kernels: tuple[str, ...] = ()

    @property
    def traffic_bytes(self) -> int:
        """Estimated DRAM traffic of one inference: every kernel reads and writes its tensors once."""
        return sum(call.bytes_read + call.bytes_written for call in self.calls)


def build_fused(
    module: Any,
    target: Any,
    instruments: Sequence[Any] = (),
    schedules: Mapping[str, TunedSchedule] | None = None,
) -> Artifact:
    """Build a module whose layouts are decided and whose chains are grouped.

    Args:
        module: What ``FuseChains`` returned for the same target.
        target: A ``tvm.target.Target``.
        instruments: Pass instruments that watch the build.
        schedules: Digest of a chain -> tuned schedule (``relay.tuned``); other kernels get what they get
            without any.

    Returns:
        The artifact.

    Raises:
        ToolFailed: TVM cannot build it.
        InternalError: A tuned schedule belongs to no kernel of the module.
    """
    if not schedules:
        return _build_chosen(module, target, instruments)
    marked = mark_kernels(module, target, schedules.keys())
    texts = {one.workload_key: one.text for one in schedules.values()}
    with tuned_schedules(TunedBuild(texts)) as tuned:
        artifact = _build_chosen(marked, target, instruments)
    tuned.check_used()
    return artifact


def _build_chosen(module: Any, target: Any, instruments: Sequence[Any]) -> Artifact:
    """Choose algorithms, then build."""
    chosen = use_winograd(module, target)
    return _build(chosen, target, _FUSED_OPT_LEVEL, PREFIX_PASSES, instruments)


def build_unfused(module: Any, target: Any) -> Artifact:
    """Build the reference: opt_level 0, nothing folded or fused, on a CPU no schedule of ours.

    Args:
        module: The importer's module.
        target: A ``tvm.target.Target``.

    Returns:
        The artifact.

    Raises:
        ToolFailed: TVM cannot build it.
    """
    return _build(module, without_our_key(target), 0, _NOT_FOR_REFERENCE)


def _build(
    module: Any, target: Any, opt_level: int, disabled: Sequence[str], instruments: Sequence[Any] = ()
) -> Artifact:
    context = tvm.transform.PassContext(
        opt_level=opt_level, disabled_pass=list(disabled), config=_CONFIG, instruments=list(instruments)
    )
    try:
        with cuda_compilation(target), context:
            library = relay.build(module, target=target)
    except tvm.TVMError as error:
        raise ToolFailed(f"relay.build failed for {target}: {_summarize(error)}") from error
    source = _cuda_source(library) if is_cuda(target) else ""
    return Artifact(library, read_calls(library.get_graph_json()), source, tuple(read_kernels(source)))


def _summarize(error: Exception) -> str:
    """The line of TVM's message that says what is wrong; TensorIR of the kernel may follow it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in reversed(lines) if _ERROR_LINE.search(line)), lines[-1])


def _cuda_source(library: Any) -> str:
    return "\n".join(
        str(part.get_source()) for part in library.get_lib().imported_modules if part.type_key == "cuda"
    )


def read_calls(graph_json: str) -> tuple[KernelCall, ...]:
    """The kernel calls of a graph executor's graph, which lists shape and dtype of every entry."""
    graph = json.loads(graph_json)
    rows, attrs = graph["node_row_ptr"], graph["attrs"]
    sizes = [
        int(np.prod(shape, dtype=np.int64)) * ((int("".join(filter(str.isdigit, dtype)) or 8) + 7) // 8)
        for shape, dtype in zip(attrs["shape"][1], attrs["dltype"][1])
    ]
    calls = []
    for index, node in enumerate(graph["nodes"]):
        if node["op"] != "tvm_op" or node["attrs"]["func_name"] == "__nop":
            continue
        read = sum(sizes[rows[source] + entry] for source, entry, _ in node["inputs"])
        calls.append(KernelCall(node["attrs"]["func_name"], read, sum(sizes[rows[index] : rows[index + 1]])))
    return tuple(calls)


class Runner:
    """Runs an artifact on this machine's CPU or GPU."""

    def __init__(self, artifact: Artifact, target: Any, ordinal: int = 0) -> None:
        """Load the library.

        Args:
            artifact: The built model.
            target: The target it was built for.
            ordinal: Number of the GPU.
        """
        self._device = tvm.device(str(target.kind.name), ordinal) if is_cuda(target) else tvm.cpu(0)
        self._module = tvm.contrib.graph_executor.GraphModule(artifact.library["default"](self._device))

    def run(self, inputs: Mapping[str, np.ndarray], outputs: Sequence[str]) -> dict[str, np.ndarray]:
        """Compute all outputs.

        Args:
            inputs: Input name -> array.
            outputs: Names to give to the outputs, in order.

        Returns:
            Output name -> array; outputs beyond the given names are called ``extra0``, ...
        """
        self.set_inputs(inputs)
        self._module.run()
        count = self._module.get_num_outputs()
        names = [*outputs[:count], *(f"extra{index}" for index in range(count - len(outputs)))]
        return {name: self._module.get_output(index).numpy() for index, name in enumerate(names)}

    def set_inputs(self, inputs: Mapping[str, np.ndarray]) -> None:
        """Copy inputs to the device."""
        for name, array in inputs.items():
            self._module.set_input(name, tvm.nd.array(array, self._device))

    def time_once(self) -> float:
        """Seconds of one inference on the inputs that were set last."""
        start = time.perf_counter()
        self._module.run()
        self._device.sync()
        return time.perf_counter() - start


def measure(
    runners: Sequence[Runner], *, budget_s: float = 4.0, most: int = 50
) -> tuple[tuple[float, ...], ...]:
    """Time several models in turn, so that a noisy neighbour disturbs all alike.

    Args:
        runners: With inputs set; each has run once already.
        budget_s: About how long to measure in all, seconds.
        most: Rounds at the most; at least 5 are made.

    Returns:
        For each runner its times in seconds, one a round.
    """
    times: list[list[float]] = [[] for _ in runners]
    end = time.perf_counter() + budget_s
    for round_index in range(most):
        for runner, row in zip(runners, times):
            row.append(runner.time_once())
        if round_index >= 4 and time.perf_counter() > end:
            break
    return tuple(tuple(row) for row in times)
