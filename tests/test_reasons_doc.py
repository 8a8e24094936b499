"""Every reason code has a minimal model that provokes it, and docs/reasons.md shows what that model gives."""

from __future__ import annotations

import pytest

from tests.support.lazy import Lazy
from tests.support.reason_models import MODELS, Model, find_reason
from tests.support.reason_page import example_of, read_examples
from tvm_fuse.core.reason import Code

kernels = Lazy("tests.support.reason_kernels")

#: Codes about how a kernel is generated: their models are layers in Relay.
OF_KERNELS = tuple(code for code in Code if code.value.startswith(("schedule-", "registers-", "occupancy-")))
UPDATE = "run: python -m tests.support.reason_page --update"


@pytest.mark.parametrize("code", [code for code in Code if code not in OF_KERNELS])
def test_a_model_without_tvm_gives_the_example(code):
    assert code in MODELS, f"{code.value} has no minimal model: add one to tests/support/reason_models.py"
    reason = find_reason(code)
    assert reason.code is code
    assert reason.hint
    assert read_examples()[code.value] == example_of(reason), UPDATE


@pytest.mark.relay
@pytest.mark.parametrize("code", OF_KERNELS)
def test_a_layer_gives_the_example(code):
    assert code in kernels.KERNELS, f"{code.value} has no layer: add one to tests/support/reason_kernels.py"
    reason = kernels.KERNELS[code]()
    assert reason.code is code
    assert read_examples()[code.value] == example_of(reason), UPDATE


def test_a_model_that_does_not_provoke_its_code_is_found(monkeypatch):
    monkeypatch.setitem(MODELS, Code.CHAIN_TOO_LONG, Model(lambda g: (g.relu(g.input("x", (1, 2))),)))
    with pytest.raises(AssertionError, match=r"the model of chain-too-long gives \['operator-alone'\]"):
        find_reason(Code.CHAIN_TOO_LONG)
