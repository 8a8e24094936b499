"""Time and memory of folding a model, in the core and as a job: ``python benchmarks/fold.py``.

``core`` folds the model in memory, from its parts to its parts: reading the graph, planning, new weights,
the edited model. ``job`` is ``fold_file``: with reading and checking the file, and saving. Memory is the most
that NumPy and Python allocated meanwhile (tracemalloc), over the bytes of the model's weights; the
weights themselves, which the model holds already, come on top.
"""

from __future__ import annotations

import statistics
import sys
import time
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.record import save_results
from examples.models import MODELS, save
from tvm_fuse.folding import fold_file
from tvm_fuse.onnx.fold import fold_parts
from tvm_fuse.onnx.parts import take_apart
from tvm_fuse.onnx.read import read_onnx

REPEATS = 7


def spread(times: list[float]) -> dict:
    return {
        "median_s": round(statistics.median(times), 3),
        "least_s": round(min(times), 3),
        "most_s": round(max(times), 3),
    }


def run_model(name: str) -> dict:
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.onnx"
        save(MODELS[name](), path)
        parts = take_apart(read_onnx(path).proto)
        weights = sum(array.nbytes for array in parts.arrays.values())
        core, job = [], []
        for _ in range(REPEATS):
            start = time.perf_counter()
            fold_parts(parts)
            core.append(time.perf_counter() - start)
            start = time.perf_counter()
            fold_file(path, Path(folder) / "folded.onnx")
            job.append(time.perf_counter() - start)
        tracemalloc.start()
        folded = fold_parts(parts)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return {
        "batch_norms": len(folded.folds),
        "weights_mb": round(weights / 1e6, 1),
        "core": spread(core),
        "job": spread(job),
        "core_peak_over_weights": round(peak / weights, 2),
    }


if __name__ == "__main__":
    save_results("fold", {name: run_model(name) for name in ("resnet50", "mobilenet_v2", "efficientnet_b0")})
