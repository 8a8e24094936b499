"""``python -m tvm_fuse.runner.probe N``: what the CUDA driver says of GPU number N, as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from tvm_fuse.core.errors import TvmFuseError
from tvm_fuse.report import to_plain
from tvm_fuse.runner.driver import Device

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Print a ``DeviceInfo``; the exit code is 0, or that of the error that is printed."""
    (ordinal,) = sys.argv[1:] if argv is None else argv
    try:
        print(json.dumps(to_plain(Device(int(ordinal)).info)))
    except TvmFuseError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
