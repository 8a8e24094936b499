"""Kernel launches with layers side by side combined, and apart, on CUDA.

``python benchmarks/horizontal.py`` writes ``benchmarks/results/horizontal.json``; half a minute, no GPU.
Counted as in ``launches.py``: of the built graph, once with ``FuseOptions(combine=False)`` and once with the
cost model's choice.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.launches import TARGET
from benchmarks.record import RESULTS, save_results
from tvm_fuse.core.accept import accept_on, compare_extension
from tvm_fuse.core.graph import Graph, TensorSpec
from tvm_fuse.core.plan_options import Candidate, Extension, PlanOptions
from tvm_fuse.core.reason import Reason
from tvm_fuse.core.targets import DEVICES
from tvm_fuse.relay.base import relay, tvm
from tvm_fuse.relay.combine_pass import combine_parallel
from tvm_fuse.relay.fuse import FuseOptions, fuse_model
from tvm_fuse.relay.kernels import build_kernels
from tvm_fuse.relay.load import RelayModel
from tvm_fuse.relay.target import resolve_target

_RNG = np.random.default_rng(0)


def constant(*shape: int) -> Any:
    """Weights of about one over the square root of what is summed."""
    fan_in = int(np.prod(shape[1:]))
    return relay.const((_RNG.normal(size=shape) / np.sqrt(fan_in)).astype("float32"))


# --- a transformer encoder -------------------------------------------------------------------------


def encoder(layers: int = 2, length: int = 128, width: int = 256, heads: int = 4) -> Any:
    """Layers as BERT has them: attention, two layer norms, a hidden layer of four times the width."""
    x = start = relay.var("x", shape=(length, width))
    for _ in range(layers):
        x = normalize(relay.add(x, attend(x, length, width, heads)), width)
        hidden = gelu(linear(x, width, 4 * width))
        x = normalize(relay.add(x, linear(hidden, 4 * width, width)), width)
    return relay.Function([start], x)


def attend(x: Any, length: int, width: int, heads: int) -> Any:
    """Attention of every head, and the layer after it."""
    size = width // heads
    query, key, value = (
        relay.transpose(relay.reshape(linear(x, width, width), (length, heads, size)), axes)
        for axes in ((1, 0, 2), (1, 0, 2), (1, 2, 0))
    )
    scores = relay.multiply(relay.nn.batch_matmul(query, key), relay.const(size**-0.5))
    mixed = relay.nn.batch_matmul(relay.nn.softmax(scores), value)
    return linear(relay.reshape(relay.transpose(mixed, (1, 0, 2)), (length, width)), width, width)


def linear(x: Any, size: int, out: int) -> Any:
    """A dense layer with a bias."""
    return relay.add(relay.nn.dense(x, constant(out, size)), constant(out))


def normalize(x: Any, width: int) -> Any:
    """A layer norm."""
    ones = relay.const(np.ones(width, "float32"))
    return relay.nn.layer_norm(x, ones, constant(width))


def gelu(x: Any) -> Any:
    """Half of x times one and the error function."""
    spread = relay.erf(relay.multiply(x, relay.const(0.5**0.5)))
    return relay.multiply(relay.multiply(x, relay.const(0.5)), relay.add(spread, relay.const(1.0)))


# --- blocks of convolutional nets ------------------------------------------------------------------


def layer(x: Any, size: int, out: int, kernel: int = 1) -> Any:
    """A convolution that keeps the image size, a bias and relu."""
    weight = constant(out, size, kernel, kernel)
    y = relay.nn.conv2d(
        x, weight, channels=out, kernel_size=(kernel, kernel), padding=(kernel // 2, kernel // 2)
    )
    return relay.nn.relu(relay.nn.bias_add(y, constant(out)))


def inception() -> Any:
    """Block 3a of GoogLeNet (Szegedy et al., 2015, table 1)."""
    x = relay.var("x", shape=(1, 192, 28, 28))
    pooled = relay.nn.max_pool2d(x, (3, 3), (1, 1), padding=(1, 1))
    branches = [
        layer(x, 192, 64),
        layer(layer(x, 192, 96), 96, 128, 3),
        layer(layer(x, 192, 16), 16, 32, 5),
        layer(pooled, 192, 32),
    ]
    return relay.Function([x], relay.concatenate(branches, 1))


def downsample() -> Any:
    """The first block of ResNet-50's first stage: the shortcut is a layer beside the first one."""
    x = relay.var("x", shape=(1, 64, 56, 56))
    weight, bias = constant(256, 64, 1, 1), constant(256)
    shortcut = relay.nn.bias_add(relay.nn.conv2d(x, weight, channels=256, kernel_size=(1, 1)), bias)
    y = layer(layer(x, 64, 64), 64, 64, 3)
    weight, bias = constant(256, 64, 1, 1), constant(256)
    y = relay.nn.bias_add(relay.nn.conv2d(y, weight, channels=256, kernel_size=(1, 1)), bias)
    return relay.Function([x], relay.nn.relu(relay.add(y, shortcut)))


DEVICE_NAMES = ("t4", "a100", "h200")
MODELS = {"encoder of 2 layers": encoder, "inception block": inception, "downsample block": downsample}


def count(function: Any, target: Any) -> dict:
    """Both forms, and what was decided."""
    inputs = tuple(
        TensorSpec("x", tuple(map(int, param.type_annotation.shape)), "float32") for param in function.params
    )
    module = relay.transform.InferType()(tvm.IRModule.from_expr(function))
    model = RelayModel("block", module, inputs, ("output",), {})
    row: dict[str, Any] = {}
    for form, combine in (("apart", False), ("combined", True)):
        fused = fuse_model(model, target, FuseOptions(combine=combine))
        build = build_kernels(fused.module, target)
        row[form] = sum(build.calls.values())
    row["estimates"] = {name: estimate(module, target, name) for name in DEVICE_NAMES}
    return row


def estimate(module: Any, target: Any, name: str) -> list[list[float]]:
    """Microseconds of each set of layers, together and apart, at a device's peaks."""
    device, found = DEVICES[name], []

    def accept(graph: Graph, candidate: Candidate) -> Reason | None:
        if candidate.extension is Extension.PARALLEL and candidate.anchor is not None:
            compared = compare_extension(graph, candidate)
            seconds = compared.together_s(device), compared.apart_s(device)
            found.append([round(1e6 * second, 1) for second in seconds])
        return accept_on(device)(graph, candidate)

    combine_parallel(module, target, PlanOptions(accept=accept))
    return found


def make_table(results: dict) -> str:
    """The results in Markdown, for docs/strategy.md."""
    heads = [f"{name.upper()}, us" for name in DEVICE_NAMES]
    lines = [
        f"| model | launches apart | combined | {' | '.join(heads)} |",
        "| --- | --- | --- |" + " --- |" * len(heads),
    ]
    for name, row in results.items():
        cells = (", ".join(map(_compared, row["estimates"][device])) for device in DEVICE_NAMES)
        lines.append(f"| {name} | {row['apart']} | {row['combined']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _compared(seconds: list[float]) -> str:
    together, apart = seconds
    return f"{together} / {apart}{'' if together < apart else ' refused'}"


def main() -> None:
    """Count, save and print."""
    target = resolve_target(TARGET)
    save_results("horizontal", {name: count(make(), target) for name, make in MODELS.items()})
    print(make_table(json.loads((RESULTS / "horizontal.json").read_text())["results"]))


if __name__ == "__main__":
    main()
