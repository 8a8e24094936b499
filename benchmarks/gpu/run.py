"""Check and time a suite on a GPU: ``python benchmarks/gpu/run.py FOLDER --out RESULTS.json``.

Needs Python, NumPy, the NVIDIA driver and what ``prepare.py`` wrote; PyTorch where it is there. Each job
runs in a process of its own, and its results are on disk before the next one begins.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.schedule import Outcome, Record, run_jobs
from benchmarks.gpu.suite import ARCHIVE, Job, plan_jobs, unpack
from benchmarks.gpu.table import render
from tvm_fuse.runner.driver import LIBRARY
from tvm_fuse.runner.run import EMULATOR

ROOT = Path(__file__).resolve().parents[2]

SCHEMA = {"name": "tvm-fuse/gpu-benchmark", "version": 1}

MOST_BYTES = 1_000_000  # of the results
_MOST_LINES = 6  # of what a process that died has said

_SMI_FIELDS = "name driver_version clocks.sm clocks.mem clocks.max.sm power.limit temperature.gpu".split()

_NOTES = [
    "times are between CUDA events on one stream; nothing is copied to or from the GPU meanwhile",
    "caches are not flushed between executions: what fits stays in L2",
    "ratios are of one round's times, form over fused; above 1 the form takes longer",
    "clocks are not locked",
    "weights are drawn from a seed; each form is checked against its own reference on the CPU",
]


@dataclass(frozen=True)
class Executor:
    """Runs jobs as processes.

    Args:
        suite: Folder of the suite.
        device: Number of the GPU, or ``emulator``.
        rounds: Rounds of a comparison, at the most.
        measure_s: How long a comparison measures, about.
        library: The driver.
    """

    suite: Path
    device: str
    rounds: int
    measure_s: float
    library: str = LIBRARY

    def __call__(self, job: Job, limit_s: float) -> Outcome:
        """Run a job; it and all that it started are stopped after ``limit_s``."""
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            request, result = Path(scratch) / "request.json", Path(scratch) / "result.json"
            request.write_text(json.dumps(self._request(job)), encoding="utf-8")
            command = [
                sys.executable,
                str(ROOT / "benchmarks" / "gpu" / "worker.py"),
                str(request),
                str(result),
            ]
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
            )
            try:
                _, said = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                error = {"error": f"stopped after {limit_s:.0f} s"}
                return Outcome(error, time.monotonic() - start, timed_out=True)
            found = json.loads(result.read_text()) if result.exists() else _died(process.returncode, said)
        return Outcome(found, time.monotonic() - start)

    def _request(self, job: Job) -> dict[str, Any]:
        fields = {name: value for name, value in asdict(self).items() if name != "suite"}
        entries = [asdict(entry) for entry in job.entries]
        return {
            "kind": job.kind,
            "compiles": job.compiles,
            "entries": entries,
            "suite": str(self.suite),
            **fields,
        }


def _died(code: int, said: str) -> dict[str, Any]:
    how = f"died of signal {-code}" if code < 0 else f"ended with code {code}"
    return {"error": "\n".join([f"the process {how}", *said.strip().splitlines()[-_MOST_LINES:]])}


# --- what the results say of themselves ------------------------------------------------------


def read_revision() -> str:
    """The commit of the clone, with a + where files differ from it; nothing outside a clone."""
    git = ["git", "-C", str(ROOT)]
    commit, changes = (
        subprocess.run([*git, *command], capture_output=True, text=True, check=False)
        if shutil.which("git")
        else None
        for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    )
    if commit is None or changes is None or commit.returncode != 0:
        return ""
    return commit.stdout.strip() + ("+" if changes.stdout.strip() else "")


def read_smi(device: str) -> dict[str, str]:
    """What nvidia-smi says of a GPU, where it is there."""
    if device == EMULATOR or not shutil.which("nvidia-smi"):
        return {}
    query = ["nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader", f"--id={device}"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
    except subprocess.TimeoutExpired:
        return {}
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(_SMI_FIELDS, values)) if done.returncode == 0 and len(values) == len(_SMI_FIELDS) else {}


def describe_machine(device: str) -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "gpu_before": read_smi(device),
    }


def save(file: Path, document: Mapping[str, Any]) -> None:
    """Write the results; the file is whole at any time.

    Raises:
        ValueError: They are too large to be kept.
    """
    text = json.dumps(document, indent=1) + "\n"
    if len(text) > MOST_BYTES:
        raise ValueError(f"{file}: {len(text)} bytes of results; wanted {MOST_BYTES} at the most")
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".tmp")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, file)


# --- the command -----------------------------------------------------------------------------


def choose_jobs(
    jobs: Sequence[Job], pattern: str, has_torch: bool
) -> tuple[list[Job], list[tuple[Job, str]]]:
    """The jobs to run, and those not to, each with the reason."""
    chosen, left_out = [], []
    for job in jobs:
        entries = tuple(entry for entry in job.entries if has_torch or entry.form != "torch")
        if not fnmatch.fnmatch(job.name, pattern):
            left_out.append((job, f"--only {pattern}"))
        elif len(entries) < min(2, len(job.entries)):
            left_out.append((job, "PyTorch is not installed"))
        else:
            if len(entries) < len(job.entries):
                left_out.append((replace(job, name=f"torch of {job.name!r}"), "PyTorch is not installed"))
            chosen.append(replace(job, entries=entries))
    return chosen, left_out


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite; the exit code is 1 when something failed or is wrong."""
    args = make_parser().parse_args(argv)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tvm_fuse_gpu_") as scratch:
        about, entries = unpack(args.folder / ARCHIVE, Path(scratch))
        has_torch = importlib.util.find_spec("torch") is not None
        jobs, left_out = choose_jobs(plan_jobs(entries), args.only, has_torch)
        if args.device == EMULATOR:  # limits are for GPUs
            jobs = [replace(job, limit_s=args.budget) for job in jobs]
        document = {
            "schema": SCHEMA,
            "command": " ".join(["python benchmarks/gpu/run.py", *(sys.argv[1:] if argv is None else argv)]),
            "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "revision": read_revision(),
            "suite": about,
            "is_emulated": args.device == EMULATOR,
            "machine": describe_machine(args.device),
            "budget_s": args.budget,
            "notes": _NOTES,
        }

        def keep(record: Record) -> None:
            skipped = [{"name": job.name, "why": why} for job, why in left_out]
            state = {"jobs": record.jobs, "not_measured": [*record.not_measured, *skipped]}
            save(args.out, {**document, "seconds": round(time.monotonic() - start, 1), **state})

        def say(record: Record) -> None:
            keep(record)
            for name, status in record.take_news():
                print(f"{time.monotonic() - start:6.0f} s  {status:<12} {name}", flush=True)

        execute = Executor(Path(scratch), args.device, args.rounds, args.measure, args.library)
        record = run_jobs(jobs, execute, args.budget - (time.monotonic() - start), say)
        document["machine"]["gpu_after"] = read_smi(args.device)
        keep(record)
    args.out.with_suffix(".md").write_text(render(json.loads(args.out.read_text())), encoding="utf-8")
    for name in record.failures:
        print(f"failed: {name}", file=sys.stderr)
    return 1 if record.failures or not record.jobs else 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Check and time what benchmarks/gpu/prepare.py wrote.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help=f"with {ARCHIVE}")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu.json", metavar="FILE",
        help="results; a table goes beside them (default: benchmarks/results/gpu.json)",
    )  # fmt: skip
    parser.add_argument(
        "--device", default="0", metavar="N", help=f"number of the GPU (default: 0), or {EMULATOR}"
    )
    parser.add_argument("--budget", type=_seconds, default=540.0, metavar="540s", help="time for all of it")
    parser.add_argument(
        "--only", default="*", metavar="PATTERN", help="jobs whose name fits, such as 'check *'"
    )
    parser.add_argument(
        "--rounds", type=int, default=50, metavar="N", help="of a comparison, at the most (50)"
    )
    parser.add_argument(
        "--measure", type=_seconds, default=8.0, metavar="8s", help="time that one measures, about"
    )
    parser.add_argument("--library", default=LIBRARY, help=argparse.SUPPRESS)
    return parser


def _seconds(text: str) -> float:
    return float(text[:-1] if text.endswith("s") else text)


if __name__ == "__main__":
    sys.exit(main())
