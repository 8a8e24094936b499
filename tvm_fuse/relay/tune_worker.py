"""A process that measures kernels, each in a child of its own: ``python -m tvm_fuse.relay.tune_worker``.

It imports TVM once and forks for every request, which takes milliseconds where a fresh process takes
seconds. A child that crashes, or is not done in time, is reported and costs nothing else. This process never
calls a kernel itself, so that TVM starts no threads in it, which a fork would lose.

Requests come on standard input and answers leave on standard output: eight bytes of length, then a pickle.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import struct
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, BinaryIO, Callable

__all__ = ["Answer", "Request", "main", "read_message", "write_message"]

_LENGTH = struct.Struct(">Q")

#: Seconds that a child may take to end, once it has answered.
_EXIT_S = 1.0

#: Name of the function, its arguments, and the seconds that it may take.
Request = tuple[str, tuple[Any, ...], float]
#: What it returned and an empty text, or None and what went wrong.
Answer = tuple[Any, str]


def write_message(stream: BinaryIO, message: Any) -> None:
    """Write one message."""
    data = pickle.dumps(message)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def read_message(stream: BinaryIO) -> Any:
    """Read one message.

    Raises:
        EOFError: The other side is gone.
    """
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    data = stream.read(_LENGTH.unpack(head)[0])
    return pickle.loads(data)


def main(functions: Mapping[str, Callable[..., Any]] | None = None) -> None:
    """Answer requests until standard input ends.

    Args:
        functions: What can be asked for, by name; None: what ``tune_kernel`` has.
    """
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what TVM prints is no answer
    functions = _load_functions() if functions is None else functions
    while True:
        try:
            name, arguments, timeout_s = read_message(requests)
        except EOFError:
            return
        write_message(answers, _run_in_child(functions[name], arguments, timeout_s))


def _load_functions() -> dict[str, Callable[..., Any]]:
    from tvm_fuse.relay import tune_kernel

    return {
        function.__name__: function
        for function in (
            tune_kernel.write_reference,
            tune_kernel.measure_kernel,
            tune_kernel.compare_kernels,
        )
    }


def _run_in_child(function: Callable[..., Any], arguments: tuple[Any, ...], timeout_s: float) -> Answer:
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)  # with the compilers that it starts
        os.close(receive)
        _answer_and_exit(function, arguments, send)
    os.close(send)
    data, is_late, is_done = b"", False, False
    try:
        with os.fdopen(receive, "rb") as stream:
            data, is_late = _read_until(receive, stream, time.monotonic() + timeout_s)
        is_done = not is_late
    finally:  # also when this process is told to end, so that no child outlives it
        status = _end(child, _EXIT_S if is_done else 0.0)
    if data:
        return pickle.loads(data)  # type: ignore[no-any-return]
    if is_late:
        return None, f"no result within {timeout_s:g} s"
    ending = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    how = signal.Signals(ending).name if ending else f"exit code {os.WEXITSTATUS(status)}"
    return None, f"the process died: {how}"


def _end(child: int, patience_s: float) -> int:
    """Wait so long for a child to end by itself, then kill it; its status."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status
        time.sleep(0.001)
    with suppress(ProcessLookupError):  # before it had a group of its own
        os.killpg(child, signal.SIGKILL)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def _read_until(descriptor: int, stream: BinaryIO, deadline: float) -> tuple[bytes, bool]:
    """All that a child writes, and whether it was too late; also ends when the parent is gone."""
    while True:
        left = deadline - time.monotonic()
        ready, _, _ = select.select([descriptor, sys.stdin.fileno()], [], [], max(0.0, left))
        if descriptor in ready:
            return stream.read(), False
        if ready:  # no request comes before the answer, so this is the end of standard input
            raise SystemExit(0)
        if left <= 0:
            return b"", True


def _answer_and_exit(function: Callable[..., Any], arguments: tuple[Any, ...], send: int) -> None:
    status = 0
    try:
        try:
            answer = pickle.dumps((function(*arguments), ""))
        except Exception as error:  # whatever it is: the candidate failed
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            answer = pickle.dumps((None, f"{type(error).__name__}: {lines[-1] if lines else ''}"))
        with os.fdopen(send, "wb") as stream:
            stream.write(answer)
    except BaseException:
        status = 1
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
