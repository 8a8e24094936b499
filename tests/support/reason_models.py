"""For every reason code that needs no TVM a minimal model that provokes it: the examples of docs/reasons.md.

A model is a function from a ``GraphBuilder`` to the graph's outputs; ``find_reason`` runs every rule on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from tests.support.graphs import GraphBuilder, plain_norm, random_norm
from tvm_fuse.core.accept import accept_on
from tvm_fuse.core.audit import audit_graph, compare_epsilons, mismatch
from tvm_fuse.core.epsilon import EpsilonOrigin, ExpectedEpsilon
from tvm_fuse.core.fold import plan_folds
from tvm_fuse.core.graph import Graph, Kind
from tvm_fuse.core.parallel import plan_parallel
from tvm_fuse.core.plan import plan_chains
from tvm_fuse.core.plan_options import PlanOptions
from tvm_fuse.core.reason import Code, Reason
from tvm_fuse.core.targets import find_device

__all__ = ["MODELS", "find_reason"]

C = 4
SHAPE = (1, C, 6, 6)
_ON_CUDA = PlanOptions(target="cuda")


@dataclass(frozen=True)
class Model:
    """A minimal model and how it is looked at."""

    make: Callable[[GraphBuilder], tuple[int, ...]]
    options: PlanOptions = _ON_CUDA
    expected: float | None = None
    dtype: str = "float32"


def find_reason(code: Code) -> Reason:
    """The reason with a code that its model provokes."""
    found = [reason for reason in reasons_of(MODELS[code]) if reason.code is code]
    assert found, (
        f"the model of {code.value} gives {sorted({r.code.value for r in reasons_of(MODELS[code])})}"
    )
    return found[0]


def reasons_of(model: Model) -> Iterator[Reason]:
    """What every rule says about a model."""
    g = GraphBuilder(model.dtype)
    outputs = model.make(g)
    graph = g.build(*outputs)
    yield from _folding(graph, model.expected)
    plan = plan_chains(graph, model.options)
    decisions = [*plan.decisions, *plan_parallel(graph, model.options).decisions]
    decisions += plan.not_joined
    yield from (decision.reason for decision in decisions if decision.reason is not None)
    yield from (group.end for group in plan.groups if group.end is not None)


def _folding(graph: Graph, expected: float | None) -> Iterator[Reason]:
    audit = audit_graph(graph)
    yield from (*audit.problems, *audit.warnings)
    if expected is not None:
        user = ExpectedEpsilon(expected, EpsilonOrigin.USER)
        norms = {str(node): user for node in graph.of_kind(Kind.BATCH_NORM)}
        checks = compare_epsilons(graph, norms, align=False).values()
        yield from (mismatch(check) for check in checks if not check.matches)
    yield from (decision.reason for decision in plan_folds(graph)[1] if decision.reason is not None)


# --- folding -------------------------------------------------------------------------------------


def _x(g, shape=SHAPE):
    return g.input("x", shape)


def _weight(*shape, dtype="float32"):
    return np.random.default_rng(0).normal(size=shape or (C, C, 3, 3)).astype(dtype)


def _conv(g, x=None, **attrs):
    return g.conv2d(_x(g) if x is None else x, _weight(), **{"name": "conv1", **attrs})


def _norm(g, data, norm=None, **attrs):
    return g.norm(data, random_norm(C, dtype=g.dtype) if norm is None else norm, **{"name": "bn1", **attrs})


def _on_conv(norm=None, **attrs):
    return Model(lambda g: (_norm(g, _conv(g), norm, **attrs),))


def _after(between):
    return Model(lambda g: (_norm(g, between(g, _conv(g))),))


def _whole_statistics(g):
    bn = g.batch_norm(_conv(g), random_norm(C, dtype="float32"), name="bn1")
    return g.item(bn), g.item(bn, 1)


def _given_gamma(g):
    gamma = g.input("gamma", (C,))
    return (_norm(g, _conv(g), (gamma, *random_norm(C, dtype="float32")[1:])),)


def _shared(g):
    conv = _conv(g)
    return _norm(g, conv), g.relu(conv)


def _returned(g):
    conv = _conv(g)
    return _norm(g, conv), conv


def _computed_weight(g):
    weight = g.transpose(g.input("w", (C, C, 3, 3)), 1, 0, 2, 3)
    return (_norm(g, g.conv2d(_x(g), weight, name="conv1")),)


def _blocked_weight(g):
    return (g.conv2d(_norm(g, _x(g)), _weight(2, 1, 1, 1, 2, 2), groups=2, kernel="OIHW2i2o", name="conv1"),)


def _float16(g):
    conv = g.conv2d(_x(g), np.full((C, C, 1, 1), 4, "float16"), name="conv1")
    return (
        _norm(
            g, conv, tuple(v.astype("float16") for v in plain_norm(C, gamma=100, variance=0)), epsilon=1e-5
        ),
    )


def _padded(g):
    y = g.norm(g.input("x", (1, 3, 6, 6)), random_norm(3, dtype="float32"), name="bn1")
    return (g.conv2d(y, _weight(64, 3, 3, 3), padding=(1, 1), name="conv1"),)


_FOLDING = {
    Code.BN_PRODUCER_UNSUPPORTED: _after(lambda g, y: g.other("nn.max_pool2d", y)),
    Code.BN_AFTER_ACTIVATION: _after(lambda g, y: g.relu(y)),
    Code.BN_BEFORE_ACTIVATION: Model(lambda g: (_conv(g, g.relu(_norm(g, _x(g)))),)),
    Code.BN_READER_UNSUPPORTED: Model(lambda g: (g.other("nn.max_pool2d", _norm(g, _x(g))),)),
    Code.BN_SHIFT_BEFORE_PADDING: Model(_padded),
    Code.NORMALIZATION_OF_DATA: Model(
        lambda g: (g.node(Kind.DATA_NORM, "nn.instance_norm", (_conv(g),), SHAPE, name="norm1"),)
    ),
    Code.BN_PARAMETERS_NOT_CONSTANT: Model(_given_gamma),
    Code.BN_STATISTICS_USED: Model(_whole_statistics),
    Code.BN_AXIS_NOT_CHANNEL: Model(lambda g: (_norm(g, _conv(g), axis=3),)),
    Code.BN_STATISTICS_NOT_FINITE: _on_conv(plain_norm(C, variance=[1, np.nan, 2, 1])),
    Code.BN_VARIANCE_NOT_POSITIVE: _on_conv(plain_norm(C, variance=[1, 1, -0.25, 1]), epsilon=1e-5),
    Code.BN_EPSILON_INVALID: _on_conv(epsilon=-1e-5),
    Code.BN_EPSILON_MISMATCH: Model(
        lambda g: (_norm(g, _conv(g), plain_norm(C, variance=[1, 2, 1, 1e-4]), epsilon=1e-5),), expected=1e-3
    ),
    Code.BN_EPSILON_UNDERFLOW: Model(
        lambda g: (_norm(g, _conv(g), random_norm(C, dtype="float16"), epsilon=1e-8),), dtype="float16"
    ),
    Code.ANCHOR_OUTPUT_SHARED: Model(_shared),
    Code.ANCHOR_OUTPUT_RETURNED: Model(_returned),
    Code.WEIGHT_NOT_CONSTANT: Model(_computed_weight),
    Code.WEIGHT_LAYOUT_UNSUPPORTED: Model(_blocked_weight),
    Code.FOLD_OVERFLOW: Model(_float16, dtype="float16"),
    Code.BN_STATISTICS_UNTRAINED: _on_conv(plain_norm(C)),
    Code.BN_VARIANCE_ALL_ZERO: _on_conv(plain_norm(C, variance=0, mean=1), epsilon=1e-5),
    Code.BN_GAIN_LARGE: _on_conv(plain_norm(C, variance=[1, 1, 0, 1], mean=1), epsilon=1e-12),
}


# --- plans ---------------------------------------------------------------------------------------


def _then(*operators):
    def make(g):
        y = _conv(g)
        for operator in operators:
            y = operator(g, y)
        return (y,)

    return make


def _pool(g, y):
    return g.other("nn.max_pool2d", y)


def _two_readers(g):
    y = g.relu(_conv(g))
    return g.other("nn.max_pool2d", y), g.conv2d(y, _weight(), name="conv2")


def _downsample(g):
    x = _x(g)
    return (g.relu(g.add(_conv(g, x, name="main"), _conv(g, x, name="shortcut"))),)


def _scaled_patches(g):
    """A multiply that a 3x3 convolution with many channels would compute 288 times."""
    x = g.other("nn.max_pool2d", g.input("x", (1, 512, 56, 56)))
    y = g.multiply(x, g.input("gate", (1, 512, 1, 1)))
    return (g.conv2d(y, np.zeros((512, 512, 3, 3), "float32"), padding=(1, 1), name="conv1"),)


def _shared_scale(g):
    x = g.other("nn.max_pool2d", _x(g))
    return (_conv(g, g.multiply(x, g.input("gate", (1, C, 1, 1)))),)


def _read_by_two(g):
    y = g.tanh(g.other("nn.max_pool2d", _x(g)))
    return _conv(g, y, name="conv1"), _conv(g, y, name="conv2")


def _many(g):
    values = [g.relu(g.input(f"x{index}", (1, 2))) for index in range(600)]
    return (g.concatenate(*values),)


def _attention(g):
    """Twelve heads of 64, 128 tokens."""
    queries, keys, values = (g.input(name, (12, 128, 64)) for name in ("queries", "keys", "values"))
    scores = g.multiply(g.matmul(queries, keys, kernel="BOI"), 0.125)
    return (g.matmul(g.softmax(scores), values, kernel="BIO"),)


def _nine_readers(g):
    x = _x(g)
    return tuple(g.clip(x, 0.0, float(most)) for most in range(1, 10))


def _side_by_side(make, **attrs):
    def model(g):
        x = _x(g)
        return g.conv2d(x, _weight(8, C, 1, 1), name="conv1"), make(g, x)

    return Model(model, **attrs)


_PLANS = {
    Code.CHAIN_NO_EPILOGUE: Model(_then(_pool)),
    Code.CHAIN_DYNAMIC_SHAPE: Model(lambda g: (g.relu(_conv(g, g.input("x", ("n", C, 6, 6)))),)),
    Code.CHAIN_TOO_LONG: Model(_then(*[lambda g, y: g.tanh(y)] * 16)),
    Code.RESULT_SHARED: Model(_two_readers),
    Code.RESULT_RETURNED: Model(_then()),
    Code.RESULT_SHAPE_CHANGES: Model(_then(lambda g, y: g.add(y, g.input("residual", (2, C, 4, 4))))),
    Code.READER_NOT_ELEMENTWISE: Model(_then(lambda g, y: g.relu(y), _pool)),
    Code.READER_IN_OTHER_CHAIN: Model(_downsample),
    Code.FUSION_COSTS_TIME: Model(
        _scaled_patches, PlanOptions(target="cuda", accept=accept_on(find_device("a100")))
    ),
    Code.OPERATOR_ALONE: Model(lambda g: (g.relu(_pool(g, _x(g))),)),
    Code.OPERATOR_OPAQUE: Model(lambda g: (g.other("argsort", _x(g)),)),
    Code.VALUE_WRITTEN: Model(_read_by_two),
    Code.TOO_MANY_ARGUMENTS: Model(_many),
    Code.TARGET_CANNOT_JOIN: Model(_shared_scale, PlanOptions(target="cpu")),
    Code.ATTENTION_IN_PARTS: Model(_attention),
    Code.LEFT_OUT_BY_USER: Model(_then(lambda g, y: g.relu(y)), PlanOptions(target="cuda", skip=("chain0",))),
    Code.SIBLINGS_DIFFER: _side_by_side(lambda g, x: _conv(g, x, padding=(1, 1), name="conv2")),
    Code.SIBLING_GROUPED: _side_by_side(
        lambda g, x: g.conv2d(x, _weight(C, 1, 3, 3), groups=C, name="conv2")
    ),
    Code.SIBLING_DTYPE: _side_by_side(
        lambda g, x: g.conv2d(x, _weight(8, C, 1, 1, dtype="float16"), name="conv2")
    ),
    Code.SEVERAL_RESULTS: Model(_nine_readers),
}

#: Code -> its model.
MODELS: dict[Code, Model] = {**_FOLDING, **_PLANS}
