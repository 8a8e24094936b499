"""Launches: sizes, and their agreement with the source."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.cuda_kernels import LAUNCHES, SOURCE
from tvm_fuse.core.errors import InternalError
from tvm_fuse.cuda.launch import Launch, Parameter, check_launches
from tvm_fuse.cuda.source import read_kernels


def scalar(size_bytes):
    return Parameter("n", "int", size_bytes, False)


def test_sizes():
    launch = Launch("f", (2, 3, 4), (8, 4, 2))
    assert (launch.blocks, launch.threads_per_block, launch.parameter_bytes) == (24, 64, 0)


@pytest.mark.parametrize(
    ("sizes", "total"), [((8,), 8), ((8, 4), 12), ((4, 8), 16), ((1, 4, 8, 1), 17), ((1, 1, 2), 4)]
)
def test_parameters_are_aligned(sizes, total):
    launch = Launch("f", (1, 1, 1), (1, 1, 1), parameters=tuple(map(scalar, sizes)))
    assert launch.parameter_bytes == total


def test_launches_agree_with_the_source():
    check_launches(LAUNCHES, read_kernels(SOURCE))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block": (129, 1, 1)}, "129 threads in the IR, of 128 in the source"),
        ({"parameters": ()}, "parameters in the IR"),
        ({"parameters": (Parameter("b", ""), Parameter("a", ""))}, "parameters in the IR"),
        ({"symbol": "other"}, "other"),
    ],
)
def test_launches_that_disagree(change, message):
    with pytest.raises(InternalError, match=message):
        check_launches((replace(LAUNCHES[0], **change), *LAUNCHES[1:]), read_kernels(SOURCE))


@pytest.mark.parametrize(
    ("name", "emitted", "same"),
    [
        ("p0", "p0", True),
        ("p0", "p0_1", True),
        ("extern", "extern_1", True),
        ("p0.shared", "p0_shared", True),
        ("p0", "p0_a", False),
        ("p0", "p01", False),
        ("p0_1", "p0", False),
    ],
)
def test_names_that_code_generation_changes(name, emitted, same):
    launch = Launch("f", (1, 1, 1), (1, 1, 1), parameters=(Parameter(name, "float32"),))
    source = read_kernels(f"__global__ void f(float* __restrict__ {emitted}) {{\n}}")
    if same:
        check_launches([launch], source)
    else:
        with pytest.raises(InternalError):
            check_launches([launch], source)
