"""``run.py`` of a package of candidates: all of them checked and timed, in bounded time, whatever they do.

Candidates run in a process of their own (``runner/candidates.py``). When one crashes it, leaves the device of
no use, or is silent for too long, it counts as failed and the next process goes on behind it. What is known
is written every few seconds, so that an interrupted job loses little.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tvm_fuse
from tvm_fuse.core.errors import MissingDependency, ModelError, ToolFailed, TvmFuseError, UsageError
from tvm_fuse.cuda.candidate_files import load_package, package_digest
from tvm_fuse.cuda.candidate_results import (
    FAILED,
    NOT_REACHED,
    TIMED,
    CandidateResult,
    Results,
    save_results,
)
from tvm_fuse.cuda.candidates import Package
from tvm_fuse.cuda.plain import make
from tvm_fuse.runner.candidates import EMULATOR, UNUSABLE
from tvm_fuse.runner.driver import LIBRARY, DeviceInfo

__all__ = ["JobOptions", "main", "render_results", "run_job"]

_REPEATS = 15
_SAVED_EVERY_S = 2.0
_GRACE_S = 5.0
_INTERRUPTED = 130
_US = 1e6

_EXIT_CODES = """\
exit codes: 0 done; 2 usage; 3 the package is damaged; 4 no driver or no GPU; 5 the driver failed, or no
candidate works; 130 Ctrl-C"""


@dataclass(frozen=True)
class JobOptions:
    """What the user may choose.

    Args:
        output: File of the results.
        budget_s: Seconds for everything.
        device: Number of the GPU, or ``emulator``.
        repeats: Rounds for each candidate.
        silence_s: Seconds that one candidate may take.
        library: The driver of GPUs.
    """

    output: Path
    budget_s: float = 240.0
    device: str = "0"
    repeats: int = _REPEATS
    silence_s: float = 20.0
    library: str = LIBRARY


@dataclass
class _Progress:
    """What is known so far."""

    package: Package
    digest: str
    options: JobOptions
    start: float
    device: DeviceInfo | None = None
    results: dict[str, CandidateResult] = field(default_factory=dict)
    saved: float = 0.0

    @property
    def left_s(self) -> float:
        return self.options.budget_s - (time.monotonic() - self.start)

    def todo(self) -> list[str]:
        """Ids of the candidates that nothing is known of, in order."""
        return [one.id for task in self.package.tasks for one in task.all if one.id not in self.results]

    def failed(self) -> list[str]:
        return [name for name, result in self.results.items() if result.outcome != TIMED]

    def add(self, result: CandidateResult) -> None:
        """Take in a result; from time to time all of them are written."""
        self.results[result.id] = result
        if time.monotonic() - self.saved > _SAVED_EVERY_S:
            self.save()

    def save(self) -> Results:
        """Write all that is known."""
        known = tuple(self.results.values())
        missing = tuple(CandidateResult(name, NOT_REACHED) for name in self.todo())
        assert self.device is not None
        results = Results(
            package=self.digest,
            card=self.device.name,
            arch=self.device.arch,
            driver=self.device.driver,
            is_emulated=self.options.device == EMULATOR,
            date=time.strftime("%Y-%m-%d", time.gmtime()),
            seconds=time.monotonic() - self.start,
            results=(*known, *missing),
        )
        save_results(self.options.output, results)
        self.saved = time.monotonic()
        return results


def run_job(
    folder: Path, options: JobOptions, show: Callable[[str], None] = lambda line: None
) -> tuple[Package, Results]:
    """Check and time the candidates of a package.

    Args:
        folder: The package.
        options: See ``JobOptions``.
        show: Gets a line for every candidate.

    Returns:
        The package, and what was found, which is in ``options.output`` as well.

    Raises:
        UsageError: There is no package or no such device, it is of another architecture, or the file cannot
            be written.
        ModelError: The package is damaged.
        MissingDependency: There is no driver, or no GPU.
        ToolFailed: The driver refuses something that is no candidate's fault.
        KeyboardInterrupt: After Ctrl-C; what is known is written.
    """
    progress = _Progress(load_package(folder), package_digest(folder), options, time.monotonic())
    try:
        while progress.todo() and progress.left_s > 0:
            before = len(progress.results)
            _run_process(folder, progress, show)
            if len(progress.results) == before and progress.left_s > 0:
                raise ToolFailed("the measuring process ends without a result")
    except KeyboardInterrupt:
        if progress.results:
            progress.save()
        raise
    if progress.device is None:
        raise ToolFailed(f"the device was not ready within {options.budget_s:g} s", "a larger --budget")
    return progress.package, progress.save()


def _run_process(folder: Path, progress: _Progress, show: Callable[[str], None]) -> None:
    """One process: it goes on until all is done, the time is over, or a candidate ends it."""
    options, current = progress.options, ""
    process = _start(folder, progress)
    try:
        for line in _read_lines(process, options.silence_s, lambda: progress.left_s + _GRACE_S):
            if "error" in line:
                raise _error(*line["error"])
            if "device" in line:
                progress.device = DeviceInfo(**line["device"])
                _check_arch(progress.package, progress.device, options)
            if "begin" in line:
                current = line["begin"]
            if "result" in line:
                result: CandidateResult = make(CandidateResult, line["result"], "")
                progress.add(result)
                show(_describe(progress, result))
                current = ""
    except TimeoutError:
        if progress.left_s > 0 and current:
            progress.add(CandidateResult(current, FAILED, error=f"no result within {options.silence_s:g} s"))
            show(_describe(progress, progress.results[current]))
            current = ""
    finally:
        code = _stop(process)
    if current and progress.left_s > 0:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        progress.add(CandidateResult(current, FAILED, error=f"the process died: {how}"))
        show(_describe(progress, progress.results[current]))
    elif code not in (0, UNUSABLE, -signal.SIGKILL) and not current:
        raise ToolFailed(f"the measuring process ended with code {code}")


def _start(folder: Path, progress: _Progress) -> subprocess.Popen[bytes]:
    options = progress.options
    root = str(Path(tvm_fuse.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    command = [
        *(sys.executable, "-m", "tvm_fuse.runner.candidates", str(folder)),
        *("--device", options.device, "--library", options.library),
        *("--repeats", str(options.repeats), "--seconds", str(progress.left_s)),
    ]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdin is not None
    work = {"todo": progress.todo(), "failed": progress.failed()}
    process.stdin.write(json.dumps(work).encode())
    process.stdin.close()
    return process


def _read_lines(
    process: subprocess.Popen[bytes], silence_s: float, left_s: Callable[[], float]
) -> Iterator[dict[str, Any]]:
    """The lines of a process.

    Raises:
        TimeoutError: It was silent for too long, or the time is over.
    """
    assert process.stdout is not None
    buffer = b""
    while True:
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, min(silence_s, left_s())))
        if not ready:
            raise TimeoutError
        data = os.read(process.stdout.fileno(), 1 << 16)
        if not data:
            return
        *lines, buffer = (buffer + data).split(b"\n")
        yield from map(json.loads, lines)


def _stop(process: subprocess.Popen[bytes]) -> int:
    """The exit code; a process that does not end by itself is killed."""
    try:
        process.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdout is not None
    process.stdout.close()
    return process.returncode


def _check_arch(package: Package, device: DeviceInfo, options: JobOptions) -> None:
    if options.device != EMULATOR and device.arch != package.arch.rstrip("af"):
        raise UsageError(
            f"the candidates are for {package.arch}, the device is {device.name} ({device.arch})",
            f"tvm-fuse tune MODEL --target 'cuda -arch={device.arch}' --export-candidates DIR",
        )


def _error(code: int, message: str, hint: str) -> TvmFuseError:
    kinds = {kind.exit_code: kind for kind in (UsageError, ModelError, MissingDependency, ToolFailed)}
    return kinds.get(code, ToolFailed)(message, hint)


# --- for people --------------------------------------------------------------------------------------


def _describe(progress: _Progress, result: CandidateResult) -> str:
    task, candidate = progress.package.find(result.id)
    what = "baseline" if candidate is task.baseline else f"predicted {candidate.predicted_s * _US:.1f} us"
    found = result.error or f"{result.cost_s * _US:.1f} us"
    return f"{len(progress.results)}: {result.id} {task.name} ({what}): {found}"


def render_results(package: Package, results: Results) -> str:
    """A line for each task, and how many candidates came to what."""
    known = results.by_id
    lines = [f"{package.model} on {results.card} ({results.arch})", ""]
    lines += [f"{'kernel':<34} {'us now':>9} {'us best':>9} {'x':>6}"]
    for task in package.tasks:
        baseline = known[task.baseline.id].cost_s
        timed = [known[one.id] for one in task.candidates if known[one.id].ratio]
        best = min(timed, key=lambda one: one.ratio, default=None)
        columns = (best.cost_s * _US, 1 / best.ratio) if best else (0.0, 0.0)
        lines.append(f"{task.name[:34]:<34} {baseline * _US:>9.1f} {columns[0]:>9.1f} {columns[1]:>6.2f}")
    outcomes = [one.outcome for one in results.results]
    counts = ", ".join(f"{outcomes.count(name)} {name}" for name in dict.fromkeys(outcomes))
    note = ["the emulator's times mean nothing"] if results.is_emulated else []
    return "\n".join([*lines, "", f"{len(outcomes)} kernels in {results.seconds:.0f} s: {counts}", *note])


def main(folder: Path, argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        folder: The package.
        argv: Arguments without the program name; None takes the process's.

    Returns:
        The exit code.
    """
    args = _make_parser().parse_args(argv)
    repeats = args.repeats or (1 if args.device == EMULATOR else _REPEATS)
    silence_s = args.timeout or (300.0 if args.device == EMULATOR else JobOptions.silence_s)
    options = JobOptions(args.json, args.budget, args.device, repeats, silence_s, args.library)
    try:
        package, results = run_job(folder, options, lambda line: print(line, file=sys.stderr, flush=True))
    except TvmFuseError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"interrupted: what was measured is in {options.output}", file=sys.stderr)
        return _INTERRUPTED
    print(render_results(package, results))
    print(f"wrote {options.output}")
    return 0 if any(one.outcome == TIMED for one in results.results) else ToolFailed.exit_code


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python run.py",
        description="Check and time the candidates of this package on a GPU.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--budget", type=float, default=240.0, metavar="S", help="seconds for everything (default: 240)")
    add("--json", type=Path, default=Path("results.json"), metavar="FILE", help="results (results.json)")
    add("--device", default="0", metavar="N", help=f"number of the GPU (0), or {EMULATOR}, for a trial")
    add("--repeats", type=int, metavar="N", help=f"rounds for each candidate ({_REPEATS}; emulator: 1)")
    add("--timeout", type=float, metavar="S", help="seconds for one candidate (20; emulator: 300)")
    add("--library", default=LIBRARY, metavar="FILE", help=f"the driver ({LIBRARY})")
    return parser
