"""Stand-in for flash_attn.bert_padding in plain PyTorch."""

import torch
from einops import rearrange  # noqa: F401  (re-exported, as in the original)


def index_first_axis(x, indices):
    return x[indices]


def unpad_input(hidden_states, attention_mask, unused_mask=None):
    """(batch, seqlen, ...) -> (tokens, ...), indices, cu_seqlens, max_seqlen, seqlens."""
    mask = attention_mask if unused_mask is None else attention_mask + unused_mask
    seqlens = mask.sum(dim=-1, dtype=torch.int32)
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(mask.flatten(), as_tuple=False).flatten()
    cu_seqlens = torch.nn.functional.pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))
    return (index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, int(seqlens.max()), used)


def pad_input(hidden_states, indices, batch, seqlen):
    out = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return out.index_put((indices,), hidden_states).unflatten(0, (batch, seqlen))
