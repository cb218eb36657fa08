"""A vLLM `LLM` as the engine of a rollout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from vllm import LLM, RequestOutput, SamplingParams
from vllm.config import VllmConfig
from vllm.logprobs import FlatLogprobs

from specrl_plugins.book_proposer import drafting_from
from specrl_plugins.draft_book import DraftBook
from specrl_plugins.engine import Continuation, Drafts
from specrl_plugins.ranks import OneRank, Ranks, own_rows
from specrl_plugins.vllm.logprobs import filed_fast


class VLLMEngine:
    """Scores by `prompt_logprobs` and generates by one `SamplingParams` a request.

    Prompt log-probs are of the model's plain distribution: vLLM applies neither temperature nor a cut of the support to
    them. So [`score`] refuses where something else is sampled.

    Args:
        llm (`LLM`): awake, with the current weights.
        sampling_params (`SamplingParams`): how to sample; its `max_tokens` is replaced by each row's budget.
        ranks (`Ranks`, *optional*): the processes that share the engine, where it is tensor-parallel: they send it the
            requests of all of them, in the same order, and each keeps the answers to its own. Defaults to this one.
    """

    def __init__(self, llm: LLM, sampling_params: SamplingParams, ranks: Ranks | None = None):
        self.llm = llm
        self.sampling_params = sampling_params
        self.ranks = ranks or OneRank()
        self._reads_cache = may_read_cache(llm.llm_engine.vllm_config)
        self._scored = False  # whether drafts are in the prefix cache

    @property
    def max_context(self) -> int:
        return self.llm.llm_engine.model_config.max_model_len

    @property
    def max_scored(self) -> int:
        return self.max_context - 1  # a scored sequence leaves room for the token that vLLM insists on

    def score(self, prompts: Sequence[list[int]], continuations: Sequence[NDArray[np.int32]]) -> list[NDArray]:
        """See [`Engine.score`].

        Raises:
            ValueError: the sampled distribution is not the model's plain one.
        """
        refuse_shaped(self.sampling_params)
        self._scored = True
        contexts = [prompt + tokens.tolist() for prompt, tokens in zip(prompts, continuations, strict=True)]
        outputs = self._call(contexts, [scoring_params(self._reads_cache)] * len(contexts))
        tails = [scores_of_tail(output, tokens) for output, tokens in zip(outputs, continuations, strict=True)]
        # Where more than the prompt was in the cache, the first tokens have no scores yet. Rows have such beginnings in
        # common, which is how they came to be there: each is computed, once. That is one token more, at most, than what
        # the cache spared these rows.
        heads = [tokens[: len(tokens) - len(tail)] for tokens, tail in zip(continuations, tails, strict=True)]
        begun = [(tuple(prompt), tuple(head.tolist())) for prompt, head in zip(prompts, heads, strict=True)]
        missing = [(prompt, head) for prompt, head in dict.fromkeys(begun) if head]
        outputs = self._call([[*prompt, *head] for prompt, head in missing], [scoring_params()] * len(missing))
        found = {key: scores(output, np.array(key[1], np.int32)) for key, output in zip(missing, outputs, strict=True)}
        return [
            np.concatenate([found[key], tail]) if key in found else tail for key, tail in zip(begun, tails, strict=True)
        ]

    def generate(self, contexts: Sequence[list[int]], budgets: Sequence[int]) -> list[Continuation]:
        """See [`Engine.generate`]."""
        params = {budget: continuing_params(self.sampling_params, budget) for budget in set(budgets)}
        # What was scored last is evicted last. Where the KV cache holds less than all that was scored, asking in the
        # order of scoring would find nothing: each request would evict what the next one needs. Without drafts the
        # order is the framework's own, and so are the samples.
        outputs = self._call(contexts, [params[budget] for budget in budgets], last_first=self._scored)
        return [continuation(output) for output in outputs]

    def generate_from_drafts(
        self, contexts: Sequence[list[int]], budgets: Sequence[int], drafts: Drafts
    ) -> list[Continuation]:
        """See [`DraftingEngine.generate_from_drafts`]. The engine was built with [`speculative_config`]."""
        gathered = self.ranks.gather(list(zip(contexts, drafts.keys, drafts.tokens, strict=True)))
        of_all, keys, tokens = zip(*(row for part in gathered for row in part), strict=True)
        book = DraftBook(of_all, keys, tokens, drafts.most_tokens, drafts.most_rows)
        with drafting_from(book):
            continuations = self.generate(contexts, budgets)
        if self.ranks.index == 0:  # the ranks of an engine all see the same
            drafts.drafted += book.drafted_tokens
            drafts.accepted += book.accepted_tokens
        return continuations

    def _call(
        self, contexts: Sequence[list[int]], params: Sequence[SamplingParams], last_first: bool = False
    ) -> list[RequestOutput]:
        """Answers in the order of the contexts, whether they are asked for in that order or in reverse."""
        gathered = self.ranks.gather(list(zip(contexts, params, strict=True)))
        order = slice(None, None, -1 if last_first else 1)
        requests = [request for part in gathered for request in part][order]
        if not requests:
            return []
        with filed_fast():
            outputs = self.llm.generate(
                [{"prompt_token_ids": context} for context, _ in requests],
                sampling_params=[params for _, params in requests],
                use_tqdm=False,
            )
        return outputs[order][own_rows(self.ranks, gathered)]


def may_read_cache(config: VllmConfig) -> bool:
    """Whether requests for prompt log-probs may read the prefix cache: whether the answer shows what is missing then.

    Positions whose keys and values come from the cache get none. The newer of vLLM's two model runners leaves them out
    of the answer. The older one returns what was in memory in their place, which may be an earlier answer, of the same
    tokens. `RequestOutput.num_cached_tokens` does not tell these: a request that is preempted may find more when it
    resumes, but the first count stays. Read in 0.26, 0.29, 0.31 and 0.32.
    """
    return config.use_v2_model_runner


def scoring_params(read_cache: bool = False) -> SamplingParams:
    """How to ask for the log-probs of a given sequence. vLLM insists on generating one token more.

    Args:
        read_cache (`bool`, *optional*, defaults to `False`): have nothing computed that the prefix cache holds. See
            [`may_read_cache`] and [`scores_of_tail`].
    """
    return SamplingParams(
        max_tokens=1,
        temperature=1.0,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        skip_reading_prefix_cache=not read_cache,
    )


def scores(output: RequestOutput, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """Log-probs, nats, of shape `(tokens,)`, of what follows the prompt, out of the answer to [`scoring_params`]."""
    logprobs = scores_of_tail(output, tokens)
    if len(logprobs) < len(tokens):
        raise RuntimeError(
            f"vLLM returned prompt log-probs of {len(logprobs)} tokens where it was asked for {len(tokens)}."
        )
    return logprobs


def scores_of_tail(output: RequestOutput, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """As [`scores`], but of the last tokens alone where the state before the first ones was in the prefix cache."""
    ids, logprobs = _flat(output.prompt_logprobs, len(tokens))
    if not np.array_equal(ids, tokens[len(tokens) - len(ids) :]):
        raise RuntimeError("vLLM returned prompt log-probs of other tokens than those it was asked to score.")
    return logprobs


def continuing_params(sampling_params: SamplingParams, budget: int) -> SamplingParams:
    """How to ask for at most `budget` tokens, sampled as given, with their log-probs."""
    params = sampling_params.clone()
    params.max_tokens = budget
    params.logprobs = 0
    params.flat_logprobs = True
    params.detokenize = False  # nobody reads the text: the trainer decodes the ids itself
    return params


def continuation(output: RequestOutput) -> Continuation:
    """What vLLM generated, out of the answer to [`continuing_params`]."""
    completion = output.outputs[0]
    tokens = np.asarray(completion.token_ids, np.int32)
    ids, logprobs = _flat(completion.logprobs, len(tokens))
    if not np.array_equal(ids, tokens):
        raise RuntimeError("vLLM returned log-probs of other tokens than those it sampled.")
    return Continuation(tokens, logprobs, "stop" if completion.finish_reason == "stop" else "length")


def refuse_shaped(sampling_params: SamplingParams) -> None:
    """Raise `ValueError` where the sampled distribution is not the model's plain one."""
    if shaped := _shaping_settings(sampling_params):
        raise ValueError(
            f"vLLM scores the model's plain distribution, but {', '.join(shaped)} shapes the sampled one: "
            "verify with the trainer's forward instead."
        )


def _shaping_settings(params: SamplingParams) -> list[str]:
    """Settings, as `name=value`, under which the sampled distribution is not the model's plain one."""
    neutral = {
        "temperature": (1.0,),
        "top_p": (1.0,),
        "top_k": (0, -1),
        "min_p": (0.0,),
        "repetition_penalty": (1.0,),
        "presence_penalty": (0.0,),
        "frequency_penalty": (0.0,),
        "min_tokens": (0,),
        "logit_bias": (None,),
        "allowed_token_ids": (None,),
        "bad_words": (None, []),
        "structured_outputs": (None,),
    }
    values = {name: getattr(params, name) for name in neutral}
    return [f"{name}={value}" for name, value in values.items() if value not in neutral[name]]


def _flat(logprobs: object, count: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Token ids and log-probs of the last `count` positions at most, each of nothing but the token in question."""
    if not isinstance(logprobs, FlatLogprobs):
        raise RuntimeError("vLLM returned no flat log-probs, although they were asked for.")
    ids, values = logprobs.token_ids, logprobs.logprobs
    start = max(0, len(ids) - count)
    return np.asarray(ids[start:], np.int32), np.asarray(values[start:], np.float32)
