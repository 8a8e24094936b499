"""ResNet-50, MobileNetV2 and EfficientNet-B0 as ONNX models with random, well-behaved weights.

The graphs have the layout, node names and initializer names of a PyTorch (torchvision) inference export
in which the BatchNormalization nodes were kept. Nothing is downloaded and torch is not needed. The weights
are random, so the classes mean nothing, but activations stay of order one through the whole net and no
BatchNormalization is close to an identity: folding one wrongly changes the output.

Usage::

    python examples/models.py resnet50 resnet50.onnx --image 224 --batch 1 --seed 0
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
IR_VERSION = 8
CLASSES = 1000

# Mean square and squared mean of an activation's output for standard normal input. SiLU's scale feeds back
# on itself (larger inputs gain more), so its mean square is put above the exact 0.355: scales then decay a
# little instead of growing from block to block.
_RELU_POWER, _RELU_OFFSET = 0.5, 0.159
_SILU_POWER, _SILU_OFFSET = 0.41, 0.04
# A residual branch's last BatchNormalization is scaled by this, so that deep sums grow slowly.
_BRANCH_SCALE = 0.5


@dataclass(frozen=True)
class _Value:
    """A tensor of the graph being written.

    Attributes:
        name: Name of the ONNX value.
        channels: Size of its channel axis.
        power: Expected mean square of its elements, from which the next layer's weights are scaled.
        offset: Expected square of the mean of its elements; part of `power`.
    """

    name: str
    channels: int
    power: float = 1.0
    offset: float = 0.0


def _scope(module: str) -> str:
    """Returns a module's scope as PyTorch writes it: ``layer1.0.conv1`` -> ``/layer1/layer1.0/conv1``."""
    parts: list[str] = []
    for token in filter(None, module.split(".")):
        parts.append(f"{parts[-1]}.{token}" if token.isdigit() and parts else token)
    return "".join(f"/{part}" for part in parts)


def _window(kernel: int) -> np.ndarray:
    """Returns weights of unit mean square that favour a filter's centre, so that borders matter less."""
    ramp = np.array([1.0 + min(tap, kernel - 1 - tap) for tap in range(kernel)])
    window = np.outer(ramp, ramp)
    return window / np.sqrt(np.mean(window**2))


