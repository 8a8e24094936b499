"""Inner operators of a joined kernel: operators with a twin that TVM takes for an elementwise one.

TVM accepts one complicated operator (a product, a pooling, a reduction) in a primitive function and gives
that one's schedule the whole kernel. A joined kernel has more: two products of a squeeze-and-excite gate, the
mean and the variance of a layer norm. All but the last are therefore written as twins::

    fn (%p0, %w1, %w2, Primitive=1) {                fn (%p0, %w1, %w2, Primitive=1) {
      %0 = nn.conv2d(%p0, %w1);                        %0 = tvm_fuse.inner.nn.conv2d(%p0, %w1);
      nn.conv2d(nn.relu(%0), %w2) }                    nn.conv2d(nn.relu(%0), %w2) }

A twin has its operator's attributes, type relation and computation, no layout rules, and the pattern of an
injective operator. The last operator's schedule finds the inner stages and must place them
(``schedules/cuda_joined.py``); on a CPU they become loops of their own in the same kernel.

A module with twins can be saved, and loaded wherever ``register_twins`` has run; elsewhere TVM says that
``tvm_fuse.inner....`` is not registered. ``restore_absorbed`` gives the plain operators back.
"""

from __future__ import annotations

import functools
from typing import Any

from tvm_fuse.core.errors import InternalError
from tvm_fuse.relay.base import relay, tvm
from tvm_fuse.relay.cuda_strategy import default_compute

__all__ = ["INNER_PREFIX", "lower_absorbed", "register_twins", "restore_absorbed"]

INNER_PREFIX = "tvm_fuse.inner."

#: Operators that may be inside a joined kernel.
_OPERATORS = (
    "max",
    "mean",
    "min",
    "nn.adaptive_avg_pool2d",
    "nn.avg_pool2d",
    "nn.batch_matmul",
    "nn.conv2d",
    "nn.dense",
    "nn.global_avg_pool2d",
    "nn.global_max_pool2d",
    "nn.matmul",
    "nn.max_pool2d",
    "nn.softmax",
    "prod",
    "sum",
    "variance",
)


@functools.cache
def register_twins() -> None:
    """Register the twin of every operator once."""
    for name in _OPERATORS:
        _register_twin(name)


def lower_absorbed(call: Any) -> Any:
    """The same call of an operator's twin.

    Args:
        call: A Relay call of an operator.

    Returns:
        A new call; attributes and span are the call's own.

    Raises:
        InternalError: The operator has no twin, so no joined kernel may contain it.
    """
    register_twins()
    name = str(call.op.name)
    if name not in _OPERATORS:
        raise InternalError(f"{name} cannot be inside a joined kernel; these can: {', '.join(_OPERATORS)}")
    return relay.Call(tvm.ir.Op.get(INNER_PREFIX + name), call.args, call.attrs, call.type_args, call.span)


def restore_absorbed(call: Any) -> Any:
    """The inverse of `lower_absorbed`; any other expression is returned as it is."""
    is_twin = (
        isinstance(call, relay.Call)
        and isinstance(call.op, tvm.ir.Op)
        and str(call.op.name).startswith(INNER_PREFIX)
    )
    if not is_twin:
        return call
    plain = tvm.ir.Op.get(str(call.op.name)[len(INNER_PREFIX) :])
    return relay.Call(plain, call.args, call.attrs, call.type_args, call.span)


def _register_twin(name: str) -> None:
    plain = tvm.ir.Op.get(name)
    twin_name = INNER_PREFIX + name
    tvm.ir.register_op_attr(twin_name, "TOpPattern", relay.op.OpPattern.INJECTIVE)
    twin = tvm.ir.Op.get(twin_name)
    twin.set_num_inputs(plain.num_inputs)
    twin.set_attrs_type_key(plain.attrs_type_key)
    twin.set_support_level(plain.support_level)
    for argument in plain.arguments:
        twin.add_argument(argument.name, argument.type_info, argument.description)
    (relation,) = plain.op_type.type_constraints
    twin.add_type_rel(str(relation.func.name).rsplit(".", 1)[-1])
    twin.set_attr("TOpIsStateful", False)
    tvm.ir.register_op_attr(twin_name, "FTVMStrategy", _strategy_of(name))


def _strategy_of(name: str) -> Any:
    """An operator's computation, scheduled as an injective one where no anchor schedules it."""

    def strategy(attrs: Any, inputs: Any, out_type: Any, target: Any) -> Any:
        compute = relay.op.get(name).get_attr("FTVMCompute") or default_compute(
            name.removeprefix("nn."), attrs, inputs, out_type
        )
        schedule = relay.op.strategy.generic.schedule_injective
        made = relay.op.OpStrategy()
        made.add_implementation(compute, schedule, name=INNER_PREFIX + name)
        return made

    generic = tvm.target.get_native_generic_func(f"{INNER_PREFIX}{name}_strategy")
    generic.set_default(strategy)
    return generic
