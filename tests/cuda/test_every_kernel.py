"""Every distinct kernel of whole models by itself: its values on random inputs, and every access it makes.

Models that agree end to end may hide a kernel that errs where the input does not show it, and run unchecked.
Here each operator of a fused model is compared with its own Relay graph, nothing fused, and its kernels run
once more with all checks: bounds, alignment, unwritten memory, races, barriers. No block is left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest

from examples.models import MODELS, save
from tests.support.emulated import Operator, read_operators, run_operator, run_operators_unfused
from tests.support.lazy import Lazy
from tests.support.numerics import max_error
from tests.support.relay_graphs import CUDA, Net, relay
from tvm_fuse.cuda.emulator import EmulatedModule, KernelFault, build_emulator

kernels = Lazy("tvm_fuse.relay.kernels")
load = Lazy("tvm_fuse.relay.load")
target = Lazy("tvm_fuse.relay.target")
transform = Lazy("tvm_fuse.transform")

pytestmark = [pytest.mark.relay, pytest.mark.cuda_codegen]

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Model:
    """A fused model built for CUDA, its operators, and what each is to compute."""

    build: Any
    operators: list[Operator]
    wanted: list[list[Any]]
    emulator: EmulatedModule


def make_model(module, *, mutate=lambda source: source):
    on = target.resolve_target(CUDA)
    build = kernels.build_kernels(transform.FuseChains(on)(transform.FoldBatchNorm()(module)), on)
    operators = read_operators(build)
    emulator = build_emulator(mutate(build.artifact.cuda_source))
    return Model(build, operators, run_operators_unfused(operators), emulator)


def run_all(model, **options):
    """What is wrong with each operator, by name, and the kernels that ran."""
    faults, ran = {}, set()
    for operator, wanted in zip(model.operators, model.wanted):
        try:
            got, symbols = run_operator(model.build, operator, model.emulator, **options)
        except KernelFault as fault:
            faults[operator.name] = str(fault)
            continue
        ran |= symbols
        error = max(map(max_error, got, wanted))
        if not error < TOLERANCE:
            faults[operator.name] = f"off by {error:.1e}"
    return faults, ran


def used_kernels(build):
    return {launch.symbol for launch in build.launches if build.calls[launch.symbol]}


# --- whole models ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=sorted(MODELS))
def model(request, tmp_path_factory):
    file = tmp_path_factory.mktemp("models") / f"{request.param}.onnx"
    save(MODELS[request.param](image=224), file)
    return make_model(load.load_model(file, shapes={}).module)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"checks": False, "seeds": (0, 1)}, {"checks": True}], ids=["values", "checked"]
)
def test_every_kernel_of_a_model(model, options):
    faults, ran = run_all(model, **options)
    assert faults == {}
    assert ran == used_kernels(model.build)
    assert len(ran) > 20


# --- these tests can fail --------------------------------------------------------------------------------


def small_net():
    """Two convolutions with a bias and an activation each, then a global pooling."""
    net = Net()
    x = relay.clip(relay.add(net.conv2d(net.input("x", (1, 4, 9, 9)), 8), net.const(8, 1, 1)), -0.5, 0.5)
    x = relay.nn.relu(relay.add(net.conv2d(x, 12, 1), net.const(12, 1, 1)))
    return net.module(relay.nn.global_avg_pool2d(x))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("5.000000e-01f", "5.001000e-01f", r"off by 1.0e-04"),
        ("__syncthreads();", "", "race: |uninitialized: "),
    ],
    ids=["a wrong bound", "no barriers"],
)
def test_an_operator_that_errs_is_named(old, new, message):
    """Only the first kernel has the bound, and only its barriers are dropped."""

    def mutate(source):
        kernels = source.split('extern "C"')
        (index,) = (
            number for number, kernel in enumerate(kernels) if "5.000000e-01f" in kernel and "{" in kernel
        )
        assert old in kernels[index]
        return 'extern "C"'.join([*kernels[:index], kernels[index].replace(old, new), *kernels[index + 1 :]])

    right = make_model(small_net())
    assert run_all(right, checks=True) == ({}, used_kernels(right.build))
    faults, _ = run_all(make_model(small_net(), mutate=mutate), checks=True)
    (name,) = faults
    assert "clip" in name
    assert re.search(message, faults[name])