class _GraphWriter:
    """Collects nodes and initializers, drawing weights from one seeded stream."""

    def __init__(self, seed: int, epsilon: float) -> None:
        self._rng = np.random.RandomState(seed)
        self._epsilon = epsilon
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[onnx.TensorProto] = []
        self._used: Counter[str] = Counter()

    def op(self, op_type: str, inputs: Sequence[str], module: str = "", **attrs: Any) -> str:
        """Adds a node with one output, named after its module, and returns the output's name."""
        name = f"{_scope(module)}/{op_type}"
        count = self._used[name]
        self._used[name] += 1
        if count:
            name = f"{name}_{count}"
        output = f"{name}_output_0"
        self._nodes.append(helper.make_node(op_type, list(inputs), [output], name=name, **attrs))
        return output

    def weight(self, name: str, array: np.ndarray) -> str:
        """Adds a float32 initializer and returns its name."""
        self._initializers.append(numpy_helper.from_array(array.astype(np.float32), name))
        return name

    def constant(self, value: float, module: str) -> str:
        """Adds a scalar float32 Constant node."""
        return self.op("Constant", [], module, value=numpy_helper.from_array(np.array(value, np.float32)))

    def conv_weight(self, x: _Value, out: int, kernel: int, group: int) -> np.ndarray:
        """Draws He-initialised weights that map `x` to outputs with a mean square of about one.

        Every filter that sums over channels has a zero mean: otherwise the positive mean that each
        activation adds would soon outweigh what depends on the input.
        """
        shape = (out, x.channels // group, kernel, kernel)
        fan_in = shape[1] * kernel * kernel
        weight = self._rng.standard_normal(shape) * _window(kernel)
        if group > 1:
            return weight * np.sqrt(1.0 / (fan_in * x.power))
        weight -= weight.mean(axis=(1, 2, 3), keepdims=True)
        return weight * np.sqrt(1.0 / (fan_in * (x.power - x.offset)))

    def conv(
        self, x: _Value, module: str, weight: np.ndarray, stride: int = 1, group: int = 1, bias: bool = False
    ) -> _Value:
        """Adds a Conv with "same" padding (static and symmetric, as in PyTorch)."""
        out, _, kernel, _ = weight.shape
        inputs = [x.name, self.weight(f"{module}.weight", weight)]
        if bias:
            inputs.append(self.weight(f"{module}.bias", self.signed(out, 0.02, 0.2)))
        name = self.op(
            "Conv",
            inputs,
            module,
            dilations=[1, 1],
            group=group,
            kernel_shape=[kernel, kernel],
            pads=[kernel // 2] * 4,
            strides=[stride, stride],
        )
        return _Value(name, out)

    def signed(self, size: int, low: float, high: float) -> np.ndarray:
        """Draws values of either sign whose magnitude is uniform over [low, high]."""
        magnitude = self._rng.uniform(low, high, size)
        return magnitude * np.where(self._rng.uniform(size=size) < 0.5, -1.0, 1.0)

    def conv_bn(
        self,
        x: _Value,
        conv: str,
        bn: str,
        out: int,
        kernel: int,
        stride: int = 1,
        group: int = 1,
        scale: float = 1.0,
    ) -> _Value:
        """Adds a Conv without bias and the BatchNormalization that follows it.

        Args:
            x: Input.
            conv: Dotted module name of the convolution.
            bn: Dotted module name of the batch normalization.
            out: Output channels.
            kernel: Kernel height and width.
            stride: Stride of both axes.
            group: Convolution groups.
            scale: Factor on the batch normalization's gamma and beta.

        Returns:
            The normalized value.
        """
        # As after training, the running variance of a channel is that of the convolution's output.
        var = np.exp(self._rng.uniform(np.log(0.3), np.log(3.0), out))
        weight = self.conv_weight(x, out, kernel, group) * np.sqrt(var)[:, None, None, None]
        y = self.conv(x, conv, weight, stride, group)
        parameters = [
            self.weight(f"{bn}.weight", scale * self.signed(out, 0.5, 1.5)),
            self.weight(f"{bn}.bias", scale * self.signed(out, 0.02, 0.2)),
            self.weight(f"{bn}.running_mean", self.signed(out, 0.05, 0.3)),
            self.weight(f"{bn}.running_var", var),
        ]
        name = self.op(
            "BatchNormalization",
            [y.name, *parameters],
            bn,
            epsilon=self._epsilon,
            momentum=0.9,
            training_mode=0,
        )
        return _Value(name, out, power=1.1 * scale * scale)

    def relu(self, x: _Value, module: str) -> _Value:
        """Adds a Relu."""
        name = self.op("Relu", [x.name], module)
        return _Value(name, x.channels, x.power * _RELU_POWER, x.power * _RELU_OFFSET)

    def relu6(self, x: _Value, module: str) -> _Value:
        """Adds a ReLU6 as Clip with Constant bounds."""
        bounds = [self.constant(0.0, module), self.constant(6.0, module)]
        name = self.op("Clip", [x.name, *bounds], module)
        return _Value(name, x.channels, x.power * _RELU_POWER, x.power * _RELU_OFFSET)

    def silu(self, x: _Value, module: str) -> _Value:
        """Adds a SiLU as Sigmoid and Mul."""
        gate = self.op("Sigmoid", [x.name], module)
        name = self.op("Mul", [x.name, gate], module)
        return _Value(name, x.channels, x.power * _SILU_POWER, x.power * _SILU_OFFSET)

    def add(self, x: _Value, y: _Value, module: str) -> _Value:
        """Adds two values elementwise."""
        name = self.op("Add", [x.name, y.name], module)
        return _Value(name, x.channels, x.power + y.power, x.offset + y.offset)

    def classifier(self, x: _Value, module: str, pool: str = "") -> str:
        """Adds global average pooling, Flatten and the Gemm; returns the logits' name."""
        pooled = self.op("GlobalAveragePool", [x.name], pool)
        flat = self.op("Flatten", [pooled], axis=1)
        weight = self._rng.standard_normal((CLASSES, x.channels)) * np.sqrt(2.0 / (x.channels * x.power))
        inputs = [
            flat,
            self.weight(f"{module}.weight", weight),
            self.weight(f"{module}.bias", self.signed(CLASSES, 0.02, 0.2)),
        ]
        return self.op("Gemm", inputs, module, alpha=1.0, beta=1.0, transB=1)

    def model(self, name: str, logits: str, batch: int, image: int) -> onnx.ModelProto:
        """Returns the finished model, with `logits` renamed to ``output``."""
        for node in self._nodes:
            if logits in node.output:
                node.output[0] = "output"
        shape_in = [batch, 3, image, image]
        graph = helper.make_graph(
            self._nodes,
            name,
            [helper.make_tensor_value_info("input", TensorProto.FLOAT, shape_in)],
            [helper.make_tensor_value_info("output", TensorProto.FLOAT, [batch, CLASSES])],
            self._initializers,
        )
        return helper.make_model(
            graph,
            producer_name="tvm-fuse-examples",
            ir_version=IR_VERSION,
            opset_imports=[helper.make_opsetid("", OPSET)],
        )


def _bottleneck(g: _GraphWriter, x: _Value, block: str, width: int, stride: int) -> _Value:
    """Adds one ResNet v1.5 bottleneck block (the stride is in the 3x3 convolution)."""
    y = g.relu(g.conv_bn(x, f"{block}.conv1", f"{block}.bn1", width, 1), f"{block}.relu")
    y = g.relu(g.conv_bn(y, f"{block}.conv2", f"{block}.bn2", width, 3, stride), f"{block}.relu_1")
    y = g.conv_bn(y, f"{block}.conv3", f"{block}.bn3", 4 * width, 1, scale=_BRANCH_SCALE)
    if stride == 1 and x.channels == y.channels:
        total = g.add(y, x, block)
        # The identity is not negative, so the Relu cuts only into what the branch added.
        return replace(total, name=g.relu(total, f"{block}.relu_2").name)
    down = f"{block}.downsample"
    shortcut = g.conv_bn(x, f"{down}.0", f"{down}.1", 4 * width, 1, stride)
    return g.relu(g.add(y, shortcut, block), f"{block}.relu_2")


def resnet50(batch: int = 1, image: int = 224, seed: int = 0) -> onnx.ModelProto:
    """Returns ResNet-50 v1.5 with its 53 BatchNormalization nodes (epsilon 1e-5).

    Args:
        batch: Batch size.
        image: Image height and width.
        seed: Seed of the weights.

    Returns:
        The model, with input ``input`` and output ``output``.
    """
    g = _GraphWriter(seed, epsilon=1e-5)
    x = g.relu(g.conv_bn(_Value("input", 3), "conv1", "bn1", 64, 7, 2), "relu")
    pooled = g.op(
        "MaxPool", [x.name], "maxpool", ceil_mode=0, kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2]
    )
    x = replace(x, name=pooled, power=2.0, offset=1.3)  # As measured for normal input.
    for layer, (width, blocks) in enumerate([(64, 3), (128, 4), (256, 6), (512, 3)], start=1):
        for index in range(blocks):
            stride = 2 if layer > 1 and index == 0 else 1
            x = _bottleneck(g, x, f"layer{layer}.{index}", width, stride)
    return g.model("resnet50", g.classifier(x, "fc", pool="avgpool"), batch, image)


def _inverted_residual(g: _GraphWriter, x: _Value, block: str, out: int, stride: int, expand: int) -> _Value:
    """Adds one MobileNetV2 block: expand (unless `expand` is 1), depthwise, linear projection."""
    hidden = x.channels * expand
    y, step = x, 0
    if expand != 1:
        y = g.relu6(g.conv_bn(x, f"{block}.conv.0.0", f"{block}.conv.0.1", hidden, 1), f"{block}.conv.0.2")
        step = 1
    depthwise = f"{block}.conv.{step}"
    y = g.conv_bn(y, f"{depthwise}.0", f"{depthwise}.1", hidden, 3, stride, group=hidden)
    y = g.relu6(y, f"{depthwise}.2")
    residual = stride == 1 and x.channels == out
    scale = _BRANCH_SCALE if residual else 1.0
    y = g.conv_bn(y, f"{block}.conv.{step + 1}", f"{block}.conv.{step + 2}", out, 1, scale=scale)
    return g.add(x, y, block) if residual else y


def mobilenet_v2(batch: int = 1, image: int = 224, seed: int = 0) -> onnx.ModelProto:
    """Returns MobileNetV2 (width 1.0) with its 52 BatchNormalization nodes (epsilon 1e-5).

    Args:
        batch: Batch size.
        image: Image height and width.
        seed: Seed of the weights.

    Returns:
        The model, with input ``input`` and output ``output``.
    """
    g = _GraphWriter(seed, epsilon=1e-5)
    x = g.conv_bn(_Value("input", 3), "features.0.0", "features.0.1", 32, 3, 2)
    x = g.relu6(x, "features.0.2")
    stages = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2)]
    index = 0
    for expand, out, blocks, stride in [*stages, (6, 320, 1, 1)]:
        for position in range(blocks):
            index += 1
            step = stride if position == 0 else 1
            x = _inverted_residual(g, x, f"features.{index}", out, step, expand)
    x = g.relu6(g.conv_bn(x, "features.18.0", "features.18.1", 1280, 1), "features.18.2")
    return g.model("mobilenet_v2", g.classifier(x, "classifier.1"), batch, image)


