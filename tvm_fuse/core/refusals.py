"""Why a kernel ends where it does, why an operator stays alone, and why kernels are not joined."""

from __future__ import annotations

from tvm_fuse.core.capabilities import capability_of
from tvm_fuse.core.chain import Chain
from tvm_fuse.core.graph import LEAF_KINDS, Graph, Node
from tvm_fuse.core.reason import Code, Reason, Stage

__all__ = ["Refusal", "alone", "cannot_join", "end_of", "too_long", "without_epilogue"]

#: How far a rule came, and why not further.
Refusal = tuple[Stage, Reason]

#: Families of ``Capability.joined``, in words.
_FAMILIES = {"gate": "two products", "normalization": "a reduction and what follows it"}


def cannot_join(anchor: Node, family: str, target: str) -> Refusal | None:
    """A target whose schedules do not join a family of ``Capability.joined`` at all."""
    if family in capability_of(target).joined:
        return None
    wanted = f"a target that computes {_FAMILIES[family]} in one kernel"
    return Stage.CONDITION, Reason(Code.TARGET_CANNOT_JOIN, str(anchor), wanted, target)


def too_long(anchor: Node, most: int, operators: int) -> Refusal:
    """A kernel around an anchor would have too many operators."""
    wanted = f"at most {most} operators"
    return Stage.CONDITION, Reason(Code.CHAIN_TOO_LONG, str(anchor), wanted, str(operators))


def without_epilogue(chain: Chain) -> Reason | None:
    """Why an anchor has nothing after it."""
    end = chain.end
    if end is not None and end.code is Code.READER_NOT_ELEMENTWISE:
        return Reason(Code.CHAIN_NO_EPILOGUE, end.at, end.wanted, end.got)
    return end


def end_of(graph: Graph, result: int) -> Reason:
    """Why nothing after a result is in its group."""
    node, readers = graph.nodes[result], sorted(set(graph.readers(result)))
    if graph.is_output(result):
        return Reason(Code.RESULT_RETURNED, str(node), "a value only the chain reads", "a model output")
    if len(readers) != 1:
        names = ", ".join(str(graph.nodes[reader]) for reader in readers)
        return Reason(Code.RESULT_SHARED, str(node), "one reader", f"{len(readers)}: {names}")
    reader = graph.nodes[readers[0]]
    return Reason(Code.READER_NOT_ELEMENTWISE, str(reader), "an operator that can join", reader.op)


def alone(graph: Graph, node: Node) -> Reason:
    """Why nothing before an operator is computed with it."""
    wanted = "an operator before it that only it reads"
    for source in node.inputs:
        operand = graph.nodes[source]
        if operand.kind in LEAF_KINDS:
            continue
        if len(graph.readers(source)) > 1 or graph.is_output(source):
            return Reason(Code.OPERATOR_ALONE, str(node), wanted, f"{operand}: read elsewhere, too")
        return Reason(Code.OPERATOR_ALONE, str(node), wanted, f"{operand}: {operand.op} cannot join it")
    return Reason(Code.OPERATOR_ALONE, str(node), wanted, "inputs of the model")
