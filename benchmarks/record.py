"""Result files: numbers together with the machine, versions, date and command that made them."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

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


def save_results(name: str, results: dict) -> None:
    """Write ``results/NAME.json``, keeping earlier results of other entries."""
    file = RESULTS / f"{name}.json"
    kept = json.loads(file.read_text())["results"] if file.exists() else {}
    document = {
        "command": f"python benchmarks/{name}.py {' '.join(sys.argv[1:])}".strip(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": {
            "cpu": detect_cpu(),
            "cores": len(os.sched_getaffinity(0)),
            "system": platform.platform(),
        },
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "tvm": find_tvm().version},
        "results": {**kept, **results},
    }
    RESULTS.mkdir(exist_ok=True)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
    os.replace(temporary, file)
