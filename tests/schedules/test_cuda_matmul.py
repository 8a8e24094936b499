"""Dense layers and batched products on CUDA: resources for three architectures, values by emulation."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.cuda_groups import ARCHS, assert_healthy, build_group, mostly_slow, run_group
from tests.support.numerics import max_error
from tests.support.relay_graphs import Net, relay

pytestmark = [pytest.mark.relay, pytest.mark.cuda_codegen]

#: Batch, depth, rows.
DENSE = [(1, 1280, 10), (3, 17, 5), (8, 64, 32), (33, 50, 19)]
#: Left, right, whether each is transposed.
BATCHED = [
    ((2, 16, 24), (2, 20, 24), False, True),
    ((2, 7, 9), (2, 9, 13), False, False),
    ((1, 24, 16), (3, 20, 24), True, True),
    ((3, 24, 16), (1, 24, 8), True, False),
    ((2, 33, 40), (2, 3, 40), False, True),
]


def make_dense(batch, depth, rows):
    rng, net = np.random.default_rng(0), Net()
    x, weight = rng.normal(size=(batch, depth)), rng.normal(size=(rows, depth), scale=depth**-0.5)
    x, weight, bias = (a.astype("float32") for a in (x, weight, rng.normal(size=(rows,))))
    y = relay.nn.dense(net.input("x", x.shape), relay.const(weight))
    module = net.module(relay.nn.relu(relay.add(y, relay.const(bias))))
    return module, {"x": x}, np.maximum(x.astype("float64") @ weight.T + bias, 0)


def make_batched(left, right, transpose_left, transpose_right):
    rng, net = np.random.default_rng(0), Net()
    x, y = (rng.normal(size=shape).astype("float32") for shape in (left, right))
    z = relay.nn.batch_matmul(
        net.input("x", left), relay.const(y), transpose_a=transpose_left, transpose_b=transpose_right
    )
    plain_x, plain_y = x.astype("float64"), y.astype("float64")
    plain_x = plain_x.swapaxes(1, 2) if transpose_left else plain_x
    plain_y = plain_y.swapaxes(1, 2) if transpose_right else plain_y
    return net.module(relay.tanh(z)), {"x": x}, np.tanh(plain_x @ plain_y)


CASES = [*((make_dense, case) for case in DENSE), *((make_batched, case) for case in BATCHED)]


def name(case):
    return f"{case[0].__name__}{case[1]}"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", CASES, ids=name)
def test_one_kernel_without_spills(case, arch):
    make, sizes = case
    module, _, _ = make(*sizes)
    assert_healthy(build_group(module, arch))


@pytest.mark.parametrize("case", mostly_slow(CASES, {1, 3, 6, 7}), ids=name)
def test_values(case):
    make, sizes = case
    module, inputs, wanted = make(*sizes)
    assert max_error(run_group(build_group(module, "sm_80"), inputs), wanted) < 1e-5
