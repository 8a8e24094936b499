"""Drafting: nothing is asked of a device, what cannot be launched is seen before it is lowered."""

from __future__ import annotations

import json
import math

import pytest

from tests.support.lazy import Lazy
from tests.support.relay_graphs import Net, relay, tvm
from tvm_fuse.core.tuning.score import find_card

draft = Lazy("tvm_fuse.relay.tune_draft")
fuse = Lazy("tvm_fuse.relay.fuse")
kernels = Lazy("tvm_fuse.relay.kernel_functions")
load = Lazy("tvm_fuse.relay.load")
search = Lazy("tvm_fuse.relay.tune_search")
targets = Lazy("tvm_fuse.relay.target")
tasks = Lazy("tvm_fuse.relay.tune_tasks")

pytestmark = [pytest.mark.relay, pytest.mark.cuda_codegen]


@pytest.fixture(scope="module")
def task():
    """A convolution and its activation."""
    net, target = Net(), targets.resolve_target("cuda -arch=sm_80")
    module = net.module(relay.nn.relu(net.conv2d(net.input("x", (1, 64, 14, 14)), 64)))
    options = fuse.FuseOptions(records=None, is_measured=False)
    model = fuse.fuse_model(load.model_from_module(module, {}), target, options)
    (one,) = tasks.find_tasks(kernels.find_kernels(model.module, target), target, None, {})
    return target, one


@pytest.mark.parametrize(("arch", "name", "sms"), [("sm_75", None, 40), ("sm_90", "h100", 132)])
def test_hardware_is_that_of_the_card(arch, name, sms):
    params = draft.hardware_params(find_card(arch, name))
    assert (params.num_cores, params.warp_size) == (sms, 32)
    assert (params.max_shared_memory_per_block, params.max_threads_per_block) == (49152, 1024)


def test_what_cannot_be_launched_is_seen_from_its_loops(task):
    """Of random schedules: what they say of threads and shared memory is what their code has."""
    target, one = task
    card = find_card("sm_80")
    found = search.make_search_task(one, target, draft.hardware_params(card))
    params = {"evolutionary_search_population": 24, "sample_init_min_population": 16}
    with search.seeded(3):
        policy = tvm.auto_scheduler.SketchPolicy(
            found, tvm.auto_scheduler.RandomModel(), params=params, seed=3, verbose=0
        )
        states = policy.sample_initial_population()
    verdicts = set()
    for state in list(states)[:16]:
        bound = found.compute_dag.infer_bound_from_state(state)
        text = search.write_schedule(found, bound)
        (profile,) = draft.profile_schedule(one, text)
        fits = profile.threads <= 1024 and profile.smem_bytes <= 48 * 1024
        assert draft._is_launchable(bound) is fits
        verdicts.add(draft._is_launchable(bound))
    assert verdicts == {True, False}


def test_drafts_fit_every_card_and_do_not_depend_on_chance(task):
    target, one = task
    scorers = [draft.Scorer(find_card(arch)) for arch in ("sm_75", "sm_80", "sm_90")]
    parameters = draft.DraftParameters(16, 1, 4)
    found = draft.draft_schedules(one, target, scorers, parameters, 5)
    assert len(found) >= 4
    assert all(math.isfinite(scorer(item.profiles)) for scorer in scorers for item in found)
    assert len({item.schedule for item in found}) == len(found)
    again = draft.draft_schedules(one, target, scorers, parameters, 5)
    assert [item.schedule for item in again] == [item.schedule for item in found]


def test_the_same_schedule_for_another_card(task):
    target, one = task
    scorer = draft.Scorer(find_card("sm_80"))
    text = draft.draft_schedules(one, target, [scorer], draft.DraftParameters(16, 0, 2), 1)[0].schedule
    other = targets.resolve_target("cuda -arch=sm_75")
    moved = draft.written_for(text, other, find_card("sm_75"))
    before, after = json.loads(text), json.loads(moved)
    assert before["i"][1] == after["i"][1]
    assert "sm_75" in after["i"][0][1]
    assert draft.profile_schedule(one, moved) == draft.profile_schedule(one, text)


def test_what_is_not_known_takes_forever():
    assert draft.Scorer(find_card("sm_80"))(()) == math.inf
