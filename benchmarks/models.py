"""What fusion buys on whole models: unfused, TVM's own opt_level 3, and tvm-fuse.

``python benchmarks/models.py [NAME ...]`` writes ``benchmarks/results/models.json``; about five minutes
a model, most of it TVM's own build.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.record import describe_speedup, save_results
from examples.models import MODELS, save
from tvm_fuse.core.inputs import make_inputs
from tvm_fuse.relay.base import relay, tvm
from tvm_fuse.relay.build import (
    Artifact,
    Runner,
    build_fused,
    build_unfused,
    measure,
    read_calls,
)
from tvm_fuse.relay.fold_pass import fold_batch_norms
from tvm_fuse.relay.layout_pass import decide_layout
from tvm_fuse.relay.load import load_model
from tvm_fuse.relay.partition_pass import partition_chains
from tvm_fuse.relay.target import resolve_target

BUDGET_S = 60.0


def build_stock(module: tvm.IRModule, target: tvm.target.Target) -> Artifact:
    """TVM's own best effort: every pass of opt_level 3, its own schedules."""
    plain = tvm.target.Target(str(target).replace("tvm_fuse,", ""))
    with tvm.transform.PassContext(opt_level=3):
        library = relay.build(module, target=plain)
    return Artifact(library, read_calls(library.get_graph_json()))


def build_ours(module: tvm.IRModule, target: tvm.target.Target) -> Artifact:
    """Fold, decide layouts, group, build."""
    return build_fused(partition_chains(decide_layout(fold_batch_norms(module), target)), target)


def run_model(name: str) -> dict:
    """Build the three forms of one model and time them in turn."""
    target = resolve_target("llvm")
    with TemporaryDirectory() as folder:
        file = Path(folder, f"{name}.onnx")
        save(MODELS[name](), file)
        model = load_model(file, shapes={})
    builders = {"unfused": build_unfused, "tvm_opt_level_3": build_stock, "tvm_fuse": build_ours}
    rows, runners = {}, []
    for form, build in builders.items():
        start = time.perf_counter()
        artifact = build(model.module, target)
        runners.append(Runner(artifact, target))
        rows[form] = {
            "kernels": len(artifact.calls),
            "traffic_mb_estimated": round(artifact.traffic_bytes / 1e6, 1),
            "build_s": round(time.perf_counter() - start, 1),
        }
    inputs = make_inputs(model.inputs, seed=0)
    for runner in runners:
        runner.run(inputs, model.outputs)
    times = measure(runners, budget_s=BUDGET_S, most=300)
    for form, row in zip(builders, times):
        rows[form]["speedup_of_tvm_fuse"] = describe_speedup(row, times[-1])
    return rows


def main(names: list[str]) -> None:
    """Run and save."""
    results = {name: run_model(name) for name in names or list(MODELS)}
    save_results("models", results)


if __name__ == "__main__":
    main(sys.argv[1:])
