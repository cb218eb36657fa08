"""Flat log-probs out of vLLM at less cost: the same results, with fewer Python calls a token.

Two private methods of vLLM are replaced while the engine is called, read in 0.29 (0.26 and 0.31 have the same).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.logprobs import FlatLogprobs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists, LogprobsTensors


@contextmanager
def filed_fast() -> Iterator[None]:
    """While it lasts, a request for flat log-probs of nothing but its own tokens has them filed without a detour.

    vLLM files each position by itself, through loops and iterators that are there for several tokens a position. For
    long responses that is a good part of what scoring costs beside the model. All other requests are vLLM's own affair.
    """
    prompt, sampled = LogprobsProcessor._update_prompt_logprobs, LogprobsProcessor._update_sample_logprobs

    def file_prompt(self: LogprobsProcessor, tensors: LogprobsTensors) -> None:
        filed = self.prompt_logprobs
        if self.num_prompt_logprobs or self.tokenizer is not None or not isinstance(filed, FlatLogprobs):
            return prompt(self, tensors)
        ids, logprobs, ranks, *_ = tensors  # of shape (tokens, 1), (tokens, 1), (tokens,)
        start, count = len(filed.token_ids), len(ids)
        filed.token_ids.extend(ids[:, 0].tolist())
        filed.logprobs.extend(logprobs[:, 0].tolist())
        filed.ranks.extend(ranks.tolist())
        filed.decoded_tokens.extend([None] * count)
        filed.start_indices.extend(range(start, start + count))
        filed.end_indices.extend(range(start + 1, start + count + 1))

    def file_sampled(self: LogprobsProcessor, lists: LogprobsLists) -> None:
        filed = self.logprobs
        # As above, of one token unless vLLM decodes speculatively. There are more columns where another request in the
        # batch asks for more than its own tokens.
        ids, logprobs, ranks, *_ = lists
        plain = self.num_logprobs == 0 and self.tokenizer is None and len(ids) == 1
        if not plain or not isinstance(filed, FlatLogprobs):
            return sampled(self, lists)
        start, logprob = len(filed.token_ids), logprobs[0, 0].item()
        assert self.cumulative_logprob is not None
        self.cumulative_logprob += logprob
        filed.token_ids.append(ids[0, 0].item())
        filed.logprobs.append(logprob)
        filed.ranks.append(ranks.item())
        filed.decoded_tokens.append(None)
        filed.start_indices.append(start)
        filed.end_indices.append(start + 1)

    LogprobsProcessor._update_prompt_logprobs, LogprobsProcessor._update_sample_logprobs = file_prompt, file_sampled
    try:
        yield
    finally:
        LogprobsProcessor._update_prompt_logprobs, LogprobsProcessor._update_sample_logprobs = prompt, sampled
