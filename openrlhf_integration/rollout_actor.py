"""OpenRLHF's rollout actor, with a `generate` that drafts, verifies, accepts and continues in its own vLLM engine.

Overridden, of `RolloutRayActor` (openrlhf 0.11.2, `openrlhf/trainer/ray/vllm_engine.py`):

- `generate`: token ids in, one output out. An executor calls it once a turn.
- `generate_responses`: runs the executor once a sample. Here each run gets to know its slot, and what came of all of
  them is stored. With pruning, more runs start than are asked for, and some are given up: `generate` then raises
  `asyncio.CancelledError` in their executor. The tokenizer need not come along.
- `reset_prefix_cache`: called at each update of the weights; its answer is checked.
"""

from __future__ import annotations

import asyncio
import logging
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np
import torch
from openrlhf.trainer.ray.vllm_engine import RolloutRayActor
from vllm import RequestOutput, SamplingParams
from vllm.logprobs import Logprob

from openrlhf_integration.cache_actor import Rules, Visit, running_cache
from openrlhf_integration.pruning import Gate, PausingRequest
from openrlhf_integration.seams import plain
from specrl_plugins import Response, RolloutCounts, prompt_key
from specrl_plugins.request import roll_out
from specrl_plugins.response import count_rewards
from specrl_plugins.trajectory import Trajectory
from specrl_plugins.vllm.engine import may_read_cache
from specrl_plugins.vllm.hidden_states import TOP, AsyncHiddenStates
from specrl_plugins.vllm.request import VLLMRequest, changed_settings

logger = logging.getLogger(__name__)

COUNTS_KEY = "spec_counts"
"""Where a response of an executor carries its [`RolloutCounts`] to the samples generator."""

# Tokens of the prompt that are decoded with the response: how its first tokens read depends on what is before them.
_CONTEXT_TOKENS = 8


@dataclass(eq=False)
class Group:
    """The samples of one prompt that start, in one call of `generate_responses`; with a gate where they are judged."""

    samples: int
    tokenizer: Any
    gate: Gate | None = None
    visits: dict[bytes, asyncio.Task[Visit | None]] = field(default_factory=dict)


@dataclass(eq=False)
class Sample:
    """One run of the executor. Its response is that of its first turn, once that is finished."""

    group: Group
    index: int
    begun: bool = False
    given_up: bool = False
    response: Response | None = None
    cap: int = 0
    step: int = 0
    counts: RolloutCounts = field(default_factory=RolloutCounts)

    def give_up(self) -> NoReturn:
        """End its executor where it is, as if it were cancelled."""
        self.given_up = True
        raise asyncio.CancelledError("this sample is not trained on")


# How long the samples of a prompt of which one has failed may take to end: an executor need not heed its cancellation.
_ENDING_SECONDS = 10.0

# Which sample the code that runs belongs to. Each has a task of its own, and so do requests it may start in turn.
_sample: ContextVar[Sample | None] = ContextVar("specrl_sample", default=None)


