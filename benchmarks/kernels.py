"""What the CUDA kernels of whole models use, read from cubins: ``python benchmarks/kernels.py``.

No GPU is needed and none is used: registers, spills and stack are the compiler's, occupancy follows from
them, DRAM bytes count each kernel's operands and results once, and the roofline is a bound, not a
measurement: for each layer the larger of its arithmetic at the float32 peak and its data, weights and
result at the DRAM peak; for everything else its bytes.
"""

from __future__ import annotations

import sys
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.record import save_results
from examples.models import MODELS, save
from tvm_fuse.core.epsilon import EpsilonConfig
from tvm_fuse.core.graph import ANCHOR_KINDS, Graph, Node
from tvm_fuse.core.targets import DEVICES, Device
from tvm_fuse.kernels import build_model, report_kernels, resolve_cuda
from tvm_fuse.relay.audit import check_model
from tvm_fuse.relay.load import RelayModel, load_model
from tvm_fuse.relay.read import read_function

FLOAT_BYTES = 4


def count_layer(graph: Graph, anchor: Node) -> tuple[int, int]:
    """Operations (a multiply-add is two) and bytes of one layer's data, weight and result."""
    data, weight = (graph.nodes[source].output.shape for source in anchor.inputs[:2])
    result = anchor.output.shape
    operations = 2 * prod(result) * prod(weight[1:])  # OIHW or OI: all but the output channels
    return operations, FLOAT_BYTES * (prod(data) + prod(weight) + prod(result))


def bound_s(layers: list[tuple[int, int]], traffic_bytes: int, device: Device) -> float:
    """No inference can be faster than this on the device."""
    inside = sum(
        max(operations / device.fp32_flops_per_s, moved / device.dram_bytes_per_s)
        for operations, moved in layers
    )
    rest = max(0, traffic_bytes - sum(moved for _, moved in layers))
    return inside + rest / device.dram_bytes_per_s


def run_device(model: RelayModel, layers: list[tuple[int, int]], device: Device) -> dict:
    target = resolve_cuda(f"cuda -arch={device.arch}")
    build = build_model(model, target)
    kernels = report_kernels(model.name, build, target).kernels
    used = [kernel.resources for kernel in kernels]
    return {
        "arch": device.arch,
        "kernels": len(kernels),
        "launches": sum(kernel.calls for kernel in kernels),
        "most_registers": max(each.registers_per_thread for each in used),
        "spill_bytes": sum(each.spill_bytes for each in used),
        "stack_bytes": sum(each.stack_bytes for each in used),
        "least_threads_per_block": min(each.threads_per_block for each in used),
        "least_occupancy": min(each.occupancy_ratio for each in used),
        "dram_mb": round(build.artifact.traffic_bytes / 1e6, 1),
        "roofline_ms": round(1e3 * bound_s(layers, build.artifact.traffic_bytes, device), 4),
    }


def run_model(name: str) -> dict:
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.onnx"
        save(MODELS[name](), path)
        model = load_model(path, shapes={})
    graph = read_function(check_model(model, {}, EpsilonConfig(), align=False).module["main"]).graph
    layers = [count_layer(graph, anchor) for anchor in graph.of_kind(*ANCHOR_KINDS)]
    rows = {device: run_device(model, layers, DEVICES[device]) for device in ("t4", "a100", "h200")}
    return {"giga_operations": round(sum(layer[0] for layer in layers) / 1e9, 2), **rows}


if __name__ == "__main__":
    for name in sys.argv[1:] or ("resnet50", "mobilenet_v2", "efficientnet_b0"):
        save_results("kernels", {name: run_model(name)})
