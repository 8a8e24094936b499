"""Where the time of a fused model goes on a CPU, kernel by kernel.

``python benchmarks/profile_cpu.py [MODEL ...]`` writes ``benchmarks/results/profile_cpu.json``, which
``cpu_pages.py`` shows in docs/cpu.md. Kernels are timed one after the other as an inference calls them,
with what the one before left in the caches; the median of many inferences counts. Operations are those of
the operators: a convolution by Winograd's algorithm does fewer, so it may be above the peak. Bytes are
every operand and result once. The peak is measured in the same process, before every model and after it
(``peak.py``), and the best one counts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cpu import NAMES
from benchmarks.interleave import read_others_s
from benchmarks.record import RESULTS, describe_cpu, revision, save_results
from tvm_fuse.core.cpu import read_cpu

_WARM = 5


def group_kernels(calls: Sequence[dict], total_s: float, peak_flops_per_s: float) -> list[dict]:
    """Put calls of equal code together, those that take most time first.

    Args:
        calls: ``name``, ``what``, ``seconds``, ``flops`` and ``bytes`` of each.
        total_s: What shares are of.
        peak_flops_per_s: What rates are percentages of.
    """
    groups: dict[str, list[dict]] = {}
    for call in calls:
        groups.setdefault(call["name"], []).append(call)
    rows = []
    for name, members in groups.items():
        seconds, flops, moved = (sum(call[key] for call in members) for key in ("seconds", "flops", "bytes"))
        rows.append(
            {
                "name": name,
                "what": members[0]["what"],
                "calls": len(members),
                "ms": round(1e3 * seconds, 4),
                "share_percent": round(100 * seconds / total_s, 2),
                "gflop_per_s": round(flops / seconds / 1e9, 2),
                "peak_percent": round(100 * flops / seconds / peak_flops_per_s, 1),
                "gb_per_s": round(moved / seconds / 1e9, 2),
            }
        )
    return sorted(rows, key=lambda row: -row["ms"])


def profile_model(name: str, batch: int, threads: int, rounds: int) -> dict[str, Any]:
    """Build one model and time its calls."""
    from benchmarks.cpu_forms import make_image, target_of
    from benchmarks.kernel_work import WorkRecorder
    from benchmarks.peak import Peak
    from examples.models import MODELS, save
    from tvm_fuse.relay.build import build_fused
    from tvm_fuse.relay.fuse import FuseOptions, fuse_model
    from tvm_fuse.relay.load import load_model

    target = target_of(threads)
    with TemporaryDirectory() as folder:
        file = Path(folder, f"{name}.onnx")
        save(MODELS[name](batch=batch), file)
        fused = fuse_model(load_model(file, shapes={}), target, FuseOptions(records=None))
        recorder = WorkRecorder()
        artifact = build_fused(fused.module, target, [recorder])
        profile = _open_profiler(artifact, make_image(batch), folder)
        peak = Peak(target)
        peaks = [peak.measure()]
        start, others = time.perf_counter(), read_others_s()
        profiles = [profile() for _ in range(_WARM + rounds)][_WARM:]
        share = (read_others_s() - others) / (time.perf_counter() - start) / read_cpu().cores
        peaks.append(peak.measure())
    if [call["name"] for call in profiles[0]] != [call.function for call in artifact.calls]:
        raise SystemExit(f"{name}: the profile does not have the calls of the graph")
    calls = []
    for index, call in enumerate(artifact.calls):
        work = recorder.work[call.function]
        seconds = statistics.median(one[index]["seconds"] for one in profiles)
        moved = call.bytes_read + call.bytes_written
        calls.append(
            {
                "name": call.function,
                "what": work.what,
                "seconds": seconds,
                "flops": work.flops,
                "bytes": moved,
            }
        )
    return {"peak": max(peaks), "calls": calls, "others_percent": max(0.0, round(100 * share, 1))}


def _open_profiler(artifact: Any, image: Any, folder: str) -> Callable[[], list[dict]]:
    """What runs one inference, and returns the name and the seconds of each call."""
    from tvm.contrib.debugger import debug_executor

    from benchmarks.cpu_forms import INPUT
    from tvm_fuse.relay.base import tvm

    library = artifact.library
    module = debug_executor.create(library.get_graph_json(), library.get_lib(), tvm.cpu(0), dump_root=folder)
    module.load_params(tvm.runtime.save_param_dict(library.get_params()))
    module.set_input(INPUT, image)
    return lambda: [
        {"name": str(call["Name"]), "seconds": 1e-6 * call["Duration (us)"].microseconds}
        for call in module.profile().calls
    ]


def main() -> None:
    """Profile and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(NAMES)}; all if none")
    parser.add_argument("--batch", type=int, default=1, metavar="N")
    parser.add_argument("--threads", type=int, default=read_cpu().cores, metavar="N")
    parser.add_argument("--rounds", type=int, default=60, metavar="N", help="inferences; 60")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where the file goes")
    args = parser.parse_args()
    load, start = os.getloadavg(), time.time()
    os.environ["TVM_NUM_THREADS"] = str(args.threads)
    profiles = {
        name: profile_model(name, args.batch, args.threads, args.rounds) for name in args.models or NAMES
    }
    peak = max(profile["peak"] for profile in profiles.values())
    models = {}
    for name, profile in profiles.items():
        total_s = sum(call["seconds"] for call in profile["calls"])
        flops = sum(call["flops"] for call in profile["calls"])
        models[name] = {
            "ms": round(1e3 * total_s, 4),
            "gflop_per_s": round(flops / total_s / 1e9, 2),
            "others_percent": profile["others_percent"],
            "kernels": group_kernels(profile["calls"], total_s, peak),
        }
    results = {
        "revision": revision(),
        "seconds": round(time.time() - start),
        "batch": args.batch,
        "threads": args.threads,
        "peak_gflop_per_s": round(peak / 1e9, 1),
        "models": models,
    }
    machine = {"model": describe_cpu(), "load_average_before": [round(value, 2) for value in load]}
    save_results("profile_cpu", results, args.out, machine)


if __name__ == "__main__":
    main()
