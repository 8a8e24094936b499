"""Operator by operator: which kernel is the one that is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from tvm_fuse.cuda.bundle import Bundle
from tvm_fuse.cuda.trace import Probe, sample_positions
from tvm_fuse.runner.network import Network

__all__ = ["LARGEST_ERROR", "OperatorCheck", "check_operators"]

#: Difference that passes, as a share of the largest element that is looked at: thirty times what float32
#: leaves after the fifty layers of ResNet-50 (3e-6, on the emulator).
LARGEST_ERROR = 1e-4


@dataclass(frozen=True)
class OperatorCheck:
    """One result of one operator.

    Args:
        operator: Name of the operator.
        symbols: Its kernels.
        tensor: Shape and dtype of the result.
        samples: Elements compared with the trace.
        error: Their largest difference, as a share of the largest of them; inf where one is no number.
        strange: Elements of the whole result that are no finite numbers: what no kernel wrote is one.
    """

    operator: str
    symbols: tuple[str, ...]
    tensor: str
    samples: int
    error: float
    strange: int

    @property
    def passed(self) -> bool:
        """Whether the operator computes what it should."""
        return self.error <= LARGEST_ERROR and self.strange == 0


def check_operators(network: Network, bundle: Bundle, probes: Iterable[Probe]) -> Iterator[OperatorCheck]:
    """Run a network operator by operator, and look at what each writes.

    Args:
        network: With its inputs set.
        bundle: Its bundle.
        probes: The bundle's trace.

    Yields:
        One check a result, in order.

    Raises:
        CudaError: A kernel cannot be launched, or fails.
    """
    by_operator: dict[int, list[Probe]] = {}
    for probe in probes:
        by_operator.setdefault(probe.operator, []).append(probe)
    network.poison()
    for index in network.run_operators():
        for probe in by_operator.get(index, ()):
            yield _check(network, bundle, probe)


def _check(network: Network, bundle: Bundle, probe: Probe) -> OperatorCheck:
    operator, tensor = bundle.operators[probe.operator], bundle.tensors[probe.tensor]
    array = network.read(probe.tensor).reshape(-1)
    got = array[sample_positions(array.size)].astype(np.float64)
    with np.errstate(invalid="ignore"):
        largest = float(np.abs(probe.values).max(initial=0.0))
        difference = float(np.abs(got - probe.values).max(initial=0.0))
    error = difference / largest if largest > 0 else difference
    return OperatorCheck(
        operator=operator.name,
        symbols=tuple(call.symbol for call in operator.calls),
        tensor=str(tensor),
        samples=got.size,
        error=error if np.isfinite(error) else float("inf"),
        strange=int(array.size - np.count_nonzero(np.isfinite(array))),
    )
