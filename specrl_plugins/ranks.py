"""The processes that train together, and what they have to agree on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Ranks(Protocol):
    """The processes that train together. Every rank makes the same calls, in the same order, or all of them wait."""

    @property
    def index(self) -> int:
        """Number of this rank, from 0."""
        ...

    @property
    def nodes(self) -> Sequence[int]:
        """Number, from 0, of the node that each rank runs on, of length `ranks`."""
        ...

    def gather(self, mine: T) -> list[T]:
        """What each rank has, in the order of ranks. Returns once all have called it."""
        ...


class OneRank:
    """A process that trains alone."""

    index = 0
    nodes = (0,)

    def gather(self, mine: T) -> list[T]:
        """See [`Ranks.gather`]."""
        return [mine]


def leads_node(ranks: Ranks) -> bool:
    """Whether this rank is the first one of its node."""
    return ranks.nodes.index(ranks.nodes[ranks.index]) == ranks.index


def together(ranks: Ranks, work: Callable[[], T]) -> T:
    """Do something on every rank. Where it fails on one it fails on all, so that none waits for the others.

    Args:
        ranks (`Ranks`): the ranks, all of which call this.
        work (callable): makes no collective call.

    Raises:
        Exception: what `work` raised on this rank.
        RuntimeError: it failed on another one.
    """
    result: list[T] = []
    failure: Exception | None = None
    try:
        result.append(work())
    except Exception as error:  # whatever it is, the other ranks must hear of it
        failure = error
    failures = [text for text in ranks.gather(failure and f"{type(failure).__name__}: {failure}") if text]
    if failure is not None:
        raise failure
    if failures:
        raise RuntimeError(f"another rank failed: {failures[0]}")
    return result[0]


def own_rows(ranks: Ranks, gathered: Sequence[Sequence[object]]) -> slice:
    """Where this rank's rows are among those of all ranks.

    Args:
        ranks (`Ranks`): the ranks.
        gathered (`Sequence` of length `ranks`): the rows of each, as [`Ranks.gather`] returns them.
    """
    start = sum(len(rows) for rows in gathered[: ranks.index])
    return slice(start, start + len(gathered[ranks.index]))
