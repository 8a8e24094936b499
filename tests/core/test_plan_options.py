"""Options of a plan: what is refused before any graph is looked at."""

from __future__ import annotations

import pytest

from tvm_fuse.core.errors import UsageError
from tvm_fuse.core.plan_options import PlanOptions


@pytest.mark.parametrize(
    ("options", "match"),
    [({"fuse": "some"}, "all, none, got 'some'"), ({"max_ops": 0}, "1 or more, got 0")],
    ids=["fuse", "max_ops"],
)
def test_refused(options, match):
    with pytest.raises(UsageError, match=match):
        PlanOptions(**options)


@pytest.mark.parametrize("options", [{}, {"fuse": "none"}, {"max_ops": 1}], ids=str)
def test_allowed(options):
    assert PlanOptions(**options).accept is None
