"""The ledger: what rollouts came to, over a run and since it was last looked at."""

from __future__ import annotations

import logging
import time
from typing import Protocol

from specrl_plugins.cache import CacheError
from specrl_plugins.guard import VerificationGuard
from specrl_plugins.metrics import RolloutCounts

logger = logging.getLogger(__name__)

# Batches in a row with nothing or everything reused, or nothing stored, after which a warning is due.
_ONE_SIDED_BATCHES = 5

# What kept all drafts of a batch from being reused, or all responses from being stored, by what counts them.
_NOT_REUSED = {
    "verified_rows": "every draft was rejected from its first token on. Verifying is in vain: is the learning rate "
    "very high, or the scorer not the one of the cache?",
    "dropped_length": "prompts leave no room in the context of the engine that scores. Give it a longer context, or "
    "use shorter prompts.",
    "dropped_vocabulary": "drafts hold token ids that the model does not have. Does another model write to this cache?",
    "dropped_nonfinite": "drafts have log-probs that are NaN or infinite under the current policy. The model or the "
    "engine that scores is broken (diverged weights?).",
}
_NOT_STORED = {
    "nonfinite_rows": "their log-probs are NaN or infinite. The model, or the engine that samples or scores, is broken "
    "(diverged weights?).",
    "refused_rows": "the cache could not be written. An earlier warning says why (a full disk?).",
}


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
        self._stored_at: float | None = None
        self._left_out_s = 0.0
        self._all_reused, self._none_reused, self._none_stored = _Streak(), _Streak(), _Streak()

    def lap(self) -> float:
        """Seconds since the last call, which follows the storing of each batch; 0 for the first one."""
        before, self._stored_at = self._stored_at, time.perf_counter()
        left_out, self._left_out_s = self._left_out_s, 0.0
        return 0.0 if before is None else self._stored_at - before - left_out

    def leave_out(self, seconds: float) -> None:
        """Let these seconds not count, since training stood still (an evaluation, a checkpoint)."""
        self._left_out_s += seconds

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
        if self._none_stored.is_due(counts, counts.unstored_rows >= counts.rows > 0):
            reason = self._none_stored.main_reason(_NOT_STORED)
            logger.warning("In %d batches in a row no response was stored: %s", _ONE_SIDED_BATCHES, reason)
        if not counts.verified_rows + counts.dropped_drafts:
            return  # no drafts, or none that the refresh rate and the carry-over limit left
        if self._none_reused.is_due(counts, not counts.reused_tokens):
            reason = self._none_reused.main_reason(_NOT_REUSED)
            logger.warning("In %d batches in a row nothing was reused: %s", _ONE_SIDED_BATCHES, reason)
        if self._all_reused.is_due(counts, counts.reused_tokens == counts.completion_tokens):
            logger.warning(
                "In %d batches in a row all was reused. Nothing new is sampled: raise the refresh rate, set a "
                "carry-over limit or lower the lenience.",
                _ONE_SIDED_BATCHES,
            )


class _Streak:
    """Batches in a row of one kind, and their counts."""

    def __init__(self) -> None:
        self._batches = 0
        self._counts = RolloutCounts()

    def is_due(self, counts: RolloutCounts, is_one: bool) -> bool:
        """Take a batch into account; whether it makes the streak long enough for a warning, which it does once."""
        self._batches = self._batches + 1 if is_one else 0
        self._counts = self._counts + counts if is_one else RolloutCounts()
        return self._batches == _ONE_SIDED_BATCHES

    def main_reason(self, texts: dict[str, str]) -> str:
        """The text of the largest of its counts, by the names of these."""
        return texts[max(texts, key=lambda name: getattr(self._counts, name))]
