"""Core graphs in three lines.

Example::

    g = GraphBuilder()
    y = g.conv2d(g.input("x", (1, 4, 5, 5)), weight, padding=(1, 1))
    graph = g.build(g.relu(g.norm(y, random_norm(4))))

Where a method takes a value, an ``int`` is the id of an existing node and anything else becomes a
constant (``3.0``, an array).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Union

import numpy as np

from tvm_fuse.core.edit import LayerEdit
from tvm_fuse.core.graph import (
    BatchNormAttrs,
    BiasAddAttrs,
    ClipAttrs,
    ConcatenateAttrs,
    ConvAttrs,
    DenseAttrs,
    Graph,
    Kind,
    LayoutTransformAttrs,
    LeakyReluAttrs,
    Node,
    PadAttrs,
    PReluAttrs,
    ReduceAttrs,
    TensorInfo,
    TransposeAttrs,
)
from tvm_fuse.core.recompose import Recomposition

Value = Union[int, float, np.ndarray]


class Norm(NamedTuple):
    """The four vectors of a batch norm."""

    gamma: np.ndarray
    beta: np.ndarray
    mean: np.ndarray
    variance: np.ndarray


def random_norm(channels: int, seed: int = 0, dtype: str = "float64") -> Norm:
    """Vectors that no bug can hide behind: both signs, a zero gamma, no unit variance, all different."""
    rng = np.random.default_rng(seed)
    gamma = rng.uniform(0.5, 2.0, channels) * np.where(np.arange(channels) % 2, -1.0, 1.0)
    if channels > 2:
        gamma[2] = 0.0
    vectors = (
        gamma,
        rng.normal(size=channels) + 2,
        rng.normal(size=channels) - 2,
        rng.uniform(0.2, 3, channels),
    )
    return Norm(*(vector.astype(dtype) for vector in vectors))


def plain_norm(channels: int, **vectors: Any) -> Norm:
    """gamma 1, beta 0, mean 0, variance 1, except for what is given."""
    defaults = {"gamma": 1.0, "beta": 0.0, "mean": 0.0, "variance": 1.0}
    filled = {role: np.asarray(vectors.get(role, fill), float) for role, fill in defaults.items()}
    return Norm(**{role: np.broadcast_to(vector, (channels,)).copy() for role, vector in filled.items()})


class GraphBuilder:
    """Collects nodes; every method returns the id of the node it adds."""

    def __init__(self, dtype: str = "float64") -> None:
        self.dtype = dtype
        self.nodes: list[Node] = []
        self.constants: dict[int, np.ndarray] = {}

    def build(self, *outputs: int) -> Graph:
        """The graph that returns these values."""
        return Graph(tuple(self.nodes), outputs, self.constants)

    def node(
        self, kind: Kind, op: str, inputs: Sequence[Value], outputs: Any, attrs: Any = None, name: str = ""
    ) -> int:
        """Add any node; ``outputs`` is a shape or a tuple of ``TensorInfo``."""
        sources = tuple(self._id(value) for value in inputs)
        if not (outputs and isinstance(outputs[0], TensorInfo)):
            outputs = (TensorInfo(tuple(outputs), self.dtype),)
        self.nodes.append(Node(len(self.nodes), kind, op, sources, outputs, attrs, name))
        return len(self.nodes) - 1

    def input(self, name: str, shape: Sequence[Any], dtype: str = "") -> int:
        info = TensorInfo(tuple(shape), dtype or self.dtype)
        return self.node(Kind.INPUT, "input", (), (info,), name=name)

    def const(self, value: Any, dtype: str = "") -> int:
        """A constant as it is; ``dtype`` is for bits that NumPy has no name for (``bfloat16``)."""
        array = np.array(value, dtype=getattr(value, "dtype", self.dtype))
        info = TensorInfo(array.shape, dtype or str(array.dtype))
        self.constants[self.node(Kind.CONSTANT, "constant", (), (info,))] = array
        return len(self.nodes) - 1

    def conv2d(
        self, data: int, weight: Value, *, strides: Sequence[int] = (1, 1), padding: Sequence[int] = (0, 0),
        dilation: Sequence[int] = (1, 1), groups: int = 1, channels: int = 0, layout: str = "NCHW",
        kernel: str = "OIHW", name: str = "",
    ) -> int:  # fmt: skip
        """``padding`` has 2 or 4 (top, left, bottom, right) numbers; ``channels`` if not the kernel's O."""
        weight = self._id(weight)
        x, w = sizes(layout, self.shape(data)), sizes(kernel, self.shape(weight))
        top, left, bottom, right = (*padding, *padding)[:4]
        out = {
            "N": x["N"],
            "C": channels or w["O"],
            "H": _window(x["H"], w["H"], strides[0], top + bottom, dilation[0]),
            "W": _window(x["W"], w["W"], strides[1], left + right, dilation[1]),
        }
        attrs = ConvAttrs(
            tuple(strides), tuple(padding), tuple(dilation), groups, out["C"], layout, kernel, layout
        )
        return self.node(Kind.CONV2D, "nn.conv2d", (data, weight), shape_in(layout, out), attrs, name)

    def convolution(
        self, data: int, weight: Value, *, layout: str, kernel: str, out_layout: str = "",
        transposed: bool = False, strides: Sequence[int] = (), padding: Sequence[int] = (),
        dilation: Sequence[int] = (), groups: int = 1, channels: int = 0, name: str = "",
    ) -> int:  # fmt: skip
        """Any number of spatial axes, transposed or not; what is left out is 1, and no padding."""
        weight = self._id(weight)
        x, w = sizes(layout, self.shape(data)), sizes(kernel, self.shape(weight))
        space = [letter for letter in layout if letter in "DHW"]
        ones = (1,) * len(space)
        strides, dilation, out_layout = tuple(strides) or ones, tuple(dilation) or ones, out_layout or layout
        padding = tuple(padding) or (0,) * len(space)
        pads = [a + b for a, b in zip(padding[: len(space)], padding[-len(space) :])]
        out = {"N": x["N"], "C": channels or (w["O"] * groups if transposed else w["O"])}
        for letter, stride, pad, dil in zip(space, strides, pads, dilation):
            if transposed:
                out[letter] = (x[letter] - 1) * stride - pad + dil * (w[letter] - 1) + 1
            else:
                out[letter] = _window(x[letter], w[letter], stride, pad, dil)
        attrs = ConvAttrs(strides, padding, dilation, groups, out["C"], layout, kernel, out_layout)
        kind = Kind(f"conv{len(space)}d{'_transpose' * transposed}")
        shape = shape_in(out_layout, out)
        info = (TensorInfo(shape, self.nodes[data].output.dtype),)
        return self.node(kind, f"nn.{kind.value}", (data, weight), info, attrs, name)

    def dense(self, data: int, weight: Value, name: str = "", kernel: str = "OI") -> int:
        weight = self._id(weight)
        out = (*self.shape(data)[:-1], sizes(kernel, self.shape(weight)).get("O", 1))
        info = (TensorInfo(out, self.nodes[data].output.dtype),)
        return self.node(Kind.DENSE, "nn.dense", (data, weight), info, DenseAttrs(kernel), name)

    def matmul(self, data: int, weight: Value, *, kernel: str = "IO", input_axis: int = -1) -> int:
        """``nn.matmul``, or ``nn.batch_matmul`` for a kernel with a batch axis."""
        weight = self._id(weight)
        x, w = self.shape(data), sizes(kernel, self.shape(weight))
        kind = Kind.BATCH_MATMUL if "B" in kernel else Kind.MATMUL
        out = (*x[:-2], x[-3 - input_axis], w["O"])
        return self.node(kind, f"nn.{kind.value}", (data, weight), out, DenseAttrs(kernel, input_axis))

    def batch_norm(
        self, data: int, norm: Sequence[Value], *, axis: int = 1, epsilon: float = 1e-3, center: bool = True,
        scale: bool = True, name: str = "",
    ) -> int:  # fmt: skip
        """The tuple-valued operator; read it with ``item``."""
        shape = self.shape(data)
        vector = TensorInfo((shape[axis],), self.dtype)
        outputs = (TensorInfo(shape, self.dtype), vector, vector)
        attrs = BatchNormAttrs(axis, epsilon, center, scale)
        return self.node(Kind.BATCH_NORM, "nn.batch_norm", (data, *norm), outputs, attrs, name)

    def item(self, value: int, index: int = 0) -> int:
        return self.node(Kind.GET_ITEM, "get_item", (value,), (self.nodes[value].outputs[index],), index)

    def norm(self, data: int, norm: Sequence[Value], **attrs: Any) -> int:
        """A batch norm and its normalized output."""
        return self.item(self.batch_norm(data, norm, **attrs))

    def bias_add(self, data: int, bias: Value, axis: int = 1) -> int:
        return self.node(Kind.BIAS_ADD, "nn.bias_add", (data, bias), self.shape(data), BiasAddAttrs(axis))

    def add(self, a: Value, b: Value) -> int:
        return self._broadcast(Kind.ADD, a, b)

    def subtract(self, a: Value, b: Value) -> int:
        return self._broadcast(Kind.SUBTRACT, a, b)

    def multiply(self, a: Value, b: Value) -> int:
        return self._broadcast(Kind.MULTIPLY, a, b)

    def divide(self, a: Value, b: Value) -> int:
        return self._broadcast(Kind.DIVIDE, a, b)

    def negative(self, x: Value) -> int:
        return self._unary(Kind.NEGATIVE, x)

    def reciprocal(self, x: Value) -> int:
        return self._unary(Kind.RECIPROCAL, x)

    def erf(self, x: Value) -> int:
        return self._unary(Kind.ERF, x)

    def exp(self, x: Value) -> int:
        return self._unary(Kind.EXP, x)

    def log(self, x: Value) -> int:
        return self._unary(Kind.LOG, x)

    def prelu(self, x: int, slopes: Value, axis: int = 1) -> int:
        inputs = (x, self._id(slopes))
        return self.node(Kind.PRELU, "nn.prelu", inputs, (self.nodes[x].output,), PReluAttrs(axis))

    def sqrt(self, x: Value) -> int:
        return self._unary(Kind.SQRT, x)

    def rsqrt(self, x: Value) -> int:
        return self._unary(Kind.RSQRT, x)

    def power(self, x: Value, exponent: Value) -> int:
        return self._broadcast(Kind.POWER, x, exponent)

    def cast(self, x: Value, dtype: str) -> int:
        x = self._id(x)
        return self.node(Kind.CAST, "cast", (x,), (TensorInfo(self.shape(x), dtype),))

    def reshape(self, x: Value, *shape: int) -> int:
        return self._move(Kind.RESHAPE, x, shape)

    def expand_dims(self, x: Value, axis: int, count: int = 1) -> int:
        x = self._id(x)
        shape = self.shape(x)
        return self._move(Kind.EXPAND_DIMS, x, (*shape[:axis], *(1,) * count, *shape[axis:]))

    def transpose(self, x: Value, *axes: int) -> int:
        x = self._id(x)
        shape = tuple(self.shape(x)[axis] for axis in axes)
        return self._move(Kind.TRANSPOSE, x, shape, TransposeAttrs(axes))

    def broadcast_to(self, x: Value, *shape: int) -> int:
        return self._move(Kind.BROADCAST_TO, x, shape)

    def layout_transform(self, x: int, source: str, target: str) -> int:
        shape = shape_in(target, sizes(source, self.shape(x)))
        return self._move(Kind.LAYOUT_TRANSFORM, x, shape, LayoutTransformAttrs(source, target))

    def concatenate(self, *parts: int, axis: int = 1) -> int:
        shape = list(self.shape(parts[0]))
        shape[axis] = sum(self.shape(part)[axis] for part in parts)
        return self._move(Kind.CONCATENATE, self.tuple(*parts), tuple(shape), ConcatenateAttrs(axis))

    def pad(self, x: int, *widths: tuple, value: float | None = 0.0) -> int:
        """``(before, after)`` of each axis; ``value=None`` pads with what only running tells (here: 1)."""
        shape = tuple(size + before + after for size, (before, after) in zip(self.shape(x), widths))
        return self._move(Kind.PAD, x, shape, PadAttrs(widths, value))

    def relu(self, x: int) -> int:
        return self.node(Kind.RELU, "nn.relu", (x,), self.shape(x))

    def clip(self, x: int, low: float = 0.0, high: float = 6.0) -> int:
        return self.node(Kind.CLIP, "clip", (x,), self.shape(x), ClipAttrs(low, high))

    def leaky_relu(self, x: int, alpha: float = 0.1) -> int:
        return self.node(Kind.LEAKY_RELU, "nn.leaky_relu", (x,), self.shape(x), LeakyReluAttrs(alpha))

    def sigmoid(self, x: int) -> int:
        return self.node(Kind.SIGMOID, "sigmoid", (x,), self.shape(x))

    def tanh(self, x: int) -> int:
        return self.node(Kind.TANH, "tanh", (x,), self.shape(x))

    def softmax(self, x: int, axis: int = -1) -> int:
        attrs = ReduceAttrs((axis % len(self.shape(x)),), True)
        return self.node(Kind.SOFTMAX, "nn.softmax", (x,), (self.nodes[x].output,), attrs)

    def elementwise(self, op: str, *inputs: Value) -> int:
        """``exp``, ``maximum``, ... : an elementwise operator that is only known by name."""
        sources = [self._id(value) for value in inputs]
        shape = np.broadcast_shapes(*(self.shape(source) for source in sources))
        return self.node(Kind.ELEMENTWISE, op, sources, shape)

    def other(self, op: str, *inputs: Value, shape: Sequence[Any] | None = None) -> int:
        """Anything that is not elementwise; the shape of its first input unless given."""
        sources = [self._id(value) for value in inputs]
        return self.node(Kind.OTHER, op, sources, self.shape(sources[0]) if shape is None else tuple(shape))

    def tuple(self, *inputs: int) -> int:
        infos = tuple(self.nodes[source].output for source in inputs)
        return self.node(Kind.TUPLE, "tuple", inputs, infos)

    def shape(self, node: int) -> tuple:
        return self.nodes[node].output.shape

    def _id(self, value: Value) -> int:
        return value if isinstance(value, int) else self.const(value)

    def _unary(self, kind: Kind, x: Value) -> int:
        x = self._id(x)
        return self.node(kind, kind.value, (x,), (self.nodes[x].output,))

    def _move(self, kind: Kind, x: Value, shape: tuple, attrs: Any = None) -> int:
        x = self._id(x)
        return self.node(kind, kind.value, (x,), (TensorInfo(shape, self.nodes[x].output.dtype),), attrs)

    def _broadcast(self, kind: Kind, a: Value, b: Value) -> int:
        sources = self._id(a), self._id(b)
        shape = _broadcast_shapes(self.shape(sources[0]), self.shape(sources[1]))
        return self.node(kind, kind.value, sources, shape)


