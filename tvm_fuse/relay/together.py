"""Several elementwise results of one shape in one kernel, which reads what they share once.

::

    fn (%p0, Primitive=1) {
      tvm_fuse.together2(tanh(%p0), nn.relu(%p0)) }        -> (tensor, tensor)

Two results of a primitive function are otherwise two loops, on a GPU two kernels: TE places a computation
where another one reads it, and these read nothing of each other. The operator here is one computation with
several results. It computes nothing, and its values stay exact.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tvm_fuse.core.capabilities import MOST_TOGETHER
from tvm_fuse.core.errors import InternalError
from tvm_fuse.relay.base import relay, tvm

__all__ = ["TOGETHER_PREFIX", "register_together", "together"]

TOGETHER_PREFIX = "tvm_fuse.together"


@functools.cache
def register_together() -> None:
    """Register the operators for two results and more once."""
    for count in range(2, MOST_TOGETHER + 1):
        _register(f"{TOGETHER_PREFIX}{count}", count)


def together(values: Sequence[Any]) -> Any:
    """One call with several results; reads as a tuple.

    Args:
        values: Relay expressions of one shape, elementwise operators or moves of a primitive function.

    Returns:
        The call, of a tuple type.

    Raises:
        InternalError: They are fewer than two, or more than `MOST_TOGETHER`.
    """
    if not 2 <= len(values) <= MOST_TOGETHER:
        raise InternalError(f"results of one kernel: wanted 2 to {MOST_TOGETHER}, got {len(values)}")
    register_together()
    return relay.Call(tvm.ir.Op.get(f"{TOGETHER_PREFIX}{len(values)}"), list(values))


def _register(name: str, count: int) -> None:
    # The schedule is that of the operator with the highest pattern: above all that is elementwise or moves.
    tvm.ir.register_op_attr(name, "TOpPattern", relay.op.OpPattern.COMM_REDUCE)
    operator = tvm.ir.Op.get(name)
    operator.set_num_inputs(count)
    for index in range(count):
        operator.add_argument(f"value{index}", "Tensor", "One result.")
    operator.add_type_rel(name, lambda types, attrs: tvm.ir.TupleType(list(types[:count])))
    operator.set_attr("TOpIsStateful", False)
    generic = tvm.target.get_native_generic_func(f"{name}_strategy")
    generic.set_default(_strategy)
    tvm.ir.register_op_attr(name, "FTVMStrategy", generic)


def _strategy(attrs: Any, inputs: Any, out_type: Any, target: Any) -> Any:
    made = relay.op.OpStrategy()
    made.add_implementation(_compute, _schedule, name=TOGETHER_PREFIX)
    return made


def _compute(attrs: Any, inputs: Any, out_type: Any) -> list[Any]:
    results = tvm.te.compute(
        inputs[0].shape, lambda *index: tuple(tensor(*index) for tensor in inputs), name="together"
    )
    return list(results)


def _schedule(attrs: Any, outs: Any, target: Any) -> Any:
    from tvm_fuse_schedules.together import schedule_together

    return schedule_together(outs[0], is_gpu="gpu" in target.keys)
