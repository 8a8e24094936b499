"""One kernel alone: built as the whole model builds it, run on seeded data, checked and timed.

Runs in the processes of ``tune_worker``. The reference is the same function at opt_level 0, each operator a
kernel of its own with TVM's schedules, on this machine's CPU.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tvm_fuse.core.errors import InternalError
from tvm_fuse.core.graph import Array, TensorSpec
from tvm_fuse.core.inputs import make_inputs
from tvm_fuse.core.parity import ParityRow, compare
from tvm_fuse.cuda.candidates import scaled_tolerance
from tvm_fuse.relay.base import relay, tvm
from tvm_fuse.relay.build import Runner, build_fused, build_unfused
from tvm_fuse.relay.partition_pass import dissolve_groups
from tvm_fuse.relay.target import is_cuda, resolve_target
from tvm_fuse.relay.tuned import TunedSchedule

__all__ = [
    "KernelSpec",
    "Remote",
    "call_kernel",
    "compare_kernels",
    "compute_reference",
    "measure_kernel",
    "write_reference",
]

_TURNS = 7  # measurements of each kernel when two are compared
_REPEATS = 3  # of which the least counts
_OUTPUT = "output"


@dataclass(frozen=True)
class Remote:
    """A device behind an RPC tracker of TVM."""

    host: str
    port: int
    key: str


@dataclass(frozen=True)
class KernelSpec:
    """A kernel to be measured; everything that a fresh process needs.

    Args:
        function: The primitive function, as TVM's JSON.
        target: Target string.
        host: String of its host, or empty.
        digest: Of its chain.
        workload_key: Its computation.
        reference: The file with the reference's results.
        seed: Seed of its data.
        repeat_ms: Milliseconds of one measurement, at least.
        remote: Where it runs; None: here.
    """

    function: str
    target: str
    host: str
    digest: str
    workload_key: str
    reference: Path
    seed: int = 0
    repeat_ms: int = 10
    remote: Remote | None = None

    def load_target(self) -> Any:
        """The ``tvm.target.Target``; schedules of ours are registered."""
        resolve_target("llvm")
        target = tvm.target.Target(self.target)
        if is_cuda(target):
            resolve_target(f"cuda -arch={target.arch}")
        return tvm.target.Target(target, host=self.host) if self.host else target

    def load_module(self) -> Any:
        """A module whose ``main`` calls the function."""
        return call_kernel(tvm.ir.load_json(self.function))


def call_kernel(function: Any) -> Any:
    """A module whose ``main`` calls a primitive function."""
    params = [relay.var(str(param.name_hint), param.type_annotation) for param in function.params]
    module = tvm.IRModule.from_expr(relay.Function(params, relay.Call(function, params)))
    return relay.transform.InferType()(module)


def write_reference(spec: KernelSpec) -> None:
    """Compute the reference's results and write them to ``spec.reference``."""
    results = compute_reference(spec.load_module(), _data(spec))
    with tempfile.NamedTemporaryFile(dir=spec.reference.parent, suffix=".npz", delete=False) as file:
        np.savez(file, **{f"{_OUTPUT}{index}": array for index, array in enumerate(results)})
    Path(file.name).replace(spec.reference)


def compute_reference(module: Any, data: Mapping[str, Array]) -> tuple[Array, ...]:
    """The results of a kernel, each operator a kernel of its own on this machine's CPU.

    Args:
        module: From ``call_kernel``.
        data: Name of each parameter of ``main`` -> array.

    Returns:
        Its results, in order.
    """
    cpu = tvm.target.Target("llvm")
    defused = relay.transform.InferType()(relay.transform.DefuseOps()(dissolve_groups(module)))
    return tuple(Runner(build_unfused(defused, cpu), cpu).run(data, ()).values())


def measure_kernel(spec: KernelSpec, schedule: str | None) -> tuple[float, ParityRow]:
    """Build a kernel, compare its results with the reference's, and time it.

    Args:
        spec: The kernel.
        schedule: A tuned schedule; None takes what the build takes without one.

    Returns:
        Seconds of a call, and the comparison of the worst output.

    Raises:
        ToolFailed: It does not build.
    """
    with _loaded(spec, schedule) as kernel:
        row = kernel.check()
        return kernel.time_once(), row


