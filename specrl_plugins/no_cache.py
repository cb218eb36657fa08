"""A cache that keeps nothing, for runs that prune without reusing."""

from __future__ import annotations

from collections.abc import Sequence

from specrl_plugins.trajectory import Trajectory


class NoCache:
    """Stands in for a [`TrajectoryCache`]: takes everything, has nothing, and touches no disk."""

    mib = 0.0
    corrupt = 0

    def __len__(self) -> int:
        return 0

    def get_many(self, keys: Sequence[tuple[bytes, int]]) -> list[Trajectory | None]:
        """See [`TrajectoryCache.get_many`]."""
        return [None] * len(keys)

    def put_many(self, trajectories: Sequence[Trajectory]) -> None:
        """See [`TrajectoryCache.put_many`]."""

    def rewind(self, step: int) -> int:
        """See [`TrajectoryCache.rewind`]."""
        return 0

    def checkpoint(self, step: int, forget: bool = True) -> None:
        """See [`TrajectoryCache.checkpoint`]."""

    def claim(self) -> None:
        """See [`TrajectoryCache.claim`]."""

    def release(self) -> None:
        """See [`TrajectoryCache.release`]."""
