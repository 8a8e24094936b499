"""``python -m tvm_fuse.runner.candidates PACKAGE``: check and time candidates, a line of JSON for each step.

A process of its own, which ``candidate_job`` starts: a kernel that fails leaves a CUDA context of no use, and
one that hangs cannot be stopped otherwise. What to do comes on standard input, as JSON: the ids to measure,
and those that are known to fail. The lines are ``{"device": ...}``, ``{"begin": ID}``, ``{"result": ...}``
and ``{"error": [EXIT CODE, MESSAGE, HINT]}``.

Every candidate is timed in turn with the kernel that the build makes without it: flush the second cache, one
call of the one, flush, one call of the other, and again.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tvm_fuse.core.dtypes import Array
from tvm_fuse.core.errors import TvmFuseError
from tvm_fuse.core.parity import compare
from tvm_fuse.cuda.bundle import Operand
from tvm_fuse.cuda.candidate_files import cubin_file, load_package, load_reference, read_source
from tvm_fuse.cuda.candidate_results import FAILED, TIMED, WRONG, CandidateResult
from tvm_fuse.cuda.candidates import Candidate, CandidateTask, Package, choose_positions, draw_operands
from tvm_fuse.cuda.launch import Parameter
from tvm_fuse.runner.driver import LIBRARY, CudaError, Device, PreparedLaunch
from tvm_fuse.runner.network import POISON, immediate

__all__ = ["EMULATOR", "UNUSABLE", "main", "measure_candidates"]

EMULATOR = "emulator"

#: Exit code: the device cannot be used from this process any more.
UNUSABLE = 9

_FLUSHED = 2  # times the second cache
_WARMUP = 2  # rounds, for the clock to rise


class _TaskMemory:
    """Operands and results of a task on a device."""

    def __init__(self, device: Device, task: CandidateTask) -> None:
        self._device, self._task = device, task
        self.addresses: list[int] = []
        for value, array in zip(task.inputs, draw_operands(task.inputs, task.seed)):
            self.addresses.append(device.allocate(value.size_bytes))
            device.upload(self.addresses[-1], array)
        self.addresses += [device.allocate(value.size_bytes) for value in task.outputs]

    def close(self) -> None:
        for address in self.addresses:
            self._device.free(address)

    def poison(self) -> None:
        """Fill the results with NaN, which a missing write leaves there."""
        for address, value in zip(self.addresses[len(self._task.inputs) :], self._task.outputs):
            self._device.fill(address, POISON, value.size_bytes)

    def results(self) -> Iterator[Array]:
        """Copy the results from the device."""
        for address, value in zip(self.addresses[len(self._task.inputs) :], self._task.outputs):
            yield self._device.download(address, value.shape, value.dtype)


class _Loaded:
    """A candidate on a device, ready to run."""

    def __init__(self, device: Device, candidate: Candidate, module: Path, memory: _TaskMemory) -> None:
        self._device, self._candidate = device, candidate
        handle = device.load_module(module)
        kernels = {kernel.symbol: kernel for kernel in candidate.kernels}
        functions = {
            symbol: device.find_kernel(handle, symbol, kernel.smem_dynamic_bytes)
            for symbol, kernel in kernels.items()
        }
        self._arena = device.allocate(candidate.arena_bytes)

        def value_of(parameter: Parameter, operand: Operand) -> Any:
            if operand.kind == "tensor":
                return ctypes.c_uint64(memory.addresses[int(operand.value)])
            if operand.kind == "workspace":
                return ctypes.c_uint64(self._arena + candidate.workspaces[int(operand.value)].offset_bytes)
            return immediate(parameter, operand.value)

        self._launches = []
        for call in candidate.calls:
            kernel = kernels[call.symbol]
            values = list(map(value_of, kernel.parameters, call.operands))
            self._launches.append(PreparedLaunch(kernel, functions[call.symbol], values))

    def close(self) -> None:
        self._device.free(self._arena)

    def run(self) -> None:
        """Launch everything, without waiting for it."""
        for launch in self._launches:
            self._device.launch(launch)

    def run_checked(self) -> None:
        """Launch kernel by kernel from memory that is no number, each waited for."""
        self._device.fill(self._arena, POISON, self._candidate.arena_bytes)
        for launch in self._launches:
            self._device.launch(launch)
            self._device.synchronize(about=launch.kernel.symbol)


@dataclass(frozen=True)
class _Bench:
    """A device, and how candidates get there.

    Args:
        folder: The package.
        device: The device.
        find_module: Id of a candidate -> a file that the device's driver loads.
        repeats: Rounds.
        flush_bytes: Bytes that are written to empty the second cache.
        flush: Where they are.
    """

    folder: Path
    device: Device
    find_module: Callable[[str], Path]
    repeats: int
    flush_bytes: int
    flush: int

    def load(self, candidate: Candidate, memory: _TaskMemory) -> _Loaded:
        """Put a candidate on the device."""
        return _Loaded(self.device, candidate, self.find_module(candidate.id), memory)

    def check(self, task: CandidateTask, loaded: _Loaded, memory: _TaskMemory, name: str) -> CandidateResult:
        """Run a candidate once and compare its results with the reference."""
        memory.poison()
        loaded.run_checked()
        wanted = load_reference(self.folder, task.digest, task.outputs)
        worst = CandidateResult(name, TIMED)
        for want, tolerance, got in zip(wanted, task.tolerances, memory.results()):
            flat = got.reshape(-1)
            sampled = flat[choose_positions(flat.size, task.seed)]
            row = compare({"result": want}, {"result": sampled}, tolerance=tolerance).rows[0]
            strange = int(flat.size - np.count_nonzero(np.isfinite(flat)))
            if strange and np.isfinite(want).all():
                error = f"{strange} of {flat.size} results are no finite numbers"
                return CandidateResult(name, WRONG, error=error)
            if not row.passed:
                error = f"{row.failing} of {row.elements} results differ, by up to {row.max_abs:.3g}"
                return CandidateResult(name, WRONG, error=row.problem or error)
            if row.needed >= worst.needed:
                worst = CandidateResult(name, TIMED, max_abs=row.max_abs, needed=row.needed)
        return worst

    def time(self, loaded: _Loaded, baseline: _Loaded | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Seconds of a candidate, and of the baseline in the same rounds; the first rounds do not count."""
        mine, theirs = [], []
        warmup = _WARMUP if self.repeats > _WARMUP else 0
        for _ in range(warmup + self.repeats):
            if baseline is not None:
                theirs.append(self._time_once(baseline))
            mine.append(self._time_once(loaded))
        return tuple(mine[warmup:]), tuple(theirs[warmup:])

    def _time_once(self, loaded: _Loaded) -> float:
        self.device.fill(self.flush, POISON, self.flush_bytes)
        return max(self.device.time(loaded.run, 1), 1e-9)  # the clock of a stand-in may stand still