class SpecRolloutActor(plain(RolloutRayActor)):
    """[`RolloutRayActor`] that reuses past responses or prunes. Takes the same arguments."""

    async def __init__(self, *args: Any, **kwargs: Any):
        self._cache = running_cache()
        self._rules: Rules = await self._cache.rules.remote()
        if self._rules.reuse:
            # What is sampled and what is scored are of one kind: vLLM scores raw log-probs, whatever the mode. At
            # temperature 1 and top-p 1 the modes differ only where an end token is banned as the whole response.
            kwargs["logprobs_mode"] = "raw_logprobs"
        if self._rules.pruning is not None:
            kwargs["max_logprobs"] = max(kwargs.get("max_logprobs", TOP), TOP)
        if self._rules.speculative_config is not None:
            kwargs["speculative_config"] = self._rules.speculative_config
        await super().__init__(*args, **kwargs)
        self._reads_cache = may_read_cache(self.llm.vllm_config)
        self._states = AsyncHiddenStates(super().generate, self.llm.collective_rpc)
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
        """As OpenRLHF's. The responses carry their counts, under [`COUNTS_KEY`].

        With pruning, `num_samples` are those that survive. Where an executor fails, the others of its prompt are
        cancelled, and nothing of them is stored.
        """
        if hf_tokenizer is None:
            hf_tokenizer = self._tokenizer
        run_executor = super().generate_responses
        gate = None if images else await self._gate(prompt, num_samples)
        group = Group(num_samples if gate is None else gate.samples, hf_tokenizer, gate)
        samples = [Sample(group, index) for index in range(group.samples)]

        async def run(sample: Sample) -> dict[str, Any] | None:
            _sample.set(sample)
            try:
                (answer,) = await run_executor(
                    prompt, label, sampling_params, max_length, hf_tokenizer, num_samples=1, images=images
                )
            except asyncio.CancelledError:
                if not sample.given_up:
                    raise
                return None
            finally:
                if gate is not None:  # it may have failed, or never asked for anything
                    gate.arrive(sample.index)
            return answer if gate is None or await gate.survives(sample.index) else None

        tasks = [asyncio.ensure_future(run(sample)) for sample in samples]
        try:
            answers = await asyncio.gather(*tasks)
        except BaseException:  # of one executor, and gather leaves the others running
            for sample, task in zip(samples, tasks, strict=True):
                sample.given_up = True
                task.cancel()
            ending = tasks if gate is None else [*tasks, gate.close()]
            _, running = await asyncio.wait(ending, timeout=_ENDING_SECONDS)
            if running:
                logger.warning("%d samples of a prompt that failed go on after being cancelled.", len(running))
            raise
        await self._store(samples, answers)
        if gate is not None:
            await self._cache.teach.remote(gate.lesson(np.array([reward_of(answer) for answer in answers])))
        return with_counts(answers, samples)

    async def _gate(self, prompt: str, survivors: int) -> Gate | None:
        """A gate for a new group; `None` where its samples are not judged."""
        if self._rules.pruning is None:
            return None
        samples: int | None = await self._cache.starts.remote(survivors)
        if samples is None:
            return None
        return Gate(
            prompt_key(list(prompt.encode())),  # the token ids are the executor's business
            samples,
            survivors,
            self._rules.pruning.detection_length,
            self._states,
            self.llm.model_config.get_hidden_size(),
            self._cache,
        )

    async def generate(
        self, prompt_token_ids: list[int], sampling_params: SamplingParams, multi_modal_data: Any = None
    ) -> RequestOutput:
        """As OpenRLHF's: token ids in, one finished output out.

        Images, turns after the first and evaluation pass through.
        """
        sample = _sample.get()
        if sample is None:
            return await super().generate(prompt_token_ids, sampling_params, multi_modal_data)
        if sample.given_up:
            sample.give_up()  # whatever its executor tries
        first_turn, sample.begun = not sample.begun, True
        gate = sample.group.gate
        if not first_turn or multi_modal_data or self._changed(sampling_params):
            if first_turn and gate is not None:
                gate.arrive(sample.index)
                if not await gate.survives(sample.index):
                    sample.give_up()
            return await super().generate(prompt_token_ids, sampling_params, multi_modal_data)
        key = prompt_key(prompt_token_ids)
        visits = sample.group.visits
        asks = key not in visits
        if asks:  # the first of the prompt's samples asks for all
            visits[key] = asyncio.ensure_future(self._visit(key, sample.group.samples))
        visit = await visits[key]
        if visit is None:
            return await super().generate(prompt_token_ids, sampling_params)

        context = self.llm.model_config.max_model_len
        cap = sampling_params.max_tokens or context - len(prompt_token_ids)
        asked = (super().generate, prompt_token_ids, sampling_params, context, self._reads_cache)
        request = VLLMRequest(*asked) if gate is None else PausingRequest(gate, sample.index, *asked)
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
        sample.counts.corrupt_rows = visit.corrupt if asks else 0
        sample.response, sample.cap, sample.step = response, cap, visit.step
        if isinstance(request, PausingRequest) and not await request.judged(response, sample.counts):
            sample.give_up()
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

    async def _store(self, samples: list[Sample], answers: list[dict[str, Any] | None]) -> None:
        """Keep what came of a prompt's samples, with their rewards where they are known by now."""
        made: list[tuple[Sample, Trajectory]] = []
        known = [(s, s.response, reward_of(a)) for s, a in zip(samples, answers, strict=True) if s.response is not None]
        if known:  # counts of a prompt's samples are only ever added up
            count_rewards([response for _, response, _ in known], [r for *_, r in known], known[0][0].counts)
        for sample, response, reward in known:
            trajectory = response.trajectory(sample.cap, sample.step, reward=reward)
            if trajectory is None:
                sample.counts.nonfinite_rows += 1
                sample.counts.unstored_rows += 1
            else:
                made.append((sample, trajectory))
        if not made or not self._rules.reuse:
            return
        stored, seconds = await self._cache.store.remote([trajectory for _, trajectory in made])
        for sample, _ in made:
            sample.counts.unstored_rows += not stored
            sample.counts.store_s = seconds / len(made)

    def _changed(self, sampling_params: SamplingParams) -> bool:
        """Whether an executor changed what OpenRLHF asks for into something that cannot be scored."""
        changed = changed_settings(sampling_params, self._rules.temperature, self._rules.top_p)
        if changed and not self._warned_changed:
            self._warned_changed = True
            logger.warning(
                "Requests with %s are neither reused nor judged: they end or are sampled in ways that are not scored.",
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


def with_counts(answers: list[dict[str, Any] | None], samples: list[Sample]) -> list[dict[str, Any]]:
    """The answers of the samples that survive, with their counts. The first also has those of all that do not.

    Args:
        answers (`list` of length `samples`): `None` for a sample that does not survive.
        samples (`list[Sample]`): of a group.
    """
    survivors = [(answer, sample.counts) for answer, sample in zip(answers, samples, strict=True) if answer is not None]
    others = [sample.counts for answer, sample in zip(answers, samples, strict=True) if answer is None]
    for counts in others:
        counts.given_up_tokens = counts.completion_tokens
    if samples[0].group.gate is not None:
        others.append(RolloutCounts(judge_s=samples[0].group.gate.judge_s))
    for row, (answer, counts) in enumerate(survivors):
        answer[COUNTS_KEY] = sum(others, counts) if row == 0 else counts
    return [answer for answer, _ in survivors]


def reward_of(answer: dict[str, Any] | None) -> float:
    """A response's reward, NaN where there is none: reward functions return floats, tensors or lists of one."""
    reward = None if answer is None else answer["reward"]
    return np.nan if reward is None else torch.as_tensor(reward, dtype=torch.float32).flatten()[0].item()
