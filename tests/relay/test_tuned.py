"""Tuned schedules in a build: used where they belong, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.lazy import Lazy
from tests.support.relay_graphs import Net, feeds, relay
from tvm_fuse.core.cpu import read_cpu
from tvm_fuse.core.errors import InternalError
from tvm_fuse.core.parity import compare
from tvm_fuse.core.reason import Code
from tvm_fuse.core.tuning.budget import SearchParameters
from tvm_fuse.core.tuning.records import TunedRecord, save_record

build = Lazy("tvm_fuse.relay.build")
fuse = Lazy("tvm_fuse.relay.fuse")
load = Lazy("tvm_fuse.relay.load")
records = Lazy("tvm_fuse.relay.records")
search = Lazy("tvm_fuse.relay.tune_search")
targets = Lazy("tvm_fuse.relay.target")
tasks = Lazy("tvm_fuse.relay.tune_tasks")
kernels = Lazy("tvm_fuse.relay.kernel_functions")
tuned = Lazy("tvm_fuse.relay.tuned")

pytestmark = pytest.mark.relay

SEARCH = SearchParameters(population=16, iterations=1, sampled=4, per_round=4)


def make_module(seed=0):
    """Three convolutions, two of the same chain, and a pooling."""
    net = Net(seed)
    x = net.input("x", (1, 16, 10, 10))
    for _ in range(3):
        x = relay.nn.relu(relay.nn.bias_add(net.conv2d(x, 16), net.const(16)))
    return net.module(relay.nn.batch_flatten(relay.nn.max_pool2d(x, (2, 2), (2, 2))))


@pytest.fixture(scope="module")
def fused():
    target = targets.resolve_target("llvm")
    options = fuse.FuseOptions(records=None)
    return target, fuse.fuse_model(load.model_from_module(make_module()), target, options)


@pytest.fixture(scope="module")
def found(fused):
    target, model = fused
    return tasks.find_tasks(kernels.find_kernels(model.module, target), target, None, {})


@pytest.fixture(scope="module")
def schedule(fused, found):
    """A schedule of the convolution, whatever it is."""
    proposed = search.ScheduleSearch(found[:1], fused[0], SEARCH).propose(found[0].task, 1, (), 1)
    return proposed[0]


def record_of(task, schedule, target, **changes):
    record = TunedRecord(
        digest=task.digest,
        device=tasks.device_key_of(target),
        name=task.name,
        chain=task.chain,
        workload_key=task.workload_key,
        schedule=schedule,
        cost_s=1e-5,
        baseline_s=2e-5,
        max_abs=0.0,
        needed=0.0,
    )
    return replace(record, **changes)


def test_tasks_are_the_kernels_that_reduce_each_once(found):
    wanted = [("conv2d_bias_relu", 2), ("conv2d_bias_relu", 1), ("max_pool2d", 1)]  # one transforms its data
    assert [(one.task.name, one.task.weight) for one in found] == wanted
    assert found[0].task.flops == found[1].task.flops > found[2].task.flops > 0


def test_digests_depend_on_no_name_and_no_weight(found):
    target = targets.resolve_target("llvm")
    model = load.model_from_module(make_module(seed=1))
    other = fuse.fuse_model(model, target, fuse.FuseOptions(records=None))
    again = tasks.find_tasks(kernels.find_kernels(other.module, target), target, None, {})
    assert [one.task for one in again] == [one.task for one in found]


def test_the_keys_of_tasks_are_those_of_the_build(fused, found):
    target, model = fused
    marked = kernels.mark_kernels(model.module, target, [one.task.digest for one in found])
    with tuned.tuned_schedules(tuned.TunedBuild()) as seen:
        build.build_fused(marked, target)
    assert {one.task.workload_key for one in found} == seen.seen.keys()


def test_a_tuned_kernel_is_used_and_right(fused, found, schedule):
    target, model = fused
    ones = {found[0].task.digest: tuned.TunedSchedule(found[0].task.workload_key, schedule)}
    plain, ours = (build.build_fused(model.module, target, schedules=schedules) for schedules in ({}, ones))
    assert plain.calls == ours.calls
    sources = [artifact.library.get_lib().get_source("asm") for artifact in (plain, ours)]
    assert sources[0] != sources[1]
    inputs = feeds(model.module)
    want, got = (build.Runner(artifact, target).run(inputs, ()) for artifact in (plain, ours))
    assert compare(want, got).passed


def test_without_a_schedule_nothing_changes(fused):
    target, model = fused
    plain = build.build_fused(model.module, target)
    with tuned.tuned_schedules(tuned.TunedBuild()):
        watched = build.build_fused(kernels.mark_kernels(model.module, target, ()), target)
    sources = [artifact.library.get_lib().get_source("asm") for artifact in (plain, watched)]
    assert sources[0] == sources[1]


def test_a_schedule_that_belongs_to_no_kernel_is_an_error_that_shows_both_keys(fused, found, schedule):
    target, model = fused
    wrong = tuned.TunedSchedule('["another"]', schedule)
    with pytest.raises(InternalError) as caught:
        build.build_fused(model.module, target, schedules={found[0].task.digest: wrong})
    assert '["another"]' in str(caught.value)
    assert found[0].task.workload_key in str(caught.value)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"i": 1}', '{"i": [], "r": [], "v": "v0.6"}'])
def test_what_is_no_schedule_is_refused(text):
    with pytest.raises(ValueError, match="no schedule of AutoScheduler"):
        tuned.load_state(text)


@pytest.mark.parametrize(
    ("target", "device"),
    [
        ("cuda -arch=sm_90", "cuda-sm_90"),
        ("llvm -mcpu=atom", "llvm-atom"),
        ("llvm -mcpu=atom -num-cores=4", "llvm-atom-4cores"),
    ],
)
def test_device_keys(target, device):
    assert tasks.device_key_of(targets.resolve_target(target)) == device


def test_the_key_of_this_machine_has_its_cores():
    assert tasks.device_key_of(targets.resolve_target("llvm")).endswith(f"-{read_cpu().cores}cores")


# --- records ---------------------------------------------------------------------------------------


def test_records_of_this_device_are_used(tmp_path, fused, found, schedule):
    target, model = fused
    save_record(tmp_path, record_of(found[0].task, schedule, target))
    used = records.apply_records(model.module, target, tmp_path)
    wanted = tuned.TunedSchedule(found[0].task.workload_key, schedule)
    assert used.schedules_for(target) == {found[0].task.digest: wanted}
    assert used.schedules_for(targets.resolve_target("llvm -mcpu=haswell")) == {}
    assert [decision.applied for decision in used.decisions] == [True]


@pytest.mark.parametrize(
    ("changes", "code", "got"),
    [
        pytest.param({"device": "llvm-znver9-64cores"}, Code.SCHEDULE_RECORD_DEVICE, "znver9", id="device"),
        pytest.param({"workload_key": '["old"]'}, Code.SCHEDULE_RECORD_STALE, "[", id="stale"),
    ],
)
def test_records_that_do_not_fit_say_why(tmp_path, fused, found, schedule, changes, code, got):
    target, model = fused
    save_record(tmp_path, record_of(found[0].task, schedule, target, **changes))
    unused = records.apply_records(model.module, target, tmp_path)
    assert unused.schedules_for(target) == {}
    (decision,) = unused.decisions
    assert decision.reason.code is code
    assert got in decision.reason.got
    assert any(code.value in line for line in records.describe_records(unused))


def test_a_draft_is_used_only_where_that_is_asked_for(tmp_path, fused, found, schedule, monkeypatch):
    target, model = fused
    save_record(tmp_path, record_of(found[0].task, schedule, target, measured=False))
    with monkeypatch.context() as patch:  # a draft that is not used costs nothing to look at
        patch.setattr("tvm_fuse.relay.records.read_kernel_computation", None)
        unused = records.apply_records(model.module, target, tmp_path)
    assert unused.schedules_for(target) == {}
    (decision,) = unused.decisions
    assert decision.reason.code is Code.SCHEDULE_RECORD_DRAFT
    assert "2.00 x" in decision.reason.got
    (line,) = records.describe_records(unused)
    assert Code.SCHEDULE_RECORD_DRAFT.value in line
    used = records.apply_records(model.module, target, tmp_path, drafts=True)
    assert used.schedules_for(target).keys() == {found[0].task.digest}
    assert "1 of them drafts that nobody measured" in records.describe_records(used)[0]
    options = fuse.FuseOptions(records=tmp_path, drafts=True)
    with_drafts = fuse.fuse_model(load.model_from_module(make_module(seed=2)), target, options)
    assert len(with_drafts.tuned.records) == 1


def test_many_unused_records_are_one_line_for_each_reason(tmp_path, fused, found, schedule):
    target, model = fused
    for one in found:
        save_record(tmp_path, record_of(one.task, schedule, target, measured=False))
    unused = records.apply_records(model.module, target, tmp_path)
    assert len(unused.decisions) == 3
    (line,) = records.describe_records(unused)
    assert line.endswith("(and 2 more)")


def test_a_damaged_record_is_named_and_not_used(tmp_path, fused, found, schedule):
    target, model = fused
    save_record(tmp_path, record_of(found[0].task, schedule, target))
    (file,) = tmp_path.rglob("*.json")
    file.write_text("{}")
    unused = records.apply_records(model.module, target, tmp_path)
    assert unused.schedules_for(target) == {}
    (decision,) = unused.decisions
    assert decision.reason.code is Code.SCHEDULE_RECORD_DAMAGED
    assert file.name in decision.reason.at


def test_fuse_model_takes_records_unless_told_not_to(tmp_path, fused, found, schedule):
    target, _ = fused
    save_record(tmp_path, record_of(found[0].task, schedule, target))
    model = load.model_from_module(make_module(seed=2))
    with_them = fuse.fuse_model(model, target, fuse.FuseOptions(records=tmp_path))
    assert len(with_them.tuned.records) == 1
    without = fuse.fuse_model(model, target, fuse.FuseOptions(records=None))
    assert without.tuned == records.NOT_TUNED
