"""Run an ONNX model: with ONNX Runtime where it is installed, else with onnx's own reference evaluator."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx

from tvm_fuse.core.errors import ToolFailed
from tvm_fuse.core.graph import Array

__all__ = ["engine_name", "run_onnx"]


def engine_name() -> str:
    """What ``run_onnx`` uses."""
    return "ONNX Runtime" if _has_runtime() else "onnx's reference evaluator"


def _has_runtime() -> bool:
    return importlib.util.find_spec("onnxruntime") is not None


def run_onnx(path: Path, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Run a model file once, on the CPU, with nothing fused or rewritten.

    Args:
        path: The file.
        inputs: Input name -> array.

    Returns:
        Output name -> array, in the order of the model.

    Raises:
        ToolFailed: The engine cannot run the model.
    """
    try:
        names, values = _run_runtime(path, inputs) if _has_runtime() else _run_reference(path, inputs)
    except Exception as error:  # each engine has its own
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ToolFailed(f"{engine_name()} cannot run {path}: {lines[0]}") from error
    return dict(zip(names, values))


def _run_runtime(path: Path, inputs: Mapping[str, Array]) -> tuple[list[str], list[Any]]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return [output.name for output in session.get_outputs()], session.run(None, dict(inputs))


def _run_reference(path: Path, inputs: Mapping[str, Array]) -> tuple[list[str], list[Any]]:
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(onnx.load(str(path)))
    return list(evaluator.output_names), list(evaluator.run(None, dict(inputs)))
