"""The speculative rollout: draft, verify, accept, continue, store."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specrl_plugins.acceptance import ReusePolicy
from specrl_plugins.cache import CacheError, CacheWriteError, TrajectoryCache
from specrl_plugins.engine import Engine
from specrl_plugins.guard import VerificationGuard
from specrl_plugins.metrics import RolloutCounts
from specrl_plugins.trajectory import FinishReason, Trajectory, assign_slots, prompt_key

logger = logging.getLogger(__name__)

_NO_TOKENS = np.empty(0, np.int32)
_NO_LOGPROBS = np.empty(0, np.float32)
_NO_AGES = np.empty(0, np.uint16)
_OLDEST = np.iinfo(np.uint16).max
# Above this share of drafts without finite log-probs, over at least so many, something is broken.
_NONFINITE_SHARE, _NONFINITE_ROWS = 0.5, 16
# Batches in a row with nothing or everything reused, after which a warning is due.
_ONE_SIDED_BATCHES = 5


@dataclass(slots=True, eq=False)
class Response:
    """One row of a rollout, from its draft to its reward.

    Args:
        prompt (`list[int]`): token ids of the prompt.
        key (`bytes`), slot (`int`): what the row is stored under.
        draft (`Trajectory`, *optional*): the past response that is verified.
        draft_tokens (`NDArray[np.int32]` of shape `(draft tokens,)`): that response, cut to the cap of today.
        draft_logprobs (`NDArray[np.float32]` of shape `(draft tokens,)`): log q of the draft, nats, once scored.
        prefix (`int`): how many of the draft's tokens are reused.
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

    @property
    def reused_whole(self) -> bool:
        """Whether nothing had to be generated: its log-probs are all the scorer's."""
        return 0 < self.prefix == len(self.tokens)


@dataclass(eq=False)
class Rollout:
    """A batch of responses, in the order of the prompts, with what it took to make them."""

    responses: list[Response]
    cap: int
    step: int
    counts: RolloutCounts


