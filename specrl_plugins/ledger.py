"""The ledger: what rollouts came to, over a run and since it was last looked at."""

from __future__ import annotations

import logging
from typing import Protocol

from specrl_plugins.cache import CacheError
from specrl_plugins.guard import VerificationGuard
from specrl_plugins.metrics import RolloutCounts

logger = logging.getLogger(__name__)

# Batches in a row with nothing or everything reused, after which a warning is due.
_ONE_SIDED_BATCHES = 5


class Stored(Protocol):
    """What the ledger asks of a cache."""

    def __len__(self) -> int:
        """Trajectories in it."""
        ...

    @property
    def mib(self) -> float:
        """Its size on disk, MiB."""
        ...


class RolloutLedger:
    """Adds up the counts of batches, shows them to the guard, and warns of what looks wrong.

    Args:
        stored (`Stored`): the cache.
        guard (`VerificationGuard`, *optional*): measures whether reuse pays. Defaults to one that may pause it.

    Attributes:
        total (`RolloutCounts`): of all batches.
        guard (`VerificationGuard`): as given.
    """

    def __init__(self, stored: Stored, guard: VerificationGuard | None = None):
        self._stored = stored
        self.guard = guard or VerificationGuard()
        self.total = RolloutCounts()
        self._since_taken = RolloutCounts()
        self._one_sided = 0  # batches in a row whose drafts were all reused; below 0: all rejected

    def observe(self, counts: RolloutCounts) -> None:
        """Add up the counts of a batch that is stored; the guard looks at them."""
        self.total += counts
        self._since_taken += counts
        self.guard.observe(counts)
        self._watch(counts)

    def take_metrics(self) -> dict[str, float]:
        """Metrics of all batches stored since the last call, see [`RolloutCounts.metrics`]; empty without any.

        `spec/cache_rows` (trajectories in the cache) and `spec/cache_mib` (its size on disk, MiB) come with them.
        """
        counts, self._since_taken = self._since_taken, RolloutCounts()
        if not counts.rows:
            return {}
        metrics = counts.metrics()
        try:
            metrics |= {"spec/cache_rows": float(len(self._stored)), "spec/cache_mib": self._stored.mib}
        except CacheError as error:  # a damaged file, which the next batch that is stored replaces
            logger.warning("%s", error)
        return metrics

    def _watch(self, counts: RolloutCounts) -> None:
        """Say so where reuse has silently stopped working, or nothing new is sampled any more."""
        if not counts.verified_rows:
            return
        side = {0: -1, counts.completion_tokens: 1}.get(counts.reused_tokens, 0)
        self._one_sided = self._one_sided + side if self._one_sided * side > 0 else side
        if abs(self._one_sided) == _ONE_SIDED_BATCHES:
            logger.warning(
                "In %d batches in a row %s. %s",
                _ONE_SIDED_BATCHES,
                "every draft was rejected from its first token on" if not counts.reused_tokens else "all was reused",
                "Verifying is in vain: is the learning rate very high, or the scorer not the one of the cache?"
                if not counts.reused_tokens
                else "Nothing new is sampled: raise the refresh rate, set a carry-over limit or lower the lenience.",
            )
