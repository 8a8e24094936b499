"""Groups that need too many registers, and what becomes of them: ``python benchmarks/register_split.py``.

Writes ``benchmarks/results/register_split.json``: for three artificial groups what ptxas says of the whole,
of its anchor alone or of each cut that was tried, and which one the plan has; for the example models, how
many groups are suspicious and were compiled for it. No GPU is used.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.record import save_results
from examples.models import MODELS, save
from tvm_fuse.core.epsilon import EpsilonConfig
from tvm_fuse.cuda.nvrtc import load_nvrtc
from tvm_fuse.relay.audit import check_model
from tvm_fuse.relay.base import relay, tvm
from tvm_fuse.relay.fold_pass import fold_batch_norms
from tvm_fuse.relay.layout_pass import decide_layout
from tvm_fuse.relay.load import load_model
from tvm_fuse.relay.partition_pass import partition_chains
from tvm_fuse.relay.registers import SplitCandidate, SplitRecord, split_spilling_groups
from tvm_fuse.relay.target import resolve_target

ARCHS = ("sm_75", "sm_80", "sm_90")


def make_activations() -> tvm.IRModule:
    """A 3x3 convolution of 64 channels and seven times ``x * sigmoid(x)`` after it."""
    data, weight = relay.var("x", shape=(1, 64, 56, 56)), relay.var("w", shape=(64, 64, 3, 3))
    value = relay.nn.conv2d(data, weight, padding=1, channels=64, kernel_size=3)
    for _ in range(7):
        value = relay.multiply(value, relay.sigmoid(value))
    return _module([data, weight], value)


def make_sum() -> tvm.IRModule:
    """The sum of twelve tensors and a 1x1 convolution, 256 to 16 channels, with a relu."""
    data = [relay.var(f"x{index}", shape=(1, 256, 56, 56)) for index in range(12)]
    weight = relay.var("w", shape=(16, 256, 1, 1))
    value = data[0]
    for other in data[1:]:
        value = relay.add(value, other)
    value = relay.nn.relu(relay.nn.conv2d(value, weight, channels=16, kernel_size=1))
    return _module([*data, weight], value)


def make_sweeps() -> tvm.IRModule:
    """``y = relu(y + x)`` for 64 tensors from the first to the last, and back: all are needed twice."""
    data = [relay.var(f"x{index}", shape=(1, 64, 56, 56)) for index in range(64)]
    value = data[0]
    for other in (*data[1:], *reversed(data)):
        value = relay.nn.relu(relay.add(value, other))
    return _module(data, value)


def _module(inputs: list, value: relay.Expr) -> tvm.IRModule:
    return relay.transform.InferType()(tvm.IRModule.from_expr(relay.Function(inputs, value)))


GROUPS = {"activations": make_activations, "sum": make_sum, "sweeps": make_sweeps}


def look_at(module: tvm.IRModule, arch: str) -> tuple[int, tuple[SplitRecord, ...]]:
    """Groups of a module in its final layout, and what was found about those that were compiled."""
    target, found = resolve_target(f"cuda -arch={arch}"), []

    def refine(read, plan):
        refined, records = split_spilling_groups(read, plan, target)
        found.append((len(plan.groups), records))
        return refined

    partition_chains(module, target, refine=refine)
    ((groups, records),) = found
    return groups, records


def describe(candidate: SplitCandidate) -> dict:
    """One way to make kernels of the chain, with ptxas' figures."""
    return {
        "kernels": [
            {
                "group": group.name,
                "registers": kernel.registers_per_thread,
                "spill_store_bytes": kernel.spill_store_bytes,
                "spill_load_bytes": kernel.spill_load_bytes,
                "stack_bytes": kernel.stack_bytes,
                "threads": kernel.threads_per_block,
                "occupancy": round(kernel.occupancy_ratio, 3),
            }
            for group, kernel in zip(candidate.groups, candidate.kernels)
        ],
        "extra_dram_bytes": candidate.extra_bytes,
    }


def run_group(name: str, arch: str) -> dict:
    """An artificial group on one architecture."""
    module = decide_layout(GROUPS[name](), resolve_target(f"cuda -arch={arch}"))
    _, (record,) = look_at(module, arch)
    return {
        "whole": describe(record.candidates[0]),
        "tried": [describe(candidate) for candidate in record.candidates[1:]],
        "chosen": record.chosen,
        "decision": str(record.decision),
    }


def run_model(name: str) -> dict:
    """How many groups of a model are compiled for their registers."""
    with TemporaryDirectory() as folder:
        path = Path(folder, f"{name}.onnx")
        save(MODELS[name](), path)
        model = load_model(path, shapes={})
    folded = fold_batch_norms(check_model(model, {}, EpsilonConfig(), align=False).module)
    module = decide_layout(folded, resolve_target(f"cuda -arch={ARCHS[1]}"))
    groups, records = look_at(module, ARCHS[1])
    return {"groups": groups, "compiled": len(records)}


if __name__ == "__main__":
    rows = {name: {arch: run_group(name, arch) for arch in ARCHS} for name in GROUPS}
    save_results("register_split", {"compiler": str(load_nvrtc()), "groups": rows})
    save_results("register_split", {"models": {name: run_model(name) for name in MODELS}})
