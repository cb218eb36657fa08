"""The speculative rollout: draft, verify, accept, continue, store."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, cast

from numpy.typing import NDArray

from specrl_plugins.acceptance import ReusePolicy
from specrl_plugins.cache import CacheWriteError, TrajectoryCache
from specrl_plugins.codec import decode, encode
from specrl_plugins.engine import DraftingEngine, Drafts, Engine, ObservingEngine
from specrl_plugins.guard import VerificationGuard
from specrl_plugins.ledger import RolloutLedger
from specrl_plugins.metrics import RolloutCounts, totals
from specrl_plugins.no_cache import NoCache
from specrl_plugins.ranks import OneRank, Ranks, leads_node, own_rows
from specrl_plugins.response import Response, count_rewards
from specrl_plugins.setting import check_number
from specrl_plugins.trajectory import Trajectory, assign_slots, prompt_key

if TYPE_CHECKING:  # it needs PyTorch
    from specrl_plugins.pruning.groups import GroupPruning, Judged

logger = logging.getLogger(__name__)

# Above this share of rows whose log-probs are none, over at least so many, something is broken.
_NONFINITE_SHARE, _NONFINITE_ROWS = 0.5, 16


@dataclass(eq=False)
class Rollout:
    """A batch of responses, in the order of the prompts, with what it took to make them.

    Args:
        responses (`list[Response]` of length `batch`): one for each prompt.
        cap (`int`), step (`int`): what [`SpeculativeRollout.run`] was told.
        counts (`RolloutCounts`): of all that was started.
        pruned (`list[Response]`, *optional*): what was started besides and is not to be trained on.
        judged (`Judged`, *optional*): what pruning learns from, once rewards are known.
    """

    responses: list[Response]
    cap: int
    step: int
    counts: RolloutCounts
    pruned: list[Response] = field(default_factory=list)
    judged: Judged | None = None


class Mode(StrEnum):
    """What past responses are for."""

    REUSE = "reuse"
    EXACT = "exact"

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise ValueError(f"mode is one of {', '.join(cls)}, not {value!r}")


@dataclass(frozen=True)
class Drafting:
    """How an engine drafts from past responses while it generates.

    Args:
        most_tokens (`int`): tokens of the longest draft in a step of the engine; 0 for none.
        most_rows (`int`): nothing is drafted while more rows than these are running.

    Raises:
        ValueError: a setting is out of its range.
    """

    most_tokens: int = 0
    most_rows: int = 64

    def __post_init__(self) -> None:
        tokens, rows = "a whole number of tokens, 0 or more", "a whole number of rows, at least 1"
        check_number("draft_tokens", self.most_tokens, tokens, lambda value: value >= 0, whole=True)
        check_number("draft_rows", self.most_rows, rows, lambda value: value >= 1, whole=True)


class SpeculativeRollout(RolloutLedger):
    """Makes rollouts out of past ones.

    Args:
        cache (`TrajectoryCache` or `NoCache`):
            Where past responses are kept.
        policy (`ReusePolicy`):
            Which drafts are looked at, and how much of each is kept.
        vocab_size (`int`):
            Token ids from here on do not exist in the model.
        guard (`VerificationGuard`, *optional*):
            Measures whether reuse pays, and pauses it while it does not. Defaults to one that may.
        ranks (`Ranks`, *optional*):
            The processes that train together. Each rolls out rows of its own; a node shares a cache. Defaults to this
            process alone.
        pruning (`GroupPruning`, *optional*):
            Starts more responses than are asked for and gives some up on the way. Its engine must be an
            [`ObservingEngine`]. Defaults to none.
        mode (`Mode`, *optional*, defaults to `"reuse"`):
            Whether verified prefixes are reused; or every response is sampled afresh, and past ones only save time, as
            drafts of the engine.
        drafting (`Drafting`, *optional*):
            How the engine, then a [`DraftingEngine`], drafts what is sampled. Defaults to no drafts.
    """

    def __init__(
        self,
        cache: TrajectoryCache | NoCache,
        policy: ReusePolicy,
        vocab_size: int,
        guard: VerificationGuard | None = None,
        ranks: Ranks | None = None,
        pruning: GroupPruning | None = None,
        mode: Mode = Mode.REUSE,
        drafting: Drafting | None = None,
    ):
        super().__init__(cache, guard)
        self.mode = Mode(mode)
        self.drafting = drafting or Drafting()
        self.cache = cache
        self.ranks = ranks or OneRank()
        self.policy = policy
        self.vocab_size = vocab_size
        self.pruning = pruning
        self._warned_unstored = False
        self._corrupt_before = 0  # what the cache had counted when a batch was last stored

    def run(self, engine: Engine, prompts: Sequence[list[int]], cap: int, step: int) -> Rollout:
        """Roll out a batch: one response a prompt. Nothing is stored before [`store`].

        All ranks call it, each with rows of its own, and make the same calls to their engines: where one rank has
        something to score or to generate, the others take part with empty lists.

        Args:
            engine (`Engine`):
                The current policy.
            prompts (`batch` lists of `prompt tokens` ids):
                A prompt that is to be sampled several times occurs as often.
            cap (`int`):
                Most tokens of a response.
            step (`int`):
                Number, from 1, of the optimizer step that the rollout is for.

        Raises:
            ValueError: most drafts have scores that are no log-probs: a broken scorer.
        """
        keys = [prompt_key(prompt) for prompt in prompts]
        rows = list(range(len(prompts))) if self.pruning is None else self.pruning.starts(keys)
        counts = RolloutCounts(rows=len(rows))
        responses = [
            Response(prompts[row], keys[row], slot)
            for row, slot in zip(rows, self._slots([keys[row] for row in rows]), strict=True)
        ]
        with timed(counts, "lookup_s"):
            self._look_up(responses, cap, step, engine.max_scored, counts)
        with timed(counts, "verify_s"):
            self._verify(responses, engine, counts)
            self._accept(responses, cap, step)
        rollout = Rollout(responses, cap, step, counts)
        if self.pruning is not None:
            self._prune(rollout, engine, keys)
        before = counts.generated_tokens
        with timed(counts, "generate_s"):
            self._generate(rollout.responses, engine, cap, cap, counts)
        if self.pruning is not None:
            counts.went_on_tokens += counts.generated_tokens - before
        self._count(rollout)
        return rollout

    def _prune(self, rollout: Rollout, engine: Engine, keys: list[bytes]) -> None:
        """Generate up to the detection length, and keep what survives there."""
        assert self.pruning is not None
        counts, halt = rollout.counts, self.pruning.settings.detection_length
        with timed(counts, "generate_s"):
            self._generate(rollout.responses, engine, rollout.cap, halt, counts)
        with timed(counts, "judge_s"):
            rollout.responses, rollout.pruned, rollout.judged = self.pruning.prune(
                rollout.responses, keys, cast(ObservingEngine, engine), rollout.step, counts
            )
        counts.went_on_rows += sum(response.finish_reason is None for response in rollout.responses)

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

        Raises:
            ValueError: most responses have log-probs that are no log-probs: a broken policy or engine. The others are
                stored.
        """
        counts = rollout.counts
        if rewards is not None:
            self._count_rewards(rollout.responses, rewards, counts)
            if self.pruning is not None:
                with timed(counts, "learn_s"):
                    self.pruning.learn(rollout.judged, rollout.responses, rewards)
        if not isinstance(self.cache, NoCache):
            self._put(rollout, logprobs, rewards)
        counts.corrupt_rows += self.cache.corrupt - self._corrupt_before
        self._corrupt_before = self.cache.corrupt
        counts.step_s = self.lap()
        # Once all ranks are here, all have stored: no look-up for a later step can come too early.
        total = totals(self.ranks.gather(counts))
        self.observe(total)
        refuse_broken_sampler(total)

    def take_metrics(self) -> dict[str, float]:
        """See [`RolloutLedger.take_metrics`]; with pruning, what its pruner says of itself comes with them."""
        metrics = super().take_metrics()
        if metrics and self.pruning is not None:
            metrics |= self.pruning.pruner.metrics()
        return metrics

    def _put(
        self, rollout: Rollout, logprobs: Sequence[NDArray | None] | None, rewards: Sequence[float] | None
    ) -> None:
        """Put a rollout into the caches of all nodes, see [`store`]."""
        counts = rollout.counts
        with timed(counts, "store_s"):
            made = [
                response.trajectory(
                    rollout.cap,
                    rollout.step,
                    None if logprobs is None else logprobs[row],
                    None if rewards is None else rewards[row],
                )
                for row, response in enumerate(rollout.responses)
            ] + [response.trajectory(rollout.cap, rollout.step) for response in rollout.pruned]
            trajectories = [trajectory for trajectory in made if trajectory is not None]
            counts.nonfinite_rows += len(made) - len(trajectories)
            counts.unstored_rows += len(made) - len(trajectories)
            counts.unstored_rows += self._keep(trajectories)
            if from_others := self._from_other_nodes(trajectories, counts):
                self._keep(from_others)

    def _keep(self, trajectories: list[Trajectory]) -> int:
        """Put trajectories into the cache of this node; returns how many it did not take."""
        try:
            self.cache.put_many(trajectories)
        except CacheWriteError as error:  # training goes on: what is not stored is only sampled again
            if not self._warned_unstored:
                self._warned_unstored = True
                logger.warning("%s\nTraining goes on; these prompts will be sampled afresh.", error)
            return len(trajectories)
        return 0

    def _from_other_nodes(self, trajectories: list[Trajectory], counts: RolloutCounts) -> list[Trajectory]:
        """Send what this rank made to all nodes; returns what this rank has to store for its node."""
        nodes, index = self.ranks.nodes, self.ranks.index
        if len(set(nodes)) == 1:
            return []
        rows = [encode(trajectory) for trajectory in trajectories]
        counts.exchanged_bytes += sum(len(row.arrays) for row in rows)
        gathered = self.ranks.gather(rows)
        if not leads_node(self.ranks):
            return []
        return [decode(row) for node, part in zip(nodes, gathered, strict=True) if node != nodes[index] for row in part]

    def _slots(self, keys: list[bytes]) -> list[int]:
        """Which of its prompt's samples each row is, counted over the rows of all ranks."""
        gathered = self.ranks.gather(keys)
        return assign_slots([key for part in gathered for key in part])[own_rows(self.ranks, gathered)]

    def _look_up(
        self, responses: list[Response], cap: int, step: int, max_scored: int | None, counts: RolloutCounts
    ) -> None:
        """Give each row its draft, where it has one that can be used."""
        if self.guard.paused:
            counts.paused_rows += len(responses)
            return
        drafts = self.cache.get_many([(response.key, response.slot) for response in responses])
        for response, draft in zip(responses, drafts, strict=True):
            if draft is None:
                continue
            if self.mode is Mode.EXACT:
                response.recall(draft, self.vocab_size, step, counts)
            else:
                response.offer(draft, self.policy, self.vocab_size, cap, step, max_scored, counts)

    def _verify(self, responses: list[Response], engine: Engine, counts: RolloutCounts) -> None:
        """Score all drafts under the current policy, in one call."""
        drafted = [response for response in responses if response.draft is not None]
        if not any(self.ranks.gather(len(drafted))):
            return
        scored = engine.score(
            [response.prompt for response in drafted], [response.draft_tokens for response in drafted]
        )
        for response, logprobs in zip(drafted, scored, strict=True):
            response.take_scores(logprobs, counts)
        refuse_broken_scorer(totals(self.ranks.gather(counts)))

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
            response.accept(prefix, cap)

    def _generate(self, responses: list[Response], engine: Engine, cap: int, until: int, counts: RolloutCounts) -> None:
        """Continue every unfinished row to its end or to `until` tokens, all in one call."""
        until = min(until, cap)
        budgets = [response.budget(until, engine.max_context) for response in responses]
        going = [response for response, budget in zip(responses, budgets, strict=True) if budget]
        if not any(self.ranks.gather(len(going))):
            return
        contexts = [r.prompt + r.tokens.tolist() for r in going]
        budgets = [budget for budget in budgets if budget]
        if self.drafting.most_tokens:
            expected = [r.past[len(r.tokens) :] for r in going]
            drafts = Drafts([r.key for r in going], expected, self.drafting.most_tokens, self.drafting.most_rows)
            continuations = cast(DraftingEngine, engine).generate_from_drafts(contexts, budgets, drafts)
            counts.engine_drafted_tokens += drafts.drafted
            counts.engine_accepted_tokens += drafts.accepted
        else:
            continuations = engine.generate(contexts, budgets)
        for response, continuation in zip(going, continuations, strict=True):
            response.extend(continuation, cap, until, counts)

    def _count_rewards(self, responses: list[Response], rewards: Sequence[float], counts: RolloutCounts) -> None:
        """The responses to a prompt may be on several ranks."""
        of_ranks = self.ranks.gather([(r.key, float(reward)) for r, reward in zip(responses, rewards, strict=True)])
        others = [row for rank, rows in enumerate(of_ranks) if rank != self.ranks.index for row in rows]
        count_rewards(responses, rewards, counts, others)

    @staticmethod
    def _count(rollout: Rollout) -> None:
        for response in rollout.responses + rollout.pruned:
            response.count(rollout.counts)
        rollout.counts.given_up_tokens += sum(len(response.tokens) for response in rollout.pruned)


