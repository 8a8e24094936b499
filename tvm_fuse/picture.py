"""A fusion plan as a picture (SVG): a box for each kernel, lines for the tensors between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

from tvm_fuse.core.chain import Step, grow_chain
from tvm_fuse.core.graph import ANCHOR_KINDS, LEAF_KINDS, VIEW_KINDS, Graph, Kind, Node
from tvm_fuse.core.group import FusionGroup
from tvm_fuse.core.order import sort_nodes
from tvm_fuse.core.reason import Reason
from tvm_fuse.layered import Layout, lay_out
from tvm_fuse.relay.fuse import FusedModel

__all__ = ["Box", "draw_plan"]

_WIDTH, _GAP, _LINE, _MARGIN = 290, 38, 14, 24
#: Straight piece below a box, beside which the shape stands.
_STEM = 15
_HEADER = 74
#: Pixels of one column of a layout.
_COLUMN = 300
_MOST_LETTERS = 48

_CSS = """\
text { font: 11px system-ui, "DejaVu Sans", sans-serif; fill: #1f2933 }
.title { font-size: 17px; font-weight: 600 } .sub { fill: #52606d }
.name { font-weight: 600 } .small { font-size: 9.5px; fill: #52606d } .shape { font-size: 9px; fill: #7b8794 }
.why { font-size: 9.5px; fill: #b42318 } .fold { font-size: 9.5px; fill: #276749 }
.edge { fill: none; stroke: #9aa5b1; stroke-width: 1.3 } .box { stroke-width: 1.2 }
.alone { stroke-dasharray: 4 3 }"""

#: What a legend calls it, fill, border.
_STYLES = {
    "convolution": ("#dbeafe", "#3b82f6"),
    "matrix product": ("#dcfce7", "#22a35a"),
    "pooling": ("#ffedd5", "#ea8a2f"),
    "reduction, softmax": ("#f3e8ff", "#9a5bd6"),
    "elementwise": ("#fef9c3", "#c7a214"),
    "in no kernel of the plan": ("#ffffff", "#9aa5b1"),
    "input or output": ("#e4e7eb", "#7b8794"),
}


@dataclass(frozen=True)
class Box:
    """One box of the picture.

    Args:
        style: Key of ``_STYLES``.
        title: First line.
        lines: Other lines, each with its CSS class.
        tip: What a reader's mouse shows.
        nodes: Ids of the nodes in it; empty for an output.
        result: What leaves it, such as ``1x64x56x56``.
        again: Ids of nodes in it that other boxes compute, too.
    """

    style: str
    title: str
    lines: tuple[tuple[str, str], ...]
    tip: str
    nodes: tuple[int, ...]
    result: str = ""
    again: tuple[int, ...] = ()


def draw_plan(name: str, fused: FusedModel) -> str:
    """Draw the plan of a model.

    Args:
        name: Name of the model.
        fused: What ``fuse_model`` returned.

    Returns:
        An SVG document, the same text for the same plan.
    """
    graph, plan = fused.planned.graph, fused.planned.plan
    boxes = _boxes(fused)
    edges = _edges(graph, boxes)
    layout = lay_out(len(boxes), edges)
    tops, bottom = _tops(boxes, layout)
    width = max(int(layout.width * _COLUMN), 700) + 2 * _MARGIN
    offset = _MARGIN + (width - 2 * _MARGIN - layout.width * _COLUMN) / 2
    middles = [offset + column * _COLUMN for column in layout.columns]
    subtitle = f"{fused.planned.file.target}: {len(plan.groups)} kernels planned"
    body = [
        f'<text class="title" x="{_MARGIN}" y="26">{_text(name)}</text>',
        f'<text class="sub" x="{_MARGIN}" y="44">{_text(subtitle)}</text>',
        *_legend({box.style for box in boxes}),
    ]
    for (source, target), bends in zip(edges, layout.bends):
        rows = range(layout.layers[source] + 1, layout.layers[target])
        layer = layout.layers[source]
        below = tops[layer] + _height(boxes[source])
        points = [(middles[source], y) for y in (below, max(tops[layer + 1] - _GAP, below) + _STEM)]
        for row, bend in zip(rows, bends):
            x = offset + bend * _COLUMN
            points += [(x, tops[row]), (x, tops[row + 1] - _GAP)]
        points.append((middles[target], tops[layout.layers[target]]))
        body.append(_line(points))
    for index, box in enumerate(boxes):
        body += _draw(box, middles[index], tops[layout.layers[index]])
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom:.0f}" '
            f'viewBox="0 0 {width} {bottom:.0f}">',
            f"<title>{_text(name)}: fusion plan</title>",
            f"<style>\n{escape(_CSS)}\n</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" '
            'orient="auto"><path d="M0 0L8 4L0 8z" fill="#9aa5b1"/></marker></defs>',
            f'<rect width="{width}" height="{bottom:.0f}" fill="#fbfbfc"/>',
            *body,
            "</svg>\n",
        ]
    )


# --- boxes ---------------------------------------------------------------------------------------


def _boxes(fused: FusedModel) -> list[Box]:
    """All boxes, in a topological order."""
    graph, plan = fused.planned.graph, fused.planned.plan
    norms: dict[str, list[str]] = {}
    for fold in fused.records["FoldBatchNorm"].details:
        for layer in fold.layers:
            norms.setdefault(layer.name, []).append(fold.name)
    grouped = {node for group in plan.groups for node in group.nodes}
    grouped.difference_update(node for group in plan.alone for node in group.nodes)
    reasons = {d.node: d.reason for d in plan.decisions if d.node is not None and d.reason is not None}
    boxes = [_group_box(graph, group, norms) for group in plan.groups]
    boxes += [
        _node_box(node, reasons.get(node.id), norms)
        for node in graph.nodes
        if node.id not in grouped and node.kind not in _PASSED
    ]
    order = sort_nodes(graph, plan.groups)
    assert not isinstance(order, FusionGroup)  # a legal plan has one
    places = {node: place for place, node in enumerate(order)}
    boxes.sort(key=lambda box: places[box.nodes[-1]])
    outputs = dict.fromkeys(graph.outputs)
    return boxes + [
        Box("input or output", f"output {index}", (), f"output {index}: {graph.nodes[node].output}", ())
        for index, node in enumerate(outputs)
    ]


#: Nodes that lines pass through.
_PASSED = (LEAF_KINDS - {Kind.INPUT}) | VIEW_KINDS | {Kind.TUPLE, Kind.GET_ITEM}


def _group_box(graph: Graph, group: FusionGroup, norms: dict[str, list[str]]) -> Box:
    label, *more = _titles(graph, group)
    names = dict.fromkeys(norm for node in group.nodes for norm in _norms_of(graph.nodes[node], norms))
    members = [f"{graph.nodes[node].op}#{node} {graph.nodes[node].name}".strip() for node in group.nodes]
    end = [f"ends there: {group.end}"] if group.end else []
    return Box(
        style=_style(graph.nodes[group.center], group),
        title=f"{group.id}  {label}",
        lines=(
            *(("name", line) for line in more),
            ("small", group.anchor_name),
            *(("fold", f"{norm} folded in") for norm in names),
        ),
        tip="\n".join([f"{group.id} {group.name}", *members, *end]),
        nodes=group.owned,
        result=", ".join(_shape(graph.nodes[result]) for result in group.results),
        again=group.recomputed,
    )


def _norms_of(node: Node, norms: dict[str, list[str]]) -> Iterator[str]:
    """Batch norms folded into a layer, or into the layers that became one (``a + b``)."""
    for name in str(node).split(" + "):
        yield from norms.get(name, ())


def _titles(graph: Graph, group: FusionGroup) -> list[str]:
    """What a kernel computes, a line for each product or for all reductions in it."""
    if group.anchor is None:
        return [group.name.replace("_", " ")]
    center = graph.nodes[group.anchor]
    if center.kind is Kind.REDUCE:
        sums = [graph.nodes[node].label for node in (*group.absorbed, group.anchor)]
        others = len(group.operators) - len(sums)
        return [" + ".join([*sums, *([f"{others} elementwise"] if others else [])])]
    if not group.absorbed:
        return [" + ".join((*_before(graph, group.prologue), group.family, *_words(group.steps)))]
    (inner,) = group.absorbed
    first = grow_chain(graph, inner, frozenset(range(len(graph.nodes))).difference(group.nodes))
    before = [node for node in group.prologue if node not in first.nodes]
    return [
        " + ".join((*_before(graph, before), graph.nodes[inner].kind.value, *_words(first.steps))),
        " + ".join((f"then {group.family}", *_words(group.steps))),
    ]


def _before(graph: Graph, prologue: Iterable[int]) -> Iterator[str]:
    nodes = [graph.nodes[node] for node in prologue if graph.nodes[node].kind not in VIEW_KINDS]
    yield from (node.label.replace("_", " ") for node in nodes[:2])
    yield from ["..."] if len(nodes) > 2 else []


def _words(steps: Iterable[Step]) -> Iterator[str]:
    return (step.name.replace("_", " ") for step in steps)


def _node_box(node: Node, reason: Reason | None, norms: dict[str, list[str]]) -> Box:
    if node.kind is Kind.INPUT:
        return Box(
            "input or output", node.name or str(node), (), f"input {node.output}", (node.id,), _shape(node)
        )
    lines = [] if str(node) == f"{node.op}#{node.id}" else [("small", str(node))]
    lines += [("fold", f"{norm} folded in") for norm in _norms_of(node, norms)]
    if reason is not None and node.kind in ANCHOR_KINDS:
        lines += [
            ("why", reason.code.value),
            ("why", f"wanted {reason.wanted}"),
            ("why", f"got {reason.got}"),
        ]
    elif reason is not None:
        lines.append(("small", reason.code.value))
    tip = "\n".join(filter(None, (f"{node.op}#{node.id} {node.name}", str(reason or ""))))
    return Box("in no kernel of the plan", node.op, tuple(lines), tip, (node.id,), _shape(node))


def _style(node: Node, group: FusionGroup) -> str:
    if group.anchor is None:
        return "elementwise"
    if node.kind in ANCHOR_KINDS:
        return "convolution" if node.kind.value.startswith("conv") else "matrix product"
    return "pooling" if "pool" in node.op else "reduction, softmax"


def _shape(node: Node) -> str:
    """``1x64x56x56``, with the dtype where it is not float32; all of a tuple's."""
    shapes = []
    for info in node.outputs:
        sizes = "x".join(map(str, info.shape)) or "scalar"
        shapes.append(sizes if info.dtype == "float32" else f"{info.dtype} {sizes}")
    return ", ".join(shapes)


def _edges(graph: Graph, boxes: list[Box]) -> list[tuple[int, int]]:
    owner = {node: index for index, box in enumerate(boxes) for node in box.nodes}
    found: dict[tuple[int, int], None] = {}
    first_output = len(boxes) - len(set(graph.outputs))
    for index, box in enumerate(boxes):
        inside = (*box.nodes, *box.again)
        inputs = [source for node in inside for source in graph.nodes[node].inputs if source not in box.again]
        if index >= first_output:
            inputs = [list(dict.fromkeys(graph.outputs))[index - first_output]]
        for source in _sources(graph, inputs, owner):
            if owner[source] < index:
                found[owner[source], index] = None
    return list(found)


def _sources(graph: Graph, inputs: Iterable[int], owner: dict[int, int]) -> Iterator[int]:
    """The nodes in boxes that these values come from, through what only names or views them."""
    pending = list(inputs)
    while pending:
        node = pending.pop()
        if node in owner:
            yield node
        else:
            pending.extend(graph.nodes[node].inputs)


# --- drawing -------------------------------------------------------------------------------------


def _height(box: Box) -> int:
    return 12 + _LINE * (1 + len(box.lines))


def _tops(boxes: list[Box], layout: Layout) -> tuple[list[float], float]:
    """The upper edge of each layer, one more for the end, and the height of the picture."""
    heights = [0] * layout.height
    for box, layer in zip(boxes, layout.layers):
        heights[layer] = max(heights[layer], _height(box))
    tops = [float(_HEADER + _MARGIN)]
    for height in heights:
        tops.append(tops[-1] + height + _GAP)
    return tops, tops[-1] - _GAP + _MARGIN


def _draw(box: Box, middle: float, top: float) -> Iterator[str]:
    fill, border = _STYLES[box.style]
    left, height = middle - _WIDTH / 2, _height(box)
    alone = " alone" if box.style == "in no kernel of the plan" else ""
    radius = 14 if box.style == "input or output" else 5
    yield f"<g><title>{_text(box.tip)}</title>"
    yield (
        f'<rect class="box{alone}" x="{left:.1f}" y="{top:.1f}" width="{_WIDTH}" height="{height}" '
        f'rx="{radius}" fill="{fill}" stroke="{border}"/>'
    )
    for row, (kind, text) in enumerate((("name", box.title), *box.lines)):
        y = top + 17 + row * _LINE
        yield f'<text class="{kind}" x="{left + 9:.1f}" y="{y:.1f}">{_text(_shorten(text, kind))}</text>'
    if box.result:
        y = top + height + 12
        shape = _text(_shorten(box.result, "shape"))
        yield f'<text class="shape" x="{middle + 6:.1f}" y="{y:.1f}">{shape}</text>'
    yield "</g>"


def _shorten(text: str, kind: str) -> str:
    """The start of a title, the end of a name."""
    most = _MOST_LETTERS - 8 if kind == "name" else 26 if kind == "shape" else _MOST_LETTERS + 5
    if len(text) <= most:
        return text
    return f"...{text[3 - most :]}" if kind in ("small", "fold") else f"{text[: most - 3]}..."


def _line(points: list[tuple[float, float]]) -> str:
    """A line that leaves and enters each point vertically."""
    (x, y), *rest = points
    path = [f"M{x:.1f} {y:.1f}"]
    for to_x, to_y in rest:
        middle = (y + to_y) / 2
        same = abs(to_x - x) < 0.5
        path.append(
            f"L{to_x:.1f} {to_y:.1f}"
            if same
            else f"C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} {to_y:.1f}"
        )
        x, y = to_x, to_y
    return f'<path class="edge" d="{" ".join(path)}" marker-end="url(#tip)"/>'


def _legend(used: set[str]) -> Iterator[str]:
    x = _MARGIN
    for style, (fill, border) in _STYLES.items():
        if style not in used:
            continue
        dash = ' stroke-dasharray="4 3"' if style == "in no kernel of the plan" else ""
        yield (
            f'<rect x="{x}" y="56" width="16" height="11" rx="2" fill="{fill}" stroke="{border}"{dash}/>'
            f'<text class="small" x="{x + 21}" y="65">{_text(style)}</text>'
        )
        x += 40 + 6 * len(style)


def _text(text: str) -> str:
    """Escaped, without the control characters that XML cannot hold."""
    return escape("".join(c if c in "\n\t" or c >= " " else "?" for c in text))