def _squeeze_excite(g: _GraphWriter, x: _Value, module: str, squeezed: int) -> _Value:
    """Adds a squeeze-and-excitation gate."""
    pooled = _Value(g.op("GlobalAveragePool", [x.name], f"{module}.avgpool"), x.channels, 0.45 * x.power)
    y = g.conv(pooled, f"{module}.fc1", g.conv_weight(pooled, squeezed, 1, 1), bias=True)
    y = g.silu(y, f"{module}.activation")
    y = g.conv(y, f"{module}.fc2", g.conv_weight(y, x.channels, 1, 1), bias=True)
    gate = g.op("Sigmoid", [y.name], f"{module}.scale_activation")
    # The gate is the sigmoid of about a standard normal: its mean square is 0.3, its mean 0.5.
    return _Value(g.op("Mul", [gate, x.name], module), x.channels, 0.3 * x.power, 0.25 * x.offset)


def _mbconv(
    g: _GraphWriter, x: _Value, block: str, out: int, kernel: int, stride: int, expand: int
) -> _Value:
    """Adds one EfficientNet block: expand (unless `expand` is 1), depthwise, gate, linear projection."""
    hidden = x.channels * expand
    y, step = x, 0
    if expand != 1:
        y = g.conv_bn(x, f"{block}.block.0.0", f"{block}.block.0.1", hidden, 1)
        y = g.silu(y, f"{block}.block.0.2")
        step = 1
    depthwise = f"{block}.block.{step}"
    y = g.conv_bn(y, f"{depthwise}.0", f"{depthwise}.1", hidden, kernel, stride, group=hidden)
    y = g.silu(y, f"{depthwise}.2")
    y = _squeeze_excite(g, y, f"{block}.block.{step + 1}", max(1, x.channels // 4))
    project = f"{block}.block.{step + 2}"
    residual = stride == 1 and x.channels == out
    scale = _BRANCH_SCALE if residual else 1.0
    y = g.conv_bn(y, f"{project}.0", f"{project}.1", out, 1, scale=scale)
    return g.add(y, x, block) if residual else y


def efficientnet_b0(batch: int = 1, image: int = 224, seed: int = 0) -> onnx.ModelProto:
    """Returns EfficientNet-B0 with its 49 BatchNormalization nodes (epsilon 1e-3).

    Args:
        batch: Batch size.
        image: Image height and width.
        seed: Seed of the weights.

    Returns:
        The model, with input ``input`` and output ``output``.
    """
    g = _GraphWriter(seed, epsilon=1e-3)
    x = g.silu(g.conv_bn(_Value("input", 3), "features.0.0", "features.0.1", 32, 3, 2), "features.0.2")
    stages = [
        (1, 3, 1, 16, 1),
        (6, 3, 2, 24, 2),
        (6, 5, 2, 40, 2),
        (6, 3, 2, 80, 3),
        (6, 5, 1, 112, 3),
        (6, 5, 2, 192, 4),
        (6, 3, 1, 320, 1),
    ]
    for stage, (expand, kernel, stride, out, blocks) in enumerate(stages, start=1):
        for index in range(blocks):
            step = stride if index == 0 else 1
            x = _mbconv(g, x, f"features.{stage}.{index}", out, kernel, step, expand)
    x = g.silu(g.conv_bn(x, "features.8.0", "features.8.1", 1280, 1), "features.8.2")
    return g.model("efficientnet_b0", g.classifier(x, "classifier.1", pool="avgpool"), batch, image)


MODELS: dict[str, Callable[..., onnx.ModelProto]] = {
    "resnet50": resnet50,
    "mobilenet_v2": mobilenet_v2,
    "efficientnet_b0": efficientnet_b0,
}


def save(model: onnx.ModelProto, path: Path) -> None:
    """Writes `model` to `path`; the file appears there only once it is complete."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(model.SerializeToString(deterministic=True))
        os.replace(temporary, path)
    finally:
        if temporary.exists():
            temporary.unlink()


def _positive(text: str) -> int:
    """Parses a positive integer for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text}")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = argparse.ArgumentParser(description="Write a model with random weights as an ONNX file.")
    parser.add_argument("name", choices=sorted(MODELS), metavar="NAME", help=", ".join(sorted(MODELS)))
    parser.add_argument("out", type=Path, metavar="OUT.onnx", help="file to write")
    parser.add_argument("--image", type=_positive, default=224, help="image height and width (default 224)")
    parser.add_argument("--batch", type=_positive, default=1, help="batch size (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default 0)")
    args = parser.parse_args(argv)
    model = MODELS[args.name](batch=args.batch, image=args.image, seed=args.seed)
    save(model, args.out)
    print(f"wrote {args.out}: {args.name}, batch {args.batch}, image {args.image}, seed {args.seed}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
