"""Statistics of batch norms: every channel that is broken, and what is legal and yet hardly meant.

Broken channels stop the job. A warning stops nothing: the fold is exact all the same, but a layer
that was never trained, or one that multiplies by ten thousand, is worth a look before the outputs are.

Conditions of a warning, over all channels: ``bn-statistics-untrained`` (mean 0, variance 1, gamma 1,
beta 0), ``bn-variance-all-zero``, and ``bn-gain-large`` in any channel
(``abs(gamma) / sqrt(variance + epsilon)`` above ``GAIN_LIMIT``).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tvm_fuse.core.fold import BatchNorm, audit_statistics, read_batch_norm
from tvm_fuse.core.graph import Array, Graph, Kind
from tvm_fuse.core.reason import Code, Reason

__all__ = ["GAIN_LIMIT", "audit_channels", "collect_warnings", "warn_statistics"]

#: A trained layer scales by less: gamma is about 1, and a variance of 1e-8 is a channel without a signal.
GAIN_LIMIT = 1e4

#: How many channels a reason names.
_MOST_CHANNELS = 4


def audit_channels(bn: BatchNorm) -> tuple[Reason, ...]:
    """What is broken, for each role and kind of damage with its channels and values.

    Returns:
        Empty where ``audit_statistics`` finds nothing.
    """
    first = audit_statistics(bn)
    if first is None:
        return ()
    return tuple(_broken_channels(bn)) or (first,)


def collect_warnings(graph: Graph) -> tuple[Reason, ...]:
    """The warnings about all batch norms of a graph that have constant parameters."""
    norms = (read_batch_norm(graph, node) for node in graph.of_kind(Kind.BATCH_NORM))
    return tuple(reason for bn in norms if isinstance(bn, BatchNorm) for reason in warn_statistics(bn))


def warn_statistics(bn: BatchNorm) -> tuple[Reason, ...]:
    """What is legal and yet hardly meant; nothing about a batch norm that is broken."""
    if bn.mean.size == 0 or audit_statistics(bn) is not None:
        return ()
    return tuple(reason for check in (_untrained, _all_zero, _large_gain) for reason in check(bn))


def _broken_channels(bn: BatchNorm) -> Iterator[Reason]:
    for role in ("gamma", "beta", "mean", "variance"):
        values: Array = getattr(bn, role)
        broken = np.flatnonzero(~np.isfinite(values))
        if broken.size:
            got = _list_channels(role, values, broken)
            yield Reason(Code.BN_STATISTICS_NOT_FINITE, bn.name, "finite statistics", got)
    with np.errstate(invalid="ignore"):
        broken = np.flatnonzero((bn.variance < 0) | (bn.variance + bn.epsilon <= 0))
    broken = broken[np.isfinite(bn.variance[broken])]
    if broken.size:
        got = f"{_list_channels('variance', bn.variance, broken)}, epsilon = {bn.epsilon:g}"
        yield Reason(Code.BN_VARIANCE_NOT_POSITIVE, bn.name, "variance >= 0 and variance + epsilon > 0", got)


def _list_channels(role: str, values: Array, channels: Array) -> str:
    """``variance[1] = nan, variance[3] = inf (2 of 4 channels)``."""
    named = [f"{role}[{channel}] = {values[channel]:g}" for channel in channels[:_MOST_CHANNELS]]
    named += ["..."] if channels.size > _MOST_CHANNELS else []
    return f"{', '.join(named)} ({channels.size} of {values.size} channels)"


def _untrained(bn: BatchNorm) -> Iterator[Reason]:
    initial = {"mean": 0.0, "variance": 1.0, "gamma": 1.0, "beta": 0.0}
    if all(np.all(getattr(bn, role) == value) for role, value in initial.items()):
        got = ", ".join(f"{role} = {value:g}" for role, value in initial.items())
        got = f"{got} in all {bn.mean.size} channels"
        yield Reason(Code.BN_STATISTICS_UNTRAINED, bn.name, "statistics of a trained layer", got)


def _all_zero(bn: BatchNorm) -> Iterator[Reason]:
    if not bn.variance.any():
        got = f"variance = 0 in all {bn.mean.size} channels, epsilon = {bn.epsilon:g}"
        yield Reason(Code.BN_VARIANCE_ALL_ZERO, bn.name, "a variance above 0 in some channel", got)


def _large_gain(bn: BatchNorm) -> Iterator[Reason]:
    with np.errstate(over="ignore"):
        gain = np.abs(bn.gamma) / np.sqrt(bn.variance + bn.epsilon)
    large = np.flatnonzero(gain > GAIN_LIMIT)
    if large.size:
        worst = int(gain.argmax())
        got = (
            f"{gain[worst]:g} in channel {worst} (gamma = {bn.gamma[worst]:g}, variance = "
            f"{bn.variance[worst]:g}, epsilon = {bn.epsilon:g}; {large.size} of {gain.size} channels)"
        )
        wanted = f"abs(gamma) / sqrt(variance + epsilon) <= {GAIN_LIMIT:g}"
        yield Reason(Code.BN_GAIN_LARGE, bn.name, wanted, got)