def sizes(layout: str, shape: Sequence[Any]) -> dict[str, Any]:
    """Size of each axis, blocks multiplied in: ``("NCHW4c", (1, 2, 5, 5, 4))`` -> C is 8."""
    result: dict[str, Any] = {}
    for (letter, _block), size in zip(tokens(layout), shape):
        letter = letter.upper()
        result[letter] = result[letter] * size if letter in result else size
    return result


def shape_in(layout: str, plain: dict[str, Any]) -> tuple:
    """Shape in a layout of at most one block an axis, from the size of each axis."""
    blocks = {letter.upper(): block for letter, block in tokens(layout) if block}
    return tuple(
        block or (plain[letter] // blocks[letter] if letter in blocks else plain[letter])
        for letter, block in tokens(layout)
    )


def tokens(layout: str) -> list[tuple[str, int]]:
    """``"OI4o"`` -> ``[("O", 0), ("I", 0), ("o", 4)]``."""
    result: list[tuple[str, int]] = []
    digits = ""
    for char in layout:
        if char.isdigit():
            digits += char
            continue
        result.append((char, int(digits or 0)))
        digits = ""
    return result


def apply_folds(graph: Graph, records: Iterable[Any]) -> Graph:
    """The graph with the folds carried out: new weights, biases after them, values aliased away."""
    edits = [record.edit for record in records]
    layers = {layer.anchor: layer for edit in edits for layer in edit.layers}
    aliases = {value: other for edit in edits for value, other in edit.aliases.items()}
    assert len(layers) == sum(len(edit.layers) for edit in edits), "two records fold into one layer"
    builder = GraphBuilder()
    new: dict[int, int] = {}
    for node in graph.nodes:
        if node.id in aliases:
            new[node.id] = new[aliases[node.id]]
        elif node.id in layers:
            new[node.id] = _copy_folded(builder, graph, node, layers[node.id], new)
        else:
            new[node.id] = _copy(builder, graph, node, new)
    return _only_live(builder.build(*(new[output] for output in graph.outputs)))


def _only_live(graph: Graph) -> Graph:
    """The graph without the nodes that no output needs; inputs stay."""
    needed: set[int] = set()
    stack = [*graph.outputs, *(node.id for node in graph.of_kind(Kind.INPUT))]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(graph.nodes[node].inputs)
    builder = GraphBuilder()
    new: dict[int, int] = {}
    for node in graph.nodes:
        if node.id in needed:
            new[node.id] = _copy(builder, graph, node, new)
    return builder.build(*(new[output] for output in graph.outputs))


def _copy(builder: GraphBuilder, graph: Graph, node: Node, new: dict[int, int]) -> int:
    inputs = [new[source] for source in node.inputs]
    copy = builder.node(node.kind, node.op, inputs, node.outputs, node.attrs, node.name)
    if node.id in graph.constants:
        builder.constants[copy] = graph.constants[node.id]
    return copy


def _copy_folded(
    builder: GraphBuilder, graph: Graph, anchor: Node, layer: LayerEdit, new: dict[int, int]
) -> int:
    weight = builder.const(layer.weight, graph.nodes[anchor.inputs[1]].output.dtype)
    inputs = [new[anchor.inputs[0]], weight]
    copy = builder.node(anchor.kind, anchor.op, inputs, anchor.outputs, anchor.attrs, anchor.name)
    if layer.bias is None:
        return copy
    return builder.node(
        Kind.ADD, "add", (copy, builder.const(layer.bias, anchor.output.dtype)), anchor.outputs
    )


def apply_recompositions(graph: Graph, records: Iterable[Recomposition]) -> Graph:
    """The graph with a batch norm in the place of the operators, which are gone."""
    by_result = {record.result: record for record in records}
    builder = GraphBuilder()
    new: dict[int, int] = {}
    for node in graph.nodes:
        record = by_result.get(node.id)
        if record is None:
            new[node.id] = _copy(builder, graph, node, new)
            continue
        vectors = (record.gamma, record.beta, record.mean, record.variance)
        new[node.id] = builder.norm(
            new[record.data], vectors, axis=record.axis, epsilon=record.epsilon, name=record.name
        )
    return _only_live(builder.build(*(new[output] for output in graph.outputs)))


def _window(size: Any, kernel: int, stride: int, padding: int, dilation: int) -> Any:
    if isinstance(size, str):
        return size
    return (size + padding - dilation * (kernel - 1) - 1) // stride + 1


def _broadcast_shapes(a: tuple, b: tuple) -> tuple:
    """Like NumPy's, with symbolic sizes that win over 1."""
    rank = max(len(a), len(b))
    pairs = zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b)
    return tuple(y if x == 1 else x for x, y in pairs)
