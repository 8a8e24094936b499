"""A measuring process whose functions fail in every way: ``python -m tests.support.faulty_worker``."""

from __future__ import annotations

import os
import signal
import sys
import time

from tvm_fuse.relay.tune_worker import main


def _crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _hang(pid_file: str = "") -> None:
    if pid_file:
        with open(pid_file, "w", encoding="utf-8") as file:
            file.write(str(os.getpid()))
    while True:
        time.sleep(0.01)


def _print() -> str:
    print("this is no answer")
    sys.stdout.flush()
    os.write(1, b"nor is this")
    return "fine"


if __name__ == "__main__":
    main(
        {
            "add": lambda a, b: a + b,
            "big": lambda size: b"x" * size,
            "crash": _crash,
            "exit": lambda: os._exit(3),
            "fail": lambda: [][0],
            "hang": _hang,
            "print": _print,
            "pid": os.getpid,
            "unpicklable": lambda: lambda: 0,
        }
    )
