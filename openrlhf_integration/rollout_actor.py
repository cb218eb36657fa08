"""OpenRLHF's rollout actor, with a `generate` that drafts, verifies, accepts and continues in its own vLLM engine.

Overridden, of `RolloutRayActor` (openrlhf 0.11.2, `openrlhf/trainer/ray/vllm_engine.py`):

- `generate`: token ids in, one output out. An executor calls it once a turn.
- `generate_responses`: runs the executor once a sample. Here each run gets to know its slot, and what came of all of
  them is stored. The tokenizer need not come along.
- `reset_prefix_cache`: called at each update of the weights; its answer is checked.
"""

from __future__ import annotations

import asyncio
import logging
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from openrlhf.trainer.ray.vllm_engine import RolloutRayActor
from vllm import RequestOutput, SamplingParams
from vllm.logprobs import Logprob

from openrlhf_integration.cache_actor import Rules, Visit, running_cache
from openrlhf_integration.seams import plain
from specrl_plugins import Response, RolloutCounts, prompt_key
from specrl_plugins.request import roll_out
from specrl_plugins.trajectory import Trajectory
from specrl_plugins.vllm.request import VLLMRequest, changed_settings

logger = logging.getLogger(__name__)

COUNTS_KEY = "spec_counts"
"""Where a response of an executor carries its [`RolloutCounts`] to the samples generator."""

# Tokens of the prompt that are decoded with the response: how its first tokens read depends on what is before them.
_CONTEXT_TOKENS = 8


@dataclass(eq=False)
class Group:
    """The samples of one prompt, in one call of `generate_responses`."""

    samples: int
    tokenizer: Any
    visits: dict[bytes, asyncio.Task[Visit | None]] = field(default_factory=dict)


@dataclass(eq=False)
class Sample:
    """One run of the executor. Its response is that of its first turn, once that is finished."""

    group: Group
    index: int
    begun: bool = False
    response: Response | None = None
    cap: int = 0
    step: int = 0
    counts: RolloutCounts = field(default_factory=RolloutCounts)


# Which sample the code that runs belongs to. Each has a task of its own, and so do requests it may start in turn.
_sample: ContextVar[Sample | None] = ContextVar("specrl_sample", default=None)


