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

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.cpu_plot import draw

__all__ = ["PAGES", "TABLES", "fill", "write_pages"]

TITLES = {"resnet50": "ResNet-50", "mobilenet_v2": "MobileNetV2", "efficientnet_b0": "EfficientNet-B0"}
FORMS = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO", "tvm_opt_level_3": "TVM, not tuned"}
PAGES = ("README.md", "docs/cpu.md")
_TOP_KERNELS = 6

Documents = Mapping[str, Mapping[str, Any]]


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
    load = machine["load_average_before"][0]
    return (
        f"{machine['model']} ({machine['cores']} cores, built for {machine['cpu']}), {document['date']}, "
        f"load before the run {load:g}; revision {document['results']['revision']}; "
        f"ONNX Runtime {versions['onnxruntime']}, OpenVINO {versions['openvino'].split('-')[0]}, "
        f"TVM {versions['tvm']}; rounds: {_span([row['rounds'] for row in document['results']['rows']])}."
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
        f"{results['peak_gflop_per_s']:.0f} GFLOP/s."
    )


def _all_cores(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    rows = document["results"]["rows"]
    most = max(row["threads"] for row in rows)
    return [row for row in rows if row["threads"] == most]


#: Name of a table -> how it is made from the result files.
TABLES: Mapping[str, Callable[[Documents], str]] = {
    "compared on all cores": lambda files: compare_table(_all_cores(files["cpu"])),
    "fusion on all cores": lambda files: fusion_table(_all_cores(files["cpu"])),
    "compared": lambda files: compare_table(files["cpu"]["results"]["rows"]),
    "fusion": lambda files: fusion_table(files["cpu"]["results"]["rows"]),
    "run": lambda files: run_line(files["cpu"]),
    "kernels": lambda files: kernel_table(files["profile_cpu"]),
    "peak": lambda files: peak_line(files["profile_cpu"]),
}


def fill(text: str, files: Documents) -> str:
    """Put the tables of the result files between the comments of a page."""

    def table(match: re.Match[str]) -> str:
        return f"{match[1]}{TABLES[match[2]](files)}\n<!-- end -->"

    return re.sub(r"(<!-- cpu: ([a-z ]+) -->\n).*?<!-- end -->", table, text, flags=re.DOTALL)


def read_results(root: Path) -> dict[str, Any]:
    """The committed result files, by name."""
    folder = root / "benchmarks" / "results"
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in ("cpu", "profile_cpu")}


def write_pages(root: Path = ROOT) -> None:
    """Write every table and the picture again."""
    files = read_results(root)
    for name in PAGES:
        page = root / name
        page.write_text(fill(page.read_text(encoding="utf-8"), files), encoding="utf-8")
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
