"""The guard: whether reuse pays, by measurement."""

from __future__ import annotations

import logging
import statistics
from collections import deque

from specrl_plugins.metrics import RolloutCounts

logger = logging.getLogger(__name__)


class VerificationGuard:
    """Compares what a training step takes with and without drafts, and pauses drafts that do not pay.

    A step is compared for what it teaches: a response that is carried over, with the reward that it had before, teaches
    less than a new one. So drafts pay where a step takes less time for what is [new][RolloutCounts.new_reward_fraction]
    in it, and a share of the rest.

    While paused, rollouts are plain, which measures their cost anew (responses grow shorter or longer as the policy
    learns); then drafts get another chance. A second failure in a row pauses twice as long. Where there was no
    opportunity to measure plain batches, since prompts come back at once or the run was resumed, or where they were
    measured long ago, a few are made.

    Args:
        samples (`int`, *optional*, defaults to `3`):
            Batches of each kind that are measured before a verdict. It goes by the newest three times as many, where
            there are.
        repeated (`float`, *optional*, defaults to `0.75`):
            What a reward that is that of last time teaches, in parts of what a new one does. Measured were 0.4 to 1
            where the policy moved slowly, and next to nothing where it moved fast (`docs/method.md`, "Freshness").
        pause (`int`, *optional*, defaults to `4`):
            Batches of the first pause.
        longest_pause (`int`, *optional*, defaults to `64`):
            Batches of the longest one, and those for which drafts may pay before plain batches are measured anew.
        may_pause (`bool`, *optional*, defaults to `True`):
            Whether to pause at all, or only to measure.
    """

    def __init__(
        self,
        samples: int = 3,
        repeated: float = 0.75,
        pause: int = 4,
        longest_pause: int = 64,
        may_pause: bool = True,
    ):
        self.samples = samples
        self.repeated = repeated
        self.may_pause = may_pause
        self._plain: deque[RolloutCounts] = deque(maxlen=3 * samples)
        self._reusing: deque[RolloutCounts] = deque(maxlen=3 * samples)
        self._first_pause = self._next_pause = pause
        self._longest_pause = longest_pause
        self._paused_for = 0
        self._paid_for = 0
        self._first_cost: float | None = None

    @property
    def plain_cost(self) -> float | None:
        """Seconds of rollouts that a completion token costs without drafts (median); `None` before it was measured."""
        costs = [counts.seconds / counts.trained_tokens for counts in self._plain]
        return statistics.median(costs) if costs else self._first_cost

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
        if not counts.step_s:
            # The first batch, which also pays for compilation and allocation: a reference only where there is no other,
            # and none at all where it already had drafts (a resumed run).
            self._first_cost = None if counts.verified_rows else counts.seconds / counts.trained_tokens
            return
        (self._reusing if counts.verified_rows else self._plain).append(counts)
        if self.may_pause and not self._paused_for and len(self._reusing) >= self.samples:
            if len(self._plain) < self.samples:
                self._paused_for = self.samples - len(self._plain)
            else:
                self._judge()

    def _judge(self) -> None:
        plain, reusing = _step_cost(self._plain), _step_cost(self._reusing)
        together = sum(self._reusing, RolloutCounts())
        new = together.new_reward_fraction
        if new is None:  # without rewards, what is generated is what is known to be new
            new = together.generated_tokens / together.completion_tokens
        taught = new + self.repeated * (1 - new)
        if reusing <= taught * plain:
            self._next_pause = self._first_pause
            self._paid_for += 1
            if self._paid_for >= self._longest_pause:
                self._paid_for = 0
                self._plain.clear()
            return
        self._paid_for = 0
        self._paused_for = self._next_pause
        self._next_pause = min(2 * self._next_pause, self._longest_pause)
        self._reusing.clear()
        self._plain.clear()
        logger.warning(
            "Reuse does not pay at present: a step takes %.3f ms a completion token with it and %.3f ms without, and "
            "teaches an estimated %.0f%% of what one without does. Reuse pauses for %d batches, then is tried again. "
            "Short responses, a small model, few rows a batch (a single fresh one takes as long as many), a policy "
            "that changes fast, and rewards that are decided early in a response do this. With the guard switched off "
            "reuse goes on whatever it costs.",
            1e3 * reusing,
            1e3 * plain,
            1e2 * taught,
            self._paused_for,
        )


def _step_cost(batches: deque[RolloutCounts]) -> float:
    """Seconds of a step for each completion token that is trained on: the mean without the quickest and the slowest.

    A median would leave out the steps in which most rows start afresh, every third with a carry-over limit of 2.
    """
    costs = sorted(counts.step_s / counts.trained_tokens for counts in batches)
    return statistics.mean(costs[1:-1] or costs)
