"""Run ONNX models: with ONNX Runtime where it is installed, else with onnx's own reference evaluator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Callable

import numpy as np
import onnx

from tvm_fuse.core.errors import ToolFailed
from tvm_fuse.core.graph import Array

__all__ = ["run_models"]


def run_models(paths: Sequence[Path], inputs: Mapping[str, Array]) -> tuple[str, list[dict[str, Array]]]:
    """Run model files once each, on the CPU, with nothing fused or rewritten.

    Args:
        paths: The files; the first engine that can run all of them does.
        inputs: Input name -> array.

    Returns:
        The name of the engine, and for each model output name -> array, in the order of the model.

    Raises:
        ToolFailed: No engine can run the models.
    """
    problems = []
    for name, run in _ENGINES.items():
        try:
            return name, [run(path, inputs) for path in paths]
        except ImportError:
            problems.append(f"{name} is not installed")
        except Exception as error:  # each engine has its own
            lines = str(error).strip().splitlines() or [type(error).__name__]
            problems.append(f"{name}: {lines[0]}")
    raise ToolFailed(f"{' and '.join(map(str, paths))} cannot be run: {'; '.join(problems)}")


def _run_runtime(path: Path, inputs: Mapping[str, Array]) -> dict[str, Array]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return dict(zip((output.name for output in session.get_outputs()), session.run(None, dict(inputs))))


def _run_reference(path: Path, inputs: Mapping[str, Array]) -> dict[str, Array]:
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun

    class BatchNormalization(OpRun):  # type: ignore[misc]
        """The inference form; up to opset 13, onnx's own mixes in the statistics of the data."""

        op_domain = ""

        def _run(self, x: Array, *vectors: Array, epsilon: float | None = None, **_: Any) -> tuple[Array]:
            shape = (-1, *(1,) * (x.ndim - 2))
            gamma, beta, mean, variance = (vector.reshape(shape) for vector in vectors)
            scale = gamma / np.sqrt(variance + (1e-5 if epsilon is None else epsilon))
            return (((x - mean) * scale + beta).astype(x.dtype),)

    own: list[Any] = [BatchNormalization]
    evaluator = ReferenceEvaluator(onnx.load(str(path)), new_ops=own)
    return dict(zip(evaluator.output_names, list(evaluator.run(None, dict(inputs)))))


#: Name -> how to run one model, the faster one first.
_ENGINES: dict[str, Callable[[Path, Mapping[str, Array]], dict[str, Array]]] = {
    "ONNX Runtime": _run_runtime,
    "onnx's reference evaluator": _run_reference,
}
