"""A Relay module in a folder: ``model.json`` (graph), ``params.bin`` (constants), ``manifest.json``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tvm_fuse.core.folders import write_files
from tvm_fuse.core.graph import Kind
from tvm_fuse.core.manifest import FILE_NAME
from tvm_fuse.relay.base import relay, tvm
from tvm_fuse.relay.read import read_function
from tvm_fuse.relay.rewrite import Replacement, rebuild_function

__all__ = ["FILES", "lift_constants", "save_folder"]

#: The files of a folder, in the order in which they are read.
FILES = ("model.json", "params.bin", FILE_NAME)


def lift_constants(
    module: Any, *, prefix: str = "p", keep_scalars: bool = False
) -> tuple[Any, dict[str, Any]]:
    """Make parameters of the constants in ``main``.

    Args:
        module: A type-inferred Relay module.
        prefix: Names begin with it; a number follows.
        keep_scalars: Leave constants of rank 0, which TVM writes into kernels.

    Returns:
        The module, whose ``main`` takes them after its own parameters, and name -> NDArray.
    """
    main = module["main"]
    read = read_function(main)
    taken = {str(param.name_hint) for param in main.params}
    variables: list[Any] = []
    values: dict[str, Any] = {}
    replacements: dict[int, Replacement] = {}
    for node in read.graph.of_kind(Kind.CONSTANT):
        data = read.expressions[node.id].data
        if keep_scalars and not data.shape:
            continue
        name = f"{prefix}{len(values)}"
        while name in taken:
            name += "_"
        variables.append(relay.var(name, shape=data.shape, dtype=data.dtype))
        values[name] = data
        replacements[node.id] = _take(variables[-1])
    body = rebuild_function(read, replacements)
    lifted = relay.Function([*main.params, *variables], body.body, None, main.type_params, main.attrs)
    result = tvm.IRModule(module.functions, module.type_definitions)
    result["main"] = lifted
    return relay.transform.InferType()(result), values


def _take(variable: Any) -> Callable[[Callable[[int], Any]], Any]:
    return lambda new: variable


def save_folder(module: Any, manifest: str, folder: Path) -> None:
    """Save a module so that ``load_model(folder)`` gives it back, bit for bit.

    Args:
        module: A type-inferred Relay module.
        manifest: JSON text.
        folder: Made if need be; files of the same names in it are replaced, all of them or none.

    Raises:
        UsageError: The folder cannot be written.
    """
    lifted, values = lift_constants(module)
    model, params, manifest_file = FILES
    contents = {
        model: tvm.ir.save_json(lifted).encode(),
        params: bytes(tvm.runtime.save_param_dict(values)),
        manifest_file: f"{manifest}\n".encode(),
    }
    write_files(folder, contents)
