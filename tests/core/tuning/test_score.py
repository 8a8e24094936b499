"""The score puts pairs of kernels in the order that is known; no time is checked against a GPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tvm_fuse.core.errors import UsageError
from tvm_fuse.core.targets import DEVICES
from tvm_fuse.core.tuning.score import KernelProfile, ScoreConstants, find_card, predict_s, with_resources

#: A tiled convolution: 392 blocks of 64 threads, eight sums a thread.
TILED = KernelProfile(
    blocks=392,
    threads=64,
    smem_bytes=10368,
    registers=80,
    fma=4616.0,
    special=0.0,
    integer=2000.0,
    shared_accesses=1952.0,
    shared_ways=2096.0,
    global_accesses=240.0,
    sectors=1000.0,
    local_accesses=0.0,
    phases=16.0,
    barriers=32.0,
    footprint_bytes=1.75e6,
    parallel=8,
)
ONE_THREAD = replace(TILED, blocks=TILED.blocks * TILED.threads, threads=1, parallel=1)


def seconds(profile, card="a100", constants=ScoreConstants()):  # noqa: B008
    return predict_s([profile], find_card(DEVICES[card].arch, card), constants)


@pytest.mark.parametrize("card", sorted(DEVICES))
@pytest.mark.parametrize(
    ("better", "worse"),
    [
        pytest.param(TILED, ONE_THREAD, id="one thread in a block"),
        pytest.param(
            replace(TILED, sectors=4 * 240.0), replace(TILED, sectors=32 * 240.0), id="strided loads"
        ),
        pytest.param(TILED, replace(TILED, shared_ways=32 * 1952.0), id="bank conflicts"),
        pytest.param(TILED, replace(TILED, spill_bytes=256), id="spills"),
        pytest.param(TILED, replace(TILED, local_accesses=9000.0), id="sums in memory"),
        pytest.param(
            replace(TILED, blocks=384), replace(TILED, blocks=1, fma=384 * TILED.fma), id="one block of many"
        ),
        pytest.param(TILED, replace(TILED, phases=160.0), id="more waiting for loads"),
        pytest.param(TILED, replace(TILED, integer=30000.0), id="more index arithmetic"),
        pytest.param(TILED, replace(TILED, footprint_bytes=1e9), id="more device memory"),
    ],
)
def test_what_is_known_to_be_worse_scores_worse(card, better, worse):
    assert seconds(better, card) < seconds(worse, card)


@pytest.mark.parametrize(("slow", "fast"), [("t4", "a100"), ("t4", "h100"), ("l4", "rtx4090")])
def test_cards_differ(slow, fast):
    assert seconds(TILED, fast) < seconds(TILED, slow)


def test_no_kernel_beats_the_peaks():
    profile = replace(TILED, fma=1e6, sectors=0.0, global_accesses=0.0, shared_ways=0.0, shared_accesses=0.0)
    device = DEVICES["a100"]
    assert seconds(profile) > 2 * 1e6 * profile.blocks * profile.threads / device.fp32_flops_per_s
    profile = replace(TILED, footprint_bytes=1e9)
    assert seconds(profile) > 1e9 / device.dram_bytes_per_s


@pytest.mark.parametrize(
    "changes", [{"threads": 2048}, {"smem_bytes": 1 << 20}, {"registers": 255, "threads": 1024}]
)
def test_what_cannot_be_launched_takes_forever(changes):
    assert seconds(replace(TILED, **changes)) == math.inf


def test_the_constants_count():
    for name, value in {"scale": 2.0, "overlap": 0.9, "latency_clocks": 1e4, "launch_s": 1e-3}.items():
        assert seconds(TILED, constants=replace(ScoreConstants(), **{name: value})) > seconds(TILED), name
    local = replace(TILED, local_accesses=9000.0)
    assert seconds(local, constants=ScoreConstants(local_clocks=9.0)) > seconds(local)


def test_several_kernels_add_up():
    card = find_card("sm_80")
    assert predict_s([TILED, TILED], card, ScoreConstants()) == 2 * seconds(TILED)


def test_what_the_compiler_says_replaces_estimates():
    estimated = replace(TILED, local_accesses=10.0)
    assert with_resources(estimated, 96, 0, 0) == replace(TILED, registers=96)
    assert with_resources(estimated, 96, 8, 32).local_accesses == 10.0
    assert with_resources(TILED, 96, 8, 32) == replace(
        TILED, registers=96, spill_bytes=8, local_accesses=2 * TILED.fma
    )


def test_the_lanes_of_the_architecture_and_the_peak_of_the_card_agree():
    """Two sources for one number: the programming guide, and the vendor's peak over clock and SMs."""
    for name, device in DEVICES.items():
        lanes = device.fp32_flops_per_s / 2 / device.sms / device.clock_hz
        assert lanes == pytest.approx(find_card(device.arch, name).gpu.fp32_lanes, rel=0.02), name


@pytest.mark.parametrize(
    ("arch", "name", "wanted"),
    [("sm_80", None, "a100"), ("sm_90a", None, "h200"), ("sm_90", "H100", "h100"), ("sm_75", None, "t4")],
)
def test_cards(arch, name, wanted):
    assert find_card(arch, name).name == wanted


@pytest.mark.parametrize(
    ("arch", "name", "message"),
    [
        ("sm_80", "h100", "card 'h100': wanted a card of sm_80; known are"),
        ("sm_80", "h1000", "card 'h1000'"),
        ("sm_70", None, "architecture sm_70: wanted a card"),
        ("sm_12", None, "no limits are known"),
    ],
)
def test_cards_that_do_not_fit(arch, name, message):
    with pytest.raises(UsageError, match=message):
        find_card(arch, name)
