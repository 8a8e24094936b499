"""What operators do, as far as folding and fusion need to know."""

from __future__ import annotations

from enum import Enum

__all__ = [
    "ANCHOR_KINDS",
    "CONVOLUTION_KINDS",
    "ELEMENTWISE_KINDS",
    "INJECTIVE_KINDS",
    "LEAF_KINDS",
    "MATRIX_KINDS",
    "TRANSPOSED_KINDS",
    "VIEW_KINDS",
    "Kind",
]


class Kind(str, Enum):
    """What a node does, as far as folding and fusion need to know."""

    INPUT = "input"
    CONSTANT = "constant"
    TUPLE = "tuple"
    GET_ITEM = "get_item"
    CONV1D = "conv1d"
    CONV2D = "conv2d"
    CONV3D = "conv3d"
    CONV1D_TRANSPOSE = "conv1d_transpose"
    CONV2D_TRANSPOSE = "conv2d_transpose"
    CONV3D_TRANSPOSE = "conv3d_transpose"
    DENSE = "dense"
    MATMUL = "matmul"
    BATCH_MATMUL = "batch_matmul"
    BATCH_NORM = "batch_norm"
    BIAS_ADD = "bias_add"
    ADD = "add"
    SUBTRACT = "subtract"
    MULTIPLY = "multiply"
    DIVIDE = "divide"
    RELU = "relu"
    CLIP = "clip"
    LEAKY_RELU = "leaky_relu"
    PRELU = "prelu"
    SIGMOID = "sigmoid"
    TANH = "tanh"
    CAST = "cast"
    ERF = "erf"
    EXP = "exp"
    LOG = "log"
    MAXIMUM = "maximum"
    MINIMUM = "minimum"
    NEGATIVE = "negative"
    POWER = "power"
    RECIPROCAL = "reciprocal"
    RSQRT = "rsqrt"
    SQRT = "sqrt"
    #: Operators that move or repeat elements and compute nothing.
    BROADCAST_TO = "broadcast_to"
    CONCATENATE = "concatenate"
    EXPAND_DIMS = "expand_dims"
    LAYOUT_TRANSFORM = "layout_transform"
    PAD = "pad"
    RESHAPE = "reshape"
    #: A part of its operand, at places that are known.
    SLICE = "slice"
    TRANSPOSE = "transpose"
    #: Any other operator that moves or repeats elements: each result element is computed from a few, known
    #: by its position or by an index operand (gathers, resizing).
    INJECTIVE = "injective"
    #: Operators that sum, or take the largest of, many elements.
    POOL = "pool"
    GLOBAL_POOL = "global_pool"
    REDUCE = "reduce"
    SOFTMAX = "softmax"
    #: A normalization whose statistics come from the data: instance, layer, group or local response norm.
    DATA_NORM = "data_norm"
    #: Any other operator that computes each output element from the elements at the same
    #: (or the broadcast) position of its inputs.
    ELEMENTWISE = "elementwise"
    OTHER = "other"


#: Convolutions whose kernel holds input channels x (output channels / groups).
TRANSPOSED_KINDS = frozenset({Kind.CONV1D_TRANSPOSE, Kind.CONV2D_TRANSPOSE, Kind.CONV3D_TRANSPOSE})

#: All convolutions.
CONVOLUTION_KINDS = TRANSPOSED_KINDS | {Kind.CONV1D, Kind.CONV2D, Kind.CONV3D}

#: Matrix products.
MATRIX_KINDS = frozenset({Kind.DENSE, Kind.MATMUL, Kind.BATCH_MATMUL})

#: Operators that a chain starts with and that absorb a batch norm.
ANCHOR_KINDS = CONVOLUTION_KINDS | MATRIX_KINDS

#: Kinds that a fused kernel can compute in registers, element by element.
ELEMENTWISE_KINDS = frozenset(
    {
        Kind.BIAS_ADD,
        Kind.ADD,
        Kind.SUBTRACT,
        Kind.MULTIPLY,
        Kind.DIVIDE,
        Kind.RELU,
        Kind.CLIP,
        Kind.LEAKY_RELU,
        Kind.PRELU,
        Kind.SIGMOID,
        Kind.TANH,
        Kind.BROADCAST_TO,
        Kind.CAST,
        Kind.ERF,
        Kind.EXP,
        Kind.LOG,
        Kind.MAXIMUM,
        Kind.MINIMUM,
        Kind.NEGATIVE,
        Kind.POWER,
        Kind.RECIPROCAL,
        Kind.RSQRT,
        Kind.SQRT,
        Kind.ELEMENTWISE,
    }
)


#: Kinds that give the elements of their operand in the same order, in another shape.
VIEW_KINDS = frozenset({Kind.EXPAND_DIMS, Kind.RESHAPE})

#: Kinds whose result elements can be computed one by one, wherever a kernel reads them.
INJECTIVE_KINDS = (
    ELEMENTWISE_KINDS
    | VIEW_KINDS
    | {Kind.CONCATENATE, Kind.INJECTIVE, Kind.LAYOUT_TRANSFORM, Kind.PAD, Kind.SLICE, Kind.TRANSPOSE}
)

#: Kinds that are no operator.
LEAF_KINDS = frozenset({Kind.INPUT, Kind.CONSTANT})
