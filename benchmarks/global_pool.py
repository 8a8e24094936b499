"""Our schedule for global pooling in a blocked layout against TVM's: build time and latency.

``python benchmarks/global_pool.py`` writes ``benchmarks/results/global_pool.json``.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.record import describe_speedup, save_results
from tvm_fuse.core.graph import TensorSpec
from tvm_fuse.core.inputs import make_inputs
from tvm_fuse.relay.base import relay, tvm
from tvm_fuse.relay.build import Runner, build_fused, measure
from tvm_fuse.relay.target import resolve_target

SHAPES = ((1, 4, 3, 96, 8), (1, 25, 2, 96, 8), (1, 25, 7, 7, 8), (1, 256, 7, 7, 8), (2, 80, 14, 14, 8))


def run_shape(shape: tuple[int, ...]) -> dict:
    """Build and time one global average pool both ways."""
    ours = resolve_target("llvm")
    stock = tvm.target.Target(str(ours).replace("tvm_fuse,", ""))
    data = relay.var("x", shape=shape)
    module = tvm.IRModule.from_expr(relay.Function([data], relay.nn.global_avg_pool2d(data, layout="NCHW8c")))
    inputs = make_inputs([TensorSpec("x", shape, "float32")], seed=0)
    build_s, runners = [], []
    for target in (stock, ours):
        start = time.perf_counter()
        runners.append(Runner(build_fused(module, target), target))
        build_s.append(round(time.perf_counter() - start, 2))
    for runner in runners:
        runner.run(inputs, ["y"])
    times = measure(runners, budget_s=3.0, most=5000)
    return {"build_s": {"tvm": build_s[0], "ours": build_s[1]}, "speedup": describe_speedup(*times)}


if __name__ == "__main__":
    save_results("global_pool", {"x".join(map(str, shape)): run_shape(shape) for shape in SHAPES})
