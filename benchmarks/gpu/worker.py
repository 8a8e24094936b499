"""One job in a process of its own: ``python benchmarks/gpu/worker.py REQUEST.json RESULT.json``.

After an illegal access a process can no longer use its GPU; what crashes here ends one job.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.suite import Entry
from benchmarks.gpu.timing import Contender, describe, run_rounds
from tvm_fuse.core.errors import TvmFuseError
from tvm_fuse.cuda.trace import load_trace
from tvm_fuse.report import to_plain
from tvm_fuse.runner.driver import LIBRARY, CudaError
from tvm_fuse.runner.run import EMULATOR, LoadedBundle, RunOptions, choose_calls, load, run_bundle
from tvm_fuse.runner.trace import OperatorCheck, check_operators

_WARMUP = 5
_MOST_FAILURES = 20  # that are written down


@dataclass(frozen=True)
class Request:
    """What the worker is asked for.

    Args:
        kind: ``check``, ``compare`` or ``kernels``.
        suite: Folder of the suite.
        entries: What it is about.
        compiles: Whether PyTorch compiles.
        device: Number of the GPU, or ``emulator``.
        rounds: Rounds of a comparison, at the most.
        measure_s: How long to measure, about.
        library: The driver.
    """

    kind: str
    suite: Path
    entries: tuple[Entry, ...]
    compiles: bool
    device: str
    rounds: int
    measure_s: float
    library: str = LIBRARY

    @property
    def is_emulated(self) -> bool:
        """Whether no number of it is a GPU's."""
        return self.device == EMULATOR

    @property
    def options(self) -> RunOptions:
        """For the runner."""
        return RunOptions(self.device, library=self.library)


# --- correctness -----------------------------------------------------------------------------


def check(request: Request) -> dict[str, Any]:
    """One bundle: every operator by its trace, the outputs launch by launch, at once, and as a graph."""
    (entry,) = request.entries
    folder = request.suite / entry.folder
    with load(folder, request.options) as loaded:
        operators: list[OperatorCheck] = []
        probes = load_trace(folder, loaded.bundle)
        steps = loaded.check(lambda: operators.extend(check_operators(loaded.network, loaded.bundle, probes)))
        ways = {"kernel by kernel": steps.passed}
        notes = list(loaded.notes)
        if not request.is_emulated:
            ways["launches"] = loaded.check(loaded.network.run).passed
            try:
                with loaded.device.captured(loaded.network.run) as graph:
                    ways["graph"] = loaded.check(graph).passed
            except CudaError as error:
                notes.append(f"not checked as a CUDA graph: {error.message}")
        wrong = [each for each in operators if not each.passed]
        return {
            "passed": all(ways.values()) and not wrong,
            "device": to_plain(loaded.device.info),
            "image": loaded.image.name,
            "launches": loaded.bundle.launch_count,
            "kernels": len(loaded.bundle.kernels),
            "memory_mb": round(loaded.network.memory_bytes / 1e6, 1),
            "ways": ways,
            "outputs": [
                {"name": row.output, "max_abs": _number(row.max_abs), "of_tolerance": _number(row.needed)}
                for row in steps.rows
            ],
            "operators": {
                "checked": len(operators),
                "largest_error": _number(max((each.error for each in operators), default=0.0)),
                "wrong": [_describe_check(each) for each in wrong[:_MOST_FAILURES]],
                "wrong_count": len(wrong),
            },
            "notes": notes,
        }


def _describe_check(operator: OperatorCheck) -> dict[str, Any]:
    return {
        "operator": operator.operator,
        "kernels": list(operator.symbols),
        "tensor": operator.tensor,
        "error": _number(operator.error),
        "strange": operator.strange,
    }


def _number(value: float) -> float | str:
    """As JSON knows it: four digits, and no number as a word."""
    return float(f"{value:.4g}") if abs(value) < float("inf") else str(value)


# --- time ------------------------------------------------------------------------------------


