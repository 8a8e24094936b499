"""Which kernel every anchor of a build gets, by the name of its function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm_fuse.relay.absorb import INNER_PREFIX
from tvm_fuse.relay.base import relay, tvm
from tvm_fuse.relay.cuda_choice import ANCHORS, Anchor, Choice, Tensor, choose_schedule, for_result
from tvm_fuse.relay.read import source_name
from tvm_fuse_schedules.cuda_kernel import Schedule

__all__ = ["ChoiceRecorder"]


@tvm.instrument.pass_instrument
class ChoiceRecorder:
    """Watches Relay's functions become kernels, and asks for each what its strategy was asked.

    Args:
        target: The target of the build.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self._by_hash: Mapping[str, Choice] = {}
        self.choices: dict[str, Choice] = {}

    def run_before_pass(self, module: Any, info: Any) -> None:
        """Called by TVM before each pass."""
        if info.name == "LowerTE":
            self._by_hash = _read_choices(module, self._target)

    def run_after_pass(self, module: Any, info: Any) -> None:
        """Called by TVM after each pass."""
        if info.name == "LowerTE":
            self.choices.update(
                (symbol, self._by_hash[digest])
                for symbol, digest in _read_symbols(module)
                if digest in self._by_hash
            )


def _read_choices(module: Any, target: Any) -> dict[str, Choice]:
    """Hash of each primitive function with an anchor -> the choice."""
    functions = [expr for expr in _nodes(module["main"]) if _is_primitive(expr)]
    choices = {str(function.attrs["hash"]): _choose(function, target) for function in functions}
    return {digest: choice for digest, choice in choices.items() if choice is not None}


def _read_symbols(module: Any) -> list[tuple[str, str]]:
    """Name and hash of every function that became a kernel."""
    calls = [expr for expr in _nodes(module["main"]) if isinstance(expr, relay.Call)]
    lowered = [call for call in calls if getattr(call.op, "name", "") == "call_lowered"]
    return [
        (str(call.args[0].name_hint), str(call.attrs.metadata["relay_attrs"]["hash"]))
        for call in lowered
        if "relay_attrs" in call.attrs.metadata and "hash" in call.attrs.metadata["relay_attrs"]
    ]


def _choose(function: Any, target: Any) -> Choice | None:
    calls = [
        expr
        for expr in _nodes(function.body)
        if isinstance(expr, relay.Call) and isinstance(expr.op, tvm.ir.Op)
    ]
    anchors = [call for call in calls if str(call.op.name).removeprefix("nn.") in ANCHORS]
    if not anchors:
        return None
    anchor = _anchor(anchors[-1])
    choice = choose_schedule(anchor, target)
    if choice.schedule is Schedule.TVM:
        return choice
    if any(str(call.op.name).startswith(INNER_PREFIX) for call in calls):
        return Choice(Schedule.JOINED)
    return for_result(choice, anchor, Tensor.of(function.ret_type))


def _anchor(call: Any) -> Anchor:
    operands = tuple(Tensor.of(arg.checked_type) for arg in call.args)
    operator = str(call.op.name)
    name = source_name(call) or operator
    return Anchor(operator.removeprefix("nn."), call.attrs, operands, Tensor.of(call.checked_type), name)


def _is_primitive(expr: Any) -> bool:
    return (
        isinstance(expr, relay.Function)
        and bool(expr.attrs)
        and "hash" in expr.attrs
        and "Primitive" in expr.attrs
    )


def _nodes(root: Any) -> list[Any]:
    found: list[Any] = []
    relay.analysis.post_order_visit(root, found.append)
    return found
