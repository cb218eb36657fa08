"""Sampling through `model.generate` with a budget a row and the log-prob of each sampled token."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria

from specrl_plugins import Continuation


class SampleRecorder:
    """Notes what `generate` samples, and stops each row at its budget.

    It sees the scores of a step as the last logits processor, and the token drawn from them as a stopping criterion.
    It changes neither the scores nor the random numbers, so the same tokens come out as without it.

    Args:
        budgets (`Sequence[int]` of length `batch`): most tokens to sample for each row.
        eos_token_ids (`Sequence[int]`): ids that end a row.
        device (`torch.device`): where the model is.
    """

    def __init__(self, budgets: Sequence[int], eos_token_ids: Sequence[int], device: torch.device):
        self._budgets = torch.tensor(budgets, device=device)
        self._eos_token_ids = torch.tensor(eos_token_ids, device=device)
        self._lengths = torch.zeros_like(self._budgets)
        self._stopped = torch.zeros_like(self._budgets, dtype=torch.bool)
        self._scores: torch.Tensor | None = None
        self._tokens: list[torch.Tensor] = []
        self._logprobs: list[torch.Tensor] = []

    def see_scores(self, scores: torch.Tensor) -> None:
        """Scores that the next token is drawn by, of shape `(batch, vocabulary)`."""
        self._scores = scores

    def see_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens drawn from them, of shape `(batch,)`; returns which rows are done, of the same shape."""
        assert self._scores is not None
        scores, self._scores = self._scores.float(), None
        self._tokens.append(tokens)
        self._logprobs.append(scores.gather(1, tokens[:, None])[:, 0] - scores.logsumexp(1))
        going = ~self._stopped & (self._lengths < self._budgets)
        self._lengths += going
        self._stopped |= going & torch.isin(tokens, self._eos_token_ids)
        return self._stopped | (self._lengths >= self._budgets)

    def continuations(self) -> list[Continuation]:
        """What was sampled, one continuation a row."""
        tokens = torch.stack(self._tokens, 1).cpu().numpy().astype(np.int32)
        logprobs = torch.stack(self._logprobs, 1).cpu().numpy()
        return [
            Continuation(tokens[row, :length], logprobs[row, :length], "stop" if stopped else "length")
            for row, (length, stopped) in enumerate(zip(self._lengths.tolist(), self._stopped.tolist(), strict=True))
        ]


class _Scores(LogitsProcessor):
    def __init__(self, recorder: SampleRecorder):
        self.recorder = recorder

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.recorder.see_scores(scores)
        return scores


class _Tokens(StoppingCriteria):
    def __init__(self, recorder: SampleRecorder):
        self.recorder = recorder

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return self.recorder.see_tokens(input_ids[:, -1])


@contextmanager
def recorded_generate(
    model: PreTrainedModel, budgets: Sequence[int], eos_token_ids: Sequence[int], warpers: LogitsProcessorList
) -> Iterator[SampleRecorder]:
    """While open, `model.generate` stops each row at its budget and notes what it samples.

    `generate` would apply temperature and cuts of the support after every processor that it is given, so that none
    sees what is sampled. They are given to it as processors, then, and its own are switched off.

    Args:
        model ([`~transformers.PreTrainedModel`]): the model whose `generate` is called, once.
        budgets, eos_token_ids: see [`SampleRecorder`].
        warpers ([`~transformers.LogitsProcessorList`]): what shapes the distribution, in place of the settings of the
            `generation_config` that `generate` is called with.
    """
    recorder = SampleRecorder(budgets, eos_token_ids, model.device)
    generate = model.generate

    def bounded(*args: Any, generation_config: Any, **kwargs: Any) -> Any:
        generation_config = copy.copy(generation_config)
        generation_config.max_new_tokens = max(budgets)
        generation_config.temperature, generation_config.top_k, generation_config.top_p = 1.0, 0, 1.0
        if generation_config.min_p is not None:  # an open one would be filled in from the model's own config
            generation_config.min_p = 0.0
        return generate(  # type: ignore[operator]
            *args,
            generation_config=generation_config,
            logits_processor=LogitsProcessorList([*warpers, _Scores(recorder)]),
            stopping_criteria=[_Tokens(recorder)],
            **kwargs,
        )

    with method_in_place(model, "generate", bounded):
        yield recorder


@contextmanager
def method_in_place(model: PreTrainedModel, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """While open, a method of this one model is another."""
    patched = vars(model).get(name)
    setattr(model, name, method)
    try:
        yield
    finally:
        delattr(model, name)  # the method of the class shows again, or what somebody else put in its place
        if patched is not None:
            setattr(model, name, patched)
