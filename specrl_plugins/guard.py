"""The guard: whether verifying drafts pays, by measurement."""

from __future__ import annotations

import logging
import statistics
from collections import deque

from specrl_plugins.metrics import RolloutCounts

logger = logging.getLogger(__name__)


class VerificationGuard:
    """Compares the seconds a completion token costs with and without drafts, and pauses drafts that save too little.

    Reuse has a price beside its seconds: responses that are carried over teach less than new ones. So it has to save
    something.

    While paused, rollouts are plain, which measures their cost anew (responses grow shorter or longer as the policy
    learns); then drafts get another chance. A second failure in a row pauses twice as long.

    Args:
        samples (`int`, *optional*, defaults to `3`):
            Batches of each kind that are measured before a verdict.
        saving (`float`, *optional*, defaults to `0.1`):
            Share of the plain cost that drafts must save, or they do not pay.
        pause (`int`, *optional*, defaults to `4`):
            Batches of the first pause.
        longest_pause (`int`, *optional*, defaults to `64`):
            Batches of the longest one.
        may_pause (`bool`, *optional*, defaults to `True`):
            Whether to pause at all, or only to measure.
    """

    def __init__(
        self,
        samples: int = 3,
        saving: float = 0.1,
        pause: int = 4,
        longest_pause: int = 64,
        may_pause: bool = True,
    ):
        self.saving = saving
        self.may_pause = may_pause
        self._plain: deque[float] = deque(maxlen=samples)
        self._reusing: deque[float] = deque(maxlen=samples)
        self._first_pause = self._next_pause = pause
        self._longest_pause = longest_pause
        self._paused_for = 0
        self._first_cost: float | None = None
        self._warm = False

    @property
    def plain_cost(self) -> float | None:
        """Seconds a completion token costs without drafts (median); `None` before it was measured."""
        return statistics.median(self._plain) if self._plain else self._first_cost

    @property
    def paused(self) -> bool:
        """Whether drafts are being left aside."""
        return self._paused_for > 0

    def observe(self, counts: RolloutCounts) -> None:
        """Take the counts of one batch into account, once it is stored."""
        if self._paused_for:
            self._paused_for -= 1
        if not counts.trained_tokens:
            return
        cost = counts.seconds / counts.trained_tokens
        if not self._warm:
            # The first batch also pays for compilation and allocation: a reference only where there is no other, and
            # none at all where it already had drafts (a resumed run).
            self._warm = True
            self._first_cost = None if counts.verified_rows else cost
            return
        if not counts.verified_rows:
            self._plain.append(cost)
            return
        self._reusing.append(cost)
        plain = self.plain_cost
        if not self.may_pause or plain is None or len(self._reusing) < (self._reusing.maxlen or 0):
            return
        reusing = statistics.median(self._reusing)
        if reusing <= (1 - self.saving) * plain:
            self._next_pause = self._first_pause
            return
        self._paused_for = self._next_pause
        self._next_pause = min(2 * self._next_pause, self._longest_pause)
        self._reusing.clear()
        self._plain.clear()
        logger.warning(
            "Verifying drafts does not pay at present: a completion token costs %.2f ms with reuse and %.2f ms "
            "without, and reuse is to save %.0f%%, since what is reused teaches less. Reuse pauses for %d batches, "
            "then is tried again. Short responses, a small model, few rows a batch (a single fresh one takes as long "
            "as many) and a policy that changes fast do this. With the guard switched off reuse goes on whatever it "
            "costs.",
            1e3 * reusing,
            1e3 * plain,
            1e2 * self.saving,
            self._paused_for,
        )
