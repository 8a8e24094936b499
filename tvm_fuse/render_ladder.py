"""A ladder as a table with bars, and as a picture (SVG)."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from tvm_fuse.ladder import Ladder, Measured

__all__ = ["HEADER", "draw_ladder", "render_ladder", "render_rung"]

_BAR = 30
_NAME = 22

HEADER = f"{'rung':<{_NAME}} {'kernels':>7} {'ms':>9} {'x before':>9} {'quartiles':>13}  {'max diff':>9}  "


def render_rung(rung: Measured) -> str:
    """One line of the table."""
    ratio, spread = "", ""
    if rung.speedup:
        ratio = f"{rung.speedup['median']:.3f}"
        spread = f"{rung.speedup['quartile_1']:.3f}-{rung.speedup['quartile_3']:.3f}"
    verdict = (
        ("slower" if rung.is_slower else "") if rung.passed else f"WRONG ({rung.needed:.3g} x tolerance)"
    )
    row = f"{rung.name:<{_NAME}} {rung.kernels:>7} {rung.median_s * 1e3:>9.3f} {ratio:>9} {spread:>13}"
    return f"{row}  {rung.max_abs:>9.1e}  {verdict}".rstrip()


def render_ladder(ladder: Ladder) -> str:
    """The whole ladder: title, table, bars, and what it shows."""
    lines = [f"{ladder.model} for {ladder.target}, by {ladder.by}", "", HEADER.rstrip()]
    lines += map(render_rung, ladder.rungs)
    return "\n".join([*lines, "", *_bars(ladder), "", *_findings(ladder)])


def _bars(ladder: Ladder) -> Iterator[str]:
    longest = max((rung.median_s for rung in ladder.rungs), default=1.0)
    for rung in ladder.rungs:
        length = max(1, round(_BAR * rung.median_s / longest))
        mark = "#" if rung.passed else "x"
        yield f"{rung.name:<{_NAME}} {mark * length} {rung.median_s * 1e3:.3f} ms"


def _findings(ladder: Ladder) -> Iterator[str]:
    if not ladder.is_complete:
        yield "interrupted: the rungs above are those that were finished"
    if ladder.wrong:
        group = f"; the first group at fault: {ladder.culprit}" if ladder.culprit else ""
        yield f"WRONG from rung {ladder.wrong!r} on{group}"
    for name in ladder.slower:
        yield f"slower than the rung before: {name!r}"
    if ladder.best:
        yield f"the fastest rung that is right: {ladder.best!r}"


# --- picture -------------------------------------------------------------------------------------

_LEFT, _WIDTH, _ROW, _TOP = 190, 420, 26, 64


def draw_ladder(ladder: Ladder) -> str:
    """The latencies as bars, with what each is in multiples of the one before; an SVG document."""
    height = _TOP + _ROW * len(ladder.rungs) + 20
    longest = max((rung.median_s for rung in ladder.rungs), default=1.0)
    body = []
    for index, rung in enumerate(ladder.rungs):
        y = _TOP + _ROW * index
        length = _WIDTH * rung.median_s / longest
        colour = "#c2410c" if not rung.passed else "#d6a312" if rung.is_slower else "#3b82f6"
        ratio = f"  {rung.speedup['median']:.2f} x" if rung.speedup else ""
        text = f"{rung.median_s * 1e3:.3f} ms{ratio}" + ("" if rung.passed else "  WRONG")
        body += [
            f'<text x="{_LEFT - 10}" y="{y + 14}" text-anchor="end">{escape(rung.name)}</text>',
            f'<rect x="{_LEFT}" y="{y}" width="{length:.1f}" height="{_ROW - 8}" rx="3" fill="{colour}">'
            f"<title>{escape(render_rung(rung))}</title></rect>",
            f'<text x="{_LEFT + length + 8:.1f}" y="{y + 14}">{text}</text>',
        ]
    width = _LEFT + _WIDTH + 180
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}">',
            '<style>text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: #1f2933 }</style>',
            f'<rect width="{width}" height="{height}" fill="#fbfbfc"/>',
            f'<text x="16" y="26" style="font-size:16px;font-weight:600">{escape(ladder.model)}</text>',
            f'<text x="16" y="45" style="fill:#52606d">{escape(ladder.target)}, by {ladder.by}: latency of '
            "one inference</text>",
            *body,
            "</svg>\n",
        ]
    )
