"""The job of ``tvm-fuse explain``: for each place in a model what it was fused with, or what stopped it."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from fnmatch import fnmatchcase

from tvm_fuse.core.errors import UsageError
from tvm_fuse.core.graph import ANCHOR_KINDS, LEAF_KINDS, Graph, Node
from tvm_fuse.core.group import FusionGroup
from tvm_fuse.core.plan import FusionPlan
from tvm_fuse.core.reason import Decision, Reason, Stage
from tvm_fuse.relay.fuse import FusedModel

__all__ = ["Explanation", "Site", "Verdict", "explain_model"]

_MOST_NEAR = 3


class Verdict(str, Enum):
    """What became of a place."""

    FUSED = "fused"
    NOT_FUSED = "not fused"
    #: A reshape or a tuple: there is nothing to compute.
    NO_KERNEL = "no kernel"
    FOLDED = "folded"
    NOT_FOLDED = "not folded"


@dataclass(frozen=True)
class Site:
    """One operator or batch norm.

    Args:
        id: ``#37``, its number in the folded graph; empty for a batch norm, which is in the model as it came.
        name: Where it came from.
        operator: The front end's name of the operator.
        verdict: What became of it.
        group: Id and name of its kernel, or of each that computes it again; empty where it is in none.
        partners: What it was fused with or folded into, in order, each with what it does there.
        stage: How far the nearest rule came.
        matched: How many operators fitted before the one that did not.
        reason: What stopped it: for a fused one, why its kernel ends there.
        hint: What a user can do about that.
        epsilon: The epsilon of a batch norm, and who says so.
        beside: Why it did, or did not, become one layer with others that read the same value.
        not_joined: Why its kernel is not part of a larger one: a gate, an attention, readers of one value.
    """

    id: str
    name: str
    operator: str
    verdict: Verdict
    group: str = ""
    partners: tuple[str, ...] = ()
    stage: Stage | None = None
    matched: int = 0
    reason: Reason | None = None
    hint: str = ""
    epsilon: str = ""
    beside: tuple[str, ...] = ()
    not_joined: tuple[Reason, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """What became of a model, or of the places that were asked about.

    Args:
        model: Name of the model.
        target: Target string.
        anchors: Convolutions and matrix products.
        fused: How many of them are fused with something.
        kernels: Groups of the plan, each one kernel.
        alone: Operators that compute and are in no group.
        reasons: Code -> how many anchors and batch norms it stopped, the most common first.
        sites: The places.
    """

    model: str
    target: str
    anchors: int
    fused: int
    kernels: int
    alone: int
    reasons: tuple[tuple[str, int], ...]
    sites: tuple[Site, ...]


def explain_model(name: str, target: str, fused: FusedModel, pattern: str | None = None) -> Explanation:
    """Explain a plan.

    Args:
        name: Name of the model.
        target: Target string.
        fused: What ``fuse_model`` returned.
        pattern: Name of an operator or batch norm, a glob pattern of such, or an operator's number (``#37``,
            ``nn.conv2d#37``); None takes every anchor and every batch norm.

    Returns:
        The places, operators in the order of the graph after the batch norms.

    Raises:
        UsageError: ``pattern`` fits nothing; the error names what comes near.
    """
    graph, plan = fused.planned.graph, fused.planned.plan
    norms = tuple(_batch_norms(fused))
    nodes = tuple(node for node in graph.nodes if node.kind not in LEAF_KINDS)
    beside = fused.records["CombineParallel"].decisions
    sites = tuple(_with_beside(_explain(graph, plan, node), beside) for node in nodes)
    anchors = tuple(site for site, node in zip(sites, nodes) if node.kind in ANCHOR_KINDS)
    stopped = Counter(
        site.reason.code.value
        for site in (*norms, *anchors)
        if site.reason is not None and site.verdict in (Verdict.NOT_FUSED, Verdict.NOT_FOLDED)
    )
    chosen = (*norms, *anchors) if pattern is None else _choose((*norms, *sites), pattern)
    return Explanation(
        model=name,
        target=target,
        anchors=len(anchors),
        fused=sum(site.verdict is Verdict.FUSED for site in anchors),
        kernels=len(plan.groups),
        alone=sum(site.verdict is Verdict.NOT_FUSED for site in sites),
        reasons=tuple(sorted(stopped.items(), key=lambda item: (-item[1], item[0]))),
        sites=chosen,
    )


# --- operators -----------------------------------------------------------------------------------


def _explain(graph: Graph, plan: FusionPlan, node: Node) -> Site:
    apart = (d.reason for d in plan.not_joined if d.node == node.id and d.reason is not None)
    place = Site(f"#{node.id}", str(node), node.op, Verdict.NO_KERNEL, not_joined=tuple(apart))
    groups = [group for group in plan.groups if node.id in group.nodes]
    if groups:
        group, end = groups[0], groups[0].end
        return replace(
            place,
            verdict=Verdict.FUSED,
            group=", ".join(f"{each.id} {each.name}" for each in groups),
            partners=tuple(_partners(graph, group, node.id)),
            stage=Stage.APPLIED,
            matched=len(group.operators),
            reason=end,
            hint=end.hint if end else "",
        )
    decision = _nearest(plan.decisions, node.id)
    if decision is None or decision.reason is None:
        return place
    return replace(
        place,
        verdict=Verdict.NOT_FUSED,
        stage=decision.stage,
        matched=decision.matched,
        reason=decision.reason,
        hint=decision.reason.hint,
    )


def _with_beside(site: Site, decisions: Iterable[Decision]) -> Site:
    """What was decided about a layer, or the layers that became it (``a + b``), and others on one value."""
    names = site.name.split(" + ")
    about = (decision for decision in decisions if decision.at in names)
    return replace(site, beside=tuple(str(decision.reason or decision.detail) for decision in about))


def _nearest(decisions: Iterable[Decision], node: int) -> Decision | None:
    """Of the decisions about a node the one that came furthest."""
    order = list(Stage)
    about = [decision for decision in decisions if decision.node == node and not decision.applied]
    return max(about, key=lambda d: (order.index(d.stage), d.matched), default=None)


def _partners(graph: Graph, group: FusionGroup, node: int) -> Iterator[str]:
    steps = {member: step.name for step in group.steps for member in step.nodes}
    for member in group.nodes:
        if member == node:
            continue
        if member == group.anchor:
            role = "the anchor"
        elif member in group.absorbed:
            role = "computed inside"
        elif member in group.prologue:
            role = "on the way in"
        else:
            role = steps.get(member, "elementwise").replace("_", " ")
        if member in group.also:
            role += ", a result of its own"
        if member in group.recomputed:
            role += ", computed again"
        yield f"{graph.nodes[member]} ({role})"


# --- batch norms ---------------------------------------------------------------------------------


def _batch_norms(fused: FusedModel) -> Iterator[Site]:
    record = fused.records["FoldBatchNorm"]
    layers = {fold.name: fold for fold in record.details}
    declined = {decision.at: decision for decision in record.decisions if not decision.applied}
    for check in fused.checked.epsilon:
        epsilon = f"{check.used:.6g} ({check.origin.value})"
        fold, decision = layers.get(check.name), declined.get(check.name)
        if fold is not None:
            partners = tuple(f"{layer.name} ({fold.direction.value} it)" for layer in fold.layers)
            yield Site("", check.name, "batch norm", Verdict.FOLDED, partners=partners, epsilon=epsilon)
            continue
        reason = decision.reason if decision else None
        stage, hint = (decision.stage if decision else None), (reason.hint if reason else "")
        yield Site(
            "",
            check.name,
            "batch norm",
            Verdict.NOT_FOLDED,
            stage=stage,
            reason=reason,
            hint=hint,
            epsilon=epsilon,
        )


# --- choice --------------------------------------------------------------------------------------


def _choose(sites: tuple[Site, ...], pattern: str) -> tuple[Site, ...]:
    found = tuple(site for site in sites if any(fnmatchcase(name, pattern) for name in _names(site)))
    if found:
        return found
    known = list(dict.fromkeys(name for site in sites for name in _names(site)))
    near = difflib.get_close_matches(pattern, known, n=_MOST_NEAR, cutoff=0.3)
    raise UsageError(
        f"nothing in the model is called {pattern!r}: wanted a name, a pattern such as '*conv*', or #NUMBER",
        f"the nearest: {', '.join(near)}" if near else "leave it out to see all anchors",
    )


def _names(site: Site) -> tuple[str, ...]:
    return (site.name, site.id, f"{site.operator}{site.id}") if site.id else (site.name,)
