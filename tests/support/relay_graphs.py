"""Small Relay graphs with seeded weights, and what tests ask about built ones.

Example::

    net = Net()
    x = net.input("x", (1, 4, 6, 6))
    module = net.module(relay.nn.relu(net.batch_norm(net.conv2d(x, 4))))

Weights are scaled so that values stay about 1; batch norms have gammas of both signs and no
trivial statistic, so that a wrong fold shows.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.support.lazy import Lazy
from tvm_fuse.cuda.source import read_kernels

__all__ = [
    "CUDA",
    "LLVM",
    "Net",
    "all_group_calls",
    "count_distinct_groups",
    "count_operators",
    "cuda_kernels",
    "feeds",
    "group_calls",
    "kernel_calls",
    "plain_build",
    "run",
    "run_unfused",
    "texts",
]

relay = Lazy("tvm_fuse.relay.base", "relay")
tvm = Lazy("tvm_fuse.relay.base", "tvm")
build = Lazy("tvm_fuse.relay.build")
cuda_hook = Lazy("tvm_fuse.relay.cuda_hook")
target = Lazy("tvm_fuse.relay.target")

#: LLVM without its own optimizations: half the time, the same Relay.
LLVM = "llvm -opt-level=0"

#: A GPU need not be there: its kernels are generated only.
CUDA = "cuda -arch=sm_80"


class Net:
    """Makes seeded constants for Relay operators, and the module in the end."""

    def __init__(self, seed: int = 0, dtype: str = "float32") -> None:
        self.rng, self.dtype = np.random.default_rng(seed), dtype
        self.inputs: list[Any] = []

    def input(self, name: str, shape: Sequence[Any], dtype: str | None = None) -> Any:
        self.inputs.append(relay.var(name, shape=tuple(shape), dtype=dtype or self.dtype))
        return self.inputs[-1]

    def const(self, *shape: int, scale: float = 1.0) -> Any:
        return relay.const(self.rng.normal(scale=scale, size=shape).astype(self.dtype), self.dtype)

    def weight(self, *shape: int, fan_in: int) -> Any:
        return self.const(*shape, scale=fan_in**-0.5)

    def conv2d(
        self, x: Any, out: int, kernel: int = 3, *, groups: int = 1, layout: str = "NCHW", weight: Any = None,
        padding: int | None = None, **attrs: Any,
    ) -> Any:  # fmt: skip
        """A convolution that keeps the image size; ``NHWC`` takes an ``HWIO`` (depthwise ``HWOI``) kernel."""
        channels = int(infer(x).shape[layout.index("C")])
        depthwise = groups == channels == out
        plain = (out, channels // groups, kernel, kernel)
        if weight is None:
            scale = (plain[1] * kernel * kernel) ** -0.5
            values = self.rng.normal(scale=scale, size=plain).astype(self.dtype)
            if layout == "NHWC":
                values = values.transpose(2, 3, 0, 1) if depthwise else values.transpose(2, 3, 1, 0)
            weight = relay.const(values, self.dtype)
        layouts = {"kernel_layout": "HWOI" if depthwise else "HWIO"} if layout == "NHWC" else {}
        padding = kernel // 2 if padding is None else padding
        return relay.nn.conv2d(
            x, weight, channels=out, kernel_size=(kernel, kernel), padding=(padding, padding), groups=groups,
            data_layout=layout, **{**layouts, **attrs},
        )  # fmt: skip

    def dense(self, x: Any, out: int) -> Any:
        size = int(infer(x).shape[-1])
        return relay.nn.dense(x, self.weight(out, size, fan_in=size))

    def norm_values(self, channels: int) -> list[np.ndarray]:
        """gamma, beta, mean and variance."""
        sign = np.where(np.arange(channels) % 2, -1.0, 1.0)
        gamma = self.rng.uniform(0.5, 1.5, channels) * sign
        beta, mean = self.rng.normal(size=(2, channels))
        values = gamma, beta, mean, self.rng.uniform(0.3, 3.0, channels)
        return [value.astype(self.dtype) for value in values]

    def batch_norm(self, x: Any, epsilon: float = 1e-3, axis: int = 1, **attrs: Any) -> Any:
        """The normalized output of a batch norm."""
        vectors = [relay.const(v, self.dtype) for v in self.norm_values(int(infer(x).shape[axis]))]
        return relay.nn.batch_norm(x, *vectors, axis=axis, epsilon=epsilon, **attrs)[0]

    def module(self, *results: Any) -> Any:
        """The type-inferred module; several results make a tuple."""
        body = results[0] if len(results) == 1 else relay.Tuple(list(results))
        return relay.transform.InferType()(tvm.IRModule.from_expr(relay.Function(self.inputs, body)))


def infer(expr: Any) -> Any:
    """The checked type of an expression with free variables."""
    free = relay.analysis.free_vars(expr)
    module = relay.transform.InferType()(tvm.IRModule.from_expr(relay.Function(free, expr)))
    return module["main"].ret_type


# --- building and running ----------------------------------------------------------------------


def feeds(module: Any, seed: int = 0) -> dict[str, np.ndarray]:
    """Seeded inputs for ``main``."""
    rng = np.random.default_rng(seed)
    values = {}
    for param in module["main"].params:
        shape = [int(dim) for dim in param.checked_type.shape]
        values[str(param.name_hint)] = rng.normal(size=shape).astype(param.checked_type.dtype)
    return values


def plain_build(module: Any, on: str = LLVM, opt_level: int = 3, disabled: Sequence[str] = ()) -> Any:
    """``relay.build`` as a user calls it; CUDA stays source, so that no compiler is needed."""
    resolved = target.resolve_target(on)
    with (
        cuda_hook.cuda_compilation(resolved),
        tvm.transform.PassContext(opt_level=opt_level, disabled_pass=list(disabled)),
    ):
        return relay.build(module, target=resolved)


def run(library: Any, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """All outputs of a library built for the CPU."""
    executor = tvm.contrib.graph_executor.GraphModule(library["default"](tvm.cpu(0)))
    executor.run(**inputs)
    return [executor.get_output(index).numpy() for index in range(executor.get_num_outputs())]


def run_unfused(module: Any, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """All outputs of the reference: the same graph at opt_level 0, nothing folded or fused."""
    return run(build.build_unfused(module, target.resolve_target(LLVM)).library, inputs)


def kernel_calls(library: Any) -> list[str]:
    """The kernels of one inference in order, by function name."""
    nodes = json.loads(library.get_graph_json())["nodes"]
    calls = [node["attrs"]["func_name"] for node in nodes if node["op"] == "tvm_op"]
    return [name for name in calls if name != "__nop"]


def cuda_kernels(library: Any) -> list[str]:
    """The ``__global__`` functions of a library built for CUDA."""
    return list(read_kernels(build._cuda_source(library)))


# --- looking at a module -----------------------------------------------------------------------


def count_operators(module: Any) -> Counter:
    """How often each operator occurs in ``main``, inside groups as well."""
    names: Counter = Counter()

    def visit(expr):
        if isinstance(expr, relay.Call) and isinstance(expr.op, tvm.ir.Op):
            names[str(expr.op.name)] += 1

    relay.analysis.post_order_visit(module["main"], visit)
    return names


def all_group_calls(module: Any) -> list[Any]:
    """The calls of function literals in ``main``, in post-order."""
    found = []

    def visit(expr):
        if isinstance(expr, relay.Call) and isinstance(expr.op, relay.Function):
            found.append(expr)

    relay.analysis.post_order_visit(module["main"].body, visit)
    return found


def group_calls(module: Any) -> list[Any]:
    """The calls of groups that are built around a layer, and of functions that are no groups."""
    return [call for call in all_group_calls(module) if _has_layer(call.op)]


def _has_layer(function: Any) -> bool:
    names: list[str] = []

    def visit(expr):
        if isinstance(expr, relay.Call) and isinstance(expr.op, tvm.ir.Op):
            names.append(str(expr.op.name))

    relay.analysis.post_order_visit(function.body, visit)
    return any("conv" in name or "dense" in name or "matmul" in name for name in names) or not names


def count_distinct_groups(module: Any) -> int:
    """How many kernels the groups of ``main`` need: equal ones are compiled once."""
    return len({tvm.ir.structural_hash(call.op, map_free_vars=True) for call in group_calls(module)})


def texts(module: Any) -> str:
    """The module as text, without the values of constants."""
    return str(module.astext(show_meta_data=False)).split("\n/* For debugging purposes")[0]
