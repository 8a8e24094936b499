"""One fused group built for CUDA: what its kernel uses, and its values by emulation.

Example::

    group = build_group(net.module(relay.nn.relu(net.conv2d(net.input("x", (1, 4, 6, 6)), 8))), "sm_80")
    assert_healthy(group)
    got = run_group(group, {"x": x})
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.lazy import Lazy
from tests.support.relay_graphs import group_calls, infer
from tvm_fuse.cuda.compile import compile_cuda
from tvm_fuse.cuda.emulator import build_emulator
from tvm_fuse.cuda.launch import Launch
from tvm_fuse.cuda.resources import KernelResources, read_resources

__all__ = [
    "ARCHS",
    "BuiltGroup",
    "assert_aligned",
    "assert_healthy",
    "build_group",
    "mostly_slow",
    "run_group",
]

kernels = Lazy("tvm_fuse.relay.kernels")
relay = Lazy("tvm_fuse.relay.base", "relay")
target = Lazy("tvm_fuse.relay.target")
transform = Lazy("tvm_fuse.transform")

#: Architectures; all but one are for the slow tests.
ARCHS = ("sm_80", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("sm_75", "sm_90")))

_SHARED_FLOATS = re.compile(r"__shared__ float \w+\[(\d+)\]")

#: Orders of threads that the emulator runs a kernel in.
_SEEDS = (0, 1)


@dataclass(frozen=True)
class BuiltGroup:
    """A module that is one group, built for CUDA."""

    call: Any
    build: Any
    arch: str

    @property
    def launch(self) -> Launch:
        """The launch of its only kernel."""
        (launch,) = self.build.launches
        return launch


def mostly_slow(cases: Sequence[Any], quick: Container[int]) -> list[Any]:
    """Parameters of which all but some (by index) are for the slow tests: emulation takes seconds."""
    return [
        case if index in quick else pytest.param(case, marks=pytest.mark.slow)
        for index, case in enumerate(cases)
    ]


def build_group(module: Any, arch: str) -> BuiltGroup:
    """Build a module that fuses into one group; weights and biases must be constants."""
    resolved = target.resolve_target(f"cuda -arch={arch}")
    fused = transform.FuseChains(resolved)(module)
    calls = group_calls(fused)
    call = calls[0] if calls else fused["main"].body  # an anchor alone is no group
    return BuiltGroup(call, kernels.build_kernels(fused, resolved), arch)


def assert_healthy(group: BuiltGroup) -> KernelResources:
    """One kernel, at least a warp a block, no spills, no stack."""
    assert len(group.build.launches) == len(group.build.artifact.calls) == 1
    assert_aligned(group.build.artifact.cuda_source)
    compiled = compile_cuda(group.build.artifact.cuda_source, group.arch)
    (used,) = read_resources(compiled, group.build.launches)
    assert used.threads_per_block >= 32
    assert (used.spill_bytes, used.stack_bytes) == (0, 0)
    return used


def assert_aligned(source: str) -> None:
    """In kernels with vectors every shared array ends, so that the next begins, at a multiple of 16 bytes."""
    for kernel in source.split('extern "C"'):
        if "float4" in kernel:
            assert [size for size in _SHARED_FLOATS.findall(kernel) if int(size) % 4] == []


def run_group(
    group: BuiltGroup, inputs: Mapping[str, np.ndarray], *, source: str | None = None
) -> np.ndarray:
    """The group's result, every access to memory checked; of another source where one is given."""
    shape = infer(group.call)
    result = np.zeros([int(dim) for dim in shape.shape], shape.dtype)
    values = {f"p{index}": _value(arg, inputs) for index, arg in enumerate(group.call.args)}
    names = [parameter.name for parameter in group.launch.parameters]
    args = [values.get(name, result) for name in names]
    (output,) = [index for index, name in enumerate(names) if name not in values]
    launch = group.launch
    with tempfile.TemporaryDirectory() as folder:
        module = build_emulator(source or group.build.artifact.cuda_source, folder=Path(folder))
        module.launch(launch.symbol, launch.grid, launch.block, args, outputs=[output], seeds=_SEEDS)
    return result


def _value(argument: Any, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    is_constant = isinstance(argument, relay.Constant)
    return argument.data.numpy() if is_constant else inputs[str(argument.name_hint)]
