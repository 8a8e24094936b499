"""Result files: numbers together with the machine, versions, date and command that made them."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tvm_fuse.core.cpu import detect_cpu
from tvm_fuse.relay.compat import find_tvm

RESULTS = Path(__file__).resolve().parent / "results"


def describe_speedup(before: Sequence[float], after: Sequence[float]) -> dict:
    """Time before over time after, round by round: median and quartiles."""
    ratios = [one / other for one, other in zip(before, after)]
    low, _, high = np.percentile(ratios, [25, 50, 75])
    return {
        "median": round(statistics.median(ratios), 3),
        "quartile_1": round(float(low), 3),
        "quartile_3": round(float(high), 3),
        "rounds": len(ratios),
        "median_ms": [round(statistics.median(row) * 1e3, 4) for row in (before, after)],
    }


def revision() -> str:
    """What was measured: the commit, and whether the tree had changes that are in none."""
    commands = ("git", "rev-parse", "--short", "HEAD"), ("git", "status", "--porcelain", "-uno")
    head, changes = (subprocess.run(c, capture_output=True, text=True, check=True).stdout for c in commands)
    return head.strip() + (" and changes" if changes.strip() else "")


def describe_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """What a processor calls itself, with its family and model, since virtual machines hide the rest."""
    lines = (line.partition(":") for line in cpuinfo.read_text(encoding="utf-8").splitlines())
    facts: dict[str, str] = {}
    for key, _, value in lines:
        facts.setdefault(key.strip(), value.strip())
    name, family, model = (facts.get(key, "unknown") for key in ("model name", "cpu family", "model"))
    return f"{name}, family {family}, model {model}"


def save_results(
    name: str,
    results: dict,
    folder: Path = RESULTS,
    machine: Mapping[str, Any] | None = None,
    versions: Mapping[str, str] | None = None,
) -> None:
    """Write ``NAME.json``, keeping earlier results of other entries.

    Args:
        name: Of the file and of the script.
        results: What was measured.
        folder: Where the file goes.
        machine: More about it than every file has.
        versions: Of further packages.
    """
    file = folder / f"{name}.json"
    kept = json.loads(file.read_text())["results"] if file.exists() else {}
    document = {
        "command": f"python benchmarks/{name}.py {' '.join(sys.argv[1:])}".strip(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": {
            "cpu": detect_cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "system": platform.platform(),
            **(machine or {}),
        },
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "tvm": find_tvm().version,
            **(versions or {}),
        },
        "results": {**kept, **results},
    }
    folder.mkdir(exist_ok=True)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
    os.replace(temporary, file)
