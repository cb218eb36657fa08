"""The speculative rollout of one response, for engines that serve many requests at once: verify, accept, continue."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specrl_plugins.acceptance import ReusePolicy
from specrl_plugins.engine import Continuation
from specrl_plugins.metrics import RolloutCounts
from specrl_plugins.response import Response
from specrl_plugins.rollout import timed
from specrl_plugins.trajectory import Trajectory


class RequestEngine(Protocol):
    """The current policy, as one request sees it. See [`Engine`], which works on batches."""

    @property
    def max_scored(self) -> int | None:
        """Most tokens of prompt and draft together that it can score; `None` if unlimited."""
        ...

    async def score(self, prompt: list[int], continuation: NDArray[np.int32]) -> NDArray[np.float32]:
        """Log-probs of a continuation of shape `(tokens,)`, nats, in the same shape."""
        ...

    async def generate(self, context: list[int], budget: int) -> Continuation:
        """Continue a context by at most `budget` tokens, at least 1; fewer where the engine's own context is full."""
        ...


async def roll_out(
    engine: RequestEngine,
    policy: ReusePolicy,
    vocab_size: int,
    response: Response,
    draft: Trajectory | None,
    cap: int,
    step: int,
) -> RolloutCounts:
    """Finish one response: [`SpeculativeRollout.run`] for one row whose draft has been looked up.

    Args:
        engine (`RequestEngine`): the current policy.
        policy (`ReusePolicy`), vocab_size (`int`): as of [`SpeculativeRollout`].
        response (`Response`): new, with its prompt, key and slot.
        draft (`Trajectory`, *optional*): what the cache holds for it.
        cap (`int`): most tokens of the response.
        step (`int`): number, from 1, of the optimizer step that it is for.

    Returns:
        `RolloutCounts` of this row.
    """
    counts = RolloutCounts(rows=1)
    if draft is not None:
        response.offer(draft, policy, vocab_size, cap, step, engine.max_scored, counts)
    if response.draft is not None:
        with timed(counts, "verify_s"):
            response.take_scores(await engine.score(response.prompt, response.draft_tokens), counts)
            if response.draft is not None:
                old = response.draft.logprobs[: len(response.draft_tokens)]
                row = (response.key, response.slot)
                (prefix,) = policy.prefix_lengths([row], step, [old], [response.draft_logprobs])
                response.accept(int(prefix), cap)
    with timed(counts, "generate_s"):
        if budget := response.budget(cap, max_context=None):
            continuation = await engine.generate(response.prompt + response.tokens.tolist(), budget)
            response.extend(continuation, cap, cap, counts)
    response.count(counts)
    return counts
