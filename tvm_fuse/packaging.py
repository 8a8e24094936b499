"""Collects the candidates of a model into a package that a machine with a GPU measures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tvm_fuse import __version__
from tvm_fuse.core.dtypes import Array
from tvm_fuse.core.errors import ModelError
from tvm_fuse.cuda.candidate_files import save_package
from tvm_fuse.cuda.candidates import (
    Candidate,
    CandidateTask,
    Package,
    choose_positions,
    draw_operands,
    scaled_tolerance,
)
from tvm_fuse.relay.compat import find_tvm
from tvm_fuse.relay.tune_draft import Scorer
from tvm_fuse.relay.tune_kernel import call_kernel, compute_reference
from tvm_fuse.relay.tune_tasks import TunedTask
from tvm_fuse.relay.tune_verify import BuiltKernel

__all__ = ["PackageWriter"]


class PackageWriter:
    """A package in the making.

    Args:
        model: Name of the model.
        target: Its target.
        device: Key of the device.
        scorer: The card, and the constants of the score.
        seed: Of the first task's operands; those of the others follow.
    """

    def __init__(self, model: str, target: Any, device: str, scorer: Scorer, seed: int) -> None:
        self._model, self._target, self._device = model, target, device
        self._scorer, self._seed = scorer, seed
        self._tasks: list[CandidateTask] = []
        self._reference: dict[str, list[Array]] = {}
        self._cubins: dict[str, bytes] = {}
        self._sources: dict[str, str] = {}
        self._compiler = ""

    def add(self, one: TunedTask, baseline: BuiltKernel, candidates: Sequence[BuiltKernel]) -> None:
        """Take in a kernel, and compute what it should give.

        Args:
            one: The task.
            baseline: What the build makes without a record.
            candidates: What to try instead, the best by score first.
        """
        number = len(self._tasks)
        seed = self._seed + number
        operands = draw_operands(baseline.inputs, seed)
        names = [str(param.name_hint) for param in one.function.params]
        results = compute_reference(call_kernel(one.function), dict(zip(names, operands)))
        self._compiler = baseline.compiler
        self._reference[one.task.digest] = [
            result.reshape(-1)[choose_positions(result.size, seed)] for result in results
        ]
        self._tasks.append(
            CandidateTask(
                digest=one.task.digest,
                name=one.task.name,
                chain=one.task.chain,
                workload_key=one.task.workload_key,
                weight=one.task.weight,
                seed=seed,
                inputs=baseline.inputs,
                outputs=baseline.outputs,
                tolerances=tuple(map(scaled_tolerance, results)),
                baseline=self._candidate(f"t{number:02d}b", baseline),
                candidates=tuple(
                    self._candidate(f"t{number:02d}c{index}", built) for index, built in enumerate(candidates)
                ),
            )
        )

    def _candidate(self, name: str, built: BuiltKernel) -> Candidate:
        self._cubins[name], self._sources[name] = built.cubin, built.source
        predicted_s = self._scorer(built.profiles)
        return Candidate(
            id=name,
            schedule=built.schedule,
            kernels=built.kernels,
            calls=built.calls,
            workspaces=built.workspaces,
            profiles=built.profiles,
            predicted_s=predicted_s if math.isfinite(predicted_s) else 0.0,
        )

    def save(self, folder: Path) -> Package:
        """Write the package; the kernels with the most predicted time in an inference come first.

        Raises:
            ModelError: There is no candidate to measure.
            UsageError: The folder is something else, or cannot be written.
        """
        if not any(task.candidates for task in self._tasks):
            raise ModelError(f"{self._model}: no candidate passed: there is nothing to measure")
        tasks = sorted(self._tasks, key=lambda task: -task.weight * task.baseline.predicted_s)
        package = Package(
            model=self._model,
            target=str(self._target),
            device=self._device,
            arch=str(self._target.arch),
            card=self._scorer.card.name,
            versions={
                "tvm-fuse": __version__,
                "tvm": find_tvm().version,
                "numpy": np.__version__,
                "compiler": self._compiler,
            },
            constants=self._scorer.constants,
            tasks=tuple(tasks),
        )
        return save_package(folder, package, self._reference, self._cubins, self._sources)
