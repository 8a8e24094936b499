"""The picture of a plan: well-formed, the same bytes each time, and all that it should show."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np
import pytest

from tests.support.onnx_models import Builder
from tvm_fuse.core.plan_options import PlanOptions
from tvm_fuse.relay.fuse import FuseOptions, fuse_model
from tvm_fuse.relay.load import load_model
from tvm_fuse.relay.target import resolve_target

pytestmark = pytest.mark.relay

SVG = "{http://www.w3.org/2000/svg}"


def draw(tmp_path):
    from tvm_fuse.picture import draw_plan

    b = Builder(dtype=np.float32)
    x = b.input("x", (1, 3, 6, 6))
    first = b.relu(b.batch_norm(b.conv(x, 4, name='<a> & "b"'), name="norm<1>"))
    lonely = b.conv(first, 4, pad=1, name="lonely")
    path = tmp_path / "net.onnx"
    path.write_bytes(b.build([b.op("Add", first, lonely, name="sum"), lonely]).SerializeToString())
    model = load_model(path, shapes={}, params=None)
    target = resolve_target("cuda -arch=sm_80")
    return draw_plan("a<b", fuse_model(model, target, FuseOptions(is_measured=False)))


@pytest.fixture
def picture(tmp_path):
    return draw(tmp_path)


def test_the_same_model_gives_the_same_bytes(picture, tmp_path):
    assert draw(tmp_path) == picture


def test_it_is_well_formed_and_shows_everything(picture):
    root = ET.fromstring(picture)
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert "a<b" in texts
    assert '<a> & "b"' in texts
    assert "norm<1> folded in" in texts
    assert "chain0  conv2d + bias + relu" in texts
    assert {"result-returned", "wanted a value only the chain reads", "got a model output"} <= set(texts)
    assert {"x", "output 0", "output 1"} <= set(texts)
    assert texts.count("1x4x4x4") == 3  # of chain0, the other convolution and the sum
    tips = [element.text for element in root.iter(f"{SVG}title")]
    assert any("ends there: result-shared" in tip for tip in tips)
    boxes = [element for element in root.iter(f"{SVG}rect") if element.get("class", "").startswith("box")]
    # x, chain0, lonely, sum, two outputs
    assert len(boxes) == 6
    edges = [element for element in root.iter(f"{SVG}path") if element.get("class") == "edge"]
    assert len(edges) == 6


def test_boxes_are_inside_and_apart(picture):
    root = ET.fromstring(picture)
    width, height = float(root.get("width")), float(root.get("height"))
    places = [
        tuple(float(element.get(name)) for name in ("x", "y", "width", "height"))
        for element in root.iter(f"{SVG}rect")
        if element.get("class", "").startswith("box")
    ]
    for index, (x, y, w, h) in enumerate(places):
        assert x >= 0
        assert y >= 0
        assert x + w <= width
        assert y + h <= height
        for other_x, other_y, other_w, other_h in places[:index]:
            assert x + w <= other_x or other_x + other_w <= x or y + h <= other_y or other_y + other_h <= y


def gate(b):
    x = b.input("x", (1, 24, 1, 1))
    squeezed = b.relu(b.conv(x, 6, kernel=1))
    return b.op("Sigmoid", b.conv(squeezed, 24, kernel=1))


def standardized(b):
    x = b.input("x", (4, 32))
    centered = b.op("Sub", x, b.op("ReduceMean", x, axes=[-1], keepdims=1))
    spread = b.op("ReduceMean", b.op("Mul", centered, centered), axes=[-1], keepdims=1)
    return b.op("Div", centered, b.op("Sqrt", spread))


@pytest.mark.parametrize(
    ("make", "titles"),
    [
        (gate, ["chain0  conv2d + relu", "then conv2d + sigmoid"]),
        (standardized, ["chain0  mean + mean + 4 elementwise"]),
    ],
    ids=["gate", "normalization"],
)
def test_a_kernel_with_several_heavy_operators_names_each(make, titles, tmp_path):
    from tvm_fuse.picture import draw_plan

    b = Builder(dtype=np.float32)
    path = tmp_path / "net.onnx"
    path.write_bytes(b.build([make(b)]).SerializeToString())
    model = load_model(path, shapes={}, params=None)
    fused = fuse_model(model, resolve_target("cuda -arch=sm_80"), FuseOptions(is_measured=False))
    root = ET.fromstring(draw_plan("net", fused))
    names = [element.text for element in root.iter(f"{SVG}text") if element.get("class") == "name"]
    assert [name for name in names if name.startswith(("chain", "then"))] == titles


@pytest.mark.parametrize(("skip", "boxes", "lines"), [((), 2, 2), (("chain1",), 1, 3)], ids=["both", "one"])
def test_what_two_kernels_compute_again_has_a_box_only_where_it_is_a_kernel(skip, boxes, lines, tmp_path):
    from tvm_fuse.picture import _boxes, _edges

    b = Builder(dtype=np.float32)
    value = b.relu(b.input("x", (1, 8, 4, 4)))
    path = tmp_path / "net.onnx"
    path.write_bytes(b.build([b.conv(value, 8), b.conv(value, 16, kernel=1)]).SerializeToString())
    model = load_model(path, shapes={}, params=None)
    options = FuseOptions(is_measured=False, plan=PlanOptions(skip=skip))
    fused = fuse_model(model, resolve_target("cuda -arch=sm_80"), options)
    made, graph = _boxes(fused), fused.planned.graph
    assert sum(bool(box.again) for box in made) == boxes
    assert sum(graph.nodes[node].op == "nn.relu" for box in made for node in box.nodes) == 2 - boxes
    before_outputs = [edge for edge in _edges(graph, made) if made[edge[1]].nodes]
    assert len(before_outputs) == lines
