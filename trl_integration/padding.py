"""Padding, and as little of it as can be: rows of similar length share a forward, where TRL pads all to the longest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig


def by_length(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Indices in batches of `size` rows of similar length, the shortest first."""
    order = np.argsort(lengths, kind="stable").tolist()
    return [order[start : start + size] for start in range(0, len(order), size)]


def logprobs_by_length(
    forward: Callable[[torch.Tensor, torch.Tensor, int], Any],
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    rows: list[int],
    size: int,
    trim: bool = True,
) -> torch.Tensor:
    """Log-probs of completions, computed in narrow batches.

    Args:
        forward (callable): from input ids and attention mask, of shape `(rows, tokens)`, and `logits_to_keep` to a
            tuple that begins with log-probs of shape `(rows, logits_to_keep)`, nats.
        input_ids, attention_mask (`torch.Tensor` of shape `(batch, tokens)`): prompts, padded on the left, and
            completions, padded on the right.
        logits_to_keep (`int`): width of the completions, padding included.
        rows (`list[int]`): those that are wanted.
        size (`int`): rows in a forward.
        trim (`bool`, *optional*, defaults to `True`): whether to leave out columns that no row of a forward needs.

    Returns:
        `torch.Tensor` of shape `(batch, logits_to_keep)`, fp32, nats; zero in other rows and in padding of a batch.
    """
    logprobs = torch.zeros((len(input_ids), logits_to_keep), device=input_ids.device)
    lengths = attention_mask[:, -logits_to_keep:].sum(1)
    for batch in by_length(attention_mask[rows].sum(1).tolist(), size):
        these = [rows[i] for i in batch]
        start, keep = 0, logits_to_keep
        if trim:
            start, keep = int(attention_mask[these].argmax(1).min()), max(1, int(lengths[these].max()))
        columns = slice(start, attention_mask.size(1) - logits_to_keep + keep)
        computed, _, _ = forward(input_ids[these, columns], attention_mask[these, columns], keep)
        logprobs[these, :keep] = computed.float()
    return logprobs


def depends_on_width(config: PreTrainedConfig) -> bool:
    """Whether a model's rotary positions follow the longest row of a forward, as dynamic scaling and LongRoPE do."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = [parameters, *(kind for kind in parameters.values() if isinstance(kind, dict))]  # one for a kind of layer
    return any(kind.get("rope_type") in ("dynamic", "longrope") for kind in kinds)


def pad(rows: Sequence[Any], value: int, side: str, device: torch.device) -> torch.Tensor:
    """Ragged rows as one integer tensor of shape `(batch, tokens)`."""
    tensors = [torch.as_tensor(row, dtype=torch.long) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side).to(device)
