"""Give Relay our CUDA schedules, for targets with the key ``tvm_fuse_cuda`` only.

For every anchor the first that fits of:

1. our schedule for its shape (``schedules/cuda_*.py``): float32 and a layout that we cover;
2. our one-element-a-thread schedule: any dtype and layout that TVM can compute, and results that are
   broadcast after the anchor;
3. TVM's own strategy for CUDA: dynamic shapes, targets with libraries (``-libs=cudnn``), and builds under
   AutoScheduler or MetaSchedule, which bring their own schedules.

``cuda_choice.py`` decides, and says why.

TVM's schedules without a tuning record give a dense convolution one thread a block; 2 keeps that out of
every static build. Implementations of ours are no AutoTVM templates, so AlterOpLayout leaves their layout
alone and never chooses Winograd for them.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, Callable

from tvm_fuse.relay.base import relay, tvm
from tvm_fuse.relay.cuda_choice import ANCHORS, Anchor, Tensor, choose_schedule, for_result, keeps_tvm
from tvm_fuse.relay.cuda_joined import has_inner_sums, joined_strategy, register_joined_schedules
from tvm_fuse_schedules.cuda_kernel import Schedule

__all__ = ["CUDA_KEY", "default_compute", "register_cuda_schedules", "strategy_of_tvm"]

#: ``tvm.target.Target({"kind": "cuda", "arch": "sm_80", "keys": ["tvm_fuse_cuda", "cuda", "gpu"]})`` opts in.
CUDA_KEY = "tvm_fuse_cuda"

#: No strategy is registered for it, so TVM's generic functions fall back to their defaults.
_NO_KEY = "tvm_fuse_none"


@functools.cache
def register_cuda_schedules() -> None:
    """Register a strategy for every anchor once."""
    for name in ANCHORS:
        generic = tvm.target.get_native_generic_func(f"{name}_strategy")
        generic.register(functools.partial(_strategy, name), [CUDA_KEY])
    register_joined_schedules(CUDA_KEY)


def _strategy(name: str, attrs: Any, inputs: Any, out_type: Any, target: Any) -> Any:
    anchor = _anchor(name, attrs, inputs, out_type)
    choice = choose_schedule(anchor, target, is_tuned=_is_tuned())
    if choice.schedule is Schedule.TVM:
        return _call_strategy(name, _without_our_key(target), attrs, inputs, out_type)
    if has_inner_sums(inputs):
        return joined_strategy(name, attrs, inputs, out_type)
    strategy, kernel = relay.op.OpStrategy(), choice.kernel
    if kernel is None:
        compute = default_compute(name, attrs, inputs, out_type)
        strategy.add_implementation(compute, _schedule_generic, name=f"{name}_generic.tvm_fuse")
        return strategy

    def schedule(attrs: Any, outs: Any, target: Any) -> Any:
        last = for_result(choice, anchor, Tensor.of(outs[0])).kernel
        return last.schedule(outs[0]) if last is not None else _schedule_generic(attrs, outs, target)

    strategy.add_implementation(
        lambda attrs, inputs, out_type: [kernel.compute(*inputs)], schedule, name=f"{name}.tvm_fuse"
    )
    return strategy


def strategy_of_tvm(
    name: str, attrs: Any, inputs: Any, out_type: Any, target: Any, always: bool = False
) -> Any | None:
    """TVM's own strategy for CUDA where a build is not for our schedules (or always); None where it is."""
    anchor = _anchor(name, attrs, inputs, out_type)
    if not always and keeps_tvm(anchor, target, is_tuned=_is_tuned()) is None:
        return None
    return _call_strategy(name, _without_our_key(target), attrs, inputs, out_type)


def _anchor(name: str, attrs: Any, inputs: Any, out_type: Any) -> Anchor:
    return Anchor(name, attrs, tuple(map(Tensor.of, inputs)), Tensor.of(out_type), name)


def _schedule_generic(attrs: Any, outs: Any, target: Any) -> Any:
    from tvm_fuse_schedules.cuda_generic import schedule_generic

    return schedule_generic(outs[0])


def _is_tuned() -> bool:
    strategies = relay.op.strategy.cuda
    return bool(strategies.is_auto_scheduler_enabled() or strategies.is_meta_schedule_enabled())


def _without_our_key(target: Any) -> Any:
    fields = dict(target.export())
    fields["keys"] = [str(key) for key in target.keys if key != CUDA_KEY]
    return tvm.target.Target(fields)


def _call_strategy(name: str, target: Any, attrs: Any, inputs: Any, out_type: Any) -> Any:
    """What TVM's generic function returns for another target."""
    generic = tvm.target.get_native_generic_func(f"{name}_strategy")
    with target:
        return generic(attrs, inputs, out_type, target)


def default_compute(name: str, attrs: Any, inputs: Any, out_type: Any) -> Callable[..., Any]:
    """TVM's computation of an operator, without any target's tricks."""
    nowhere = tvm.target.Target({"kind": "llvm", "keys": [_NO_KEY]})
    log = logging.getLogger("strategy")
    was_disabled, log.disabled = log.disabled, True  # it warns that nothing is optimized for this target
    try:
        strategy = _call_strategy(name, nowhere, attrs, inputs, out_type)
    finally:
        log.disabled = was_disabled
    (specialization,) = strategy.specializations
    return specialization.implementations[0].compute
