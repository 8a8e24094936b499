"""TVM's tracker and server as processes: ``python -m tests.support.rpc tracker``, or ``server PORT KEY``.

``python -m tvm.exec.rpc_tracker`` does the same where TVM can be imported by that name. The port is printed.
"""

from __future__ import annotations

import importlib
import sys

from tvm_fuse.relay.base import tvm  # noqa: F401  (makes tvm importable)


def main(kind: str, *arguments: str) -> None:
    """Start one and serve until killed."""
    if kind == "tracker":
        module = importlib.import_module("tvm.rpc.tracker")
        state = module.PopenTrackerServerState("127.0.0.1", port=19190, port_end=19990, silent=True)
    else:
        module = importlib.import_module("tvm.rpc.server")
        port, key = arguments
        state = module.PopenRPCServerState(
            "127.0.0.1",
            port=29090,
            port_end=29990,
            tracker_addr=("127.0.0.1", int(port)),
            key=key,
            silent=True,
        )
    print(state.port, flush=True)
    state.thread.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
