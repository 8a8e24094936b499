"""Shortlists: the best, a few from the range, nothing twice, a bounded number of tries."""

from __future__ import annotations

import pytest

from tvm_fuse.core.tuning.shortlist import choose_shortlist


def choose(size, count, rejected=()):
    tried = []

    def verify(draft):
        tried.append(draft)
        return None if draft in rejected else draft

    return choose_shortlist(range(size), count, verify), tried


@pytest.mark.parametrize(
    ("size", "count", "wanted"),
    [
        pytest.param(100, 8, (0, 1, 2, 3, 4, 5, 74, 99), id="six of the best, two of the range"),
        pytest.param(100, 2, (0, 1), id="too few for a range"),
        pytest.param(100, 1, (0,), id="one"),
        pytest.param(5, 8, (0, 1, 2, 3, 4), id="all there are"),
        pytest.param(0, 8, (), id="none"),
    ],
)
def test_who_is_chosen(size, count, wanted):
    chosen, tried = choose(size, count)
    assert chosen == wanted
    assert len(tried) == len(set(tried))


def test_those_that_are_rejected_are_replaced_by_the_next():
    assert choose(100, 8, {0, 3, 99})[0] == (1, 2, 4, 5, 6, 7, 74, 98)


def test_tries_are_bounded():
    chosen, tried = choose(1000, 8, set(range(1000)))
    assert (chosen, len(tried)) == ((), 24)
