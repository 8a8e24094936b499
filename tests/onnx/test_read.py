"""ONNX files: what is read, what is refused and by which name. Needs no TVM."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.onnx_models import Builder
from tvm_fuse.core.errors import ModelError
from tvm_fuse.onnx.read import read_onnx


@pytest.fixture
def save(tmp_path):
    """``save(model)`` writes a model and returns its path."""

    def write(model, name="model.onnx"):
        (tmp_path / name).write_bytes(model.SerializeToString())
        return tmp_path / name

    return write


def conv_norm(opset=17, **options):
    b = Builder(opset=opset, **options)
    x = b.input("x", (1, 3, 8, 8))
    return b.build([b.batch_norm(b.conv(x, 4, name="conv"), epsilon=1e-3, name="bn")])


@pytest.mark.parametrize("opset", range(7, 18))
def test_opsets_that_are_read(save, opset):
    model = read_onnx(save(conv_norm(opset)))
    assert model.opset == opset
    assert model.outputs == ("bn",)
    assert [(spec.name, spec.shape, spec.dtype) for spec in model.inputs] == [("x", (1, 3, 8, 8), "float32")]
    assert np.isclose(model.epsilon["bn"].value, 1e-3, rtol=1e-6)


@pytest.mark.parametrize("opset", [6, 18])
def test_opsets_that_are_refused(save, opset):
    model = conv_norm()
    model.opset_import[0].version = opset
    with pytest.raises(ModelError, match=f"opset {opset}"):
        read_onnx(save(model))
