"""A small builder for hand-written ONNX test graphs.

Example::

    b = Builder(opset=17)
    x = b.input("x", (1, 3, 8, 8))
    y = b.conv(x, out=4, kernel=3, pad=1, bias=True)
    y = b.relu(b.batch_norm(y, epsilon=1e-3))
    model = b.build(outputs=[y])
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Union

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper, shape_inference
from onnx.reference import ReferenceEvaluator
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented

Dim = Union[int, str, None]
Ints = Union[int, Sequence[int]]
Param = Union[np.ndarray, str, float, None]  # An array, the name of an existing value, a fill, or "draw one".


class Builder:
    """Collects nodes; every method returns the name of the value it adds.

    Args:
        opset: Version of the default operator set.
        ir_version: ONNX IR version.
        seed: Seed of the parameters that are not given.
        dtype: Type of inputs and parameters (for example ``np.float16``).
        initializers_as_inputs: Also list initializers as graph inputs, as IR version 3 required.
        const_nodes: Write parameters as Constant nodes instead of initializers.
    """

    def __init__(
        self, opset: int = 17, ir_version: int = 8, seed: int = 0, dtype: Any = np.float32,
        initializers_as_inputs: bool = False, const_nodes: bool = False,
    ) -> None:  # fmt: skip
        self.opset, self.ir_version, self.dtype = opset, ir_version, np.dtype(dtype)
        self.initializers_as_inputs, self.const_nodes = initializers_as_inputs, const_nodes
        self.rng = np.random.RandomState(seed)
        self._count = 0
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.initializers: list[onnx.TensorProto] = []

    def input(self, name: str, shape: Sequence[Dim], dtype: Any = None) -> str:
        """Adds a graph input; a dimension may be a string (symbolic) or None (unknown)."""
        elem = helper.np_dtype_to_tensor_dtype(np.dtype(dtype or self.dtype))
        self.inputs.append(helper.make_tensor_value_info(name, elem, list(shape)))
        return name

    def const(
        self, array: Any, name: str | None = None, as_node: bool | None = None, dtype: Any = None
    ) -> str:
        """Adds a constant as an initializer, or as a Constant node; float64 takes the builder's type.

        `dtype` is the type, whatever the array's.
        """
        value = np.asarray(array, dtype)
        if dtype is None and value.dtype == np.float64:
            value = value.astype(self.dtype)
        name = name or self._fresh("const")
        if self.const_nodes if as_node is None else as_node:
            tensor = numpy_helper.from_array(value)
            self.nodes.append(helper.make_node("Constant", [], [name], name=f"{name}_node", value=tensor))
        else:
            self.initializers.append(numpy_helper.from_array(value, name))
        return name

    def op(
        self, op_type: str, *inputs: str | None, n_out: int = 1, name: str | None = None, **attrs: Any
    ) -> Any:
        """Adds any node; None is an omitted input. Returns a name, or a list of names if `n_out` > 1.

        `name` names the node and its first output; attributes that are None are left out.
        """
        name = name or self._fresh(op_type.lower())
        outputs = [name, *(f"{name}_{i}" for i in range(1, n_out))]
        given = {key: value for key, value in attrs.items() if value is not None}
        self.nodes.append(helper.make_node(op_type, [i or "" for i in inputs], outputs, name=name, **given))
        return outputs if n_out > 1 else name

    def conv(
        self, x: str, out: int, kernel: Ints = 3, *, pad: Ints = 0, stride: Ints = 1, group: int = 1,
        bias: bool | np.ndarray | str = False, weight: np.ndarray | str | None = None,
        channels: int | None = None, name: str | None = None, **attrs: Any,
    ) -> str:  # fmt: skip
        """Adds a Conv; an int `kernel` means two dimensions, a sequence sets the rank.

        `weight` and `bias` may be arrays or names of values; `channels` (of `x`) is inferred if not given.
        """
        kernel = [kernel] * 2 if isinstance(kernel, int) else list(kernel)
        if weight is None:
            shape = (out, (channels or self._channels(x)) // group, *kernel)
            weight = self.rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
        inputs = [x, self._param(weight, f"{name}.weight" if name else None)]
        if bias is not False:
            drawn = self.rng.uniform(-1, 1, out) if bias is True else bias
            inputs.append(self._param(drawn, f"{name}.bias" if name else None))
        spatial: dict[str, Any] = {"kernel_shape": kernel, "strides": _repeat(stride, len(kernel))}
        if "auto_pad" not in attrs:
            spatial["pads"] = _repeat(pad, 2 * len(kernel))
        return self.op("Conv", *inputs, name=name, **{"group": group, **spatial, **attrs})

    def batch_norm(
        self, x: str, epsilon: float | None = 1e-5, *, gamma: Param = None, beta: Param = None,
        mean: Param = None, var: Param = None, channels: int | None = None, omit: Collection[str] = (),
        param_dtype: Any = None, n_out: int = 1, name: str | None = None, **attrs: Any,
    ) -> Any:  # fmt: skip
        """Adds a BatchNormalization; other attributes (``training_mode=1``, with `n_out` 3) pass through.

        A parameter may be an array, the name of a value, a number to fill with, or None to draw it (gamma of
        both signs, var over [0.3, 3]). `omit` names parameters to leave out, which is invalid ONNX: build
        with ``check=False``. `param_dtype` is their type if not the builder's; epsilon None is left out.
        """
        inputs: list[str | None] = [x]
        for key, value in zip(("gamma", "beta", "mean", "var"), (gamma, beta, mean, var)):
            if value is None or isinstance(value, (int, float)):
                size = channels or self._channels(x)
                value = self._bn_values(key, size) if value is None else np.full(size, float(value))
            full_name = f"{name}.{key}" if name else None
            inputs.append(None if key in omit else self._param(value, full_name, param_dtype))
        while inputs[-1] is None:
            inputs.pop()
        return self.op("BatchNormalization", *inputs, n_out=n_out, name=name, epsilon=epsilon, **attrs)

    def relu(self, x: str, name: str | None = None) -> str:
        """Adds a Relu."""
        return self.op("Relu", x, name=name)

    def clip(self, x: str, low: float | None = 0.0, high: float | None = 6.0, name: str | None = None) -> str:
        """Adds a Clip (ReLU6 by default); bounds are attributes before opset 11, inputs from then on."""
        if self.opset < 11:
            return self.op("Clip", x, name=name, min=low, max=high)
        bounds = [None if v is None else self.const(np.array(v, self.dtype)) for v in (low, high)]
        return self.op("Clip", x, *bounds, name=name)

    def silu(self, x: str, name: str | None = None) -> str:
        """Adds a SiLU as Sigmoid and Mul."""
        return self.op("Mul", x, self.op("Sigmoid", x), name=name)

    def shape(self, value: str) -> list[Any]:
        """Returns a value's inferred shape: ints, strings, and None for unknown dimensions."""
        info = self._infer().get(value)
        if info is None or not info.type.tensor_type.HasField("shape"):
            raise ValueError(f"cannot infer the shape of {value!r}")
        dims = info.type.tensor_type.shape.dim
        return [d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in dims]

    def build(self, outputs: Sequence[str], check: bool = True) -> onnx.ModelProto:
        """Returns the model, checked unless `check` is false (for graphs that are invalid on purpose)."""
        known = self._infer()
        elem = helper.np_dtype_to_tensor_dtype(self.dtype)
        infos = [known.get(out) or helper.make_tensor_value_info(out, elem, None) for out in outputs]
        model = self._model(infos)
        if check:
            onnx.checker.check_model(model, full_check=True)
        return model

    def _fresh(self, stem: str) -> str:
        self._count += 1
        return f"{stem}_{self._count}"

    def _param(self, value: Any, name: str | None, dtype: Any = None) -> str:
        if isinstance(value, str):
            return value
        return self.const(value, name, dtype=dtype or self.dtype)

    def _channels(self, value: str) -> int:
        channels = self.shape(value)[1]
        if not isinstance(channels, int):
            raise ValueError(f"{value!r} has no known channel count: pass channels=")
        return channels

    def _bn_values(self, key: str, size: int) -> np.ndarray:
        sign = np.where(self.rng.uniform(size=size) < 0.5, -1.0, 1.0)
        bounds = {"gamma": (0.5, 1.5), "beta": (0.1, 0.5), "mean": (0.1, 0.5), "var": (0.3, 3.0)}[key]
        values = self.rng.uniform(*bounds, size)
        return values if key == "var" else values * sign

    def _model(self, outputs: Sequence[onnx.ValueInfoProto]) -> onnx.ModelProto:
        inputs = list(self.inputs)
        if self.initializers_as_inputs:
            inputs += [helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in self.initializers]
        graph = helper.make_graph(self.nodes, "test", inputs, outputs, self.initializers)
        opsets = [helper.make_opsetid("", self.opset)]
        return helper.make_model(graph, ir_version=self.ir_version, opset_imports=opsets)

    def _infer(self) -> dict[str, onnx.ValueInfoProto]:
        graph = shape_inference.infer_shapes(self._model([]), data_prop=True).graph
        return {info.name: info for info in [*graph.input, *graph.value_info]}


def run(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Runs a model as it is written: with onnxruntime, or where that lacks an operator, onnx's reference."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    except NotImplemented:
        return list(ReferenceEvaluator(model).run(None, dict(feeds)))
    return list(session.run(None, dict(feeds)))


def _repeat(value: Ints, count: int) -> list[int]:
    """Returns `value` as a list of `count` ints."""
    return [value] * count if isinstance(value, int) else list(value)
