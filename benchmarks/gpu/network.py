"""A network without ONNX: its operators and how its weights are drawn, as JSON, and what to expect.

Written where ONNX and a runtime for it are; read where PyTorch is, which may have neither.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tvm_fuse.cuda.bundle import Draw, Tensor
from tvm_fuse.cuda.bundle_files import draw_parameters, measure_draw

if TYPE_CHECKING:
    import onnx

__all__ = ["draw_weights", "load_network", "save_network"]

_SEED = 0


def save_network(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray], folder: Path) -> None:
    """Write the description of a network, and its outputs for drawn weights.

    Args:
        model: An ONNX model; scalars stay as they are, other weights are drawn like the model's.
        inputs: One input, by name.
        folder: Made if need be.
    """
    import onnx
    from onnx import numpy_helper

    from tvm_fuse.onnx.run import run_models

    nodes, constants = [], {}
    for node in model.graph.node:
        if node.op_type == "Constant":
            constants[node.output[0]] = float(numpy_helper.to_array(node.attribute[0].t))
            continue
        attributes = {each.name: _plain(onnx.helper.get_attribute_value(each)) for each in node.attribute}
        nodes.append(
            {
                "op": node.op_type,
                "inputs": list(node.input),
                "outputs": list(node.output),
                "attributes": attributes,
            }
        )
    weights = [(each.name, numpy_helper.to_array(each)) for each in model.graph.initializer]
    description = {
        "inputs": list(inputs),
        "outputs": [each.name for each in model.graph.output],
        "nodes": nodes,
        "constants": constants,
        "weights": [
            {"name": name, "shape": list(array.shape), "draw": asdict(measure_draw(array))}
            for name, array in weights
        ],
    }
    drawn = onnx.ModelProto()
    drawn.CopyFrom(model)
    values = draw_weights(description)
    for each in drawn.graph.initializer:
        each.CopyFrom(numpy_helper.from_array(values[each.name], each.name))
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "drawn.onnx"
        onnx.save(drawn, file)
        _, (outputs,) = run_models([file], inputs)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "network.json").write_text(json.dumps(description) + "\n", encoding="utf-8")
    arrays = {f"input{index}": array for index, array in enumerate(inputs.values())}
    np.savez(
        folder / "golden.npz", **arrays, **{f"output{i}": array for i, array in enumerate(outputs.values())}
    )


def _plain(value: Any) -> Any:
    """An attribute of an ONNX operator as JSON knows it."""
    if isinstance(value, bytes):
        return value.decode()
    return value if isinstance(value, (int, float)) else list(value)


def draw_weights(description: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The weights of a network by name, the same with every version of NumPy."""
    rows = description["weights"]
    specs = [Tensor(tuple(row["shape"]), "float32", 0) for row in rows]
    draws = [Draw(**row["draw"]) for row in rows]
    return dict(zip((row["name"] for row in rows), draw_parameters(specs, draws, _SEED)))


def load_network(folder: Path) -> tuple[dict[str, Any], list[np.ndarray], list[np.ndarray]]:
    """The description of a network, its golden inputs and its golden outputs."""
    description = json.loads((folder / "network.json").read_text(encoding="utf-8"))
    with np.load(folder / "golden.npz", allow_pickle=False) as stored:
        inputs = [stored[f"input{index}"] for index in range(len(description["inputs"]))]
        outputs = [stored[f"output{index}"] for index in range(len(description["outputs"]))]
    return description, inputs, outputs
