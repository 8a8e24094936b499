"""The runner's job: load, run, compare, measure.

Every kernel is waited for in the first run, so that a failure has a name; all other memory than
inputs and parameters is filled with NaN before, so that nothing passes by what lay there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tvm_fuse.core.dtypes import Array
from tvm_fuse.core.errors import ParityFailed
from tvm_fuse.core.parity import ParityReport, compare
from tvm_fuse.cuda.bundle import Bundle
from tvm_fuse.cuda.bundle_files import KERNELS_FILE, load_bundle, load_golden, load_parameters
from tvm_fuse.runner.driver import LIBRARY, CudaError, Device
from tvm_fuse.runner.emulate import emulated
from tvm_fuse.runner.network import Network, Step, choose_image
from tvm_fuse.runner.report import KernelTiming, RunReport, Timing

__all__ = ["EMULATOR", "LoadedBundle", "RunOptions", "choose_calls", "load", "run_bundle"]

#: Name of the device that is no GPU.
EMULATOR = "emulator"

_EMULATED = (
    "emulated on the CPU: it says nothing about speed, and not all that could fail on a GPU fails here"
)

_LEAST_REPEAT_S = 2e-3  # of one repeat: short work is done many times
_MOST_CALLS = 1000
_LAUNCHES_OF_GRAPH = 20  # of one kernel, where it is measured by itself


@dataclass(frozen=True)
class RunOptions:
    """What the user may choose.

    Args:
        device: Number of the GPU, or ``emulator``.
        repeats: Measurements of each piece of work; 0: none are made.
        warmup: Executions before they begin.
        kernels: Also measure every launch by itself.
        is_checked: On the emulator, look at every access to memory.
        library: The driver of GPUs: a file, or a name for the system's loader.
    """

    device: str = "0"
    repeats: int = 50
    warmup: int = 10
    kernels: bool = False
    is_checked: bool = False
    library: str = LIBRARY


def run_bundle(folder: Path, options: RunOptions) -> RunReport:
    """Run a bundle on its golden input, compare the outputs, and measure.

    Args:
        folder: The bundle.
        options: See ``RunOptions``.

    Returns:
        What was found; outputs that differ are in the report, not raised.

    Raises:
        UsageError: There is no bundle, no such device, or no machine code for it.
        ModelError: The bundle is damaged.
        MissingDependency: There is no driver, or no GPU.
        ParityFailed: The outputs are wrong as a CUDA graph only.
        ToolFailed: The driver refuses something; a kernel that fails is named.
    """
    with load(folder, options) as loaded:
        bundle, device, notes = loaded.bundle, loaded.device, list(loaded.notes)
        parity = loaded.check(loaded.network.run_checked)
        measured = _Run(loaded, options).measure() if options.repeats and parity.passed else _Measured()
        if options.repeats and not parity.passed:
            notes.append("nothing was measured: the outputs are wrong")
        return RunReport(
            model=bundle.model,
            source_sha256=bundle.provenance.source.sha256,
            target=bundle.provenance.target,
            versions=dict(bundle.provenance.versions),
            device=device.info,
            is_emulated=options.device == EMULATOR,
            image=KERNELS_FILE if options.device == EMULATOR else loaded.image.name,
            is_seeded=bundle.is_seeded,
            memory_bytes=loaded.network.memory_bytes,
            launches=bundle.launch_count,
            parity=parity,
            timings=measured.timings,
            kernels=measured.kernels,
            notes=(*notes, *measured.notes),
        )


@dataclass(frozen=True)
class LoadedBundle:
    """A bundle on a device, with its golden inputs and its parameters set.

    Args:
        bundle: The bundle.
        device: Where it is.
        image: File with its kernels.
        network: Its kernels and memory.
        golden: The outputs to expect, by name.
        notes: What a reader of its numbers should know.
    """

    bundle: Bundle
    device: Device
    image: Path
    network: Network
    golden: Mapping[str, Array]
    notes: tuple[str, ...]

    def check(self, work: Callable[[], None]) -> ParityReport:
        """Compute all outputs from nothing, and compare each within its own tolerance."""
        self.network.poison()
        work()
        got = self.network.outputs()
        reports = [
            compare(
                {port.name: self.golden[port.name]}, {port.name: got[port.name]}, tolerance=port.tolerance
            )
            for port in self.bundle.outputs
        ]
        return ParityReport(tuple(row for report in reports for row in report.rows), (), (), self.bundle.seed)


@contextmanager
def load(folder: Path, options: RunOptions) -> Iterator[LoadedBundle]:
    """Load a bundle; its memory is free again after the block.

    Raises:
        TvmFuseError: As of ``run_bundle``.
    """
    bundle = load_bundle(folder)
    inputs, golden = load_golden(folder, bundle)
    with ExitStack() as stack:
        device, image, notes = _open(stack, folder, bundle, options)
        network = stack.enter_context(closing(Network(device, bundle, image)))
        network.set(load_parameters(folder, bundle))
        network.set(inputs)
        yield LoadedBundle(bundle, device, image, network, golden, tuple(notes))


def _open(
    stack: ExitStack, folder: Path, bundle: Bundle, options: RunOptions
) -> tuple[Device, Path, list[str]]:
    """The device, the file with its kernels, and what to say about them."""
    notes = ["the parameters are drawn from a seed: the outputs mean nothing"] if bundle.is_seeded else []
    if options.device == EMULATOR:
        kernels = emulated(folder / KERNELS_FILE, checked=options.is_checked)
        library, module = stack.enter_context(kernels)
        return Device(library=str(library)), module, [*notes, _EMULATED]
    device = Device(int(options.device), options.library)
    image = choose_image(bundle, device.info.arch)
    if image.form == "ptx":
        notes.append(f"no cubin fits {device.info.arch}: the driver compiled PTX for {image.arch}")
    elif image.arch != device.info.arch:
        notes.append(f"the cubin is for {image.arch}, the device is {device.info.arch}")
    return device, folder / image.file, notes


# --- correctness and time ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Measured:
    """Times, and what to say about them."""

    timings: tuple[Timing, ...] = ()
    kernels: tuple[KernelTiming, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Run:
    """The measurements of one bundle."""

    loaded: LoadedBundle
    options: RunOptions

    @property
    def device(self) -> Device:
        return self.loaded.device

    @property
    def network(self) -> Network:
        return self.loaded.network

    def measure(self) -> _Measured:
        """One inference, as launches and as a graph, and every launch by itself where that is asked for."""
        timings = [self._time(self.network.run, 1, is_graph=False)]
        notes = []
        try:
            with self.device.captured(self.network.run) as graph:
                if not self.loaded.check(graph).passed:
                    raise ParityFailed("the outputs are right launch by launch, and wrong as a CUDA graph")
                timings.append(self._time(graph, 1, is_graph=True))
        except CudaError as error:
            notes.append(f"not measured as a CUDA graph: {error.message}")
        can_capture = not notes
        steps = self.network.steps if self.options.kernels else ()
        return _Measured(
            tuple(timings), tuple(self._time_step(step, can_capture) for step in steps), tuple(notes)
        )

    def _time_step(self, step: Step, can_capture: bool) -> KernelTiming:
        """One launch again and again: in a graph, where they follow each other faster than from here."""

        def launch() -> None:
            self.device.launch(step.launch)

        def launch_often() -> None:
            for _ in range(_LAUNCHES_OF_GRAPH):
                launch()

        if not can_capture:
            return KernelTiming(step.operator, step.symbol, self._time(launch, 1, is_graph=False))
        with self.device.captured(launch_often) as graph:
            timing = self._time(graph, _LAUNCHES_OF_GRAPH, is_graph=True)
        return KernelTiming(step.operator, step.symbol, timing)

    def _time(self, work: Callable[[], None], executions: int, *, is_graph: bool) -> Timing:
        """Measure work that is a number of executions of something."""
        for _ in range(self.options.warmup):
            work()
        calls = choose_calls(self.device.time(work, 1))
        times_s = (self.device.time(work, calls) / executions for _ in range(self.options.repeats))
        return Timing(tuple(times_s), calls * executions, is_graph)


def choose_calls(once_s: float) -> int:
    """How often to do work between two events, so that their resolution does not matter.

    Args:
        once_s: Seconds that it takes once, about.
    """
    return min(_MOST_CALLS, math.ceil(_LEAST_REPEAT_S / once_s)) if once_s > 0 else _MOST_CALLS