class SpecRolloutActor(plain(RolloutRayActor)):
    """[`RolloutRayActor`] that reuses past responses. Takes the same arguments."""

    async def __init__(self, *args: Any, **kwargs: Any):
        # What is sampled and what is scored are of one kind: vLLM scores raw log-probs, whatever the mode. At
        # temperature 1 and top-p 1 the modes differ only where an end token is banned as the whole response.
        kwargs["logprobs_mode"] = "raw_logprobs"
        await super().__init__(*args, **kwargs)
        self._cache = running_cache()
        self._rules: Rules = await self._cache.rules.remote()
        self._tokenizer: Any = None
        self._warned_changed = False

    async def hold_tokenizer(self, tokenizer: Any) -> None:
        """Keep the tokenizer of all prompts that come without one."""
        self._tokenizer = tokenizer

    async def generate_responses(
        self,
        prompt: str,
        label: str,
        sampling_params: SamplingParams,
        max_length: int,
        hf_tokenizer: Any,
        num_samples: int = 1,
        images: Any = None,
    ) -> list[dict[str, Any]]:
        """As OpenRLHF's. The responses carry their counts, under [`COUNTS_KEY`]."""
        if hf_tokenizer is None:
            hf_tokenizer = self._tokenizer
        run_executor = super().generate_responses
        group = Group(num_samples, hf_tokenizer)
        samples = [Sample(group, index) for index in range(num_samples)]

        async def run(sample: Sample) -> dict[str, Any]:
            _sample.set(sample)
            (answer,) = await run_executor(
                prompt, label, sampling_params, max_length, hf_tokenizer, num_samples=1, images=images
            )
            return answer

        answers = await asyncio.gather(*map(run, samples))
        await self._store(samples, answers)
        for sample, answer in zip(samples, answers, strict=True):
            answer[COUNTS_KEY] = sample.counts
        return answers

    async def generate(
        self, prompt_token_ids: list[int], sampling_params: SamplingParams, multi_modal_data: Any = None
    ) -> RequestOutput:
        """As OpenRLHF's: token ids in, one finished output out.

        Images, turns after the first and evaluation pass through.
        """
        sample = _sample.get()
        first_turn = sample is not None and not sample.begun
        if sample is not None:
            sample.begun = True
        if sample is None or not first_turn or multi_modal_data or self._changed(sampling_params):
            return await super().generate(prompt_token_ids, sampling_params, multi_modal_data)
        key = prompt_key(prompt_token_ids)
        visits = sample.group.visits
        if key not in visits:  # the first of the prompt's samples asks for all
            visits[key] = asyncio.ensure_future(self._visit(key, sample.group.samples))
        visit = await visits[key]
        if visit is None:
            return await super().generate(prompt_token_ids, sampling_params)

        context = self.llm.model_config.max_model_len
        cap = sampling_params.max_tokens or context - len(prompt_token_ids)
        request = VLLMRequest(super().generate, prompt_token_ids, sampling_params, context)
        response = Response(prompt_token_ids, key, visit.first_slot + sample.index)
        sample.counts = await roll_out(
            request,
            self._rules.policy,
            self._rules.vocab_size,
            response,
            visit.drafts[sample.index],
            cap,
            visit.step,
        )
        sample.counts.lookup_s = visit.seconds / sample.group.samples
        sample.counts.paused_rows = int(visit.paused)
        sample.response, sample.cap, sample.step = response, cap, visit.step
        assert request.output is not None
        return finished_output(request.output, response, sampling_params, sample.group.tokenizer)

    async def reset_prefix_cache(self) -> None:
        """As OpenRLHF's.

        Raises:
            RuntimeError: blocks were in use, so stale ones remain.
        """
        if not await self.llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM could not reset its prefix cache (blocks are in use): keys and values of old weights would be "
                "read. A request that was never finished or aborted does this."
            )

    async def _visit(self, key: bytes, samples: int) -> Visit | None:
        return await self._cache.visit.remote(key, samples)

    async def _store(self, samples: list[Sample], answers: list[dict[str, Any]]) -> None:
        """Keep what came of a prompt's samples, with their rewards where they are known by now."""
        made: list[tuple[Sample, Trajectory]] = []
        for sample, answer in zip(samples, answers, strict=True):
            if sample.response is None:
                continue
            reward = first_value(answer["reward"])
            if reward is not None:
                sample.response.count_reward(reward, sample.counts)
            trajectory = sample.response.trajectory(sample.cap, sample.step, reward=reward)
            if trajectory is None:
                sample.counts.unstored_rows += 1
            else:
                made.append((sample, trajectory))
        if not made:
            return
        stored, seconds = await self._cache.store.remote([trajectory for _, trajectory in made])
        for sample, _ in made:
            sample.counts.unstored_rows += not stored
            sample.counts.store_s = seconds / len(made)

    def _changed(self, sampling_params: SamplingParams) -> bool:
        """Whether an executor changed what OpenRLHF asks for into something that cannot be reused."""
        changed = changed_settings(sampling_params)
        if changed and not self._warned_changed:
            self._warned_changed = True
            logger.warning(
                "Requests with %s are not reused: they end or are sampled in ways that are not scored.",
                ", ".join(changed),
            )
        return bool(changed)


def finished_output(
    latest: RequestOutput, response: Response, sampling_params: SamplingParams, tokenizer: Any
) -> RequestOutput:
    """What vLLM would have returned, had it sampled the whole response.

    Args:
        latest (`RequestOutput`): its answer to the last request of the rollout, which is ours to change.
        response (`Response`): finished.
        sampling_params (`SamplingParams`): what the executor asked for.
        tokenizer: OpenRLHF's, or the processor of a vision-language model.
    """
    tokens, logprobs = response.tokens.tolist(), response.logprobs.tolist()
    wanted = sampling_params.logprobs is not None
    stopped = response.finish_reason == "stop"
    latest.prompt_token_ids = response.prompt
    latest.prompt_logprobs = None
    latest.outputs = [
        replace(
            latest.outputs[0],
            text=_text(response.prompt, tokens[:-1] if stopped else tokens, sampling_params, tokenizer),
            token_ids=tokens,
            cumulative_logprob=sum(logprobs) if wanted else None,
            logprobs=[{t: Logprob(p)} for t, p in zip(tokens, logprobs, strict=True)] if wanted else None,
            finish_reason=response.finish_reason,
            stop_reason=latest.outputs[0].stop_reason if stopped and not response.reused_whole else None,
        )
    ]
    return latest


def _text(prompt: list[int], tokens: list[int], sampling_params: SamplingParams, tokenizer: Any) -> str:
    """The text of a response as vLLM writes it: read on from the prompt, less what an unfinished character left."""
    context = prompt[-_CONTEXT_TOKENS:]

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(
            ids, skip_special_tokens=sampling_params.skip_special_tokens, clean_up_tokenization_spaces=False
        )

    return decode(context + tokens)[len(decode(context)) :].rstrip("\ufffd")


def first_value(reward: Any) -> float | None:
    """A response's reward as a number: reward functions return floats, tensors or lists of one."""
    return None if reward is None else torch.as_tensor(reward, dtype=torch.float32).flatten()[0].item()
