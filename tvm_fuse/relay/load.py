"""Models into Relay: ONNX files, Relay text or JSON with parameters, or a module in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tvm_fuse.core.epsilon import ExpectedEpsilon
from tvm_fuse.core.errors import ModelError, UsageError
from tvm_fuse.core.graph import TensorSpec
from tvm_fuse.core.manifest import FILE_NAME, read_folder
from tvm_fuse.onnx.load import load_onnx
from tvm_fuse.onnx.manifest import external_files
from tvm_fuse.onnx.mixed import with_casts
from tvm_fuse.onnx.read import fix_shapes
from tvm_fuse.relay.base import relay, tvm
from tvm_fuse.relay.save import FILES

__all__ = ["RelayModel", "load_model", "model_files", "model_from_module"]

_NO_BRANCHES = "export the model without branches and loops: they are not supported yet"


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
        path: ``.onnx``, a Relay module as text (``.relay``, ``.txt``) or JSON (``.json``), or a folder
            that ``tvm-fuse fold`` wrote.
        shapes: Shapes for an ONNX model's dynamic inputs.
        params: Parameters of a Relay module, as ``tvm.runtime.save_param_dict`` writes them.

    Returns:
        The model.

    Raises:
        UsageError: A file is missing, or an option does not fit it.
        ModelError: The model cannot be read.
    """
    if path.is_dir():
        return _load_folder(path, shapes, params)
    if path.suffix.lower() in (".relay", ".txt", ".json"):
        if shapes:
            raise UsageError("--shape is for ONNX models; a Relay module has its shapes")
        return _load_relay(path, params)
    if params is not None:
        raise UsageError("--params is for Relay modules; an ONNX model has its parameters inside")
    return _import_onnx(path, shapes)


def model_files(path: Path, params: Path | None = None) -> list[Path]:
    """All files that ``load_model`` reads for a model, in order."""
    if path.is_dir():
        return [path / name for name in FILES[:2]]
    if path.suffix.lower() == ".onnx":
        return [path, *external_files(path)]
    return [path, *([params] if params is not None else [])]


