"""Epsilon alignment: is the epsilon in the graph the one the model was trained with?

A wrong epsilon does not crash and hardly moves a random test (1e-5 for 1e-3 moves outputs by
some 3e-3), so it is compared as a number, never through the outputs. The expected value comes,
in this order, from the user (``--epsilon NAME=1e-3``), from the training config
(``--epsilon-config FILE``) or from the source file (an attribute of the ONNX node, or ONNX's default
1e-5 when the attribute is absent).

What a wrong epsilon does to a channel with variance v, in the graph e1 and expected e2::

    scale    changes by  sqrt((v + e1) / (v + e2)) - 1                          of itself
    output   changes by  abs(gamma) * abs(sqrt(v / (v + e1)) - sqrt(v / (v + e2)))

the output where the input is one standard deviation, sqrt(v), from the mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase

import numpy as np

from tvm_fuse.core.dtypes import FLOATS, Array, narrow
from tvm_fuse.core.errors import UsageError
from tvm_fuse.core.reason import Code, Reason

__all__ = [
    "EPSILON_RTOL",
    "ChannelImpact",
    "EpsilonCheck",
    "EpsilonConfig",
    "EpsilonImpact",
    "EpsilonOrigin",
    "ExpectedEpsilon",
    "check_epsilon",
    "check_epsilon_dtype",
    "measure_impact",
    "resolve_expected",
]

#: ONNX stores epsilon in float32: 1e-5 arrives as 9.999999747378752e-06.
EPSILON_RTOL = 1e-6

#: How many channels an impact names.
_MOST_CHANNELS = 3


class EpsilonOrigin(str, Enum):
    """Where an expected epsilon comes from."""

    SOURCE_ATTRIBUTE = "source attribute"
    SOURCE_DEFAULT = "source default"
    RECOVERED = "recovered from operators"
    CONFIG = "training config"
    USER = "user"
    GRAPH = "graph attribute"


@dataclass(frozen=True)
class ExpectedEpsilon:
    """The epsilon a batch norm should have, and who says so."""

    value: float
    origin: EpsilonOrigin


@dataclass(frozen=True)
class ChannelImpact:
    """What the expected epsilon in place of the graph's changes in one channel.

    Args:
        channel: Its index.
        variance: Its variance.
        scale_change: Relative change of the scale; -0.1 makes it a tenth smaller.
        output_change: Change of the output, one standard deviation from the mean.
    """

    channel: int
    variance: float
    scale_change: float
    output_change: float

    def __str__(self) -> str:
        detail = f"variance {self.variance:.3g}, scale {100 * self.scale_change:+.3g} %"
        return f"{self.output_change:.3g} in channel {self.channel} ({detail})"


@dataclass(frozen=True)
class EpsilonImpact:
    """The channels that another epsilon changes most, the largest change of output first."""

    worst: tuple[ChannelImpact, ...]

    @property
    def largest(self) -> float:
        """The largest change of an output, one standard deviation from the mean."""
        return self.worst[0].output_change

    def __str__(self) -> str:
        return f"the output at one standard deviation changes by {', '.join(map(str, self.worst))}"


@dataclass(frozen=True)
class EpsilonCheck:
    """The comparison of one batch norm; ``used`` is what folding will use.

    ``impact`` is there when the values differ and the parameters are sound constants.
    """

    name: str
    in_graph: float
    expected: float
    origin: EpsilonOrigin
    used: float
    impact: EpsilonImpact | None = None

    @property
    def matches(self) -> bool:
        """Whether the graph has the expected value."""
        return math.isclose(self.in_graph, self.expected, rel_tol=EPSILON_RTOL, abs_tol=0.0)


def check_epsilon(
    name: str, in_graph: float, expected: ExpectedEpsilon | None, *, align: bool
) -> EpsilonCheck:
    """Compare one batch norm's epsilon with the expected one.

    Args:
        name: Name of the batch norm.
        in_graph: The graph's epsilon.
        expected: What it should be; None when nobody says, and the graph is believed.
        align: Whether the expected value replaces the graph's.

    Returns:
        The comparison.
    """
    if expected is None:
        return EpsilonCheck(name, in_graph, in_graph, EpsilonOrigin.GRAPH, in_graph)
    check = EpsilonCheck(name, in_graph, expected.value, expected.origin, in_graph)
    used = expected.value if align and not check.matches else in_graph
    return EpsilonCheck(name, in_graph, expected.value, expected.origin, used)


def measure_impact(gamma: Array, variance: Array, in_graph: float, expected: float) -> EpsilonImpact | None:
    """What the expected epsilon in place of the graph's changes (the formulas are above).

    Args:
        gamma: float64 ``(C,)``.
        variance: float64 ``(C,)``.
        in_graph: The graph's epsilon.
        expected: The one it should have.

    Returns:
        The channels that change most; None where a number is not finite or there is nothing to
        divide by, so that no change can be told.
    """
    before, after = variance + in_graph, variance + expected
    is_finite = np.isfinite(gamma) & np.isfinite(before) & np.isfinite(after)
    is_sound = is_finite & (variance >= 0) & (before > 0) & (after > 0)
    if not variance.size or not is_sound.all():
        return None
    with np.errstate(over="ignore"):
        scale = np.sqrt(before / after) - 1
        output = np.abs(gamma) * np.abs(np.sqrt(variance / before) - np.sqrt(variance / after))
    order = np.lexsort((-np.abs(scale), -output))  # by the last key first
    return EpsilonImpact(
        tuple(
            ChannelImpact(
                int(channel), float(variance[channel]), float(scale[channel]), float(output[channel])
            )
            for channel in order[:_MOST_CHANNELS]
        )
    )


def check_epsilon_dtype(name: str, epsilon: float, dtype: str) -> Reason | None:
    """Check that an epsilon does not vanish in the dtype of a batch norm's parameters.

    Args:
        name: Name of the batch norm.
        epsilon: Its epsilon.
        dtype: Dtype of its variance, to which the epsilon is added.

    Returns:
        A reason when the dtype rounds an epsilon above zero to zero.
    """
    if dtype not in FLOATS or not epsilon > 0 or narrow(np.array(epsilon), dtype).any():
        return None
    wanted = f"an epsilon that {dtype} (at least {FLOATS[dtype].smallest:g}) can hold"
    return Reason(Code.BN_EPSILON_UNDERFLOW, name, wanted, f"{epsilon:g}")


@dataclass(frozen=True)
class EpsilonConfig:
    """The epsilons of a training config.

    Args:
        values: Name or glob pattern -> epsilon; each must fit a batch norm of the graph.
        names_layers: The names are instead those of layers of the training model (Keras). Exporters make
            paths of them (``model/bn1/FusedBatchNormV3``) and drop some; one of them must be there.
        source: Where it was read, for messages.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    names_layers: bool = False
    source: str = "training config"


