"""PyTorch as a contender: checked against ONNX Runtime's outputs, then timed by its own events."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.network import draw_weights, load_network
from benchmarks.gpu.timing import Contender
from benchmarks.gpu.torch_network import TorchNetwork
from tvm_fuse.runner.run import choose_calls
from tvm_fuse.runner.trace import LARGEST_ERROR

__all__ = ["enter_torch"]

_WARMUP = 5


def enter_torch(
    stack: ExitStack, folder: Path, device: str, compiles: bool
) -> tuple[list[Contender], list[str]]:
    """Load a network, check it, and make contenders of it.

    Args:
        stack: Gets what has to stay open.
        folder: The network.
        device: ``cuda:0`` or ``cpu``; on the CPU everything runs once, and nothing is a measurement.
        compiles: With ``torch.compile``, else operator by operator.

    Returns:
        The contenders, and notes.

    Raises:
        ValueError: The outputs are not those of ONNX Runtime.
    """
    # float32 as it is; whoever compares kernels compares the same arithmetic.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    stack.enter_context(torch.inference_mode())
    description, inputs, outputs = load_network(folder)
    network = TorchNetwork(description, draw_weights(description)).eval().to(device)
    feeds = [torch.from_numpy(array).to(device) for array in inputs]
    run: Callable[..., tuple[torch.Tensor, ...]] = torch.compile(network) if compiles else network
    error = _largest_error(run(*feeds), outputs)
    name = "torch compiled" if compiles else "torch"
    notes = [
        f"{name}: PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, error {error:.2g}"
    ]
    if not error <= LARGEST_ERROR:
        raise ValueError(f"PyTorch's outputs differ from ONNX Runtime's by {error:.3g} of the largest")
    if device == "cpu":
        return [Contender(name, "launches", lambda: _time_on_cpu(lambda: run(*feeds)), 1)], notes
    torch.cuda.set_device(device)
    for _ in range(_WARMUP):
        run(*feeds)
    contenders = [_contender(name, "launches", lambda: run(*feeds))]
    try:
        graph = _capture(lambda: run(*feeds))
        contenders.append(_contender(name, "graph", graph.replay))
    except RuntimeError as problem:
        notes.append(f"{name}: not captured as a CUDA graph: {problem}")
    return contenders, notes


def _largest_error(got: tuple[torch.Tensor, ...], wanted: list[np.ndarray]) -> float:
    """The largest difference, as a share of the largest output."""
    pairs = [
        (one.cpu().numpy().astype(np.float64), other.astype(np.float64)) for one, other in zip(got, wanted)
    ]
    return max(float(np.abs(one - other).max() / np.abs(other).max()) for one, other in pairs)


def _capture(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """As PyTorch's notes on CUDA graphs say: first on a stream beside, then captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _contender(name: str, mode: str, work: Callable[[], object]) -> Contender:
    for _ in range(_WARMUP):
        work()
    calls = choose_calls(_time(work, 1))
    return Contender(name, mode, lambda: _time(work, calls), calls)


def _time(work: Callable[[], object], calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3 / calls


def _time_on_cpu(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
