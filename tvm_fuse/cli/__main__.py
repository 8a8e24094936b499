"""``python -m tvm_fuse.cli`` is the ``tvm-fuse`` command."""

import sys

from tvm_fuse.cli import main

sys.exit(main())
