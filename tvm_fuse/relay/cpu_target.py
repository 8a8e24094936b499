"""What a target of TVM says of a CPU, and which of them get our schedules."""

from __future__ import annotations

from typing import Any

from tvm_fuse.core.cpu import read_cpu
from tvm_fuse.relay.base import tvm
from tvm_fuse_schedules.cpu_tiles import Cpu

__all__ = ["TARGET_KEY", "cpu_of", "without_our_key"]

#: ``tvm.target.Target({"kind": "llvm", "keys": ["tvm_fuse", "cpu"]})`` opts in.
TARGET_KEY = "tvm_fuse"


def cpu_of(target: Any) -> Cpu:
    """What schedules must know of a target's CPU.

    Args:
        target: A ``tvm.target.Target`` of kind ``llvm``. Its ``-mcpu`` and ``-mattr`` say how wide vectors
            are, ``-num-cores`` how many threads share a kernel; without that, as many as this machine has
            cores. The cache is this machine's.

    Returns:
        The facts.
    """
    here = read_cpu()
    with target:
        lanes = int(tvm.target.x86.get_simd_32bit_lanes())
    has_avx512 = lanes >= 16
    threads = int(target.attrs.get("num-cores", 0)) or here.cores
    return Cpu(lanes=lanes, registers=32 if has_avx512 else 16, threads=threads, l2_bytes=here.l2_bytes)


def without_our_key(target: Any) -> Any:
    """The same target, for TVM's own schedules; any other is returned as it is."""
    if TARGET_KEY not in target.keys:
        return target
    fields = dict(target.export())
    fields["keys"] = [str(key) for key in target.keys if key != TARGET_KEY]
    return tvm.target.Target(fields)