class SpeculativeRollout:
    """Makes rollouts out of past ones.

    Args:
        cache (`TrajectoryCache`):
            Where past responses are kept.
        policy (`ReusePolicy`):
            Which drafts are looked at, and how much of each is kept.
        vocab_size (`int`):
            Token ids from here on do not exist in the model.
        guard (`VerificationGuard`, *optional*):
            Measures whether reuse pays, and pauses it while it does not. Defaults to one that may.
    """

    def __init__(
        self,
        cache: TrajectoryCache,
        policy: ReusePolicy,
        vocab_size: int,
        guard: VerificationGuard | None = None,
    ):
        self.cache = cache
        self.policy = policy
        self.vocab_size = vocab_size
        self.guard = guard or VerificationGuard()
        self.total = RolloutCounts()
        self._since_taken = RolloutCounts()
        self._warned_unstored = False
        self._one_sided = 0  # batches in a row whose drafts were all rejected, or all reused

    def run(
        self,
        engine: Engine,
        prompts: Sequence[list[int]],
        cap: int,
        step: int,
        pause_at: int | None = None,
        keep: Callable[[list[Response]], Sequence[bool]] | None = None,
    ) -> Rollout:
        """Roll out a batch: one response a prompt. Nothing is stored before [`store`].

        Args:
            engine (`Engine`):
                The current policy.
            prompts (`batch` lists of `prompt tokens` ids):
                A prompt that is to be sampled several times occurs as often.
            cap (`int`):
                Most tokens of a response.
            step (`int`):
                Number, from 1, of the optimizer step that the rollout is for.
            pause_at (`int`, *optional*):
                Length, at least 1, at which responses halt for `keep`; those that end before are not asked about.
            keep (callable, *optional*):
                Says of each halted response whether it goes on; one that does not is finished as `pruned`.

        Raises:
            ValueError: most drafts have log-probs that are not finite, so the scorer is broken.
        """
        counts = RolloutCounts(rows=len(prompts))
        keys = [prompt_key(prompt) for prompt in prompts]
        responses = [
            Response(prompt, key, slot) for prompt, key, slot in zip(prompts, keys, assign_slots(keys), strict=True)
        ]
        with _timed(counts, "lookup_s"):
            self._look_up(responses, cap, step, engine.max_context, counts)
        with _timed(counts, "verify_s"):
            self._verify(responses, engine, counts)
            self._accept(responses, cap, step)
        with _timed(counts, "generate_s"):
            if pause_at is None or keep is None:
                self._generate(responses, engine, cap, cap, counts)
            else:
                self._generate(responses, engine, cap, pause_at, counts)
                halted = [response for response in responses if response.finish_reason is None]
                for response, goes_on in zip(halted, keep(halted), strict=True):
                    if not goes_on:
                        response.finish_reason = "pruned"
                self._generate(responses, engine, cap, cap, counts)
        self._count(responses, counts)
        return Rollout(responses, cap, step, counts)

    def store(
        self,
        rollout: Rollout,
        logprobs: Sequence[NDArray | None] | None = None,
        rewards: Sequence[float] | None = None,
    ) -> None:
        """Keep the responses of a rollout as drafts for the next visit, and add up its counts.

        Args:
            rollout (`Rollout`):
                What [`run`] returned.
            logprobs (`batch` arrays of shape `(tokens,)`, *optional*):
                Log-probs of the responses by the scorer, nats, where they are better known than while generating.
            rewards (`Sequence[float]` of length `batch`, *optional*):
                Their rewards; NaN for a row that has none.
        """
        counts = rollout.counts
        if rewards is not None:
            self._count_rewards(rollout.responses, rewards, counts)
        with _timed(counts, "store_s"):
            trajectories = []
            for row, response in enumerate(rollout.responses):
                given = None if logprobs is None else logprobs[row]
                p = response.logprobs if given is None else given
                if not np.isfinite(p).all():
                    counts.unstored_rows += 1
                    continue
                reward = None if rewards is None or np.isnan(rewards[row]) else float(rewards[row])
                trajectories.append(
                    Trajectory(
                        prompt=response.key,
                        slot=response.slot,
                        tokens=response.tokens,
                        logprobs=np.minimum(p, 0.0, dtype=np.float32),
                        ages=response.ages,
                        finish_reason=response.finish_reason or "length",
                        cap=rollout.cap,
                        step=rollout.step,
                        reward=reward,
                    )
                )
            try:
                self.cache.put_many(trajectories)
            except CacheWriteError as error:  # training goes on: what is not stored is only sampled again
                counts.unstored_rows += len(trajectories)
                if not self._warned_unstored:
                    self._warned_unstored = True
                    logger.warning("%s\nTraining goes on; these prompts will be sampled afresh.", error)
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
            metrics |= {"spec/cache_rows": float(len(self.cache)), "spec/cache_mib": self.cache.mib}
        except CacheError as error:  # a damaged file, which the next batch that is stored replaces
            logger.warning("%s", error)
        return metrics

    def _look_up(
        self, responses: list[Response], cap: int, step: int, max_context: int | None, counts: RolloutCounts
    ) -> None:
        """Give each row its draft, where it has one that can be used."""
        if self.guard.paused:
            counts.paused_rows += len(responses)
            return
        drafts = self.cache.get_many([(response.key, response.slot) for response in responses])
        for response, draft in zip(responses, drafts, strict=True):
            # A batch of this very step may have met the prompt too: its responses are this policy's, not past ones.
            if draft is None or draft.step >= step:
                continue
            counts.draft_rows += 1
            tokens = draft.tokens[:cap]
            if self.policy.refreshes(response.key, response.slot, step):
                counts.refreshed_rows += 1
            elif self.policy.outlived(draft.ages):
                counts.outlived_rows += 1
            elif int(tokens.max()) >= self.vocab_size:
                counts.dropped_vocabulary += 1
            elif max_context is not None and len(response.prompt) + len(tokens) > max_context:
                counts.dropped_length += 1
            else:
                response.draft, response.draft_tokens = draft, tokens

    def _verify(self, responses: list[Response], engine: Engine, counts: RolloutCounts) -> None:
        """Score all drafts under the current policy, in one call."""
        drafted = [response for response in responses if response.draft is not None]
        if not drafted:
            return
        scored = engine.score(
            [response.prompt for response in drafted], [response.draft_tokens for response in drafted]
        )
        nonfinite = 0
        for response, logprobs in zip(drafted, scored, strict=True):
            if len(logprobs) != len(response.draft_tokens):
                raise ValueError(f"the engine scored {len(logprobs)} of {len(response.draft_tokens)} draft tokens")
            if not np.isfinite(logprobs).all():
                nonfinite += 1
                response.draft = None
                continue
            response.draft_logprobs = logprobs
            counts.verified_rows += 1
            counts.drafted_tokens += len(logprobs)
        counts.dropped_nonfinite += nonfinite
        if len(drafted) >= _NONFINITE_ROWS and nonfinite > _NONFINITE_SHARE * len(drafted):
            raise ValueError(
                f"{nonfinite} of {len(drafted)} drafts have log-probs that are not finite under the current policy: "
                "the model or the engine that scores is broken (diverged weights?)."
            )

    def _accept(self, responses: list[Response], cap: int, step: int) -> None:
        """Keep the verified prefix of each draft, with the log-probs of today."""
        drafted = [response for response in responses if response.draft is not None]
        prefixes = self.policy.prefix_lengths(
            [(response.key, response.slot) for response in drafted],
            step,
            old=[r.draft.logprobs[: len(r.draft_tokens)] for r in drafted if r.draft is not None],
            new=[response.draft_logprobs for response in drafted],
        )
        for response, prefix in zip(drafted, prefixes.tolist(), strict=True):
            draft = response.draft
            assert draft is not None
            response.prefix = prefix
            response.tokens = response.draft_tokens[:prefix]
            response.logprobs = response.draft_logprobs[:prefix]
            response.ages = np.minimum(draft.ages[:prefix], _OLDEST - 1) + np.uint16(1)
            if prefix == len(draft.tokens) and draft.finish_reason == "stop":
                response.finish_reason = "stop"
            elif prefix == cap:
                response.finish_reason = "length"

    def _generate(self, responses: list[Response], engine: Engine, cap: int, until: int, counts: RolloutCounts) -> None:
        """Continue every unfinished row to its end or to `until` tokens, all in one call."""
        until = min(until, cap)
        going, budgets = [], []
        for response in responses:
            if response.finish_reason is not None:
                continue
            budget = until - len(response.tokens)
            if len(response.tokens) and engine.max_context is not None:
                room = engine.max_context - len(response.prompt) - len(response.tokens)
                if room <= 0:
                    response.finish_reason = "length"
                    continue
                budget = min(budget, room)
            if budget > 0:
                going.append(response)
                budgets.append(budget)
        if not going:
            return
        continuations = engine.generate([r.prompt + r.tokens.tolist() for r in going], budgets)
        for response, continuation in zip(going, continuations, strict=True):
            response.tokens = np.concatenate([response.tokens, continuation.tokens])
            response.logprobs = np.concatenate([response.logprobs, continuation.logprobs])
            response.ages = np.concatenate([response.ages, np.zeros(len(continuation.tokens), np.uint16)])
            if continuation.finish_reason == "stop" or len(response.tokens) == cap:
                response.finish_reason = continuation.finish_reason
            elif len(response.tokens) < until:  # the context of the engine is full
                response.finish_reason = "length"
            counts.generated_tokens += len(continuation.tokens)

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

    @staticmethod
    def _count(responses: list[Response], counts: RolloutCounts) -> None:
        for response in responses:
            counts.completion_tokens += len(response.tokens)
            if not response.prefix:
                continue
            assert response.draft is not None
            prefix = response.prefix
            counts.reused_tokens += prefix
            counts.reuse_rows += 1
            counts.full_reuse_rows += response.reused_whole
            counts.log_ratio_sum += float((response.logprobs[:prefix] - response.draft.logprobs[:prefix]).sum())
            counts.age_sum += int(response.ages[:prefix].sum())

    @staticmethod
    def _count_rewards(responses: list[Response], rewards: Sequence[float], counts: RolloutCounts) -> None:
        for response, reward in zip(responses, rewards, strict=True):
            if np.isnan(reward):
                continue
            if response.prefix:
                counts.reuse_reward_sum += float(reward)
                counts.reuse_rewards += 1
            else:
                counts.fresh_reward_sum += float(reward)
                counts.fresh_rewards += 1


@contextmanager
def _timed(counts: RolloutCounts, name: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        setattr(counts, name, getattr(counts, name) + time.perf_counter() - start)
