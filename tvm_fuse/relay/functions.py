"""Apply a rewrite to every ordinary Relay function of a module."""

from __future__ import annotations

from typing import Any, Callable

from tvm_fuse.relay.base import relay, tvm
from tvm_fuse.relay.read import ReadFunction, read_function

__all__ = ["rewrite_functions"]


def rewrite_functions(module: Any, rewrite: Callable[[ReadFunction], Any]) -> tuple[Any, bool]:
    """Rewrite each function of a module that is neither primitive nor another compiler's.

    Args:
        module: A Relay ``IRModule``.
        rewrite: Gets the function as read, returns the new ``relay.Function`` (the same object:
            no change).

    Returns:
        The type-inferred module and whether any function changed.
    """
    module = relay.transform.InferType()(module)
    changed = {}
    for symbol, function in module.functions.items():
        if not isinstance(function, relay.Function) or not _is_ordinary(function):
            continue
        rewritten = rewrite(read_function(function))
        if not rewritten.same_as(function):
            changed[symbol] = rewritten
    if not changed:
        return module, False
    module = tvm.IRModule(module.functions, module.type_definitions, attrs=module.attrs)
    for symbol, function in changed.items():
        module.update_func(symbol, function)
    return relay.transform.InferType()(module), True


def _is_ordinary(function: Any) -> bool:
    attrs = function.attrs
    return not attrs or not any(key in attrs for key in ("Primitive", "Compiler", "Composite", "extern"))