def refuse_broken_scorer(counts: RolloutCounts) -> None:
    """Raise `ValueError` where most drafts of a batch have scores that are no log-probs (NaN, infinity)."""
    nonfinite, drafts = counts.dropped_nonfinite, counts.dropped_nonfinite + counts.verified_rows
    if _is_broken(nonfinite, drafts):
        raise ValueError(
            f"{nonfinite} of {drafts} drafts have log-probs that are NaN or infinite under the current policy: "
            "the model or the engine that scores is broken (diverged weights?)."
        )


def refuse_broken_sampler(counts: RolloutCounts) -> None:
    """Raise `ValueError` where most responses of a batch have log-probs that are NaN or infinite."""
    if _is_broken(counts.nonfinite_rows, counts.rows):
        raise ValueError(
            f"{counts.nonfinite_rows} of {counts.rows} responses have log-probs that are NaN or infinite: the model, "
            "or the engine that samples or scores, is broken (diverged weights?). Such responses cannot be reused."
        )


def _is_broken(nonfinite: int, rows: int) -> bool:
    return rows >= _NONFINITE_ROWS and nonfinite > _NONFINITE_SHARE * rows


@contextmanager
def timed(counts: RolloutCounts, name: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        setattr(counts, name, getattr(counts, name) + time.perf_counter() - start)