def compare_kernels(spec: KernelSpec, schedule: str) -> tuple[float, float]:
    """Seconds of a call without and with a tuned schedule: medians of measurements in turn."""
    with _loaded(spec, None) as plain, _loaded(spec, schedule) as tuned:
        times = [(plain.time_once(), tuned.time_once()) for _ in range(_TURNS)]
    before, after = zip(*times)
    return statistics.median(before), statistics.median(after)


def _data(spec: KernelSpec) -> dict[str, Array]:
    """Seeded operands by name."""
    params = spec.load_module()["main"].params
    specs = [
        TensorSpec(
            str(param.name_hint),
            tuple(int(dim) for dim in param.checked_type.shape),
            str(param.checked_type.dtype),
        )
        for param in params
    ]
    return make_inputs(specs, spec.seed)


@dataclass(frozen=True)
class _Kernel:
    """A kernel that is loaded where it runs."""

    spec: KernelSpec
    function: str
    module: Any = field(repr=False)
    device: Any = field(repr=False)
    operands: tuple[Any, ...] = field(repr=False)
    results: tuple[Any, ...] = field(repr=False)

    def check(self) -> ParityRow:
        """Run once and compare; the worst output."""
        self.module.get_function(self.function)(*self.operands, *self.results)
        self.device.sync()
        with np.load(self.spec.reference) as wanted:
            rows = [
                compare_results(wanted[f"{_OUTPUT}{index}"], result.numpy())
                for index, result in enumerate(self.results)
            ]
        return max(rows, key=lambda row: row.needed)

    def time_once(self) -> float:
        """Seconds of a call: the least of a few measurements, since other processes can only add to it."""
        evaluator = self.module.time_evaluator(
            self.function, self.device, number=1, repeat=_REPEATS, min_repeat_ms=self.spec.repeat_ms
        )
        return float(min(evaluator(*self.operands, *self.results).results))


def compare_results(wanted: Array, got: Array) -> ParityRow:
    """Compare one output; absolute errors are allowed by the size of the largest value, as sums have them."""
    return compare({_OUTPUT: wanted}, {_OUTPUT: got}, tolerance=scaled_tolerance(wanted)).rows[0]


@contextmanager
def _loaded(spec: KernelSpec, schedule: str | None) -> Iterator[_Kernel]:
    target = spec.load_target()
    schedules = None if schedule is None else {spec.digest: TunedSchedule(spec.workload_key, schedule)}
    artifact = build_fused(spec.load_module(), target, schedules=schedules)
    name, order, shapes = _read_call(artifact.library.get_graph_json())
    data = _data(spec)
    with _placed(spec, artifact.library.get_lib(), target) as (module, device):
        operands = tuple(tvm.nd.array(data[operand], device) for operand in order)
        results = tuple(tvm.nd.empty(shape, dtype, device) for shape, dtype in shapes)
        yield _Kernel(spec, name, module, device, operands, results)


def _read_call(graph_json: str) -> tuple[str, tuple[str, ...], tuple[tuple[tuple[int, ...], str], ...]]:
    """The one call of a built graph: its function, its operands' names, shapes and dtypes of results."""
    graph = json.loads(graph_json)
    calls = [(index, node) for index, node in enumerate(graph["nodes"]) if node["op"] == "tvm_op"]
    if len(calls) != 1:
        raise InternalError(f"a kernel alone was built as {len(calls)} kernels")
    index, node = calls[0]
    rows, attrs = graph["node_row_ptr"], graph["attrs"]
    entries = range(rows[index], rows[index + 1])
    shapes = tuple((tuple(attrs["shape"][1][entry]), str(attrs["dltype"][1][entry])) for entry in entries)
    order = tuple(str(graph["nodes"][source]["name"]) for source, _, _ in node["inputs"])
    return str(node["attrs"]["func_name"]), order, shapes


@contextmanager
def _placed(spec: KernelSpec, library: Any, target: Any) -> Iterator[tuple[Any, Any]]:
    """The library where it runs, and the device."""
    if spec.remote is None:
        yield library, tvm.cuda(0) if is_cuda(target) else tvm.cpu(0)
        return
    tracker = tvm.rpc.connect_tracker(spec.remote.host, spec.remote.port)
    session = tracker.request(spec.remote.key, session_timeout=60)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "kernel.tar")
        library.export_library(str(file), fcompile=tvm.contrib.tar.tar)
        session.upload(str(file))
    module = session.load_module("kernel.tar")
    try:
        yield module, session.cuda(0) if is_cuda(target) else session.cpu(0)
    finally:
        session.remove("kernel.tar")
        session.remove("kernel.tar.so")
