"""What ``results/cpu.json`` and ``results/profile_cpu.json`` look like: tables in Markdown, and a picture.

A page holds a table between two comments, ``<!-- cpu: NAME -->`` and ``<!-- end -->``. ``python
benchmarks/cpu_pages.py`` writes all of them again from the files.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cpu_plot import draw

__all__ = ["PAGES", "STOCK", "TABLES", "fill", "read_results", "write_pages"]

ROOT = Path(__file__).resolve().parents[1]

TITLES = {"resnet50": "ResNet-50", "mobilenet_v2": "MobileNetV2", "efficientnet_b0": "EfficientNet-B0"}
#: TVM alone, not tuned: for this processor, and as ``relay.build(module, "llvm")`` builds it for any x86-64.
STOCK = {"tvm_opt_level_3": "TVM with `-mcpu`", "tvm_plain_llvm": "TVM, plain `llvm`"}
FORMS = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO", **STOCK}
PAGES = ("README.md", "docs/cpu.md")
NOT_MEASURED = "Not yet measured."
_TOP_KERNELS = 6


def compare_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Latencies, and how many times as fast tvm-fuse is, with the quartiles of the rounds."""
    body = []
    for row in rows:
        cells = [_what(row), _ms(row["ms"]["tvm_fuse"])]
        for form in FORMS:
            cells.append(f"{_ms(row['ms'][form])} ms, {_ratio(row['speedup_of_tvm_fuse'][form])}")
        body.append(cells)
    return _table((*_WHAT, "tvm-fuse, ms", *FORMS.values()), body)


def fusion_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """What fusion saves, with batch norms folded beforehand and without."""
    body = []
    for row in rows:
        cells, after = [_what(row)], row["ms"]["tvm_fuse"]
        for form in ("unfolded_apart", "folded_apart"):
            saved = row["saved_by_fusion_percent"][form]
            cells.append(
                f"{_ms(row['ms'][form])} -> {_ms(after)} ms, {saved['median']:.1f} % "
                f"({saved['quartile_1']:.1f} to {saved['quartile_3']:.1f})"
            )
        body.append(cells)
    return _table((*_WHAT, "nothing folded or fused -> all", "folded, not fused -> all"), body)


def run_line(document: Mapping[str, Any]) -> str:
    """Where, when and with what: one sentence."""
    machine, versions = document["machine"], document["versions"]
    load, rows = machine["load_average_before"][0], document["results"]["rows"]
    return (
        f"{machine['model']} ({machine['cores']} cores, built for {machine['cpu']}), {document['date']}, "
        f"load before the run {load:g}; revision {document['results']['revision']}; "
        f"ONNX Runtime {versions['onnxruntime']}, OpenVINO {versions['openvino'].split('-')[0]}, "
        f"TVM {versions['tvm']}; {_span([row['rounds'] for row in rows])} rounds, in which other processes "
        f"took at most {max(row['others_percent'] for row in rows):g} % of the machine."
    )


def kernel_table(document: Mapping[str, Any]) -> str:
    """The kernels that take most of each model's time, those of equal code together."""
    body = []
    for name, model in document["results"]["models"].items():
        for kernel in model["kernels"][:_TOP_KERNELS]:
            body.append(
                (
                    TITLES[name],
                    f"{kernel['what']}",
                    f"{kernel['calls']}",
                    f"{kernel['ms']:.3f}",
                    f"{kernel['share_percent']:.1f} %",
                    f"{kernel['gflop_per_s']:.0f} ({kernel['peak_percent']:.0f} %)",
                    f"{kernel['gb_per_s']:.1f}",
                )
            )
    head = ("model", "kernel", "calls", "ms, all calls", "of the model", "GFLOP/s (of peak)", "GB/s")
    return _table(head, body)


def peak_line(document: Mapping[str, Any]) -> str:
    """What the percentages are of."""
    results = document["results"]
    return (
        f"{document['machine']['model']}, {results['threads']} threads, batch {results['batch']}, "
        f"{document['date']}, revision {results['revision']}: multiply-adds in registers reach "
        f"{results['peak_gflop_per_s']:.0f} GFLOP/s; others took at most "
        f"{max(model['others_percent'] for model in results['models'].values()):g} % of the machine. "
        "[All kernels](../benchmarks/results/profile_cpu.json)."
    )


def _all_cores(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    rows = document["results"]["rows"]
    most = max(row["threads"] for row in rows)
    return [row for row in rows if row["threads"] == most]


#: Name of a table -> its result file, and how it is made.
TABLES: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], str]]] = {
    "compared on all cores": ("cpu", lambda document: compare_table(_all_cores(document))),
    "fusion on all cores": ("cpu", lambda document: fusion_table(_all_cores(document))),
    "compared": ("cpu", lambda document: compare_table(document["results"]["rows"])),
    "fusion": ("cpu", lambda document: fusion_table(document["results"]["rows"])),
    "run": ("cpu", run_line),
    "picture": ("cpu", lambda document: "![The table as bars](../benchmarks/results/cpu.svg)"),
    "kernels": ("profile_cpu", kernel_table),
    "peak": ("profile_cpu", peak_line),
}


def fill(text: str, files: Mapping[str, Any]) -> str:
    """Put the tables of the result files between the comments of a page."""

    def table(match: re.Match[str]) -> str:
        file, make = TABLES[match[2]]
        made = make(files[file]) if file in files else NOT_MEASURED
        return f"{match[1]}{made}\n<!-- end -->"

    return re.sub(r"(<!-- cpu: ([a-z ]+) -->\n).*?<!-- end -->", table, text, flags=re.DOTALL)


def read_results(root: Path) -> dict[str, Any]:
    """The committed result files that are there, by name."""
    folder = root / "benchmarks" / "results"
    files = {name: folder / f"{name}.json" for name in ("cpu", "profile_cpu")}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def write_pages(root: Path = ROOT) -> None:
    """Write every table and the picture again."""
    files = read_results(root)
    for name in PAGES:
        page = root / name
        page.write_text(fill(page.read_text(encoding="utf-8"), files), encoding="utf-8")
    if "cpu" in files:
        picture = root / "benchmarks" / "results" / "cpu.svg"
        picture.write_text(draw(files["cpu"]["results"]["rows"]), encoding="utf-8")


_WHAT = ("model, batch, threads",)


def _what(row: Mapping[str, Any]) -> str:
    return f"{TITLES[row['model']]}, {row['batch']}, {row['threads']}"


def _ms(times: Mapping[str, float]) -> str:
    """Three digits."""
    value = times["median"]
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _ratio(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f} x ({ratio['quartile_1']:.2f} to {ratio['quartile_3']:.2f})"


def _span(values: Sequence[int]) -> str:
    return f"{min(values)} to {max(values)}" if min(values) < max(values) else f"{min(values)}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


if __name__ == "__main__":
    write_pages()
