"""Records of passes: the latest of each, in order, by thread."""

from __future__ import annotations

import threading

import pytest

from tests.support.lazy import Lazy
from tvm_fuse.core.reason import Code, Reason, applied, declined

record = Lazy("tvm_fuse.relay.record")

pytestmark = pytest.mark.relay


@pytest.fixture(autouse=True)
def clear():
    record.clear_records()


def make(name, *decisions, changed=True):
    return record.PassRecord(name, f"{name} ran", changed, decisions)


def test_latest_record_of_each_pass():
    first, second, third = make("A"), make("B"), make("A", changed=False)
    for item in (first, second, third):
        record.record(item)
    report = record.last_report()
    assert report.records == (second, third)
    assert report["A"] is third
    assert report["B"] is second


def test_pass_that_did_not_run():
    record.record(make("A"))
    with pytest.raises(KeyError, match="A"):
        record.last_report()["B"]
    record.clear_records()
    with pytest.raises(KeyError, match="none"):
        record.last_report()["A"]


def test_report_is_a_snapshot():
    record.record(make("A"))
    before = record.last_report()
    record.record(make("B"))
    assert [item.name for item in before.records] == ["A"]


def test_threads_have_their_own():
    record.record(make("A"))
    seen = []
    thread = threading.Thread(target=lambda: seen.extend(record.last_report().records))
    thread.start()
    thread.join()
    assert seen == []
    assert len(record.last_report().records) == 1


def test_text_names_every_decision():
    reason = Reason(Code.RESULT_SHARED, "conv1", "one reader", "2: a, b")
    record.record(make("A", applied("chain", "conv2", "conv2d_relu"), declined("chain", "conv1", reason)))
    text = str(record.last_report())
    assert "conv2" in text
    assert Code.RESULT_SHARED.value in text


def test_text_names_every_warning():
    reason = Reason(Code.BN_GAIN_LARGE, "bn1", "at most 1", "2 in channel 3")
    record.record(record.PassRecord("A", "A ran", True, (), (), (reason,)))
    assert f"  warning: {reason}" in str(record.last_report()).splitlines()
