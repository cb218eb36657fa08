"""An asynchronous vLLM engine as the engine of one request's rollout."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import numpy as np
from numpy.typing import NDArray
from vllm import RequestOutput, SamplingParams
from vllm.sampling_params import RequestOutputKind

from specrl_plugins.engine import Continuation
from specrl_plugins.vllm.engine import continuation, continuing_params, scores, scores_of_tail, scoring_params


class VLLMRequest:
    """Scores and generates for one prompt, see [`specrl_plugins.request.RequestEngine`].

    Args:
        ask (async callable): sends token ids and `SamplingParams` to the engine, returns its last `RequestOutput`.
        prompt (`list[int]`): token ids.
        sampling_params (`SamplingParams`): how to sample; see [`changed_settings`] for what can be scored.
        max_model_len (`int`): context length of the engine, tokens.
        reads_cache (`bool`): what [`may_read_cache`] says of the engine.

    Attributes:
        output (`RequestOutput`, *optional*): vLLM's latest answer.
    """

    def __init__(
        self,
        ask: Callable[[list[int], SamplingParams], Awaitable[RequestOutput]],
        prompt: list[int],
        sampling_params: SamplingParams,
        max_model_len: int,
        reads_cache: bool,
    ):
        self.ask = ask
        self.prompt = prompt
        self.sampling_params = sampling_params
        self.max_scored = max_model_len - 1  # a scored sequence leaves room for the token that vLLM insists on
        self.reads_cache = reads_cache
        self.output: RequestOutput | None = None

    async def score(self, prompt: list[int], continuation: NDArray[np.int32]) -> NDArray[np.float32]:
        output = await self._ask(prompt + continuation.tolist(), scoring_params(self.reads_cache))
        tail = scores_of_tail(output, continuation)
        head = continuation[: len(continuation) - len(tail)]
        if not len(head):
            return tail
        # More than the prompt was in the prefix cache, so these have no scores yet.
        return np.concatenate([scores(await self._ask(prompt + head.tolist(), scoring_params()), head), tail])

    async def generate(self, context: list[int], budget: int) -> Continuation:
        params = continuing_params(self.sampling_params, budget)
        # Reused tokens count towards the least length, but vLLM takes them for a part of the prompt.
        params.min_tokens = max(0, params.min_tokens - (len(context) - len(self.prompt)))
        return continuation(await self._ask(context, params))

    async def _ask(self, tokens: list[int], params: SamplingParams) -> RequestOutput:
        params.output_kind = RequestOutputKind.FINAL_ONLY  # nobody reads what is not finished
        self.output = await self.ask(tokens, params)
        return self.output


def changed_settings(params: SamplingParams, temperature: float = 1.0, top_p: float = 1.0) -> list[str]:
    """Settings, by name, that make a request other than one of a plain sample with at most its own log-prob.

    Such a request is sampled from another distribution than the one that vLLM scores, ends by other rules than the
    response that is reused did, or asks for more than is known of reused tokens. A least length of one token is
    plain: it only bans the end token as the whole response, which scores do not know of. They are then off by
    log(1 - P(end token)) at the first token, in old and new log-probs alike.

    Args:
        params (`SamplingParams`): of the request.
        temperature, top_p (`float`, *optional*, default to 1): those of a plain sample. Others than 1 cannot be scored,
            but continued: for runs that prune and reuse nothing.
    """
    plain = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=params.top_k if params.top_k in (0, -1) else 0,  # both keep all
        max_tokens=params.max_tokens,
        min_tokens=min(params.min_tokens, 1),
        logprobs=params.logprobs if params.logprobs in (0, 1) else None,
        seed=params.seed,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        output_kind=params.output_kind,
    )
    return [
        f"{name}={getattr(params, name)!r}"
        for name in params.__struct_fields__
        if not name.startswith("_") and getattr(params, name) != getattr(plain, name)
    ]
