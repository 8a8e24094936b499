"""PyTorch runs the network that a bundle was made of: one call for each ONNX operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn import functional

__all__ = ["OPERATORS", "TorchNetwork"]


def _conv(attributes: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    top, left, bottom, right = attributes.get("pads", [0, 0, 0, 0])
    if (top, left) != (bottom, right):
        raise ValueError(f"Conv: wanted the same padding on both sides, got {attributes['pads']}")
    strides, dilations = attributes.get("strides", [1, 1]), attributes.get("dilations", [1, 1])
    group = attributes.get("group", 1)

    def conv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return functional.conv2d(x, weight, bias, strides, (top, left), dilations, group)

    return conv


def _batch_norm(attributes: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    epsilon = attributes.get("epsilon", 1e-5)

    def batch_norm(x, gamma, beta, mean, variance):  # type: ignore[no-untyped-def]
        return functional.batch_norm(x, mean, variance, gamma, beta, False, 0.0, epsilon)

    return batch_norm


def _max_pool(attributes: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    top, left, bottom, right = attributes.get("pads", [0, 0, 0, 0])
    if (top, left) != (bottom, right) or attributes.get("ceil_mode"):
        raise ValueError(f"MaxPool: wanted the same padding on both sides and no ceil_mode, got {attributes}")
    kernel, strides = attributes["kernel_shape"], attributes["strides"]
    return lambda x: functional.max_pool2d(x, kernel, strides, (top, left))


def _gemm(attributes: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    wanted = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 1}
    got = {"transA": 0, **attributes}
    if got != wanted:
        raise ValueError(f"Gemm: wanted {wanted}, got {got}")
    return lambda x, weight, bias: functional.linear(x, weight, bias)


def _flatten(attributes: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
    axis = attributes.get("axis", 1)
    return lambda x: torch.flatten(x, axis)


#: ONNX operator -> a function of its attributes that makes a function of its inputs.
OPERATORS: dict[str, Callable[[Mapping[str, Any]], Callable[..., torch.Tensor]]] = {
    "Add": lambda attributes: torch.add,
    "BatchNormalization": _batch_norm,
    "Clip": lambda attributes: torch.clamp,
    "Conv": _conv,
    "Flatten": _flatten,
    "Gemm": _gemm,
    "GlobalAveragePool": lambda attributes: lambda x: functional.adaptive_avg_pool2d(x, 1),
    "MaxPool": _max_pool,
    "Mul": lambda attributes: torch.mul,
    "Relu": lambda attributes: torch.relu,
    "Sigmoid": lambda attributes: torch.sigmoid,
}


class TorchNetwork(torch.nn.Module):
    """A network of ``network.py`` as a module, which PyTorch may compile."""

    def __init__(self, description: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> None:
        """Put the weights in place.

        Args:
            description: The network.
            weights: Its weights by name.

        Raises:
            ValueError: It holds an operator, or attributes, that are not among those above.
        """
        super().__init__()
        unknown = sorted({node["op"] for node in description["nodes"]} - OPERATORS.keys())
        if unknown:
            raise ValueError(f"no PyTorch for {', '.join(unknown)}; there is {', '.join(OPERATORS)}")
        self._buffers_of = {name: f"weight{index}" for index, name in enumerate(weights)}
        for name, array in weights.items():
            self.register_buffer(self._buffers_of[name], torch.from_numpy(np.array(array)))
        self._constants = dict(description["constants"])
        self._inputs, self._outputs = description["inputs"], description["outputs"]
        self._steps = [
            (
                OPERATORS[node["op"]](node["attributes"]),
                [name for name in node["inputs"] if name],
                node["outputs"][0],
            )
            for node in description["nodes"]
        ]

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The outputs, in the order of the network."""
        values: dict[str, Any] = {**self._constants, **dict(zip(self._inputs, inputs))}
        values.update((name, getattr(self, buffer)) for name, buffer in self._buffers_of.items())
        for function, operands, result in self._steps:
            values[result] = function(*[values[name] for name in operands])
        return tuple(values[name] for name in self._outputs)
