"""Measure kernels in processes of their own, here or on devices behind an RPC tracker."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tvm_fuse
from tvm_fuse.core.errors import MissingDependency
from tvm_fuse.core.tuning.job import Comparison
from tvm_fuse.core.tuning.task import Measurement, Task
from tvm_fuse.relay.base import tvm
from tvm_fuse.relay.tune_kernel import KernelSpec, Remote
from tvm_fuse.relay.tune_tasks import TunedTask
from tvm_fuse.relay.tune_worker import Answer, read_message, write_message

__all__ = ["KernelMeasurer", "Worker", "count_servers"]

#: What building a kernel twice, running and comparing it may take more than one candidate.
_SLOW_STEPS = 4.0
_CONNECT_S = 10.0


class Worker:
    """One process of ``tune_worker``; it is started when it is first asked, and again when it died.

    Args:
        module: What the process runs.
    """

    def __init__(self, module: str = "tvm_fuse.relay.tune_worker") -> None:
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, function: str, *arguments: Any, timeout_s: float) -> Answer:
        """Call a function of ``tune_kernel`` in a child of the process.

        Args:
            function: Its name.
            arguments: Its arguments.
            timeout_s: Seconds that it may take.

        Returns:
            What it returned and an empty text; None and what went wrong.
        """
        process = self._start()
        try:
            write_message(process.stdin, (function, arguments, timeout_s))  # type: ignore[arg-type]
            return read_message(process.stdout)  # type: ignore[arg-type, no-any-return]
        except (EOFError, OSError):
            self.close()
            return None, "the measuring process died"
        except BaseException:  # Ctrl-C: the answer to come is nobody's
            self.close()
            raise

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            root = str(Path(tvm_fuse.__file__).parents[1])
            paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "OPENBLAS_NUM_THREADS": "1",  # threads that a fork would lose
            }
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the command
            )
        return self._process

    def close(self) -> None:
        """End the process; a child in flight ends with it."""
        if self._process is not None:
            process, self._process = self._process, None
            for stream in (process.stdin, process.stdout):
                stream.close()  # type: ignore[union-attr]
            process.wait()


def count_servers(remote: Remote) -> int:
    """How many devices of a key a tracker has.

    Raises:
        MissingDependency: The tracker does not answer, or has no such device.
    """
    place = f"{remote.host}:{remote.port}"
    try:
        # TVM's own connection tries again for a minute.
        socket.create_connection((remote.host, remote.port), timeout=_CONNECT_S).close()
        summary = tvm.rpc.connect_tracker(remote.host, remote.port).summary()
    except (RuntimeError, OSError, tvm.TVMError) as error:
        raise MissingDependency(
            f"--rpc {place}: no tracker answers: {error}",
            "python -m tvm.exec.rpc_tracker starts one, python -m tvm.exec.rpc_server adds a device",
        ) from error
    keys = [str(server["key"]).partition(":")[2] for server in summary["server_info"]]
    if remote.key not in keys:
        known = ", ".join(sorted(set(keys))) or "none"
        raise MissingDependency(
            f"--key {remote.key}: the tracker at {place} has no such device; it has: {known}"
        )
    return keys.count(remote.key)


class KernelMeasurer:
    """Builds, checks and times kernels.

    Args:
        tasks: What will be measured.
        target: Their target.
        timeout_s: Seconds that one candidate may take, built and measured.
        repeat_ms: Milliseconds of one measurement, at least.
        remote: Devices behind a tracker; None: this machine.
        seed: Seed of the data.
    """

    def __init__(
        self,
        tasks: Sequence[TunedTask],
        target: Any,
        *,
        timeout_s: float = 30.0,
        repeat_ms: int = 10,
        remote: Remote | None = None,
        seed: int = 0,
    ) -> None:
        self._timeout_s = timeout_s
        self._scratch = tempfile.TemporaryDirectory(prefix="tvm_fuse_tune_")
        host = str(target.host) if target.host is not None else ""
        without_host = str(tvm.target.Target(dict(target.export(), host=None)) if host else target)
        self._specs = {
            one.task.workload_key: KernelSpec(
                function=tvm.ir.save_json(one.function),
                target=without_host,
                host=host,
                digest=one.task.digest,
                workload_key=one.task.workload_key,
                reference=Path(self._scratch.name, f"{one.task.digest}.npz"),
                seed=seed,
                repeat_ms=repeat_ms,
                remote=remote,
            )
            for one in tasks
        }
        self._workers = [Worker() for _ in range(1 if remote is None else count_servers(remote))]
        self._free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._free.put(worker)

    def __enter__(self) -> KernelMeasurer:
        return self

    def __exit__(self, *exception: Any) -> None:
        for worker in self._workers:
            worker.close()
        self._scratch.cleanup()

    def baseline(self, task: Task) -> Measurement:
        """The kernel that the build makes without tuning."""
        return self._measure(task, None, _SLOW_STEPS * self._timeout_s)

    def measure(self, task: Task, schedules: Sequence[str]) -> Sequence[Measurement]:
        """Candidates; on as many devices at once as there are."""
        if len(self._workers) == 1:
            return [self._measure(task, schedule, self._timeout_s) for schedule in schedules]
        self._ready(task)  # once, before all of them need it
        with ThreadPoolExecutor(len(self._workers)) as pool:
            waiting = [pool.submit(self._measure, task, one, self._timeout_s) for one in schedules]
            try:
                return [future.result() for future in waiting]
            except BaseException:  # Ctrl-C: what has not begun does not begin
                for future in waiting:
                    future.cancel()
                raise

    def compare(self, task: Task, schedule: str) -> Comparison:
        """A candidate and the kernel of the build, in turn."""
        spec, error = self._ready(task)
        times = None
        if not error:
            times, error = self._ask(
                "compare_kernels", spec, schedule, timeout_s=_SLOW_STEPS * self._timeout_s
            )
        return Comparison(*times) if times else Comparison(0.0, 0.0, error)

    def _measure(self, task: Task, schedule: str | None, timeout_s: float) -> Measurement:
        text = schedule or ""
        spec, error = self._ready(task)
        if error:
            return Measurement(text, None, error)
        found, error = self._ask("measure_kernel", spec, schedule, timeout_s=timeout_s)
        if error:
            return Measurement(text, None, error)
        cost_s, row = found
        if not row.passed:
            wrong = (
                row.problem or f"{row.failing} of {row.elements} values differ, by up to {row.max_abs:.3g}"
            )
            return Measurement(text, None, f"wrong results: {wrong}", row.max_abs, row.needed)
        return Measurement(text, cost_s, "", row.max_abs, row.needed)

    def _ready(self, task: Task) -> tuple[KernelSpec, str]:
        """The kernel, with its reference on disk; or why there is none."""
        spec = self._specs[task.workload_key]
        if spec.reference.exists():
            return spec, ""
        _, error = self._ask("write_reference", spec, timeout_s=_SLOW_STEPS * self._timeout_s)
        return spec, error and f"the reference cannot be computed: {error}"

    def _ask(self, function: str, *arguments: Any, timeout_s: float) -> Answer:
        worker = self._free.get()
        try:
            return worker.ask(function, *arguments, timeout_s=timeout_s)
        finally:
            self._free.put(worker)
