"""The fusion plan: which operators become one kernel, and why the others do not.

Four rounds, three of them from the last operator to the first:

1. Anchors and what follows them (``chain.py``). Of two producers of one residual add the later one takes it:
   the earlier result is in memory by then.
2. What an anchor reads, where the target can compute it on the way in (``region.py``, ``capabilities.py``),
   and slices that what follows it reads.
3. Elementwise operators and moves that are left, together.
4. Elementwise kernels that read one value, side by side (``readers.py``); cheap values that several kernels
   read, computed again in each (``recompute.py``).

The same graph and options always give the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm_fuse.core.attention import explain_attention
from tvm_fuse.core.capabilities import capability_of
from tvm_fuse.core.chain import MOST_OPERATORS, Chain, grow_chain
from tvm_fuse.core.errors import InternalError
from tvm_fuse.core.families import ELEMENTWISE, LAYERS, REDUCE, Family, family_of
from tvm_fuse.core.graph import LEAF_KINDS, VIEW_KINDS, Graph, Kind, Node
from tvm_fuse.core.group import FusionGroup, count_arguments, make_group
from tvm_fuse.core.joins import RowJoin, find_row_join, is_like_a_gate, is_used_in_rows, join_gate
from tvm_fuse.core.legality import find_faults
from tvm_fuse.core.plan_options import Candidate, Extension, PlanOptions
from tvm_fuse.core.readers import join_readers
from tvm_fuse.core.reason import Code, Decision, Reason, Stage, applied
from tvm_fuse.core.recompute import recompute_values
from tvm_fuse.core.refusals import Refusal, alone, cannot_join, end_of, too_long, without_epilogue
from tvm_fuse.core.region import MOST_EVALUATIONS, find_region, find_slices, takes_no_tuple
from tvm_fuse.core.steer import leave_alone, leave_out

__all__ = ["FusionGroup", "FusionPlan", "check_plan", "decide_groups", "plan_chains"]

RULE = "chain"

#: Not worth a decision: leaves, what only names values, and what costs no kernel.
_SILENT_KINDS = LEAF_KINDS | VIEW_KINDS | {Kind.TUPLE, Kind.GET_ITEM}


@dataclass(frozen=True)
class FusionPlan:
    """What becomes one kernel, and why.

    Args:
        groups: In topological order of their anchors (or results); disjoint but for what is computed again.
        decisions: One for each group and for each operator that computes and is in none, in order.
        alone: Groups of one operator, which the user asked to leave alone: TVM must not fuse it either.
        not_joined: Why kernels are not one larger kernel: gates, attentions, elementwise kernels that read
            one value; a decision at each operator that such a kernel would be named after.
    """

    groups: tuple[FusionGroup, ...]
    decisions: tuple[Decision, ...]
    alone: tuple[FusionGroup, ...] = ()
    not_joined: tuple[Decision, ...] = ()


def plan_chains(graph: Graph, options: PlanOptions | None = None) -> FusionPlan:
    """Decide the fused kernels of a graph.

    Args:
        graph: The graph, after folding and in its final layout.
        options: What the target can do, and what the user wants.

    Returns:
        The plan. Groups are disjoint but for what is computed again, and only results are read outside.

    Raises:
        UsageError: The target is none of ``CAPABILITIES``, or a pattern fits no group.
    """
    options = options or PlanOptions()
    planner = _Planner(graph, options)
    chains = planner.grow_chains()
    planner.join_rows(chains)
    for anchor in reversed(tuple(chains)):
        planner.group_anchor(*chains[anchor])
    planner.join_gates()
    for node in reversed(graph.nodes):
        planner.group_elementwise(node)
    planner.join_readers()
    groups = tuple(sorted(planner.groups, key=lambda group: group.center))
    groups = tuple(replace(group, id=f"chain{index}") for index, group in enumerate(groups))
    kept, alone, by_user = leave_out(graph, groups, options)
    if options.max_ops is not None:  # TVM must not make a larger kernel of what is in none
        grouped = {node for group in (*kept, *alone) for node in group.nodes}
        alone += leave_alone(graph, (node.id for node in graph.nodes if node.id not in grouped))
    decisions = [*planner.decisions, *map(_applied, kept), *by_user]
    decided = {decision.node for decision in decisions}.union(*(group.nodes for group in kept))
    decisions += [planner.explain(node) for node in graph.nodes if node.id not in decided and _computes(node)]
    apart = () if options.fuse == "none" else (*planner.not_joined, *explain_attention(graph, options.target))
    plan = FusionPlan(kept, tuple(sorted(decisions, key=lambda decision: decision.node or 0)), alone, apart)
    check_plan(graph, plan, options.target)
    return plan


class _Planner:
    """The groups so far, and why some operators are in none."""

    def __init__(self, graph: Graph, options: PlanOptions) -> None:
        self.graph, self.options = graph, options
        self.capability = capability_of(options.target)
        self.taken: set[int] = set()
        self.groups: list[FusionGroup] = []
        self.decisions: list[Decision] = []
        self.not_joined: list[Decision] = []
        self.misses: dict[int, tuple[Stage, Reason]] = {}

    def grow_chains(self) -> dict[int, tuple[Family, Chain]]:
        """Anchor -> its family and what follows it, in topological order; layers choose first."""
        found: dict[int, tuple[Family, Chain]] = {}
        anchors = [(node, family_of(node.kind)) for node in reversed(self.graph.nodes)]
        for node, family in sorted(anchors, key=lambda pair: pair[1] not in LAYERS):
            if family is None or family is ELEMENTWISE:
                continue
            reason = family.check(self.graph, node)
            if reason is not None:
                self.decline(family.rule, node, Stage.CONDITION, reason)
                continue
            chain = Chain(node.id, (), None)
            if family.has_epilogue:
                chain = grow_chain(self.graph, node.id, self.taken, self.most(MOST_OPERATORS))
            self.taken.update(chain.nodes)
            found[node.id] = family, chain
        return dict(sorted(found.items()))

    def group_anchor(self, family: Family, chain: Chain) -> None:
        """Make a group of an anchor, what follows it and what can be computed on the way in."""
        graph, anchor = self.graph, self.graph.nodes[chain.anchor]
        prologue = self._find_prologue(family, chain)
        if not chain.steps and not prologue:
            reason = without_epilogue(chain) or alone(graph, anchor)
            self.decline(family.rule, anchor, *self.misses.get(anchor.id, (Stage.CONDITION, reason)))
            return
        end = chain.end or end_of(graph, chain.result)
        nodes = {*chain.nodes, *prologue}
        self._add(
            make_group(graph, anchor.id, nodes, chain.result, chain.steps, prologue, end=end), family.rule
        )

    def join_rows(self, chains: dict[int, tuple[Family, Chain]]) -> None:
        """Make groups of reductions with what is before, between and after them along their rows."""
        reductions = {anchor for anchor in chains if self.graph.nodes[anchor].kind is Kind.REDUCE}
        for anchor in sorted(reductions, reverse=True):
            if anchor not in chains:
                continue
            taken = self.taken - reductions.intersection(chains)
            join = find_row_join(self.graph, self.graph.nodes[anchor], taken)
            refused = self._check_rows(anchor, join)
            if isinstance(join, Reason) or refused is not None:
                self._refuse_rows(anchor, chains, refused)
                continue
            for node in join.nodes:
                chains.pop(node, None)
            before = tuple(n for n in join.nodes if n < anchor and n not in join.absorbed)
            self._add(
                make_group(self.graph, anchor, join.nodes, join.result, (), before, join.absorbed, join.end),
                REDUCE.rule,
            )

    def _check_rows(self, anchor: int, join: RowJoin | Reason) -> Refusal | None:
        node = self.graph.nodes[anchor]
        refused = cannot_join(node, "normalization", self.options.target)
        if isinstance(join, Reason):
            return refused or (Stage.CONDITION, join)
        others = tuple(member for member in join.nodes if member != anchor)
        return refused or self._check_join(node, (anchor,), others, join.absorbed)

    def _refuse_rows(
        self, anchor: int, chains: dict[int, tuple[Family, Chain]], refused: Refusal | None
    ) -> None:
        """Keep why a reduction is not with what follows it, unless a later one of its rows said so."""
        if refused is not None and is_used_in_rows(self.graph, self.graph.nodes[anchor]):
            family, chain = chains[anchor]
            _, reason = self.misses.setdefault(anchor, refused)
            chains[anchor] = family, replace(chain, end=reason)

    def join_gates(self) -> None:
        """Make one group of two where the second product of a gate reads the first."""
        by_result = {group.result: group for group in self.groups if group.is_layer}
        for second in [group for group in self.groups if group.is_layer]:
            first = by_result.get(self.graph.nodes[second.center].inputs[0])
            if first is None:
                continue
            joined = join_gate(self.graph, first, second)
            center = self.graph.nodes[second.center]
            refused = cannot_join(center, "gate", self.options.target)
            if isinstance(joined, Reason):
                refused = refused or (Stage.CONDITION, joined)
            else:
                refused = refused or self._check_join(center, second.nodes, first.nodes, joined.absorbed)
            if isinstance(joined, Reason) or refused is not None:
                self._refuse_gate(first, second, refused)
                continue
            self.groups = [group for group in self.groups if group not in (first, second)]
            self._add(joined, RULE)

    def _refuse_gate(self, first: FusionGroup, second: FusionGroup, refused: Refusal | None) -> None:
        products = [self.graph.nodes[group.center] for group in (first, second)]
        if refused is not None and is_like_a_gate(self.graph, *products):
            decisions = (Decision("gate", str(node), *refused, node=node.id, matched=2) for node in products)
            self.not_joined.extend(decisions)

    def _check_join(
        self, anchor: Node, nodes: tuple[int, ...], added: tuple[int, ...], absorbed: tuple[int, ...]
    ) -> Refusal | None:
        """Too many operators, or the cost model's reason, which is kept for what would join."""
        count, most = len(nodes) + len(added), self.most(MOST_EVALUATIONS)
        if count > most:
            return too_long(anchor, most, count)
        if self.options.accept is None or not absorbed:
            return None
        candidate = Candidate(Extension.ABSORBED, anchor.kind.value, anchor.id, nodes, added)
        reason = self.options.accept(self.graph, candidate)
        if reason is None:
            return None
        self.misses.update(dict.fromkeys(added, (Stage.COST, reason)))
        return Stage.COST, reason

    def group_elementwise(self, node: Node) -> None:
        """Make a group of an operator that is left and of what can be computed with it."""
        graph = self.graph
        if not self._may_join(node, ELEMENTWISE.kinds) or not takes_no_tuple(graph, node):
            return
        kinds = ELEMENTWISE.kinds | {Kind.TUPLE}
        region = find_region(
            graph,
            (node.id,),
            node.inputs,
            lambda other: self._may_join(other, kinds),
            self.most(MOST_EVALUATIONS),
        )
        nodes = (*region, node.id)
        operators = [
            graph.nodes[member].kind for member in nodes if graph.nodes[member].kind is not Kind.TUPLE
        ]
        if len(operators) > 1 and not VIEW_KINDS.issuperset(operators):
            self._add(make_group(graph, None, nodes, node.id, end=end_of(graph, node.id)), ELEMENTWISE.rule)

    def join_readers(self) -> None:
        """Make one group of elementwise kernels that read one value, or let each compute it."""
        most = self.most(MOST_EVALUATIONS)
        self.groups, refused = join_readers(self.graph, self.groups, self.options, most)
        self.groups, again = recompute_values(self.graph, self.groups, self.options, most)
        self.not_joined += (*refused, *again)
        grouped = {node for group in self.groups for node in group.nodes}
        self.taken |= grouped
        self.decisions = [decision for decision in self.decisions if decision.node not in grouped]

    def explain(self, node: Node) -> Decision:
        """Why an operator is in no group."""
        family = family_of(node.kind)
        if family is None:
            wanted = "an operator that kernels are built around or with"
            reason = Reason(Code.OPERATOR_OPAQUE, str(node), wanted, node.op)
            return Decision("operator", str(node), Stage.NO_MATCH, reason, node=node.id)
        failed = family.check(self.graph, node)
        stage, reason = self.misses.get(node.id) or (Stage.CONDITION, failed or alone(self.graph, node))
        return Decision(family.rule, str(node), stage, reason, node=node.id, matched=1)

    def decline(self, rule: str, node: Node, stage: Stage, reason: Reason) -> None:
        self.decisions.append(Decision(rule, str(node), stage, reason, node=node.id, matched=1))

    def most(self, limit: int) -> int:
        """The planner's own limit, or the user's where it is lower."""
        return limit if self.options.max_ops is None else min(limit, self.options.max_ops)

    def _add(self, group: FusionGroup, rule: str) -> None:
        """Add a group, unless the target cannot pass it so many tensors."""
        limit, graph = self.capability.most_arguments, self.graph
        arguments = 1 + count_arguments(graph, group.nodes)
        if arguments <= limit:
            self.taken.update(group.nodes)
            self.groups.append(group)
            return
        reason = Reason(
            Code.TOO_MANY_ARGUMENTS, group.anchor_name, f"at most {limit} tensors", f"{arguments}"
        )
        self.misses.update(dict.fromkeys(group.nodes, (Stage.CONDITION, reason)))
        if group.anchor is not None:
            self.decline(rule, graph.nodes[group.anchor], Stage.CONDITION, reason)

    def _find_prologue(self, family: Family, chain: Chain) -> tuple[int, ...]:
        graph, anchor = self.graph, self.graph.nodes[chain.anchor]
        entries = [anchor.inputs[index] for index in family.entries if index < len(anchor.inputs)]
        kinds = self.capability.prologue_of(family.name, graph, anchor)
        limit = self.most(MOST_EVALUATIONS if family.rule == "reduce" else MOST_OPERATORS)
        found = find_region(graph, chain.nodes, entries, lambda node: self._may_join(node, kinds), limit)
        beside = self._find_beside(chain, kinds)
        if all(graph.nodes[node].kind in VIEW_KINDS for node in found):
            self._note_target(family, anchor, entries)
            return beside
        if self.options.accept is not None:
            candidate = Candidate(Extension.PROLOGUE, anchor.kind.value, anchor.id, chain.nodes, found)
            reason = self.options.accept(graph, candidate)
            if reason is not None:
                self.misses.update(dict.fromkeys(found, (Stage.COST, reason)))
                return beside
        return tuple(sorted({*found, *beside}))

    def _find_beside(self, chain: Chain, kinds: frozenset[Kind]) -> tuple[int, ...]:
        """Slices that what follows an anchor reads, such as a part that is added to the result."""
        found = find_slices(self.graph, frozenset(chain.nodes) - {chain.anchor})
        room = self.most(MOST_OPERATORS) - len(chain.nodes)
        return tuple(node for node in found if self._may_join(self.graph.nodes[node], kinds))[: max(0, room)]

    def _note_target(self, family: Family, anchor: Node, entries: list[int]) -> None:
        """Keep the reason for operators that another target would compute on the way into an anchor."""
        for source in entries:
            node = self.graph.nodes[source]
            if self._may_join(node, ELEMENTWISE.kinds - VIEW_KINDS) and self.graph.readers(source) == (
                anchor.id,
            ):
                wanted = f"a target that computes {node.op} while {anchor.op} reads it"
                reason = Reason(Code.TARGET_CANNOT_JOIN, str(node), wanted, self.options.target)
                self.misses[source] = Stage.CONDITION, reason

    def _may_join(self, node: Node, kinds: frozenset[Kind]) -> bool:
        if node.id in self.taken or node.kind not in kinds:
            return False
        return node.kind is Kind.TUPLE or ELEMENTWISE.check(self.graph, node) is None


