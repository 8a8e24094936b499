"""Joined kernels by hand: primitive functions with inner operators, as partitioning makes them.

Example::

    group = Joined()
    x = group.input("x", np.ones((1, 32), "float32"))
    hidden = group.inner(relay.nn.dense(x, group.const(w1)))
    module = group.module(relay.nn.dense(relay.nn.relu(hidden), group.const(w2)))
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.lazy import Lazy

__all__ = ["Joined"]

absorb = Lazy("tvm_fuse.relay.absorb")
relay = Lazy("tvm_fuse.relay.base", "relay")
tvm = Lazy("tvm_fuse.relay.base", "tvm")


class Joined:
    """Builds one primitive function and a module that calls it."""

    def __init__(self) -> None:
        self.params: list[Any] = []
        self.arguments: list[Any] = []
        self.values: dict[str, np.ndarray] = {}

    def input(self, name: str, value: np.ndarray) -> Any:
        self.values[name] = value
        return self._param(relay.var(name, shape=value.shape, dtype=str(value.dtype)), value)

    def const(self, value: np.ndarray) -> Any:
        return self._param(relay.const(value), value)

    def _param(self, argument: Any, value: np.ndarray) -> Any:
        self.arguments.append(argument)
        self.params.append(relay.var(f"p{len(self.params)}", shape=value.shape, dtype=str(value.dtype)))
        return self.params[-1]

    def inner(self, call: Any) -> Any:
        """The operator as an inner one."""
        return absorb.lower_absorbed(call)

    def module(self, result: Any) -> Any:
        """The type-inferred module of the one call; several results make a tuple."""
        function = relay.Function(self.params, result)
        function = function.with_attr("Primitive", tvm.tir.IntImm("int32", 1))
        inputs = [argument for argument in self.arguments if isinstance(argument, relay.Var)]
        main = relay.Function(inputs, relay.Call(function, self.arguments))
        return relay.transform.InferType()(tvm.IRModule.from_expr(main))
