"""Batch norms written as operators become ``nn.batch_norm`` (``core/recompose.py`` finds them).

::

    %1 = subtract(%x, mean)
    %2 = multiply(%1, rsqrt(variance + 1e-3))      nn.batch_norm(%x, gamma, beta, mean, variance,
    %3 = multiply(%2, gamma)                                     epsilon=1e-3).0
    %4 = add(%3, beta)

Runs before constants are folded: after that, epsilon cannot be told from the variance. Relay's
batch norm wants parameters of the data's dtype; where that cannot hold the numbers, the operators stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Callable

from tvm_fuse.core.dtypes import holds, narrow
from tvm_fuse.core.graph import Kind
from tvm_fuse.core.reason import Decision
from tvm_fuse.core.recompose import Recomposition, plan_recompositions
from tvm_fuse.relay.base import relay
from tvm_fuse.relay.functions import rewrite_functions
from tvm_fuse.relay.read import ReadFunction
from tvm_fuse.relay.record import PassRecord, last_report, record
from tvm_fuse.relay.rewrite import Replacement, constant, rebuild_function

__all__ = ["recompose_batch_norms"]

_NAME = "RecomposeBatchNorm"


def recompose_batch_norms(module: Any, *, again: bool = False) -> Any:
    """Make batch norms of the operators that compute one, in all functions of a module, until none is left.

    Args:
        module: A Relay module with its parameters bound as constants, which nobody has folded yet.
        again: Whether this was done before, as far as the caller knows: a run that finds none then leaves
            the record of the earlier one.

    Returns:
        The type-inferred module; ``last_report()["RecomposeBatchNorm"]`` tells what was found.
    """
    found: list[Recomposition] = []
    done: list[Decision] = []
    left: list[Decision] = []

    def rewrite(read: ReadFunction) -> Any:
        records, decisions = plan_recompositions(read.graph)
        decided = (decision for decision in decisions if decision.applied)
        possible = [pair for pair in zip(records, decided) if _is_possible(read, pair[0])]
        named = _named(read, [item for item, _ in possible])
        found.extend(named)
        done.extend(decision for _, decision in possible)
        left.extend(decision for decision in decisions if not decision.applied)
        return rebuild_function(read, {item.result: _batch_norm(read, item) for item in named})

    changed = True
    while changed:
        left.clear()
        module, changed = rewrite_functions(module, rewrite)
    if found or not (again and any(earlier.name == _NAME for earlier in last_report().records)):
        summary = f"{len(found)} batch norms recovered from operators"
        record(PassRecord(_NAME, summary, bool(found), (*done, *left), tuple(found)))
    return module


def _is_possible(read: ReadFunction, item: Recomposition) -> bool:
    return holds(read.graph.nodes[item.data].output.dtype, item.dtype)


def _named(read: ReadFunction, items: Sequence[Recomposition]) -> list[Recomposition]:
    """Each with a name: where it has none, the one that ``read_function`` would make up."""
    places = [node.id for node in read.graph.of_kind(Kind.BATCH_NORM)] + [item.result for item in items]
    made_up = (f"batch_norm_{sum(place < item.result for place in places)}" for item in items)
    return [replace(item, name=item.name or name) for item, name in zip(items, made_up)]


def _batch_norm(read: ReadFunction, item: Recomposition) -> Replacement:
    dtype = read.graph.nodes[item.data].output.dtype
    parameters = [
        constant(narrow(vector, dtype), dtype) for vector in (item.gamma, item.beta, item.mean, item.variance)
    ]

    def construct(new: Callable[[int], Any]) -> Any:
        norm = relay.nn.batch_norm(new(item.data), *parameters, axis=item.axis, epsilon=item.epsilon)[0]
        call, span = norm.tuple_value, relay.Span(relay.SourceName(item.name), 0, 0, 0, 0)
        return relay.TupleGetItem(relay.Call(call.op, call.args, call.attrs, None, span), 0, span)

    return construct
