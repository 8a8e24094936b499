"""Products whose terms several groups of threads share, with tiles that the rule need not choose."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.schedules.test_cuda_conv2d import BLOCKED, Conv, make
from tests.schedules.test_cuda_conv2d_transpose import make as make_transposed
from tests.schedules.test_cuda_matmul import make_batched
from tests.support.cuda_groups import assert_healthy, build_group, mostly_slow, run_group
from tests.support.numerics import max_error
from tvm_fuse.cuda.emulator.module import KernelFault
from tvm_fuse_schedules.cuda_tiles import Product, Tile, choose_tile, device_of, estimate_cycles


def conv(data, weight, **attrs):
    return make(Conv("", data, weight, BLOCKED, attrs))


#: Name, taps, tile, module with inputs and wanted result.
CASES = [
    ("1x1", 1, Tile(16, 4, (1, 1, 14), (1, 1, 1), 64, 4),
     lambda: conv((1, 128, 4, 14), (32, 128, 1, 1))),
    ("edges, no vectors", 9, Tile(16, 4, (1, 2, 7), (1, 1, 1), 4, 4),
     lambda: conv((2, 9, 7, 7), (17, 9, 3, 3), padding=(1, 1, 1, 1))),
    ("own columns", 1, Tile(16, 2, (1, 2, 14), (1, 2, 1), 32, 2),
     lambda: conv((1, 40, 7, 14), (24, 40, 1, 1))),
    ("grouped", 9, Tile(12, 4, (1, 2, 14), (1, 1, 1), 4, 2),
     lambda: conv((1, 24, 6, 14), (48, 6, 3, 3), padding=(1, 1, 1, 1), groups=4)),
    ("parts larger than a chunk", 1, Tile(64, 8, (1, 2, 14), (1, 1, 2), 64, 4),
     lambda: conv((1, 64, 3, 14), (70, 64, 1, 1))),
    ("eight slices", 1, Tile(16, 8, (1, 1, 14), (1, 1, 1), 128, 8),
     lambda: conv((1, 200, 2, 14), (16, 200, 1, 1))),
    ("batched", 1, Tile(16, 4, (16,), (1,), 32, 2),
     lambda: make_batched((2, 33, 40), (2, 19, 40), False, True)),
    ("transposed", 4, Tile(16, 4, (1, 2, 7), (1, 1, 1), 16, 4),
     lambda: make_transposed((1, 18, 7, 7), (18, 9, 4, 4), {"strides": (2, 2), "padding": (1, 1, 1, 1)})),
]  # fmt: skip


@pytest.fixture
def group_with(monkeypatch):
    def build(tile, module):
        monkeypatch.setattr("tvm_fuse_schedules.cuda_plan.choose_tile", lambda product, device: tile)
        return build_group(module, "sm_80")

    return build


@pytest.mark.relay
@pytest.mark.cuda_codegen
@pytest.mark.parametrize("case", mostly_slow(CASES, {1, 4}), ids=lambda case: case[0])
def test_slices(case, group_with):
    _, taps, tile, make_module = case
    module, inputs, wanted = make_module()
    group = group_with(tile, module)
    used = assert_healthy(group)
    assert group.launch.block == (tile.thread_columns, tile.thread_rows, tile.slices)
    assert used.smem_static_bytes == tile.shared_bytes(taps)
    assert max_error(run_group(group, inputs), wanted) < 1e-5


@pytest.mark.relay
@pytest.mark.cuda_codegen
@pytest.mark.parametrize("barrier", [2, 3], ids=["before writing", "before adding"])
def test_a_barrier_around_the_sums_of_slices_is_needed(barrier, group_with):
    _, _, tile, make_module = CASES[1]
    module, inputs, _ = make_module()
    group = group_with(tile, module)
    pieces = group.build.artifact.cuda_source.split("__syncthreads();")
    assert len(pieces) == 5
    pieces[barrier : barrier + 2] = [pieces[barrier] + pieces[barrier + 1]]
    with pytest.raises(KernelFault, match=r"race|uninitialized"):
        run_group(group, inputs, source="__syncthreads();".join(pieces))


@pytest.mark.parametrize(
    "product",
    [Product(1, 512, (1, 7, 7), 512, 9, left_vector=4), Product(1, 160, (1, 7, 7), 960, left_vector=4)],
    ids=["3x3", "1x1"],
)
def test_a_late_layer_is_sliced(product):
    device = device_of("sm_90")
    tile = choose_tile(product, device)
    assert tile.slices > 1
    alone = replace(tile, slices=1, depth=tile.depth // tile.slices)
    assert estimate_cycles(tile, product, device) < 0.7 * estimate_cycles(alone, product, device)


def test_an_early_layer_is_not_sliced():
    assert choose_tile(Product(1, 64, (1, 112, 112), 3, 49), device_of("sm_90")).slices == 1
