"""The update with its rows packed end to end, as a side of `update.py`: no padding at all.

Attention of the packed rows is PyTorch's variable-length kernel (`torch.nn.attention.varlen`), by way of transformers'
registry of attention functions. It is the same for models whose layers all attend to everything before them; it is not
part of the product, see `NOTES.md`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

PACKED = "packed-rows"


def packed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    row_starts: torch.Tensor | None = None,
    longest: int = 0,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    """Causal attention of each row to itself.

    Args:
        query, key, value (`torch.Tensor` of shape `(1, heads, tokens, head size)`): key and value may have fewer heads.
        row_starts (`torch.Tensor` of shape `(rows + 1,)`): where each row begins, and the number of tokens.
        longest (`int`): tokens of the longest row.
    """
    if row_starts is None:  # a forward that is not packed
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    if query.device.type == "cpu":  # PyTorch has the kernel for GPUs alone
        rows = [slice(a, b) for a, b in zip(row_starts[:-1].tolist(), row_starts[1:].tolist(), strict=True)]
        parts = [
            torch.nn.functional.scaled_dot_product_attention(
                *(part[row].transpose(0, 1) for part in (query, key, value)),
                is_causal=True, scale=scaling, enable_gqa=True,
            ).transpose(0, 1)
            for row in rows
        ]  # fmt: skip
        return torch.cat(parts)[None], None
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    settings: dict[str, Any] = {"scale": scaling} if "scale" in known else {}
    settings |= {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        settings["enable_gqa"] = True
    else:
        key, value = (part.repeat_interleave(query.size(1) // part.size(1), 1) for part in (key, value))
    return varlen_attn(query, key, value, row_starts, row_starts, longest, longest, **settings)[None], None


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(
    PACKED,
    lambda *args, attention_mask=None, **kwargs: (
        None if attention_mask is None else sdpa_mask(*args, attention_mask=attention_mask, **kwargs)
    ),
)


def packed_logprobs(
    trainer: Any, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """As TRL's `_get_per_token_logps_and_entropies`, for rows of prompts on the left and completions on the right, of a
    model whose attention implementation is `PACKED`."""
    there = attention_mask.bool()
    lengths = there.sum(1)
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    positions = (attention_mask.cumsum(1) - 1)[there]
    scored = there.clone()
    scored[:, :-logits_to_keep] = False
    labels = input_ids.masked_fill(~scored, -100)[there]
    with trainer.accelerator.autocast():
        output = model(
            input_ids=input_ids[there][None],
            position_ids=positions[None],
            attention_mask=None,
            labels=labels[None],
            fused_lm_head=True,
            row_starts=starts,
            longest=int(lengths.max()),
        )
    # The label of a row's first token is asked of the row before it, and is no completion's.
    at = scored[there].nonzero()[:, 0] - 1
    lines = (line[0][at] for line in (output.log_probs, output.entropy))
    wide = scored[:, -logits_to_keep:]
    return *(line.new_zeros(wide.shape).masked_scatter(wide, line) for line in lines), None
