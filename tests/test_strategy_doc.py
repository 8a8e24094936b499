"""The tables of docs/strategy.md are those of the code and of the committed results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.extensions import exponential, gate_case, prologue_case, scaled
from tests.support.lazy import Lazy
from tvm_fuse.core.accept import compare_extension
from tvm_fuse.core.targets import DEVICES

horizontal = Lazy("benchmarks.horizontal")
launches = Lazy("benchmarks.launches")

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "strategy.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results"

EXTENSIONS = {
    "squeeze-excite multiply, then 1x1 convolution, 480 to 112 channels, 14x14": prologue_case(
        scaled, 480, 112, 14
    ),
    "the same, 1152 to 320 channels, 7x7": prologue_case(scaled, 1152, 320, 7),
    "gate of two products, 672 to 28 to 672": gate_case(672, 28),
    "gate of two products, 1152 to 48 to 1152": gate_case(1152, 48),
    "gate of two products, 4096 to 1024 to 4096": gate_case(4096, 1024),
    "exponential, then 3x3 convolution of 512 channels, 56x56": prologue_case(
        exponential, 512, 512, 56, kernel=3
    ),
}


def results(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["results"]


def device_row(device):
    cells = (
        device.name,
        device.arch,
        f"{device.fp32_flops_per_s / 1e12:.1f}",
        f"{device.dram_bytes_per_s / 1e9:.0f}",
        f"{device.ridge_flops_per_byte:.1f}",
        f"{device.l2_bytes >> 20}",
        device.source,
    )
    return f"| {' | '.join(cells)} |"


def extension_row(name, graph, candidate):
    compared = compare_extension(graph, candidate)
    cells = []
    for device in map(DEVICES.__getitem__, ("t4", "a100", "h200")):
        together, apart = 1e6 * compared.together_s(device), 1e6 * compared.apart_s(device)
        cells.append(f"{together:.1f} / {apart:.1f}{'' if together < apart else ' refused'}")
    return f"| {name} | {' | '.join(cells)} |"


def split_row(name, arch, row):
    candidates = [row["whole"], *row["tried"]]

    def used(candidate):
        return " and ".join(
            f"{kernel['registers']} ({kernel['occupancy']:.0%}, "
            f"{kernel['spill_store_bytes'] + kernel['spill_load_bytes']} bytes)"
            for kernel in candidate["kernels"]
        )

    chosen = used(candidates[row["chosen"]]) if row["chosen"] else "whole"
    return f"| {name} | {arch} | {used(candidates[0])} | {chosen} |"


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_devices(device):
    assert device_row(device) in TEXT


@pytest.mark.parametrize("name", EXTENSIONS)
def test_extensions(name):
    assert extension_row(name, *EXTENSIONS[name]) in TEXT


@pytest.mark.parametrize("name", ["sum", "activations", "sweeps"])
def test_splits(name):
    for arch, row in results("register_split")["groups"][name].items():
        assert split_row(name, arch, row) in TEXT


def test_no_example_model_is_compiled_for_its_registers():
    models = results("register_split")["models"]
    assert {row["compiled"] for row in models.values()} == {0}
    assert ", ".join(f"{models[name]['groups']}" for name in sorted(models)) in TEXT


@pytest.mark.relay
def test_launches():
    rows = results("launches")
    assert launches.make_table(rows) in TEXT
    assert {"resnet50", "mobilenet_v2", "efficientnet_b0"} <= rows.keys()


@pytest.mark.relay
def test_layers_side_by_side():
    assert horizontal.make_table(results("horizontal")) in TEXT


@pytest.mark.relay
@pytest.mark.cuda_codegen
@pytest.mark.slow
def test_layers_side_by_side_again():
    """One row of the committed table."""
    function = horizontal.MODELS["inception block"]()
    assert (
        horizontal.count(function, launches.resolve_target(launches.TARGET))
        == results("horizontal")["inception block"]
    )


@pytest.mark.relay
@pytest.mark.cuda_codegen
def test_launches_of_the_small_model_again():
    """The row of the committed table that takes seconds; the others, minutes (``benchmarks/launches.py``)."""
    row, model = results("launches")["small"], launches.load("small")
    assert launches.count_ours(model, launches.resolve_target(launches.TARGET)) == row["tvm_fuse"]
    assert launches.count_stock_levels(model).items() <= row.items()
    assert row["tvm_fuse"]["launches"] < row["tvm_opt_level_2"]["launches"]
