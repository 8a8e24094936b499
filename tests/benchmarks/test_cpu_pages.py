"""Tables, picture and pages of the benchmark on a CPU: from known results, and those that are committed."""

from __future__ import annotations

import re
from copy import deepcopy
from xml.etree import ElementTree

import pytest

from benchmarks import cpu, cpu_pages
from benchmarks.cpu_plot import draw
from benchmarks.interleave import Timed
from benchmarks.profile_cpu import group_kernels

ROOT = cpu_pages.ROOT
FORMS = {
    "tvm_fuse": 0.010,
    "folded_apart": 0.0125,
    "unfolded_apart": 0.016,
    "onnxruntime": 0.012,
    "openvino": 0.009,
    "tvm_opt_level_3": 0.050,
    "tvm_plain_llvm": 0.100,
}


def row(batch=1, threads=2):
    times = {form: [[seconds * scale] * 4 for scale in (1, 1.1, 1)] for form, seconds in FORMS.items()}
    return cpu.describe("mobilenet_v2", batch, threads, Timed(times, 1, 2.5))


def document():
    rows = [row(batch, threads) for batch in (1, 8) for threads in (1, 2)]
    return {
        "date": "2026-01-02",
        "machine": {"model": "A <CPU>", "cores": 2, "cpu": "haswell", "load_average_before": [0.1, 0.2, 0.3]},
        "versions": {"onnxruntime": "1.0", "openvino": "2026.1-5-releases", "tvm": "0.17"},
        "results": {"revision": "abc", "seconds": 9, "rows": rows},
    }


def test_a_row_of_the_comparison():
    last = cpu_pages.compare_table([row()]).splitlines()[-1]
    assert last == (
        "| MobileNetV2, 1, 2 | 10.0 | 12.0 ms, 1.20 x (1.20 to 1.20) "
        "| 9.00 ms, 0.90 x (0.90 to 0.90) | 50.0 ms, 5.00 x (5.00 to 5.00) "
        "| 100 ms, 10.00 x (10.00 to 10.00) |"
    )


def test_a_row_of_what_fusion_saves():
    last = cpu_pages.fusion_table([row()]).splitlines()[-1]
    assert last == (
        "| MobileNetV2, 1, 2 | 16.0 -> 10.0 ms, 37.5 % (37.5 to 37.5) "
        "| 12.5 -> 10.0 ms, 20.0 % (20.0 to 20.0) |"
    )


def test_the_run_is_told():
    assert cpu_pages.run_line(document()) == (
        "A <CPU> (2 cores, built for haswell), 2026-01-02, load before the run 0.1; revision abc; "
        "ONNX Runtime 1.0, OpenVINO 2026.1, TVM 0.17; 3 rounds, in which other processes took "
        "at most 2.5 % of the machine."
    )


def test_kernels_of_equal_code_are_one_row():
    calls = [
        {"name": "f", "what": "conv2d", "seconds": 1e-3, "flops": 10**8, "bytes": 10**6},
        {"name": "g", "what": "pool", "seconds": 3e-3, "flops": 0, "bytes": 6 * 10**6},
        {"name": "f", "what": "conv2d", "seconds": 1e-3, "flops": 10**8, "bytes": 3 * 10**6},
    ]
    g, f = group_kernels(calls, total_s=5e-3, peak_flops_per_s=200e9)
    assert (g["name"], g["calls"], g["share_percent"], g["gflop_per_s"]) == ("g", 1, 60.0, 0.0)
    assert (f["calls"], f["ms"], f["share_percent"]) == (2, 2.0, 40.0)
    assert (f["gflop_per_s"], f["peak_percent"], f["gb_per_s"]) == (100.0, 50.0, 2.0)
    made = {"machine": {"model": "C"}, "date": "d", "results": {"models": {"mobilenet_v2": {"kernels": [f]}}}}
    last = cpu_pages.kernel_table(made).splitlines()[-1]
    assert last == "| MobileNetV2 | conv2d | 2 | 2.000 | 40.0 % | 100 (50 %) | 2.0 |"


def test_a_page_is_filled_between_its_comments():
    page = "a\n<!-- cpu: run -->\nold\nold\n<!-- end -->\nb\n<!-- cpu: peak -->\n<!-- end -->\nc\n"
    once = cpu_pages.fill(page, {"cpu": document()})
    line = cpu_pages.run_line(document())
    assert once == (
        f"a\n<!-- cpu: run -->\n{line}\n<!-- end -->\nb\n"
        "<!-- cpu: peak -->\nNot yet measured.\n<!-- end -->\nc\n"
    )
    assert cpu_pages.fill(once, {"cpu": document()}) == once


def test_the_readme_has_all_cores_only():
    made = cpu_pages.TABLES["compared on all cores"][1](document())
    assert re.findall(r"MobileNetV2, (\d), (\d)", made) == [("1", "2"), ("8", "2")]


def test_the_picture_has_a_bar_for_each_form_and_cuts_long_ones():
    rows = document()["results"]["rows"]
    root = ElementTree.fromstring(draw(rows))
    space = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in root.iter(f"{space}text")]
    assert texts.count("10 ms") == texts.count("12 ms") == texts.count("50 ms") == 4
    bars = [bar for bar in root.iter(f"{space}rect") if bar.get("height") == "11"]
    widths = [float(bar.get("width")) for bar in bars[:4]]
    assert [width / widths[0] for width in widths] == pytest.approx([1, 1.2, 0.9, 4.0], abs=0.01)
    right = max(float(bar.get("x")) + float(bar.get("width")) for bar in bars)
    assert right + 40 < float(root.get("width"))


# --- committed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", cpu_pages.PAGES)
def test_pages_have_the_tables_of_the_committed_results(page):
    text, files = (ROOT / page).read_text(encoding="utf-8"), cpu_pages.read_results(ROOT)
    assert cpu_pages.fill(text, files) == text
    changed = deepcopy(files)
    for measured in changed.get("cpu", {"results": {"rows": []}})["results"]["rows"]:
        measured["ms"]["tvm_fuse"]["median"] *= 2
    assert (cpu_pages.fill(text, changed) == text) == ("cpu" not in files)


def test_every_table_is_on_a_page():
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in cpu_pages.PAGES)
    assert set(re.findall(r"<!-- cpu: ([a-z ]+) -->", text)) == cpu_pages.TABLES.keys()


def test_the_committed_picture():
    files, picture = cpu_pages.read_results(ROOT), ROOT / "benchmarks" / "results" / "cpu.svg"
    assert picture.exists() == ("cpu" in files)
    if "cpu" in files:
        assert picture.read_text(encoding="utf-8") == draw(files["cpu"]["results"]["rows"])


def test_without_a_peer_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(cpu, "find_spec", lambda name: None if name == "openvino" else object())
    with pytest.raises(SystemExit, match="openvino is not installed: `make bench` does that"):
        cpu.run_all(cpu.parse([]))


def test_an_unknown_model_is_refused(capsys):
    with pytest.raises(SystemExit):
        cpu.parse(["vgg"])
    assert "no such model: vgg" in capsys.readouterr().err
