"""Which drafts are worth a visit to a GPU: most of them the best by score, a few from all over its range.

With the best alone, times would say whether these are fast, and nothing about whether the score is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Callable, TypeVar

__all__ = ["choose_shortlist"]

_Draft = TypeVar("_Draft")
_Kept = TypeVar("_Kept")

#: One of so many comes from the range below the best.
_SPREAD = 4
#: So many drafts are verified for each one that is wanted, at the most.
_MOST_TRIED = 3


def choose_shortlist(
    ranked: Sequence[_Draft], count: int, verify: Callable[[_Draft], _Kept | None]
) -> tuple[_Kept, ...]:
    """Verify drafts until there are enough.

    Args:
        ranked: Drafts, the best by score first.
        count: How many are wanted.
        verify: What a draft becomes; None where it is rejected.

    Returns:
        At most ``count``: the best that pass, then those from the range.
    """
    spread = count // _SPREAD
    tries = iter(range(_MOST_TRIED * count))
    kept: list[_Kept] = []
    used: set[int] = set()
    for index in _while_allowed(range(len(ranked)), tries):
        if len(kept) >= count - spread:
            break
        used.add(index)
        found = verify(ranked[index])
        kept += [] if found is None else [found]
    for wanted in range(spread):
        for index in _while_allowed(_near(_place(wanted, spread, len(ranked)), len(ranked), used), tries):
            used.add(index)
            found = verify(ranked[index])
            if found is not None:
                kept.append(found)
                break
    return tuple(kept)


def _while_allowed(indices: Sequence[int], tries: Iterator[int]) -> Iterator[int]:
    for index in indices:
        if next(tries, None) is None:
            return
        yield index


def _place(number: int, count: int, size: int) -> int:
    """Evenly over the half below the middle: the last one is the worst by score."""
    return size // 2 + (size - 1 - size // 2) * (number + 1) // count


def _near(place: int, size: int, used: set[int]) -> list[int]:
    """Indices that are free, the nearest to a place first."""
    return sorted((index for index in range(size) if index not in used), key=lambda index: abs(index - place))
