"""One kernel of each family of ours, broken in one place at a time: a value or a check shows each break."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.support.cuda_groups import build_group
from tests.support.numerics import max_error
from tests.support.relay_graphs import Net, feeds, infer, relay, run_unfused
from tvm_fuse.cuda.emulator import EmulatedModule, KernelFault, build_emulator

pytestmark = [pytest.mark.relay, pytest.mark.cuda_codegen]

TOLERANCE = 1e-5
BOUND = "7.500000e-01f"
BARRIER = "__syncthreads();"


def finish(y, bias):
    """The epilogue of every kernel here: a bias, and an activation with a bound that nothing else has."""
    return relay.clip(relay.add(y, bias), -0.5, 0.75)


def product(net):
    return finish(net.conv2d(net.input("x", (2, 20, 11, 13)), 35), net.const(35, 1, 1))


def narrow(net):
    return finish(net.dense(net.input("x", (1, 75)), 33), net.const(33))


def depthwise(net):
    return finish(net.conv2d(net.input("x", (1, 6, 13, 11)), 6, groups=6), net.const(6, 1, 1))


def generic(net):
    weight = net.weight(6, 4, 3, fan_in=12)
    return finish(
        relay.nn.conv1d(net.input("x", (1, 4, 70)), weight, channels=6, kernel_size=3), net.const(6, 1)
    )


def transposed(net):
    x, weight = net.input("x", (1, 40, 7, 6)), net.weight(40, 6, 3, 3, fan_in=90)
    y = relay.nn.conv2d_transpose(x, weight, channels=6, kernel_size=(3, 3), strides=(2, 2))
    return finish(y, net.const(6, 1, 1))


def pooling(net):
    return finish(relay.nn.global_avg_pool2d(net.input("x", (2, 5, 19, 37))), net.const(5, 1, 1))


#: Each with the stage by which its kernel is recognised.
FAMILIES = {
    product: "product_left[",
    narrow: "__shfl_down_sync(",
    depthwise: "depthwise_data[",
    generic: "conv1d_ncw[",
    transposed: "product_right[",
    pooling: "__shfl_down_sync(",
}

# --- what is broken --------------------------------------------------------------------------------------


def replace(pattern, new, *, count=1):
    """The first match replaced, or all with a count of 0."""
    return lambda kernel: re.sub(pattern, new, kernel, count=count)


def drop_guards(array):
    """The comparisons in the ``if`` lines right above each line with an array are dropped."""

    def mutate(kernel):
        lines = kernel.split("\n")
        for number, line in enumerate(lines):
            above = number - 1
            while array in line and lines[above].lstrip().startswith("if ("):
                lines[above] = re.sub(r"if \(.*<.*\) \{$", "if (true) {", lines[above])
                above -= 1
        return "\n".join(lines)

    return mutate


def drop_each_barrier(kernel):
    """One mutant a barrier."""
    parts = kernel.split(BARRIER)
    joined = ([*parts[:at], parts[at] + parts[at + 1], *parts[at + 2 :]] for at in range(len(parts) - 1))
    return [BARRIER.join(mutant) for mutant in joined]


ANY = "out of bounds|uninitialized|unwritten|race|order|misaligned|wrong values"

#: Mutation -> how, and what may find it.
SHARED = {
    "an input's index": (replace(r"\bp0\[", "p0[1 + "), ANY),
    "the result's index": (replace(r"\bcompute\[", "compute[1 + ", count=0), "out of bounds|unwritten"),
    "a missing block": (replace(r"\) \{", r") { if (blockIdx.x + 1 == gridDim.x) return;"), "unwritten"),
    "a wrong bound": (replace(re.escape(BOUND), "7.510000e-01f", count=0), "wrong values"),
}
WEIGHTED = {
    "a weight's index": (replace(r"\bp1\[", "p1[1 + "), ANY),
    "no bias": (replace(r"\bp2\[", "0.0f * p2[", count=0), "wrong values"),
    "no guard of the tail": (drop_guards("compute["), ANY),
}
SHUFFLED = {
    "a missing shuffle": (replace(r"= __shfl_down_sync\((.*?), (\w+\[0\]), 8, 32\)", "= 0.0f"), ANY),
    "a shuffle too far": (replace(r"(__shfl_down_sync\(.*?), 8, 32\)", r"\1, 7, 32)"), ANY),
}


MUTATIONS = {
    product: {**SHARED, **WEIGHTED},
    narrow: {**SHARED, **WEIGHTED, **SHUFFLED},
    depthwise: {**SHARED, **WEIGHTED},
    generic: {**SHARED, **WEIGHTED},
    transposed: {**SHARED, **WEIGHTED},
    pooling: {
        **SHARED,
        **SHUFFLED,
        "no bias": (replace(r"\bp1\[", "0.0f * p1[", count=0), "wrong values"),
        "no guard of the tail": (drop_guards("p0["), ANY),
    },
}
CASES = [(family, name) for family, mutations in MUTATIONS.items() for name in mutations]


# --- running them ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Broken:
    """A kernel with all its mutants in one source: ``symbol``, ``symbol_0``, ``symbol_barrier_0``, ..."""

    group: Any
    kernel: str
    emulator: EmulatedModule
    inputs: dict[str, np.ndarray]
    wanted: np.ndarray

    def run(self, suffix):
        """How a launch ends: with a fault, with ``wrong values``, or with an empty string."""
        launch, kind = self.group.launch, infer(self.group.call)
        result = np.zeros([int(dim) for dim in kind.shape], kind.dtype)
        operands = {f"p{index}": self._value(arg) for index, arg in enumerate(self.group.call.args)}
        names = [parameter.name for parameter in launch.parameters]
        args = [operands.get(name, result) for name in names]
        symbol, outputs = launch.symbol + suffix, [names.index("compute")]
        try:
            self.emulator.launch(symbol, launch.grid, launch.block, args, outputs=outputs, seeds=(0, 1))
        except KernelFault as fault:
            return fault.what
        return "" if max_error(result, self.wanted) < TOLERANCE else "wrong values"

    def _value(self, argument):
        is_constant = isinstance(argument, relay.Constant)
        return argument.data.numpy() if is_constant else self.inputs[str(argument.name_hint)]


@functools.cache
def break_kernel(family):
    net = Net(3)
    module = net.module(family(net))
    group = build_group(module, "sm_80")
    symbol = group.launch.symbol
    head, declared, kernel = group.build.artifact.cuda_source.partition('extern "C" __global__ void')
    kernel = kernel[kernel.index(declared) :]  # what comes first is its declaration
    mutants = {f"_{at}": mutate(kernel) for at, (mutate, _) in enumerate(MUTATIONS[family].values())}
    mutants.update((f"_barrier_{at}", mutant) for at, mutant in enumerate(drop_each_barrier(kernel)))
    named = (mutant.replace(f" {symbol}(", f" {symbol}{suffix}(") for suffix, mutant in mutants.items())
    inputs = feeds(module)
    (wanted,) = run_unfused(module, inputs)
    return Broken(group, kernel, build_emulator("\n".join([head, kernel, *named])), inputs, wanted)


@pytest.fixture(autouse=True)
def without_nvcc_and_gpu(monkeypatch):
    monkeypatch.setattr("tvm_fuse.relay.cuda_hook.has_cuda_device", lambda: False)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_the_kernel_is_right(family):
    broken = break_kernel(family)
    assert FAMILIES[family] in broken.kernel
    assert broken.run("") == ""


@pytest.mark.parametrize(
    "family", [product, depthwise, transposed, pooling], ids=lambda family: family.__name__
)
def test_no_barrier_can_be_dropped(family):
    broken = break_kernel(family)
    count = broken.kernel.count(BARRIER)
    assert count > 0
    found = [broken.run(f"_barrier_{at}") for at in range(count)]
    assert [what for what in found if not re.match("race|uninitialized", what)] == []


@pytest.mark.parametrize(("family", "name"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_a_mutant_is_caught(family, name):
    broken = break_kernel(family)
    mutate, kinds = MUTATIONS[family][name]
    assert mutate(broken.kernel) != broken.kernel, "the mutation does not apply"
    found = broken.run(f"_{list(MUTATIONS[family]).index(name)}")
    assert re.match(kinds, found), found or "not caught"
