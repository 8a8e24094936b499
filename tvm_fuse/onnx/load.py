"""An ONNX file as the jobs want it: checked, and with every batch norm as one node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tvm_fuse.core.epsilon import EpsilonOrigin, ExpectedEpsilon
from tvm_fuse.onnx.parts import put_together, take_apart
from tvm_fuse.onnx.read import DEFAULT_DOMAINS, OnnxModel, read_onnx
from tvm_fuse.onnx.recompose import recompose_parts

__all__ = ["load_onnx"]


def load_onnx(path: Path) -> OnnxModel:
    """Load and check an ONNX file, and recover the batch norms that the exporter wrote as operators.

    Args:
        path: The file; external data is looked for beside it.

    Returns:
        The model; ``epsilon`` says which batch norms were recovered.

    Raises:
        UsageError: There is no such file.
        ModelError: As for ``read_onnx``; or the shapes of a model with such operators cannot be inferred.
    """
    model = read_onnx(path)
    if not _has_constant_root(model.proto.graph):
        return model
    parts, records = recompose_parts(take_apart(model.proto))
    if not records:
        return model
    recovered = {r.name: ExpectedEpsilon(r.epsilon, EpsilonOrigin.RECOVERED) for r in records}
    return replace(model, proto=put_together(parts), epsilon={**model.epsilon, **recovered})


def _has_constant_root(graph: Any) -> bool:
    """Whether a root of constants is taken, without which there is nothing to recover.

    Most models have none, and need not be taken apart.
    """
    constants = {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        if node.domain in DEFAULT_DOMAINS and constants.issuperset(filter(None, node.input)):
            if node.op_type in ("Sqrt", "Pow"):
                return True
            constants.update(node.output)
    return False
