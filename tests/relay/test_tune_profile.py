"""Profiles of kernels that are known by hand, and known orders of whole schedules."""

from __future__ import annotations

import pytest

from tests.support.lazy import Lazy
from tests.support.relay_graphs import Net, relay, tvm
from tvm_fuse.core.tuning.score import ScoreConstants, find_card, predict_s

fuse = Lazy("tvm_fuse.relay.fuse")
kernels = Lazy("tvm_fuse.relay.kernel_functions")
load = Lazy("tvm_fuse.relay.load")
draft = Lazy("tvm_fuse.relay.tune_draft")
profiles = Lazy("tvm_fuse.relay.tune_profile")
targets = Lazy("tvm_fuse.relay.target")

pytestmark = [pytest.mark.relay, pytest.mark.cuda_codegen]

SIZE = 1 << 16
THREADS = 64


def lower(schedule, tensors):
    with profiles.small_lowering():
        (profile,) = profiles.profile_functions(tvm.lower(schedule, tensors))
    return profile


def copy_kernel(stride=1, threads=THREADS):
    """``y[i] = x[i * stride] + 1``."""
    te = tvm.te
    x = te.placeholder((SIZE * stride,), "float32", "x")
    y = te.compute((SIZE,), lambda i: x[i * stride] + te.const(1, "float32"), "y")
    schedule = te.create_schedule(y.op)
    block, thread = schedule[y].split(y.op.axis[0], threads)
    schedule[y].bind(block, te.thread_axis("blockIdx.x"))
    schedule[y].bind(thread, te.thread_axis("threadIdx.x"))
    return lower(schedule, [x, y])


@pytest.mark.parametrize(("stride", "sectors"), [(1, 4 + 4), (2, 8 + 4), (8, 32 + 4), (100, 32 + 4)])
def test_sectors_of_a_warp(stride, sectors):
    profile = copy_kernel(stride)
    assert (profile.blocks, profile.threads) == (SIZE // THREADS, THREADS)
    assert profile.sectors == sectors
    assert (profile.global_accesses, profile.fma, profile.smem_bytes) == (2, 0.5, 0)
    assert profile.footprint_bytes == 4 * SIZE * (stride + 1)


@pytest.mark.parametrize(("padding", "ways"), [(0, 32), (1, 1)])
def test_bank_conflicts_of_a_transposed_tile(padding, ways):
    te = tvm.te
    x = te.placeholder((32, 32), "float32", "x")
    tile = te.compute((32, 32), lambda i, j: x[i, j], "tile")
    y = te.compute((32, 32), lambda i, j: tile[j, i], "y")
    schedule = te.create_schedule(y.op)
    schedule[tile].set_scope("shared")
    block, _ = schedule[y].split(y.op.axis[0], 32)
    schedule[y].bind(block, te.thread_axis("blockIdx.x"))
    schedule[y].bind(y.op.axis[1], te.thread_axis("threadIdx.x"))
    schedule[tile].compute_at(schedule[y], block)
    _, thread = schedule[tile].split(tile.op.axis[1], 32)
    schedule[tile].bind(thread, te.thread_axis("threadIdx.x"))
    schedule[tile].storage_align(tile.op.axis[0], 32, padding)
    profile = lower(schedule, [x, y])
    stores = profile.shared_accesses - 32
    assert profile.smem_bytes == 4 * 32 * (32 + padding)
    assert profile.shared_ways - stores == 32 * ways


def sum_kernel(is_unrolled):
    """Sixteen sums a thread over eight steps; in registers only where the loop over them is unrolled."""
    te = tvm.te
    x = te.placeholder((SIZE, 8), "float32", "x")
    step = te.reduce_axis((0, 8), "k")
    y = te.compute((SIZE,), lambda i: te.sum(x[i, step] * x[i, step], step), "y")
    schedule = te.create_schedule(y.op)
    sums = schedule.cache_write(y, "local")
    block, inner = schedule[y].split(y.op.axis[0], THREADS * 40)
    thread, _ = schedule[y].split(inner, 40)
    schedule[y].bind(block, te.thread_axis("blockIdx.x"))
    schedule[y].bind(thread, te.thread_axis("threadIdx.x"))
    schedule[sums].compute_at(schedule[y], thread)
    (row,), (k,) = sums.op.axis, sums.op.reduce_axis
    schedule[sums].reorder(k, row)
    if is_unrolled:
        schedule[sums].unroll(row)
    return lower(schedule, [x, y])


def test_sums_that_a_loop_indexes_are_in_memory():
    assert sum_kernel(is_unrolled=True).local_accesses < sum_kernel(is_unrolled=False).local_accesses


def test_loads_of_one_address_in_a_region_are_one():
    profile = sum_kernel(is_unrolled=True)  # x[i, k] * x[i, k]
    assert profile.global_accesses == 40 * 8 + 40


def score(found, card="a100"):
    return predict_s(found, find_card("sm_80", card), ScoreConstants())


def test_one_thread_in_a_block_is_worse():
    assert score([copy_kernel(threads=1)]) > 4 * score([copy_kernel()])


def test_our_schedule_is_better_than_the_fallback_of_tvm():
    """TVM's convolution without a record has one thread in a block."""
    net = Net()
    conv = net.conv2d(net.input("x", (1, 32, 28, 28)), 32)
    module = net.module(relay.nn.relu(relay.nn.bias_add(conv, net.const(32))))
    found = []
    for target in ("cuda -arch=sm_80", "cuda -arch=sm_80 -keys=cuda,gpu"):
        target = targets.resolve_target(target)
        options = fuse.FuseOptions(records=None, is_measured=False)
        model = fuse.fuse_model(load.model_from_module(module, {}), target, options)
        (kernel,) = kernels.find_kernels(model.module, target)
        found.append(draft.profile_kernel(kernel.function, target))
    ours, fallback = found
    assert fallback[0].threads == 1
    assert score(ours) < score(fallback) / 10