def compare(request: Request) -> dict[str, Any]:
    """All entries in one process, in turn; what is wrong or refuses is left out, by name."""
    problems: dict[str, str] = {}
    notes: list[str] = []
    with ExitStack() as stack:
        contenders: list[Contender] = []
        for entry in request.entries:
            try:
                enter = _enter_torch if entry.form == "torch" else _enter_bundle
                contenders += enter(stack, request, entry, notes)
            except Exception as error:  # of any library; the others go on
                problems[entry.form] = f"{type(error).__name__}: {error}"
        times = run_rounds(contenders, 1 if request.is_emulated else request.rounds, request.measure_s)
    rows = describe(contenders, times, request.entries[0].form)
    if request.is_emulated:
        rows = [{key: row[key] for key in ("name", "mode", "rounds")} for row in rows]
        notes.append("emulated: what was measured is not a GPU's and is not kept")
    return {"passed": not problems, "problems": problems, "rows": rows, "notes": notes}


def _enter_bundle(stack: ExitStack, request: Request, entry: Entry, notes: list[str]) -> list[Contender]:
    loaded = stack.enter_context(load(request.suite / entry.folder, request.options))
    _require(loaded.check(loaded.network.run_checked).passed, "the outputs are not the golden ones")
    contenders = [_contender(loaded, entry.form, "launches", loaded.network.run, request)]
    try:
        graph = stack.enter_context(loaded.device.captured(loaded.network.run))
    except CudaError as error:
        notes.append(f"{entry.form}: not captured as a CUDA graph: {error.message}")
        return contenders
    _require(loaded.check(graph).passed, "the outputs are right launch by launch, and wrong as a CUDA graph")
    return [*contenders, _contender(loaded, entry.form, "graph", graph, request)]


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)


def _contender(loaded: LoadedBundle, name: str, mode: str, work: Any, request: Request) -> Contender:
    for _ in range(0 if request.is_emulated else _WARMUP):
        work()
    calls = 1 if request.is_emulated else choose_calls(loaded.device.time(work, 1))
    return Contender(name, mode, lambda: loaded.device.time(work, calls), calls)


def _enter_torch(stack: ExitStack, request: Request, entry: Entry, notes: list[str]) -> list[Contender]:
    from benchmarks.gpu.torch_worker import enter_torch

    device = "cpu" if request.is_emulated else f"cuda:{request.device}"
    contenders, said = enter_torch(stack, request.suite / entry.folder, device, request.compiles)
    notes += said
    return contenders


def measure_kernels(request: Request) -> dict[str, Any]:
    """Every launch of a bundle by itself."""
    (entry,) = request.entries
    repeats, warmup = (1, 0) if request.is_emulated else (7, 2)
    options = RunOptions(request.device, repeats, warmup, kernels=True, library=request.library)
    report = run_bundle(request.suite / entry.folder, options)
    rows = [
        {"kernel": row.symbol, "us": None if request.is_emulated else round(row.timing.median_s * 1e6, 3)}
        for row in report.kernels
    ]
    return {"passed": report.parity.passed, "rows": rows, "notes": list(report.notes)}


_KINDS = {"check": check, "compare": compare, "kernels": measure_kernels}


def main(argv: Sequence[str]) -> int:
    """Do what the request says; the exit code is 1 when there is an error instead of a result."""
    request_file, result_file = map(Path, argv)
    document = json.loads(request_file.read_text(encoding="utf-8"))
    entries = tuple(Entry(**entry) for entry in document.pop("entries"))
    request = Request(**{**document, "suite": Path(document["suite"]), "entries": entries})
    try:
        result, code = _KINDS[request.kind](request), 0
    except TvmFuseError as error:
        result, code = {"error": str(error)}, 1
    except Exception as error:
        traceback.print_exc()
        result, code = {"error": f"{type(error).__name__}: {error}"}, 1
    result_file.write_text(json.dumps(result), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
