"""Give Relay our schedules, for targets with the key ``tvm_fuse`` only."""

from __future__ import annotations

import functools
from typing import Any

from tvm_fuse.relay.base import relay, tvm

__all__ = ["TARGET_KEY", "register_schedules"]

#: ``tvm.target.Target({"kind": "llvm", "keys": ["tvm_fuse", "cpu"]})`` opts in.
TARGET_KEY = "tvm_fuse"

_GLOBAL_POOLS = ("nn.global_avg_pool2d", "nn.global_max_pool2d")


@functools.cache
def register_schedules() -> None:
    """Register every schedule once; what a schedule does not fit goes to TVM's own."""
    for name in _GLOBAL_POOLS:
        strategy = tvm.target.get_native_generic_func(f"{name}_strategy")
        strategy.register(functools.partial(_global_pool_strategy, name), [TARGET_KEY])


def _global_pool_strategy(name: str, attrs: Any, inputs: Any, out_type: Any, target: Any) -> Any:
    compute = relay.op.get(name).get_attr("FTVMCompute")
    strategy = relay.op.OpStrategy()
    strategy.add_implementation(compute, _schedule_global_pool, name="global_pool.tvm_fuse")
    return strategy


def _schedule_global_pool(attrs: Any, outs: Any, target: Any) -> Any:
    from tvm_fuse_schedules.global_pool import find_global_pool, schedule_global_pool

    pool = find_global_pool(outs[0]) if len(outs) == 1 else None
    if pool is not None:
        return schedule_global_pool(outs[0], pool)
    with target:
        return tvm.topi.x86.schedule_adaptive_pool(outs)
