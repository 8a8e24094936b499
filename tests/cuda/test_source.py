"""Kernels found in CUDA C."""

from __future__ import annotations

import pytest

from tests.support.cuda_kernels import LAUNCHES, SOURCE
from tvm_fuse.cuda.source import read_kernels


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
