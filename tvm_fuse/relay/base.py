"""TVM, found and imported once for the modules of this package."""

from __future__ import annotations

from tvm_fuse.relay.compat import load_tvm, require_relay

__all__ = ["relay", "tvm"]

tvm = load_tvm()
relay = require_relay()
