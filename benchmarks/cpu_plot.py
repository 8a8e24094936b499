"""The rows of ``results/cpu.json`` as bars (SVG): a panel for each batch and number of threads.

A bar's length is a form's time as a multiple of tvm-fuse's, the whisker its quartiles, the number at its
end milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

__all__ = ["draw"]

_TITLES = {"resnet50": "ResNet-50", "mobilenet_v2": "MobileNetV2", "efficientnet_b0": "EfficientNet-B0"}
#: Form -> name and colour, from top to bottom.
_FORMS = {
    "tvm_fuse": ("tvm-fuse", "#1d6fd8"),
    "onnxruntime": ("ONNX Runtime", "#8fa3b5"),
    "openvino": ("OpenVINO", "#b3a58a"),
    "tvm_opt_level_3": ("TVM with -mcpu", "#d9c7d0"),
    "tvm_plain_llvm": ("TVM, plain llvm", "#ece4e8"),
}
_PANEL, _LEFT, _BAR, _GROUP, _TOP, _MARGIN = 460, 112, 13, 16, 64, 20
#: A longer bar is cut; its number says the rest.
_MOST = 4.0

_CSS = """\
text { font: 11px system-ui, "DejaVu Sans", sans-serif; fill: #1f2933 }
.title { font-size: 15px; font-weight: 600 } .panel { font-weight: 600 }
.ms { font-size: 9.5px; fill: #52606d } .one { stroke: #1d6fd8; stroke-dasharray: 3 3 }
.whisker { stroke: #1f2933 }"""


def draw(rows: Sequence[Mapping[str, Any]]) -> str:
    """Draw the bars.

    Args:
        rows: ``results.rows`` of ``cpu.json``.

    Returns:
        An SVG document.
    """
    panels: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        panels.setdefault((row["batch"], row["threads"]), []).append(row)
    columns = len({threads for _, threads in panels})
    height = max(map(len, panels.values())) * (len(_FORMS) * _BAR + _GROUP) + 34
    scale = (_PANEL - _LEFT - 70) / min(_MOST, max(_length(row, form) for row in rows for form in _FORMS))
    body: list[str] = []
    for index, (key, members) in enumerate(panels.items()):
        left, top = _MARGIN + index % columns * _PANEL, _TOP + index // columns * height
        body += _panel(left, top, key, members, scale)
    width = 2 * _MARGIN + columns * _PANEL
    bottom = _TOP + -(-len(panels) // columns) * height
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom}" '
            f'viewBox="0 0 {width} {bottom}">',
            "<title>Latency on a CPU</title>",
            f"<style>\n{escape(_CSS)}\n</style>",
            f'<rect width="{width}" height="{bottom}" fill="#fbfbfc"/>',
            f'<text class="title" x="{_MARGIN}" y="24">Time of one inference, float32: '
            "multiples of tvm-fuse's; less is better</text>",
            *_legend(),
            *body,
            "</svg>\n",
        ]
    )


def _legend() -> Iterator[str]:
    for index, (name, colour) in enumerate(_FORMS.values()):
        x = _MARGIN + index * 130
        yield f'<rect x="{x}" y="35" width="16" height="10" fill="{colour}"/>'
        yield f'<text x="{x + 21}" y="44">{escape(name)}</text>'


def _panel(
    left: int, top: int, key: tuple[int, int], rows: Sequence[Mapping[str, Any]], scale: float
) -> Iterator[str]:
    batch, threads = key
    start, y = left + _LEFT, top + 22
    yield f'<text class="panel" x="{left}" y="{top + 12}">batch {batch}, {_threads(threads)}</text>'
    for row in rows:
        middle = y + len(_FORMS) * _BAR / 2 + 4
        yield f'<text x="{left}" y="{middle:.1f}">{escape(_TITLES[row["model"]])}</text>'
        for form, (_, colour) in _FORMS.items():
            yield from _bar(row, form, colour, start, y, scale)
            y += _BAR
        y += _GROUP
    one = start + scale
    yield f'<line class="one" x1="{one:.1f}" x2="{one:.1f}" y1="{top + 18}" y2="{y - _GROUP + 4}"/>'


def _bar(row: Mapping[str, Any], form: str, colour: str, start: int, y: int, scale: float) -> Iterator[str]:
    times, ours = row["ms"][form], row["ms"]["tvm_fuse"]["median"]
    low, high = (min(times[key] / ours, _MOST) for key in ("quartile_1", "quartile_3"))
    length = min(_length(row, form), _MOST)
    middle = y + (_BAR - 2) / 2
    yield (
        f'<rect x="{start}" y="{y}" width="{scale * length:.1f}" height="{_BAR - 2}" fill="{colour}"/>'
        f'<line class="whisker" x1="{start + scale * low:.1f}" x2="{start + scale * high:.1f}" '
        f'y1="{middle:.1f}" y2="{middle:.1f}"/>'
    )
    end = start + scale * max(length, high) + 5
    yield f'<text class="ms" x="{end:.1f}" y="{y + _BAR - 4}">{times["median"]:.3g} ms</text>'


def _length(row: Mapping[str, Any], form: str) -> float:
    return float(row["ms"][form]["median"] / row["ms"]["tvm_fuse"]["median"])


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"
