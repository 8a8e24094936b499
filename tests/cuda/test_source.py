"""Kernels found in CUDA C."""

from __future__ import annotations

import pytest

from tests.support.cuda_kernels import LAUNCHES, SOURCE
from tvm_fuse.core.errors import UsageError
from tvm_fuse.cuda.source import choose_kernel, read_kernels, short_name


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (
            'extern "C" __global__ void __launch_bounds__(64) f_kernel(float* a, int n) {',
            ("f_kernel", ("a", "n"), 64),
        ),
        ("__global__ void g(float* __restrict__ a){", ("g", ("a",), None)),
        ('extern "C" __global__ void h() {', ("h", (), None)),
        (
            "__global__ void i(half* __restrict__ p0, signed char* __restrict__ p1) {",
            ("i", ("p0", "p1"), None),
        ),
        ("__global__ void declared(float* a);", None),
        ("void host(float* a) {", None),
        ("// __global__ void f(float* a) {", None),
    ],
)
def test_definitions_are_recognized(line, found):
    kernels = read_kernels(f"{line}\n  body;\n}}\n").values()
    assert [(kernel.symbol, kernel.parameters, kernel.launch_bounds) for kernel in kernels] == (
        [found] if found else []
    )


def test_a_kernel_is_found_once_although_it_is_declared_as_well():
    line = 'extern "C" __global__ void __launch_bounds__(8) f(float* __restrict__ a)'
    kernels = read_kernels(f"{line};\n{line} {{\n  a[0] = 1;\n}}\n\nint after;\n")
    assert list(kernels) == ["f"]
    assert kernels["f"].text == f"{line} {{\n  a[0] = 1;\n}}"


def test_inner_braces_do_not_end_a_kernel():
    kernels = read_kernels(SOURCE)
    assert list(kernels) == [launch.symbol for launch in LAUNCHES]
    assert kernels["stack"].text.count("{") == kernels["stack"].text.count("}") == 1
    assert kernels["spill"].text.endswith("a[threadIdx.x] = sum;\n}")
    assert "helper" not in kernels["spill"].text


@pytest.mark.parametrize("name", ["plain", "pla", "lain"])
def test_a_kernel_by_a_part_of_its_name(name):
    assert choose_kernel(read_kernels(SOURCE), name).symbol == "plain"


def test_a_whole_name_wins_over_longer_ones():
    both = "".join(f"__global__ void tvmgen_default_f{suffix}() {{\n}}\n" for suffix in ("", "_1"))
    kernels = read_kernels(both)
    assert short_name("tvmgen_default_f") == "f"
    for name in ("f", "tvmgen_default_f"):
        assert choose_kernel(kernels, name).symbol == "tvmgen_default_f"
    assert choose_kernel(kernels, "_1").symbol == "tvmgen_default_f_1"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shared", "several kernels have 'shared'.*: dynamic_shared_memory, shared_memory"),
        ("none", "no kernel has"),
    ],
)
def test_a_name_that_is_not_one_kernels(name, message):
    with pytest.raises(UsageError, match=message):
        choose_kernel(read_kernels(SOURCE), name)
