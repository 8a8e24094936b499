"""Models into Relay: names and epsilons are kept, and what cannot be read is refused with a type."""

from __future__ import annotations

import pytest

from tests.support.lazy import Lazy
from tvm_fuse.core.errors import UsageError

pytestmark = pytest.mark.relay

load = Lazy("tvm_fuse.relay.load")


@pytest.mark.parametrize("name", ["m.onnx", "m.relay", "m.json", "m.txt"])
def test_a_missing_file_is_a_usage_error(tmp_path, name):
    with pytest.raises(UsageError, match=name):
        load.load_model(tmp_path / name, shapes={})
