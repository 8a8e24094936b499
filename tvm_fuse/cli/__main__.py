"""``python -m tvm_fuse.cli`` is the ``tvm-fuse`` command."""

import sys

from tvm_fuse.cli import main

if __name__ == "__main__":
    sys.exit(main())
