"""Models into Relay: ONNX files, Relay text or JSON with parameters, or a module in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tvm_fuse.core.epsilon import ExpectedEpsilon
from tvm_fuse.core.errors import ModelError, UsageError
from tvm_fuse.onnx.read import TensorSpec, fix_shapes, read_onnx
from tvm_fuse.relay.base import relay, tvm

__all__ = ["RelayModel", "load_model", "model_from_module"]


@dataclass(frozen=True)
class RelayModel:
    """A Relay module with all parameters bound, ready for the passes.

    Args:
        name: For people and file names.
        module: The module, type-inferred; ``main`` takes exactly ``inputs``.
        inputs: What a caller supplies.
        outputs: Names of the outputs, in order.
        epsilon: Batch norm name -> the source's epsilon (empty for a Relay source).
    """

    name: str
    module: Any = field(compare=False, repr=False)
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[str, ...]
    epsilon: Mapping[str, ExpectedEpsilon]


def load_model(
    path: Path, *, shapes: Mapping[str, tuple[int, ...]], params: Path | None = None
) -> RelayModel:
    """Read a model file.

    Args:
        path: ``.onnx``, or a Relay module as text (``.relay``, ``.txt``) or JSON (``.json``).
        shapes: Shapes for an ONNX model's dynamic inputs.
        params: Parameters of a Relay module, as ``tvm.runtime.save_param_dict`` writes them.

    Returns:
        The model.

    Raises:
        UsageError: A file is missing, or an option does not fit it.
        ModelError: The model cannot be read.
    """
    if path.suffix.lower() in (".relay", ".txt", ".json"):
        if shapes:
            raise UsageError("--shape is for ONNX models; a Relay module has its shapes")
        return _load_relay(path, params)
    if params is not None:
        raise UsageError("--params is for Relay modules; an ONNX model has its parameters inside")
    return _import_onnx(path, shapes)


def _import_onnx(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> RelayModel:
    source = read_onnx(path)
    inputs = fix_shapes(source.inputs, shapes)
    try:
        module, params = relay.frontend.from_onnx(
            source.proto,
            shape={spec.name: spec.shape for spec in inputs},
            dtype={spec.name: spec.dtype for spec in inputs},
            freeze_params=True,
        )
    except tvm.error.OpNotImplemented as error:
        raise ModelError(
            f"{path}: {_last_line(error)}", "TVM's ONNX importer does not know the operator"
        ) from error
    except Exception as error:  # the importer raises whatever its converters run into
        raise ModelError(f"{path}: TVM cannot import the model: {_last_line(error)}") from error
    return _finish(path.stem, module, params, source.outputs, source.epsilon)


def _load_relay(path: Path, params: Path | None) -> RelayModel:
    for file in (path, *([params] if params else [])):
        if not file.is_file():
            raise UsageError(f"no such file: {file}")
    try:
        text = path.read_text(encoding="utf-8")
        module = tvm.ir.load_json(text) if path.suffix.lower() == ".json" else tvm.relay.fromtext(text)
        values = tvm.runtime.load_param_dict(params.read_bytes()) if params else {}
    except Exception as error:  # parser diagnostics come as several types
        raise ModelError(f"{path}: not a Relay module: {_last_line(error)}") from error
    return model_from_module(module, values, name=path.stem)


def model_from_module(
    module: Any, params: Mapping[str, Any] | None = None, *, name: str = "model"
) -> RelayModel:
    """A model from a Relay module in memory.

    Args:
        module: An ``IRModule`` with a ``main`` function (or a ``relay.Function``).
        params: Parameter name -> NDArray or NumPy array, bound as constants.
        name: For people and file names.

    Returns:
        The model; outputs are called ``output0``, ``output1``, ...

    Raises:
        ModelError: There is no ``main``, or its types cannot be inferred or are dynamic.
        UsageError: A parameter name is not an input of ``main``.
    """
    if isinstance(module, relay.Function):
        module = tvm.IRModule.from_expr(module)
    return _finish(name, module, dict(params or {}), None, {})


def _finish(
    name: str,
    module: Any,
    params: Mapping[str, Any],
    outputs: tuple[str, ...] | None,
    epsilon: Mapping[str, ExpectedEpsilon],
) -> RelayModel:
    if "main" not in [symbol.name_hint for symbol in module.get_global_vars()]:
        raise ModelError(f"{name}: the module has no function named main")
    known = {str(param.name_hint) for param in module["main"].params}
    for param in params:
        if param not in known:
            raise UsageError(
                f"parameter {param!r} is not an input of main", f"main has: {', '.join(sorted(known))}"
            )
    if params:
        module = tvm.IRModule(module.functions, module.type_definitions)
        module["main"] = relay.build_module.bind_params_by_name(module["main"], dict(params))
    try:
        module = relay.transform.InferType()(module)
        if _is_dynamic(module["main"].ret_type):
            module = relay.transform.DynamicToStatic()(module)
    except tvm.TVMError as error:
        raise ModelError(f"{name}: types cannot be inferred: {_last_line(error)}") from error
    main = module["main"]
    inputs = tuple(_read_param(param) for param in main.params)
    dynamic = [str(spec) for spec in inputs if not spec.is_static]
    if dynamic or _is_dynamic(main.ret_type):
        raise ModelError(f"{name}: shapes are not static: {'; '.join(dynamic) or 'the output'}")
    count = len(main.ret_type.fields) if isinstance(main.ret_type, relay.TupleType) else 1
    return RelayModel(name, module, inputs, outputs or tuple(f"output{i}" for i in range(count)), epsilon)


def _read_param(param: Any) -> TensorSpec:
    shape = tuple(int(dim) if isinstance(dim, tvm.tir.IntImm) else "?" for dim in param.checked_type.shape)
    return TensorSpec(str(param.name_hint), shape, str(param.checked_type.dtype))


def _is_dynamic(checked_type: Any) -> bool:
    if isinstance(checked_type, relay.TupleType):
        return any(_is_dynamic(field) for field in checked_type.fields)
    return not all(isinstance(dim, tvm.tir.IntImm) for dim in checked_type.shape)


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
