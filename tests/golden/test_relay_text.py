"""What the passes make of conv2d -> batch_norm -> relu, as text that people have read."""

from __future__ import annotations

import pytest

from tests.support.lazy import Lazy
from tests.support.relay_graphs import Net, relay, texts

transform = Lazy("tvm_fuse.transform")

pytestmark = pytest.mark.relay


@pytest.fixture
def module():
    net = Net()
    x = net.input("x", (1, 3, 224, 224))
    return net.module(relay.nn.relu(net.batch_norm(net.conv2d(x, 64), epsilon=1e-3)))


def test_before(module, golden):
    golden(texts(module))


def test_fold_batch_norm(module, golden):
    golden(texts(transform.FoldBatchNorm()(module)))


def test_fold_and_partition(module, golden):
    golden(texts(transform.PartitionChains()(transform.FoldBatchNorm()(module))))