def decide_groups(graph: Graph, groups: tuple[FusionGroup, ...]) -> tuple[Decision, ...]:
    """The decisions of a plan that somebody else made, such as a file.

    Args:
        graph: The graph.
        groups: The groups of the plan.

    Returns:
        One decision for each group and for each operator that computes and is in none.
    """
    decisions = list(map(_applied, groups))
    grouped = frozenset(node for group in groups for node in group.nodes)
    for node in graph.nodes:
        if node.id in grouped or not _computes(node):
            continue
        family = family_of(node.kind)
        reason = Reason(Code.LEFT_OUT_BY_USER, str(node), "a group of the plan file", "none")
        rule = "operator" if family is None else family.rule
        decisions.append(Decision(rule, str(node), Stage.CONDITION, reason, node=node.id))
    return tuple(sorted(decisions, key=lambda decision: decision.node or 0))


def check_plan(graph: Graph, plan: FusionPlan, target: str = "other") -> None:
    """Verify a plan's promises.

    Raises:
        InternalError: A group breaks a rule of ``legality.py``.
    """
    for fault in find_faults(graph, (*plan.groups, *plan.alone), capability_of(target)):
        raise InternalError(str(fault))


def _computes(node: Node) -> bool:
    return node.kind not in _SILENT_KINDS


def _applied(group: FusionGroup) -> Decision:
    rule = RULE if group.is_layer else group.family
    decision = applied(rule, group.anchor_name, f"{group.name}; ends: {group.end}")
    return replace(decision, node=group.center, matched=len(group.nodes))
