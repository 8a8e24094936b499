"""tvm-fuse on a CPU beside ONNX Runtime, OpenVINO and TVM alone, and the share that fusion has in it.

``make bench`` installs OpenVINO and runs this script, which writes ``benchmarks/results/cpu.json``, then
``profile_cpu.py``, and ``cpu_pages.py``, which shows what both wrote.

All forms (``cpu_forms.py``) are built first, then timed in turn (``interleave.py``): for each number of
threads and images one process, since TVM's pool of threads is made once in a process, and in it all forms of
one model after the other. The machine should do nothing else; its load before the run is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cpu_pages import STOCK
from benchmarks.interleave import Timed, describe_saving, describe_speedup, describe_times, run_rounds
from benchmarks.record import RESULTS, describe_cpu, revision, save_results
from tvm_fuse.core.cpu import read_cpu

NAMES = ("resnet50", "mobilenet_v2", "efficientnet_b0")
BATCHES = (1, 8)
OURS = "tvm_fuse"
OTHERS = ("onnxruntime", "openvino", *STOCK)
APART = ("folded_apart", "unfolded_apart")


def describe(name: str, batch: int, threads: int, timed: Timed) -> dict:
    """One row of the results, from the times of all forms."""
    times = timed.times
    return {
        "model": name,
        "batch": batch,
        "threads": threads,
        "rounds": len(times[OURS]),
        "rounds_left_out": timed.left_out,
        "others_percent": timed.others_percent,
        "ms": {form: describe_times(turns) for form, turns in times.items()},
        "speedup_of_tvm_fuse": {form: describe_speedup(times, form, OURS) for form in OTHERS},
        "saved_by_fusion_percent": {form: describe_saving(times, form, OURS) for form in APART},
    }


def measure(folder: Path, names: Sequence[str], batch: int, threads: int, budget_s: float) -> Iterable[dict]:
    """Time the models that ``build`` left in a folder."""
    from benchmarks.cpu_forms import open_forms

    for name in names:
        contestants = open_forms(folder, name, batch, threads)
        yield describe(name, batch, threads, run_rounds(contestants, budget_s))


def build(folder: Path, names: Sequence[str], batches: Sequence[int], threads: Sequence[int]) -> None:
    """Build all forms, as many models at a time as there are cores; large batches first."""
    waiting = [(batch, name) for batch in sorted(batches, reverse=True) for name in names]
    running: list[subprocess.Popen] = []
    while waiting or running:
        while waiting and len(running) < read_cpu().cores:
            batch, name = waiting.pop(0)
            tell(f"building {name}, batch {batch}")
            words = ("--build", name, "--batch", batch, "--threads", *threads)
            running.append(subprocess.Popen(command(folder, *words), env=environment(1)))
        time.sleep(0.2)
        if any(process.poll() for process in running):
            for process in running:
                process.kill()
            raise SystemExit("a model could not be built")
        running = [process for process in running if process.poll() is None]


def command(folder: Path, *words: object) -> list[str]:
    """This script as a process of its own."""
    return [sys.executable, __file__, "--folder", str(folder), *map(str, words)]


def environment(threads: int) -> dict[str, str]:
    """TVM reads the number of its threads when it makes them; nobody else's is left to chance either."""
    return {**os.environ, "TVM_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}


def tell(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def run_all(args: argparse.Namespace) -> None:
    """Build, measure and save."""
    missing = [name for name in ("onnxruntime", "openvino") if find_spec(name) is None]
    if missing:
        raise SystemExit(f"{', '.join(missing)} is not installed: `make bench` does that")
    start, load, rows = time.time(), os.getloadavg(), []
    with TemporaryDirectory() as temporary:
        folder = Path(args.folder or temporary)
        if not args.reuse:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            build(folder, args.models, args.batch, args.threads)
        for batch in args.batch:
            for threads in args.threads:
                tell(f"measuring batch {batch}, {threads} thread(s)")
                words = ("--measure", *args.models, "--batch", batch, "--threads", threads)
                words += ("--budget", args.budget)
                done = subprocess.run(
                    command(folder, *words), env=environment(threads), stdout=subprocess.PIPE, check=True
                )
                rows += [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{")]
    machine = {
        "model": describe_cpu(),
        "tvm_default_threads": max(1, (os.cpu_count() or 2) // 2),
        "load_average_before": [round(value, 2) for value in load],
    }
    results = {
        "revision": revision(),
        "seconds": round(time.time() - start),
        "rows": rows,
    }
    versions = {name: version(name) for name in ("onnxruntime", "openvino")}
    save_results("cpu", results, args.out, machine, versions)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; ``--build`` and ``--measure`` are what this script starts itself with."""
    cores = read_cpu().cores
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(NAMES)}; all if none")
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES, metavar="N")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, cores}), metavar="N")
    parser.add_argument("--budget", type=float, default=20.0, metavar="S", help="seconds for a model; 20")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where cpu.json goes")
    parser.add_argument("--folder", type=Path, help="keep what is built there")
    parser.add_argument("--reuse", action="store_true", help="take what is in --folder")
    parser.add_argument("--build", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("--measure", nargs="+", metavar="MODEL", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    args.models = args.models or list(NAMES)
    unknown = set(args.models) - set(NAMES)
    if unknown:
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    return args


def main() -> None:
    """Do what the command line says."""
    args = parse()
    if args.build:
        from benchmarks.cpu_forms import build_forms

        build_forms(args.folder, args.build, args.batch[0], tuple(args.threads))
    elif args.measure:
        (batch,), (threads,) = args.batch, args.threads
        for row in measure(args.folder, args.measure, batch, threads, args.budget):
            print(json.dumps(row), flush=True)
    else:
        run_all(args)


if __name__ == "__main__":
    main()
