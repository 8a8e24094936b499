"""Single layers of ResNet-50: the generated kernel, and the one by hand on the same numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tvm_fuse.cuda.bundle import Bundle, Call, Draw, Operand, Operator, Port, Tensor
from tvm_fuse.cuda.bundle_files import load_golden, save_bundle
from tvm_fuse.cuda.launch import Launch, Parameter
from tvm_fuse.cuda.reference import THREADS, reference_conv2d
from tvm_fuse.relay.export import compile_images

__all__ = ["LAYERS", "SMALL_LAYERS", "Layer", "export_by_hand", "make_layer"]


@dataclass(frozen=True)
class Layer:
    """Convolution, batch norm and ReLU; sizes are those of the input."""

    channels: int
    filters: int
    size: int
    kernel: int
    stride: int = 1

    @property
    def name(self) -> str:
        """Such as ``conv3x3_64_64_56``: taps, channels, filters, size, and the stride where it is not 1."""
        stride = f"_s{self.stride}" if self.stride > 1 else ""
        return f"conv{self.kernel}x{self.kernel}_{self.channels}_{self.filters}_{self.size}{stride}"


LAYERS = (
    Layer(3, 64, 224, 7, 2),
    Layer(64, 64, 56, 3),
    Layer(256, 64, 56, 1),
    Layer(128, 128, 28, 3),
    Layer(256, 256, 14, 3),
    Layer(512, 512, 7, 3),
    Layer(512, 2048, 7, 1),
)
SMALL_LAYERS = (Layer(8, 16, 14, 3, 2),)


def make_layer(layer: Layer, batch: int = 1) -> onnx.ModelProto:
    """The layer as a model, with seeded weights."""
    rng = np.random.default_rng(0)
    fan_in = layer.channels * layer.kernel**2
    weight = rng.standard_normal((layer.filters, layer.channels, layer.kernel, layer.kernel)) * fan_in**-0.5
    norm = {
        "gamma": rng.uniform(0.5, 1.5, layer.filters),
        "beta": rng.uniform(-0.2, 0.2, layer.filters),
        "mean": rng.uniform(-0.3, 0.3, layer.filters),
        "variance": rng.uniform(0.5, 2.0, layer.filters),
    }
    pads, strides = [layer.kernel // 2] * 4, [layer.stride] * 2
    nodes = [
        helper.make_node("Conv", ["input", "weight"], ["conv"], pads=pads, strides=strides, dilations=[1, 1],
                         group=1, kernel_shape=[layer.kernel] * 2),
        helper.make_node("BatchNormalization", ["conv", *norm], ["norm"], epsilon=1e-5),
        helper.make_node("Relu", ["norm"], ["output"]),
    ]  # fmt: skip
    size = (layer.size + 2 * (layer.kernel // 2) - layer.kernel) // layer.stride + 1
    graph = helper.make_graph(
        nodes,
        layer.name,
        [
            helper.make_tensor_value_info(
                "input", TensorProto.FLOAT, [batch, layer.channels] + [layer.size] * 2
            )
        ],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, [batch, layer.filters, size, size])],
        [
            numpy_helper.from_array(a.astype(np.float32), name)
            for name, a in {"weight": weight, **norm}.items()
        ],
    )
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 13)])


def export_by_hand(
    layer: Layer, generated: Bundle, source: Path, folder: Path, archs: tuple[str, ...]
) -> Bundle:
    """Write a bundle whose only kernel is the textbook's.

    Args:
        layer: The layer.
        generated: The seeded bundle of the generated kernel: same weights, same golden output.
        source: The folder of that bundle.
        folder: Where the new one goes.
        archs: Architectures to compile for.

    Returns:
        The bundle.
    """
    weight, shift = generated.parameters
    x, w, y = (generated.tensors[port.tensor] for port in (generated.inputs[0], weight, generated.outputs[0]))
    kernel = reference_conv2d(layer.kernel, layer.stride, layer.kernel // 2)
    images, files, compiler = compile_images(kernel.source, archs)
    pointers = [Parameter(name, "float32") for name in ("x", "w", "scale", "shift", "y")]
    sizes = {
        "batch": x.shape[0], "channels": layer.channels, "height": layer.size, "width": layer.size,
        "filters": layer.filters, "out_height": y.shape[2], "out_width": y.shape[3],
    }  # fmt: skip
    numbers = [Parameter(name, "int32", 4, is_pointer=False) for name in sizes]
    grid = kernel.grid(x.shape[0], layer.filters, layer.size, layer.size)
    operands = [Operand("tensor", index) for index in range(5)]
    operands += [Operand("immediate", size) for size in sizes.values()]
    vector = Tensor((layer.filters,), "float32", 0)
    tensors = (x, w, vector, vector, y)
    bundle = replace(
        generated,
        provenance=replace(
            generated.provenance, versions={**generated.provenance.versions, "compiler": compiler}
        ),
        inputs=(replace(generated.inputs[0], tensor=0),),
        outputs=(replace(generated.outputs[0], tensor=4),),
        # In this order, so that the seed draws the same weight and shift; the scale is in the weight.
        parameters=(Port(weight.name, 1), Port(shift.name, 3), Port("scale", 2)),
        draws=(*generated.draws, Draw(1.0, 1.0, 1.0, 0.0)),
        operators=(Operator("by_hand", (Call(kernel.symbol, tuple(operands)),)),),
        kernels=(Launch(kernel.symbol, grid, (THREADS, 1, 1), 0, (*pointers, *numbers)),),
        tensors=tuple(replace(tensor, storage=index) for index, tensor in enumerate(tensors)),
        storages=tuple(tensor.size_bytes for tensor in tensors),
        workspaces=(),
        images=images,
        files=(),
    )
    return save_bundle(folder, bundle, files, {}, load_golden(source, generated))