def resolve_expected(
    names: tuple[str, ...],
    source: Mapping[str, ExpectedEpsilon],
    user: Mapping[str, float],
    config: EpsilonConfig | None = None,
) -> dict[str, ExpectedEpsilon]:
    """Combine the source's values with the training config's, which win, and the user's, which win over both.

    Args:
        names: Names of the batch norms in the graph.
        source: Name -> the source file's value.
        user: Name or glob pattern (``layer4.*``) -> value. A name wins over a pattern, and of
            patterns the later.
        config: The training config.

    Returns:
        Name -> expected value, for every name that somebody speaks for.

    Raises:
        UsageError: A pattern of the user or the config matches no batch norm, or a value is not a
            valid epsilon.
    """
    expected = {name: source[name] for name in names if name in source}
    config = config or EpsilonConfig()
    if config.names_layers:
        configured = _match_layers(names, config)
    else:
        configured = _match_patterns(names, config.values, f"{config.source}: ")
    for values, origin in (
        (configured, EpsilonOrigin.CONFIG),
        (_match_patterns(names, user), EpsilonOrigin.USER),
    ):
        expected.update((name, ExpectedEpsilon(value, origin)) for name, value in values.items())
    return expected


def _match_patterns(names: tuple[str, ...], values: Mapping[str, float], place: str = "") -> dict[str, float]:
    matched: dict[str, float] = {}
    for pattern, value in values.items():
        if not math.isfinite(value) or value < 0:
            raise UsageError(f"{place}epsilon for {pattern!r}: wanted a finite number >= 0, got {value}")
        matching = [name for name in names if name == pattern or fnmatchcase(name, pattern)]
        if not matching:
            raise UsageError(
                f"{place}epsilon for {pattern!r}: no batch norm has that name; {_name_some(names)}",
                "quote the pattern, or use '*' for all of them",
            )
        matched.update(dict.fromkeys(matching, value))
    return {name: values.get(name, value) for name, value in matched.items()}


def _match_layers(names: tuple[str, ...], config: EpsilonConfig) -> dict[str, float]:
    matched = {
        name: value
        for layer, value in config.values.items()
        for name in names
        if name == layer or layer in name.split("/")
    }
    if not matched:
        some = ", ".join(list(config.values)[:5])
        raise UsageError(
            f"{config.source}: none of its {len(config.values)} batch norms ({some}) is in the model; "
            f"{_name_some(names)}",
            "name the batch norms as the model does: a mapping of name to epsilon",
        )
    return matched


def _name_some(names: tuple[str, ...]) -> str:
    return f"the model has {len(names)}: {', '.join(names[:5]) or 'none'}"