def measure_candidates(
    bench: _Bench,
    package: Package,
    todo: Collection[str],
    failed: Collection[str],
    seconds: float,
    say: Callable[[dict[str, Any]], None],
) -> None:
    """Check and time candidates, task by task, until they are done or the time is over.

    Args:
        bench: Where.
        package: The package.
        todo: Ids of the candidates to measure.
        failed: Ids of those that are known to fail.
        seconds: How long it may take.
        say: Gets every line.

    Raises:
        SystemExit: A kernel left the device of no use to this process; the result was said.
    """
    end = time.monotonic() + seconds
    for task in package.tasks:
        wanted = [one for one in task.all if one.id in todo]
        if not wanted:
            continue
        if time.monotonic() >= end:
            return
        with ExitStack() as stack:
            memory = stack.enter_context(closing(_TaskMemory(bench.device, task)))
            baseline = None
            if task.baseline not in wanted and task.baseline.id not in failed:
                baseline = stack.enter_context(closing(bench.load(task.baseline, memory)))
            for candidate in wanted:
                if time.monotonic() >= end:
                    return
                say({"begin": candidate.id})
                result, loaded = _measure(bench, task, candidate, memory, baseline)
                say({"result": asdict(result)})
                if loaded is not None:
                    stack.enter_context(closing(loaded))
                if result.outcome == FAILED and not _is_usable(bench.device):
                    raise SystemExit(UNUSABLE)
                if candidate is task.baseline and result.outcome == TIMED:
                    baseline = loaded


def _measure(
    bench: _Bench, task: CandidateTask, candidate: Candidate, memory: _TaskMemory, baseline: _Loaded | None
) -> tuple[CandidateResult, _Loaded | None]:
    loaded = None
    try:
        loaded = bench.load(candidate, memory)
        result = bench.check(task, loaded, memory, candidate.id)
        if result.outcome != TIMED:
            return result, loaded
        mine, theirs = bench.time(loaded, baseline)
    except TvmFuseError as error:
        return CandidateResult(candidate.id, FAILED, error=error.message), loaded
    timed = CandidateResult(candidate.id, TIMED, mine, theirs, result.max_abs, result.needed)
    return timed, loaded


def _is_usable(device: Device) -> bool:
    """Whether a device still works, after a failure."""
    try:
        device.synchronize()
    except CudaError:
        return False
    return True


# --- the process -------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 0, that of the error that was said, or ``UNUSABLE``."""
    parser = argparse.ArgumentParser(prog="python -m tvm_fuse.runner.candidates")
    parser.add_argument("package", type=Path)
    parser.add_argument("--device", default="0")
    parser.add_argument("--library", default=LIBRARY)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=240.0)
    args = parser.parse_args(argv)

    def say(line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)

    try:
        work = json.load(sys.stdin)
        package = load_package(args.package)
        with ExitStack() as stack:
            bench = _open(stack, args)
            say({"device": asdict(bench.device.info)})
            measure_candidates(bench, package, set(work["todo"]), set(work["failed"]), args.seconds, say)
    except TvmFuseError as error:
        say({"error": [error.exit_code, error.message, error.hint]})
        return error.exit_code
    return 0


def _open(stack: ExitStack, args: argparse.Namespace) -> _Bench:
    def compiled(candidate: str) -> Path:
        return args.package / cubin_file(candidate)

    if args.device != EMULATOR:
        device, find_module = Device(int(args.device), args.library), compiled
    else:
        from tvm_fuse.cuda.emulator import build_driver, build_emulator

        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tvm_fuse_candidates_")))

        def find_module(candidate: str) -> Path:
            place = scratch / candidate
            place.mkdir(exist_ok=True)
            source = read_source(args.package, candidate)
            return build_emulator(source, folder=place).library(checked=False)

        device = Device(library=str(build_driver(scratch)))
    flush_bytes = _FLUSHED * device.l2_bytes
    flush = device.allocate(flush_bytes)
    return _Bench(args.package, device, find_module, args.repeats, flush_bytes, flush)


if __name__ == "__main__":
    sys.exit(main())
