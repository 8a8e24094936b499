"""Kernels found in CUDA C."""

from __future__ import annotations

import pytest

from tests.support.cuda_kernels import LAUNCHES, SOURCE
from tvm_fuse.core.errors import UsageError
from tvm_fuse.cuda.source import choose_kernel, keep_registers, read_kernels, short_name, sort_kernels


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


def test_blocked_products_keep_their_registers():
    """All else is left to ptxas, and so is what names a least number of blocks."""
    source = "".join(
        f'extern "C" __global__ void __launch_bounds__({bounds}) {symbol}(float* a){end}'
        for bounds, symbol, body in [
            ("64", "product", "float4"),
            ("64", "product_2", ""),
            ("32, 4", "both", "float"),
        ]
        for end in (";\n", f" {{\n{f'  __shared__ {body} product_left[8];' if body else ''}\n}}\n")
    )
    kept = keep_registers(source)
    assert kept == source.replace("(64) product(", "(64, 1) product(")
    assert kept.count("(64, 1)") == 2
    assert [kernel.launch_bounds for kernel in read_kernels(kept).values()] == [64, 64, 32]


def test_kernels_are_sorted():
    def source(*names):
        declared = [f'extern "C" __global__ void {name}(int a)' for name in names]
        return (
            "#define X(y) (y)\n"
            + "".join(f"{line};\n" for line in declared)
            + "\n\n".join(f"{line} {{\n  // {line[-8]}\n}}" for line in declared)
            + "\n"
        )

    assert sort_kernels(source("b", "c", "a")) == source("a", "b", "c")
    assert sort_kernels(source("a", "b", "c")) == source("a", "b", "c")
    assert sort_kernels("#define X(y) (y)\n") == "#define X(y) (y)\n"
