"""A response in the making: one row of a rollout, from its draft to its reward. All that changes a row is here."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specrl_plugins.acceptance import ReusePolicy, first
from specrl_plugins.engine import Continuation
from specrl_plugins.metrics import RolloutCounts
from specrl_plugins.trajectory import FinishReason, Trajectory

_NO_TOKENS = np.empty(0, np.int32)
_NO_LOGPROBS = np.empty(0, np.float32)
_NO_AGES = np.empty(0, np.uint16)
_OLDEST = np.iinfo(np.uint16).max


@dataclass(slots=True, eq=False)
class Response:
    """One row of a rollout, from its draft to its reward.

    Args:
        prompt (`list[int]`): token ids of the prompt.
        key (`bytes`), slot (`int`): what the row is stored under.
        draft (`Trajectory`, *optional*): the past response that is verified.
        draft_tokens (`NDArray[np.int32]` of shape `(draft tokens,)`): that response, cut to the cap of today
            and to what can be scored.
        draft_logprobs (`NDArray[np.float32]` of shape `(draft tokens,)`): log q of the draft, nats, once scored; minus
            infinity for a token that the current policy cannot sample.
        prefix (`int`): how many of the draft's tokens are reused.
        past (`NDArray[np.int32]` of shape `(past tokens,)`): the past response that an engine may draft from, whether
            it is verified or not.
        tokens, logprobs, ages (arrays of shape `(tokens,)`): the response so far; log-probs in nats, ages in visits.
        finish_reason (`"stop"`, `"length"` or `"pruned"`, *optional*): how it ended; `None` while it goes on.
    """

    prompt: list[int]
    key: bytes
    slot: int
    draft: Trajectory | None = None
    draft_tokens: NDArray[np.int32] = field(default_factory=lambda: _NO_TOKENS)
    draft_logprobs: NDArray[np.float32] = field(default_factory=lambda: _NO_LOGPROBS)
    prefix: int = 0
    tokens: NDArray[np.int32] = field(default_factory=lambda: _NO_TOKENS)
    logprobs: NDArray[np.float32] = field(default_factory=lambda: _NO_LOGPROBS)
    ages: NDArray[np.uint16] = field(default_factory=lambda: _NO_AGES)
    finish_reason: FinishReason | None = None
    past: NDArray[np.int32] = field(default_factory=lambda: _NO_TOKENS)

    @property
    def reused_whole(self) -> bool:
        """Whether nothing had to be generated: its log-probs are all the scorer's."""
        return 0 < self.prefix == len(self.tokens)

    def offer(
        self,
        draft: Trajectory,
        policy: ReusePolicy,
        vocab_size: int,
        cap: int,
        step: int,
        max_scored: int | None,
        counts: RolloutCounts,
    ) -> None:
        """Take what the cache holds as the draft, where it can be used, up to the cap and to what can be scored."""
        if not self.recall(draft, vocab_size, step, counts):
            return
        room = cap if max_scored is None else min(cap, max_scored - len(self.prompt))
        if policy.refreshes(self.key, self.slot, step):
            counts.refreshed_rows += 1
        elif policy.outlived(draft.ages):
            counts.outlived_rows += 1
        elif room < 1:
            counts.dropped_length += 1
        elif int(draft.tokens[:room].max()) >= vocab_size:
            counts.dropped_vocabulary += 1
        else:
            self.draft, self.draft_tokens = draft, draft.tokens[:room]

    def recall(self, past: Trajectory, vocab_size: int, step: int, counts: RolloutCounts) -> bool:
        """Keep what the cache holds for an engine to draft from; returns whether it is of an earlier step."""
        # A batch of this very step may have met the prompt too: its responses are this policy's, not past ones.
        if past.step >= step:
            return False
        counts.draft_rows += 1
        if int(past.tokens.max()) < vocab_size:
            self.past = past.tokens
        return True

    def take_scores(self, logprobs: NDArray, counts: RolloutCounts) -> None:
        """Keep the draft's log-probs under the current policy; drop the draft where one of them is no log-prob."""
        if len(logprobs) != len(self.draft_tokens):
            raise ValueError(f"the engine scored {len(logprobs)} of {len(self.draft_tokens)} draft tokens")
        if not logprobs.max() < np.inf:  # nor is a NaN
            counts.dropped_nonfinite += 1
            self.draft = None
            return
        self.draft_logprobs = logprobs
        counts.verified_rows += 1
        counts.drafted_tokens += len(logprobs)

    def accept(self, prefix: int, cap: int) -> None:
        """Begin with the verified prefix of the draft, with the log-probs of today."""
        assert self.draft is not None
        self.prefix = prefix
        self.tokens = self.draft_tokens[:prefix]
        self.logprobs = self.draft_logprobs[:prefix]
        self.ages = np.minimum(self.draft.ages[:prefix], _OLDEST - 1) + np.uint16(1)
        if prefix == len(self.draft.tokens) and self.draft.finish_reason == "stop":
            self.finish_reason = "stop"
        elif prefix == cap:
            self.finish_reason = "length"

    def budget(self, until: int, max_context: int | None) -> int:
        """Tokens to generate before the response ends or is `until` tokens long; ends it where none fits."""
        if self.finish_reason is not None:
            return 0
        budget = until - len(self.tokens)
        if len(self.tokens) and max_context is not None:
            room = max_context - len(self.prompt) - len(self.tokens)
            if room <= 0:
                self.finish_reason = "length"
                return 0
            budget = min(budget, room)
        return max(budget, 0)

    def extend(self, continuation: Continuation, cap: int, until: int, counts: RolloutCounts) -> None:
        """Go on with what the engine generated."""
        self.tokens = np.concatenate([self.tokens, continuation.tokens])
        self.logprobs = np.concatenate([self.logprobs, continuation.logprobs])
        self.ages = np.concatenate([self.ages, np.zeros(len(continuation.tokens), np.uint16)])
        if continuation.finish_reason == "stop" or len(self.tokens) == cap:
            self.finish_reason = continuation.finish_reason
        elif len(self.tokens) < until:  # the context of the engine is full
            self.finish_reason = "length"
        counts.generated_tokens += len(continuation.tokens)

    def count(self, counts: RolloutCounts) -> None:
        """Add what came of the row."""
        counts.completion_tokens += len(self.tokens)
        if not self.prefix:
            return
        assert self.draft is not None
        counts.reused_tokens += self.prefix
        counts.reuse_rows += 1
        counts.full_reuse_rows += self.reused_whole and self.finish_reason != "pruned"
        counts.log_ratio_sum += float((self.logprobs[: self.prefix] - self.draft.logprobs[: self.prefix]).sum())
        counts.age_sum += int(self.ages[: self.prefix].sum())

    def behaviour_logprobs(self, policy: ReusePolicy) -> NDArray[np.float32]:
        """Log-probs of shape `(tokens,)`, nats, under what wrote each token: see [`ReusePolicy.behaviour_logprobs`] for
        those that were reused; the others are the engine's."""
        if not self.prefix:
            return self.logprobs
        assert self.draft is not None
        reused = policy.behaviour_logprobs(self.draft.logprobs[: self.prefix], self.logprobs[: self.prefix])
        return np.concatenate([reused, self.logprobs[self.prefix :]])

    def count_reward(self, reward: float, counts: RolloutCounts) -> None:
        """Add its reward; NaN where it has none."""
        if math.isnan(reward):
            return
        if self.prefix:
            counts.reuse_reward_sum += float(reward)
            counts.reuse_rewards += 1
        else:
            counts.fresh_reward_sum += float(reward)
            counts.fresh_rewards += 1

    def trajectory(
        self, cap: int, step: int, logprobs: NDArray | None = None, reward: float | None = None
    ) -> Trajectory | None:
        """What is stored of it; `None` where a log-prob is no number, or nothing can be stored.

        Where a log-prob is minus infinity, what comes before is stored, as a response that was cut: the scorer and
        the engine that sampled the token differ by rounding, and so about the last token that a cut of the support
        keeps. No scorer could accept it as a draft.

        Args:
            cap, step (`int`): of the rollout.
            logprobs (`NDArray` of shape `(tokens,)`, *optional*): nats, where better known than while generating.
            reward (`float`, *optional*): NaN and `None` alike say that there is none.
        """
        p = self.logprobs if logprobs is None else logprobs
        length = first(~np.isfinite(p))
        if not length or (length < len(p) and p[length] != -np.inf):
            return None
        finish_reason = self.finish_reason if length == len(p) else "length"
        return Trajectory(
            prompt=self.key,
            slot=self.slot,
            tokens=self.tokens[:length],
            logprobs=np.minimum(p[:length], 0.0, dtype=np.float32),
            ages=self.ages[:length],
            finish_reason=finish_reason or "length",
            cap=cap,
            step=step,
            reward=None if reward is None or math.isnan(reward) else float(reward),
        )


