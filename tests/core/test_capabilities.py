"""What targets can do: the table is whole, and a target that is not in it is refused."""

from __future__ import annotations

import pytest

from tvm_fuse.core.capabilities import CAPABILITIES, CHEAP_KINDS, capability_of
from tvm_fuse.core.errors import UsageError
from tvm_fuse.core.families import FAMILIES
from tvm_fuse.core.graph import ELEMENTWISE_KINDS, Kind


@pytest.mark.parametrize("target", CAPABILITIES)
def test_families_that_are_named_exist(target):
    named = set(CAPABILITIES[target].prologue)
    assert named <= {family.name for family in FAMILIES}


def test_only_cuda_computes_on_the_way_into_a_convolution():
    assert [target for target in CAPABILITIES if "conv" in CAPABILITIES[target].prologue] == ["cuda"]


def test_cheap_is_elementwise_and_has_no_transcendental_functions():
    assert CHEAP_KINDS < ELEMENTWISE_KINDS
    assert not CHEAP_KINDS & {Kind.EXP, Kind.TANH, Kind.SIGMOID, Kind.ERF, Kind.LOG, Kind.POWER, Kind.DIVIDE}


def test_unknown_target():
    assert capability_of("cuda") is CAPABILITIES["cuda"]
    with pytest.raises(UsageError, match="one of cuda, cpu, other, got 'vulkan'"):
        capability_of("vulkan")
