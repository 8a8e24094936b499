"""What each kernel of a build computes: its operators, and their floating-point operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm_fuse.core.flops import count_elements, count_flops
from tvm_fuse.core.graph import LEAF_KINDS, ConvAttrs, Graph, Node
from tvm_fuse.relay.base import relay, tvm
from tvm_fuse.relay.read import read_function

__all__ = ["KernelWork", "WorkRecorder"]

#: What ``tvm_fuse/relay/winograd_pass.py`` makes of 3x3 convolutions, in blocked layout.
WINOGRAD = "tvm_fuse.conv2d_winograd"


@dataclass(frozen=True)
class KernelWork:
    """Operators of a kernel for people, and operations of one call."""

    what: str
    flops: int


@tvm.instrument.pass_instrument
class WorkRecorder:
    """Watches Relay's functions become kernels; ``work`` has what each kernel's name stands for."""

    def __init__(self) -> None:
        self.work: dict[str, KernelWork] = {}
        self._by_hash: dict[str, KernelWork] = {}

    def run_before_pass(self, module: Any, info: Any) -> None:
        """Called by TVM before each pass."""
        if info.name == "LowerTE":
            functions = [expr for expr in _nodes(module) if isinstance(expr, relay.Function) and expr.attrs]
            self._by_hash = {
                str(function.attrs["hash"]): _describe(read_function(function).graph)
                for function in functions
                if "hash" in function.attrs
            }

    def run_after_pass(self, module: Any, info: Any) -> None:
        """Called by TVM after each pass."""
        if info.name != "LowerTE":
            return
        for call in _nodes(module):
            if isinstance(call, relay.Call) and getattr(call.op, "name", "") == "call_lowered":
                attrs = call.attrs.metadata["relay_attrs"]
                self.work[str(call.args[0].name_hint)] = self._by_hash[str(attrs["hash"])]


def _nodes(module: Any) -> list[Any]:
    found: list[Any] = []
    relay.analysis.post_order_visit(module["main"], found.append)
    return found


def _describe(graph: Graph) -> KernelWork:
    operators = [node for node in graph.nodes if node.kind not in LEAF_KINDS]
    flops = [_count(graph, node) for node in operators]
    names = [node.op.split(".")[-1].removeprefix("contrib_").replace("_NCHWc", "") for node in operators]
    heaviest = operators[flops.index(max(flops))]
    shape = "x".join(map(str, heaviest.output.shape))
    window = ""
    if isinstance(heaviest.attrs, ConvAttrs):
        weight = graph.nodes[heaviest.inputs[1]].output.shape
        window = f"{weight[2]}x{weight[3]} "
    return KernelWork(f"{window}{' + '.join(names)}, {shape}", sum(flops))


def _count(graph: Graph, node: Node) -> int:
    """Operations of an operator; of a convolution by Winograd's algorithm, those of the direct sum."""
    if node.op != WINOGRAD:
        return count_flops(graph, node)
    _, blocks, _, _, lanes = graph.nodes[node.inputs[0]].output.shape
    return 2 * 3 * 3 * int(blocks) * int(lanes) * count_elements(node.output)
