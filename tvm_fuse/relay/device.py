"""The device that a target stands for, as far as its peaks are known."""

from __future__ import annotations

from typing import Any

from tvm_fuse.core.accept import accept_on
from tvm_fuse.core.cpu import read_cpu
from tvm_fuse.core.plan_options import Accept
from tvm_fuse.core.targets import Device, cpu_device, device_of_arch
from tvm_fuse.relay.target import is_cuda

__all__ = ["accept_for", "device_of"]


def device_of(target: Any) -> Device | None:
    """The device whose peaks the cost model takes.

    Args:
        target: A ``tvm.target.Target``.

    Returns:
        The first device of a GPU's architecture; this machine for its own CPU; None for any other target.
    """
    if is_cuda(target):
        return device_of_arch(str(target.arch))
    facts = read_cpu()
    is_here = target.kind.name == "llvm" and str(target.attrs.get("mcpu", "")) == facts.name
    return cpu_device(facts) if is_here else None


def accept_for(target: Any) -> Accept | None:
    """The rule of a target's device for ``PlanOptions.accept``; None where no peaks are known."""
    device = device_of(target)
    return None if device is None else accept_on(device)
