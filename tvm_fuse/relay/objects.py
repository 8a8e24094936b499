"""TVM's immutable objects, each read once: crossing into TVM costs more than everything else.

Passes read the same operators, attributes, spans and types again and again.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import Any, Callable

from tvm_fuse.core.graph import Dim, TensorInfo
from tvm_fuse.relay.base import relay, tvm

__all__ = ["handle_of", "items_of", "kept", "tensors_of"]

_array_size = tvm.get_global_func("runtime.ArraySize")
_array_item = tvm.get_global_func("runtime.ArrayGetItem")

_MOST_KEPT = 8192


def handle_of(expr: Any) -> int:
    """What tells objects apart while they are alive: their address in TVM."""
    return int(expr.handle.value)


def items_of(array: Any) -> Iterator[Any]:
    """The items of a TVM array; its own iterator asks for its size before each."""
    return (_array_item(array, position) for position in range(_array_size(array)))


def kept(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Remember what was read from an immutable TVM object, by its address."""
    known: dict[int, tuple[Any, Any]] = {}

    @wraps(read)
    def read_once(source: Any) -> Any:
        found = known.get(handle_of(source))
        if found is None:
            if len(known) >= _MOST_KEPT:
                known.clear()
            # The source is kept as well, so that its address is not given to another object.
            found = known[handle_of(source)] = source, read(source)
        return found[1]

    return read_once


#: Structural hash of a type -> the type and its tensors; every pass makes new types, but few different ones.
_known_types: dict[int, tuple[Any, tuple[TensorInfo, ...]]] = {}


def tensors_of(checked_type: Any) -> tuple[TensorInfo, ...]:
    """Shapes and dtypes in a type, tuples flattened; what is no tensor has the dtype ``opaque``."""
    key = tvm.ir.structural_hash(checked_type)
    found = _known_types.get(key)
    if found is None or not tvm.ir.structural_equal(found[0], checked_type):
        if len(_known_types) >= _MOST_KEPT:
            _known_types.clear()
        found = _known_types[key] = checked_type, _read_tensors(checked_type)
    return found[1]


def _read_tensors(checked_type: Any) -> tuple[TensorInfo, ...]:
    if isinstance(checked_type, relay.TensorType):
        shape = tuple(_dim(dim) for dim in items_of(checked_type.shape))
        return (TensorInfo(shape, str(checked_type.dtype)),)
    if isinstance(checked_type, relay.TupleType):
        return tuple(info for part in items_of(checked_type.fields) for info in _read_tensors(part))
    return (TensorInfo((), "opaque"),)


def _dim(dim: Any) -> Dim:
    return int(dim) if isinstance(dim, (int, tvm.tir.IntImm)) else "?"
