"""The distribution that responses are sampled from: the model's own, shaped by temperature, top-k, top-p and min-p.

What shapes it is the sampling library's own code where that can be called, in the order in which the library applies
it. The order matters: each cut of the support is measured by what the one before has left.

| | order |
| --- | --- |
| transformers 5.15, `generate` | temperature, top-k, top-p, min-p |
| vLLM 0.29 | temperature, min-p, top-k, top-p |
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel, is_peft_model
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

# Bounds of memory: logits of one forward (in the model's dtype), and those that are sorted at once (in fp32).
_FORWARD_LOGITS = 1 << 28
_SORTED_LOGITS = 1 << 26


class SampledDistribution:
    """What is sampled from, and log-probs under it.

    Args:
        temperature (`float`): what logits are divided by, above 0.
        top_k (`int`): how many of the likeliest tokens are kept; 0 keeps all.
        top_p (`float`): mass of the likeliest tokens that are kept, above 0; 1 keeps all.
        min_p (`float`, *optional*): least chance of a token that is kept, as a share of the likeliest token's.
        sampler (`str`): which library samples, `"transformers"` or `"vllm"`.

    Attributes:
        sampler (`str`): as given.
        truncated (`bool`): whether some tokens may be left without probability.
        warpers ([`~transformers.LogitsProcessorList`]): turn logits of shape `(rows, vocabulary)` into those of the
            sampled distribution, in the same shape; minus infinity for a token that is left out.
    """

    def __init__(self, temperature: float, top_k: int, top_p: float, min_p: float | None, sampler: str):
        self.sampler = sampler
        self.truncated = truncates(top_k, top_p, min_p)
        temper = [TemperatureLogitsWarper(float(temperature))] if temperature != 1.0 else []
        least = [MinPLogitsWarper(min_p)] if min_p else []
        if sampler == "vllm":
            likeliest = [_VLLMTopKTopP(top_k, top_p)] if truncates(top_k, top_p, None) else []
            self.warpers = LogitsProcessorList([*temper, *least, *likeliest])
        else:
            most = [TopKLogitsWarper(top_k)] if top_k else []
            mass = [TopPLogitsWarper(top_p)] if top_p < 1.0 else []
            self.warpers = LogitsProcessorList([*temper, *most, *mass, *least])

    def logprobs(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int
    ) -> torch.Tensor:
        """Log-probs of the last tokens of sequences, by a forward of the model.

        TRL's own forward never has all logits of a position at once, which a cut of the support needs.

        Args:
            model ([`~transformers.PreTrainedModel`]): the policy.
            input_ids, attention_mask (`torch.Tensor` of shape `(batch, tokens)`): the sequences.
            logits_to_keep (`int`): how many tokens at the end are scored.

        Returns:
            `torch.Tensor` of shape `(batch, logits_to_keep)`, fp32, nats; minus infinity for a token that the cut of
            the support leaves out.
        """
        # One position more: the logits of a token stand before it. A model without this argument returns them all.
        inner: Any = extract_model_from_parallel(model)  # FSDP 1 wraps it
        inner = inner.get_base_model() if is_peft_model(inner) else inner
        takes_it = "logits_to_keep" in inspect.signature(type(inner).forward).parameters
        few = {"logits_to_keep": logits_to_keep + 1} if takes_it else {}
        output = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **few)
        logits = output.logits[:, -logits_to_keep - 1 : -1]
        tokens = input_ids[:, -logits_to_keep:].flatten()
        at_once = max(1, _SORTED_LOGITS // logits.size(-1))
        scored = [
            self.token_logprobs(part, token)
            for part, token in zip(logits.flatten(0, 1).split(at_once), tokens.split(at_once), strict=True)
        ]
        return torch.cat(scored).view(len(input_ids), logits_to_keep)

    def rows_at_once(self, tokens: int, vocabulary: int) -> int:
        """How many rows one call of [`logprobs`] may have, so that its logits stay few; at least 1.

        Args:
            tokens (`int`): most tokens of a row that are scored.
            vocabulary (`int`): token ids of the model.
        """
        return max(1, _FORWARD_LOGITS // (tokens * vocabulary))

    def token_logprobs(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Log-probs, nats, of tokens of shape `(rows,)` by the model's logits of shape `(rows, vocabulary)`."""
        warped = self.warpers(tokens[:, None], logits.float())  # type: ignore[arg-type]
        return warped.gather(1, tokens[:, None])[:, 0] - warped.logsumexp(1)


def truncates(top_k: int, top_p: float, min_p: float | None) -> bool:
    """Whether these settings may leave some tokens without probability."""
    return bool(top_k or top_p < 1.0 or min_p)


class _VLLMTopKTopP(LogitsProcessor):
    """vLLM's top-k and top-p, by the function that its sampler calls: kernels differ in which of two equals they keep.

    Read in vLLM 0.29. Like its sampler it hands over a `k` that keeps all as the size of the vocabulary, and
    nothing for a setting that no row has.
    """

    def __init__(self, top_k: int, top_p: float):
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        self.top_k, self.top_p, self._apply = top_k, top_p, apply_top_k_top_p

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        rows, vocabulary = scores.shape
        k = min(self.top_k, vocabulary)
        ks = torch.full((rows,), k, dtype=torch.int32, device=scores.device) if k else None
        ps = torch.full((rows,), self.top_p, device=scores.device) if self.top_p < 1.0 else None
        return self._apply(scores.clone(), ks, ps)  # it works in place
