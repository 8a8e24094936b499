"""Which device's peaks stand for a target."""

from __future__ import annotations

import pytest

from tests.support.extensions import exponential, prologue_case
from tests.support.lazy import Lazy
from tvm_fuse.core.cpu import detect_cpu
from tvm_fuse.core.reason import Code
from tvm_fuse.core.targets import DEVICES

device = Lazy("tvm_fuse.relay.device")
target = Lazy("tvm_fuse.relay.target")

pytestmark = [pytest.mark.relay, pytest.mark.cuda_codegen]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("cuda -arch=sm_75", "t4"),
        ("cuda -arch=sm_80", "a100"),
        ("cuda -arch=sm_90a", "h200"),
        ("cuda -arch=sm_87", None),
        ("llvm -mcpu=nehalem", None),
    ],
)
def test_device_of(text, name):
    resolved = target.resolve_target(text)
    assert device.device_of(resolved) is (DEVICES[name] if name else None)
    assert (device.accept_for(resolved) is None) is (name is None)


def test_this_machine():
    found = device.device_of(target.resolve_target("llvm"))
    assert found.arch == detect_cpu()
    assert found.sms >= 1


def test_the_rule_of_a_target():
    graph, candidate = prologue_case(exponential, 512, 512, 56, kernel=3)
    reason = device.accept_for(target.resolve_target("cuda -arch=sm_75"))(graph, candidate)
    assert reason.code is Code.FUSION_COSTS_TIME
    assert "Tesla T4" in reason.wanted
