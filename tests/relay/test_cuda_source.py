"""The CUDA C of a build: the same from every process, and with registers to spare."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.lazy import Lazy
from tests.support.relay_graphs import Net, relay

kernels = Lazy("tvm_fuse.relay.kernels")
target = Lazy("tvm_fuse.relay.target")
transform = Lazy("tvm_fuse.transform")

pytestmark = [pytest.mark.relay, pytest.mark.cuda_codegen]

ROOT = Path(__file__).parents[2]
SHOW = "from tests.relay.test_cuda_source import build; print(build().artifact.cuda_source)"


def build():
    """Six kernels."""
    net = Net()
    x = net.input("x", (1, 8, 14, 14))
    for channels in (8, 16, 24, 32):
        x = relay.nn.relu(net.conv2d(x, channels))
    y = relay.nn.max_pool2d(x, (2, 2))
    on = target.resolve_target("cuda -arch=sm_80")
    fused = transform.FuseChains(on)(net.module(relay.nn.conv2d(y, relay.nn.softmax(y), padding=(1, 1))))
    return kernels.build_kernels(fused, on)


@pytest.mark.slow
def test_processes_agree():
    """Without the order of ``sort_kernels`` two of them hardly ever do."""
    texts = {
        subprocess.run(
            [sys.executable, "-c", SHOW],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1
    assert texts.pop().count("__global__") > 10


def test_blocked_products_name_their_least_number_of_blocks():
    source = build().artifact.cuda_source
    bounds = {kernel: "product_left[" in kernel for kernel in source.split('extern "C"') if "{" in kernel}
    assert any(bounds.values())
    for kernel, is_product in bounds.items():
        if "__global__" in kernel:
            assert (", 1)" in kernel.split("(float")[0]) == is_product