def count_rewards(
    responses: Sequence[Response],
    rewards: Sequence[float],
    counts: RolloutCounts,
    others: Sequence[tuple[bytes, float]] = (),
) -> None:
    """Add the rewards of a batch, or of all responses to a prompt.

    Args:
        responses (`Sequence[Response]` of length `batch`).
        rewards (`Sequence[float]` of length `batch`): NaN for a row that has none.
        counts (`RolloutCounts`): what they are added to.
        others (`Sequence[tuple[bytes, float]]`, *optional*): key of the prompt and reward of rows that are not counted
            here, but may be of the same prompts.
    """
    of_prompts = defaultdict(list)
    own = [(response.key, float(reward)) for response, reward in zip(responses, rewards, strict=True)]
    for key, reward in [*own, *others]:
        if math.isfinite(reward):
            of_prompts[key].append(reward)
    variances = {key: float(np.var(known, ddof=1)) for key, known in of_prompts.items() if len(known) > 1}
    for response, (key, reward) in zip(responses, own, strict=True):
        response.count_reward(reward, counts)
        before = response.draft.reward if response.prefix and response.draft is not None else None
        if before is not None and math.isfinite(before) and math.isfinite(reward) and key in variances:
            counts.reward_changes += 1
            counts.reward_change_sum += (reward - before) ** 2 / 2
            counts.reward_spread_sum += variances[key]
