"""Kernel launches and DRAM bytes of an inference: ours, and TVM's opt_level 2 and 3.

``python benchmarks/launches.py [--ours] [NAME ...]`` writes ``benchmarks/results/launches.json``; a few
minutes a model, no GPU; ``--ours`` keeps TVM's columns, which take most of them. Launches are calls of
``__global__`` functions: the graph's operators, each with as many kernels as its host function launches.
Bytes count each operator's operands and results once; what an operator keeps between its own kernels is left
out, on both sides.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.record import RESULTS, revision, save_results
from examples.models import MODELS, save
from tvm_fuse.relay.base import relay, tvm
from tvm_fuse.relay.build import KernelCall, read_calls
from tvm_fuse.relay.cuda_hook import cuda_compilation
from tvm_fuse.relay.fuse import fuse_model
from tvm_fuse.relay.kernels import SplitRecorder, build_kernels, read_callers
from tvm_fuse.relay.load import RelayModel, load_model
from tvm_fuse.relay.target import resolve_target

TARGET = "cuda -arch=sm_80"
STOCK_LEVELS = (2, 3)
#: A block of every kind that the models are made of, small enough for a test.
SMALL = """#[version = "0.0.5"]
def @main(%x: Tensor[(1, 8, 16, 16), float32], %w1: Tensor[(16, 8, 1, 1), float32],
          %w2: Tensor[(16, 1, 3, 3), float32], %w3: Tensor[(4, 16, 1, 1), float32],
          %w4: Tensor[(16, 4, 1, 1), float32], %w5: Tensor[(8, 16, 1, 1), float32]) {
  %0 = nn.conv2d(%x, %w1, channels=16, kernel_size=[1, 1]);
  %1 = multiply(%0, sigmoid(%0));
  %2 = nn.conv2d(%1, %w2, padding=[1, 1, 1, 1], groups=16, channels=16, kernel_size=[3, 3]);
  %3 = multiply(%2, sigmoid(%2));
  %4 = nn.global_avg_pool2d(%3);
  %5 = nn.relu(nn.conv2d(%4, %w3, channels=4, kernel_size=[1, 1]));
  %6 = sigmoid(nn.conv2d(%5, %w4, channels=16, kernel_size=[1, 1]));
  %7 = nn.conv2d(multiply(%3, %6), %w5, channels=8, kernel_size=[1, 1]);
  add(%7, %x)
}
"""


def count_ours(model: RelayModel, target: Any) -> dict:
    """Launches and bytes of what ``tvm-fuse run`` builds."""
    build = build_kernels(fuse_model(model, target).module, target)
    return describe(build.artifact.calls, sum(build.calls.values()))


def count_stock(model: RelayModel, target: Any, opt_level: int) -> dict:
    """Launches and bytes of TVM alone, with its own schedules."""
    recorder = SplitRecorder()
    context = tvm.transform.PassContext(opt_level=opt_level, instruments=[recorder])
    with cuda_compilation(target), context:
        library = relay.build(model.module, target=target)
    calls = read_calls(library.get_graph_json())
    called = Counter(call.function for call in calls)
    launches = sum(called[caller] for caller in read_callers(recorder.modules).values())
    return describe(calls, launches)


def describe(calls: tuple[KernelCall, ...], launches: int) -> dict:
    """One form of a model; an operator of the built graph may launch several kernels."""
    moved = sum(call.bytes_read + call.bytes_written for call in calls)
    return {"operators": len(calls), "launches": launches, "dram_bytes": moved}


def count_stock_levels(model: RelayModel) -> dict:
    """TVM's part of a row."""
    stock = resolve_target(f"{TARGET} -keys=cuda,gpu")
    return {f"tvm_opt_level_{level}": count_stock(model, stock, level) for level in STOCK_LEVELS}


def load(name: str) -> RelayModel:
    """One of the example models at batch 1, or the small block."""
    with TemporaryDirectory() as folder:
        if name == "small":
            path = Path(folder, "small.relay")
            path.write_text(SMALL)
        else:
            path = Path(folder, f"{name}.onnx")
            save(MODELS[name](), path)
        return load_model(path, shapes={})


def make_table(results: dict) -> str:
    """The results in Markdown, for docs/strategy.md."""
    forms = ("tvm_fuse", *(f"tvm_opt_level_{level}" for level in STOCK_LEVELS))
    heads = ("tvm-fuse", *(f"TVM opt_level {level}" for level in STOCK_LEVELS))
    lines = [f"| model | {' | '.join(heads)} |", f"| --- |{' --- |' * len(heads)}"]
    for name, row in results.items():
        cells = (
            f"{row[form]['launches']} ({row[form]['operators']}), {row[form]['dram_bytes'] / 1e6:.2f} MB"
            for form in forms
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def saved() -> dict:
    """The results so far."""
    return json.loads((RESULTS / "launches.json").read_text())["results"]


def main(names: list[str], *, only_ours: bool) -> None:
    """Count, save and print."""
    for name in names or ["small", *MODELS]:
        model = load(name)
        counted = {"tvm_fuse": count_ours(model, resolve_target(TARGET)), "revision": revision()}
        stock = saved()[name] if only_ours else count_stock_levels(model)
        save_results("launches", {name: {**stock, **counted}})
    print(make_table(saved()))


if __name__ == "__main__":
    main([name for name in sys.argv[1:] if name != "--ours"], only_ours="--ours" in sys.argv)
