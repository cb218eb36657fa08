"""Online pruning of the samples of a prompt: they wait for each other at the detection length, where some are given up.

Each sample is a task of its own, and the executor that it runs knows nothing of the others. So a group has a gate.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openrlhf_integration.cache_actor import Lesson
from specrl_plugins import Continuation, Response, RolloutCounts
from specrl_plugins.pruning import Judgement
from specrl_plugins.vllm import AsyncHiddenStates, VLLMRequest

# What comes of a sample that is given up before anything was generated for it.
_NOTHING = Continuation(np.empty(0, np.int32), np.empty(0, np.float32), "length")


class Gate:
    """Where the samples of a group wait to be judged, which is done once all of them have arrived.

    A sample arrives where it is as long as the detection length, or where it has ended. One of which no state is known
    arrives too: whoever failed, or asked for something that is passed through. Else the others would wait for ever.

    Args:
        group (`bytes`): its key.
        samples (`int`): how many started.
        survivors (`int`): how many go on.
        length (`int`): detection length, tokens.
        states (`AsyncHiddenStates`): of the engine.
        hidden_size (`int`): of a state.
        cache (Ray actor): the [`RolloutCache`], whose pruner judges.

    Attributes:
        judge_s (`float`): seconds of judging, without waiting for the samples.
    """

    def __init__(
        self,
        group: bytes,
        samples: int,
        survivors: int,
        length: int,
        states: AsyncHiddenStates,
        hidden_size: int,
        cache: Any,
    ):
        self.group = group
        self.samples = samples
        self.survivors = survivors
        self.length = length
        self.judge_s = 0.0
        self._states = states
        self._cache = cache
        self._hidden = np.full((samples, hidden_size), np.nan, np.float32)
        self._contexts: dict[int, list[int]] = {}
        self._ended = np.ones(samples, np.bool_)
        self._missing = set(range(samples))
        self._all_here = asyncio.Event()
        self._judgement = asyncio.ensure_future(self._judge())

    def arrive(self, sample: int, context: list[int] | None = None, ended: bool = True) -> None:
        """A sample is here; only its first arrival counts.

        Args:
            sample (`int`): its index in the group.
            context (`list[int]`, *optional*): the tokens after which its state is looked at. Without, it is judged as
                an average one.
            ended (`bool`, *optional*, defaults to `True`): whether it ended before the detection length.
        """
        if sample not in self._missing:
            return
        self._missing.remove(sample)
        if context is not None:
            self._contexts[sample] = context
        self._ended[sample] = ended
        if not self._missing:
            self._all_here.set()

    async def survives(self, sample: int) -> bool:
        """Whether a sample that has arrived goes on. Waits until all have."""
        judgement = await asyncio.shield(self._judgement)
        return bool(judgement.survives[sample])

    def lesson(self, rewards: NDArray[np.float64]) -> Lesson:
        """What the pruner learns from the group.

        Args:
            rewards (`NDArray[np.float64]` of shape `(samples,)`): NaN where unknown.
        """
        judgement, rows = self._judgement.result(), self._judgement.result().survives
        return Lesson(
            self.group,
            self._hidden[rows],
            judgement.scores[rows],
            judgement.probabilities[rows],
            judgement.control[rows],
            judgement.ended[rows],
            rewards[rows],
        )

    def close(self) -> asyncio.Future[Judgement]:
        """Judge no more, unless that has begun; returns what is over once nothing of it runs."""
        if self._missing:
            self._judgement.cancel()
        return self._judgement

    async def _judge(self) -> Judgement:
        await self._all_here.wait()
        start = time.perf_counter()
        if self._contexts:
            self._hidden[list(self._contexts)] = await self._states.of(list(self._contexts.values()))
        judgement = await self._cache.judge.remote(self.group, self._hidden, self._ended, self.survivors)
        self.judge_s = time.perf_counter() - start
        return judgement


class PausingRequest(VLLMRequest):
    """A request that pauses at the detection length, and goes on if its sample survives.

    Args:
        gate (`Gate`): of its group.
        sample (`int`): its index in the group.
        *args: those of [`VLLMRequest`].
    """

    def __init__(self, gate: Gate, sample: int, *args: Any):
        super().__init__(*args)
        self.gate = gate
        self.sample = sample
        self._paused = False
        self._waited_s = 0.0
        self._went_on = 0  # tokens

    async def generate(self, context: list[int], budget: int) -> Continuation:
        """As [`VLLMRequest.generate`], but where the sample is given up only what came before, perhaps nothing."""
        end = len(self.prompt) + self.gate.length
        before = _NOTHING
        if len(context) < end:
            before = await super().generate(context, min(budget, end - len(context)))
            context = context + before.tokens.tolist()
            budget -= len(before.tokens)
            if before.finish_reason == "stop" or len(context) < end or not budget or len(context) > self.max_scored:
                return before
        self._paused = True
        start = time.perf_counter()
        self.gate.arrive(self.sample, context[:end], ended=False)
        survives = await self.gate.survives(self.sample)
        self._waited_s = time.perf_counter() - start
        if not survives:
            return before
        after = await super().generate(context, budget)
        self._went_on = len(after.tokens)
        return Continuation(
            np.concatenate([before.tokens, after.tokens]),
            np.concatenate([before.logprobs, after.logprobs]),
            after.finish_reason,
        )

    async def judged(self, response: Response, counts: RolloutCounts) -> bool:
        """Whether its sample survives, once the response is as far as it gets.

        Args:
            response (`Response`): its response, which is marked where it was given up before it ended.
            counts (`RolloutCounts`): of its row.
        """
        if not self._paused:
            length = len(response.tokens)
            context = (self.prompt + response.tokens[: self.gate.length].tolist())[: self.max_scored]
            self.gate.arrive(self.sample, context, ended=length <= self.gate.length)
        survives = await self.gate.survives(self.sample)
        counts.judged_rows += 1
        counts.generate_s -= self._waited_s
        if not self._paused:
            return survives
        if survives:
            counts.went_on_rows += 1
            counts.went_on_tokens += self._went_on
        else:
            counts.pruned_rows += 1
            response.finish_reason = "pruned"
        return survives
