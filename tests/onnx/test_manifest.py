"""The manifest inside an ONNX file, and the files that a model is read from."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import convert_model_to_external_data, set_external_data

from tests.support.onnx_models import Builder
from tvm_fuse.core.errors import ModelError, UsageError
from tvm_fuse.core.manifest import METADATA_KEY, Manifest, Source, to_json
from tvm_fuse.onnx.manifest import external_files, find_manifest, load_manifest, with_manifest
from tvm_fuse.onnx.parts import put_together, take_apart

FIRST, SECOND = (Manifest(Source(name, "00"), {"onnx": "1"}, (), (), (), ("y",)) for name in ("a", "b"))


def small_model():
    b = Builder()
    model = b.build([b.conv(b.input("x", (1, 4, 6, 6)), 8, name="y")])
    model.metadata_props.add(key="author", value="somebody")
    return model


def entries(model):
    return [(entry.key, entry.value) for entry in model.metadata_props]


def test_a_manifest_stands_beside_the_metadata_of_the_model(tmp_path):
    parts = take_apart(small_model())
    model = put_together(with_manifest(parts, FIRST))
    assert entries(model) == [("author", "somebody"), (METADATA_KEY, to_json(FIRST))]
    assert entries(parts.structure) == [("author", "somebody")]
    onnx.checker.check_model(model)
    onnx.save(model, str(tmp_path / "m.onnx"))
    assert load_manifest(tmp_path / "m.onnx") == find_manifest(model, tmp_path) == FIRST


def test_an_older_manifest_is_replaced():
    parts = with_manifest(with_manifest(take_apart(small_model()), FIRST), SECOND)
    assert entries(parts.structure) == [("author", "somebody"), (METADATA_KEY, to_json(SECOND))]


def test_a_model_without_a_manifest(tmp_path):
    model = small_model()
    onnx.save(model, str(tmp_path / "m.onnx"))
    assert find_manifest(model, tmp_path) is None
    with pytest.raises(ModelError, match=r"m\.onnx has no manifest"):
        load_manifest(tmp_path / "m.onnx")


def test_a_damaged_manifest_is_named_with_its_file(tmp_path):
    model = small_model()
    model.metadata_props.add(key=METADATA_KEY, value="{}")
    onnx.save(model, str(tmp_path / "m.onnx"))
    with pytest.raises(ModelError, match=r"m\.onnx: not a manifest"):
        load_manifest(tmp_path / "m.onnx")


def test_no_file_and_no_model(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        load_manifest(tmp_path / "absent.onnx")
    (tmp_path / "text.onnx").write_bytes(b"hello")
    with pytest.raises(ModelError, match="is not an ONNX file"):
        load_manifest(tmp_path / "text.onnx")


def test_large_data_is_not_needed_for_the_manifest(tmp_path):
    model = put_together(with_manifest(take_apart(small_model()), FIRST))
    onnx.save(model, str(tmp_path / "m.onnx"), save_as_external_data=True, location="d", size_threshold=0)
    (tmp_path / "d").unlink()
    assert load_manifest(tmp_path / "m.onnx") == FIRST


# --- files beside a model --------------------------------------------------------------------------


def test_a_model_in_one_file_has_no_others(tmp_path):
    onnx.save(small_model(), str(tmp_path / "m.onnx"))
    assert external_files(tmp_path / "m.onnx") == []


def test_files_of_initializers_constants_and_branches(tmp_path):
    b = Builder(const_nodes=True)
    x, condition = b.input("x", (1, 2)), b.input("c", (), np.bool_)
    y = b.op("Add", x, b.const(np.ones((1, 2), "float32"), "in_node"))
    y = b.op("Add", y, b.const(np.ones((1, 2), "float32"), "in_initializer", as_node=False))
    tensor = numpy_helper.from_array(np.ones((1, 2), np.float32))
    inner = helper.make_graph(
        [helper.make_node("Constant", [], ["in_branch"], value=tensor)], "branch", [],
        [helper.make_tensor_value_info("in_branch", TensorProto.FLOAT, (1, 2))],
    )  # fmt: skip
    z = b.op("If", condition, then_branch=inner, else_branch=inner, name="z")
    model = b.build([y, z])
    nodes = {node.op_type: node for node in model.graph.node}
    tensors = {
        "one": model.graph.initializer[0],
        "two": nodes["Constant"].attribute[0].t,
        "three": nodes["If"].attribute[0].g.node[0].attribute[0].t,
        "two again": nodes["If"].attribute[1].g.node[0].attribute[0].t,
    }
    for name, each in tensors.items():
        set_external_data(each, name.split()[0])
    onnx.save(model, str(tmp_path / "m.onnx"))
    assert external_files(tmp_path / "m.onnx") == [tmp_path / name for name in ("one", "two", "three")]
    assert all((tmp_path / name).is_file() for name in ("one", "two", "three"))


def test_one_file_for_all_is_listed_once(tmp_path):
    model = small_model()
    convert_model_to_external_data(model, location="all", size_threshold=0)
    onnx.save(model, str(tmp_path / "m.onnx"))
    assert external_files(tmp_path / "m.onnx") == [tmp_path / "all"]


@pytest.mark.parametrize("data", [b"hello", b"", None], ids=["text", "empty", "absent"])
def test_what_is_no_model_has_no_files(tmp_path, data):
    if data is not None:
        (tmp_path / "m.onnx").write_bytes(data)
    assert external_files(tmp_path / "m.onnx") == []