def _import_onnx(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> RelayModel:
    source = with_casts(load_onnx(path))
    inputs = fix_shapes(source.inputs, shapes)
    with _complaints() as complaints:
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
            _refuse_onnx_branches(path, source.proto.graph)
            detail = _detail(error, complaints)
            raise ModelError(f"{path}: TVM cannot import the model: {detail}") from error
    return _finish(path.stem, module, params, source.outputs, source.epsilon)


def _refuse_onnx_branches(path: Path, graph: Any) -> None:
    """Name the control flow that the importer stumbled over, which its own message does not."""
    for node in graph.node:
        if node.op_type in ("If", "Loop", "Scan"):
            raise ModelError(f"{path}: {node.op_type} {node.name!r} is control flow", _NO_BRANCHES)


def _load_folder(path: Path, shapes: Mapping[str, tuple[int, ...]], params: Path | None) -> RelayModel:
    if shapes or params is not None:
        raise UsageError(f"{path}: --shape and --params are not for a folder, which has both inside")
    name = path.resolve().name
    loaded = _load_relay(path / FILES[0], path / FILES[1])
    if not (path / FILE_NAME).is_file():
        return replace(loaded, name=name)
    outputs = read_folder(path).outputs
    if len(outputs) != len(loaded.outputs):
        raise ModelError(f"{path}: its manifest names {len(outputs)} outputs; it has {len(loaded.outputs)}")
    return replace(loaded, name=name, outputs=outputs)


def _load_relay(path: Path, params: Path | None) -> RelayModel:
    for file in (path, *([params] if params else [])):
        if not file.is_file():
            raise UsageError(f"no such file: {file}")
    with _complaints() as complaints:
        try:
            text = path.read_text(encoding="utf-8")
            is_json = path.suffix.lower() == ".json"
            module = tvm.ir.load_json(text) if is_json else relay.fromtext(text)
        except Exception as error:  # parser diagnostics come as several types
            raise ModelError(f"{path}: not a Relay module: {_detail(error, complaints)}") from error
    return model_from_module(module, _load_params(params) if params else {}, name=path.stem)


def _load_params(path: Path) -> Mapping[str, Any]:
    try:
        data = path.read_bytes()
        values: Mapping[str, Any] = tvm.runtime.load_param_dict(data)
    except (tvm.TVMError, OSError) as error:
        raise ModelError(
            f"{path}: not a file of parameters: {_last_line(error)}", "tvm.runtime.save_param_dict writes one"
        ) from error
    if len(tvm.runtime.save_param_dict(values)) != len(data):  # TVM does not notice the end of the file
        raise ModelError(f"{path}: the parameters are cut off, or more follows", "is the file complete?")
    return values


@contextmanager
def _complaints() -> Iterator[list[str]]:
    """Collect what TVM's parser and type checker have to say, instead of printing it."""
    messages: list[str] = []

    def collect(context: Any) -> None:
        for item in context.diagnostics:
            line = item.span.line if item.span is not None else 0
            where = f" (line {line}, column {item.span.column})" if line else ""
            messages.append(" ".join(str(item.message).split()) + where)

    tvm.ir.diagnostics.override_renderer(collect)
    try:
        yield messages
    finally:
        tvm.ir.diagnostics.override_renderer(None)


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
        UsageError: A parameter is not an input of ``main``, or of another shape or dtype.
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
    if not isinstance(module, tvm.IRModule):
        raise ModelError(f"{name}: wanted a Relay module, got {type(module).__name__}")
    if "main" not in [symbol.name_hint for symbol in module.get_global_vars()]:
        raise ModelError(f"{name}: the module has no function named main")
    if params:
        _check_params(module["main"], params)
        module = tvm.IRModule(module.functions, module.type_definitions)
        module["main"] = relay.build_module.bind_params_by_name(module["main"], dict(params))
    with _complaints() as complaints:
        try:
            module = relay.transform.InferType()(module)
            _check_signature(name, module["main"])
            module = relay.transform.InferType()(_straighten(name, module))
            if _is_dynamic(module["main"].ret_type):
                module = relay.transform.DynamicToStatic()(module)
        except tvm.TVMError as error:
            raise ModelError(f"{name}: types cannot be inferred: {_detail(error, complaints)}") from error
    main = module["main"]
    inputs = tuple(_read_param(param) for param in main.params)
    dynamic = [str(spec) for spec in inputs if not spec.is_static]
    if dynamic or _is_dynamic(main.ret_type):
        raise ModelError(f"{name}: shapes are not static: {'; '.join(dynamic) or 'the output'}")
    count = len(list(_tensor_types(main.ret_type)))
    return RelayModel(name, module, inputs, outputs or tuple(f"output{i}" for i in range(count)), epsilon)


def _check_params(main: Any, params: Mapping[str, Any]) -> None:
    """Refuse parameters that are no inputs, or of another type: not every operator's typing would."""
    known = {str(param.name_hint): param.type_annotation for param in main.params}
    for name, value in params.items():
        if name not in known:
            raise UsageError(
                f"parameter {name!r} is not an input of main", f"main has: {', '.join(sorted(known))}"
            )
        wanted = known[name]
        got = relay.TensorType(value.shape, str(value.dtype))
        if _is_tensor(wanted) and not _is_dynamic(wanted) and wanted != got:
            raise UsageError(f"parameter {name!r}: wanted {wanted}, got {got}")


def _straighten(name: str, module: Any) -> Any:
    """Make ``main`` one straight-line expression, or refuse: the graph executor runs nothing else."""
    found: dict[str, Any] = {}

    def visit(expr: Any) -> None:
        if isinstance(expr, (relay.If, relay.Match, relay.Let)):
            found.setdefault(type(expr).__name__, expr)
        if isinstance(expr, relay.Call) and isinstance(expr.op, relay.GlobalVar):
            found.setdefault("Call", expr)

    relay.analysis.post_order_visit(module["main"].body, visit)
    for kind in ("If", "Match"):
        if kind in found:
            raise ModelError(f"{name}: main has control flow ({kind.lower()})", _NO_BRANCHES)
    if "Call" in found:
        callee = found["Call"].op.name_hint
        raise ModelError(f"{name}: main calls the function {callee!r}", "inline it: relay.transform.Inline()")
    return relay.transform.ToGraphNormalForm()(module) if "Let" in found else module


def _check_signature(name: str, main: Any) -> None:
    """Refuse a ``main`` that does not take tensors and return at least one."""
    results = list(_tensor_types(main.ret_type))
    others = [f"the input {param.name_hint}" for param in main.params if not _is_tensor(param.checked_type)]
    others += ["an output" for result in results if not _is_tensor(result)]
    if others or not results:
        what = f"{others[0]} is no tensor" if others else "it returns nothing"
        raise ModelError(f"{name}: main must take and return tensors; {what}")


def _is_tensor(checked_type: Any) -> bool:
    return isinstance(checked_type, relay.TensorType)


def _tensor_types(checked_type: Any) -> Iterator[Any]:
    """The types in a tuple, however nested, in order; a type that is no tuple is its own."""
    if not isinstance(checked_type, relay.TupleType):
        yield checked_type
        return
    for field_type in checked_type.fields:
        yield from _tensor_types(field_type)


def _read_param(param: Any) -> TensorSpec:
    shape = tuple(int(dim) if isinstance(dim, tvm.tir.IntImm) else "?" for dim in param.checked_type.shape)
    return TensorSpec(str(param.name_hint), shape, str(param.checked_type.dtype))


def _is_dynamic(checked_type: Any) -> bool:
    dims = (dim for tensor in _tensor_types(checked_type) for dim in tensor.shape)
    return not all(isinstance(dim, tvm.tir.IntImm) for dim in dims)


def _detail(error: BaseException, complaints: list[str]) -> str:
    """What is wrong: TVM's ``DiagnosticError`` only says that something was printed."""
    said = isinstance(error, tvm.error.DiagnosticError) and complaints
    return complaints[0] if said else _last_line(error)


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
