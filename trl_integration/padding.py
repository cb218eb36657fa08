"""Padding, and as little of it as can be: rows of similar length share a forward, where TRL pads all to the longest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig

# Share of a forward that may be padding, unless it has so few tokens that a GPU is no quicker with fewer.
_PADDED_SHARE = 1 / 16
_FEW_TOKENS = 4096


def by_length(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Rows that share a forward, the shortest first: of no more tokens, padding included, than `size` of the longest
    row, and little padding."""
    most, forwards, unpadded = size * max(lengths, default=0), [], 0
    for row in np.argsort(lengths, kind="stable").tolist():
        tokens = (len(forwards[-1]) + 1) * lengths[row] if forwards else most + 1
        unpadded += lengths[row]
        if tokens <= most and (tokens <= _FEW_TOKENS or unpadded >= (1 - _PADDED_SHARE) * tokens):
            forwards[-1].append(row)
        else:
            forwards.append([row])
            unpadded = lengths[row]
    return forwards


def narrow_logprobs(
    forward: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor],
    prompts: Sequence[list[int] | NDArray[np.integer]],
    continuations: Sequence[NDArray[np.int32]],
    size: int,
    device: torch.device,
    of_all_ranks: Callable[[int], int] | None = None,
    take: Callable[[list[int]], None] | None = None,
) -> list[NDArray[np.float32]]:
    """Log-probs of continuations of prompts, in narrow forwards.

    Prompt and continuation stand together at the left and padding behind them, where causal attention does not see it:
    so no mask is needed, without which PyTorch attends by its fastest kernel.

    Args:
        forward (callable): from input ids and attention mask, of shape `(rows, tokens)`, and how many tokens at the end
            are scored to their log-probs, of shape `(rows, scored)`, nats.
        prompts (`batch` lists or arrays of `prompt tokens` ids).
        continuations (`batch` arrays of shape `(tokens,)`, of one token at least).
        size (`int`): rows in a forward, of the longest.
        device (`torch.device`): where they are computed.
        of_all_ranks (callable, *optional*): from the number of this rank's forwards to the most of any rank: each makes
            as many, since a sharded model needs all ranks for one. Defaults to this rank alone.
        take (callable, *optional*): called with the rows of each forward after it.

    Returns:
        `batch` arrays of shape `(tokens,)`, nats.

    Raises:
        ValueError: a prompt has no tokens, so that nothing says how likely the first one of its continuation is.
    """
    if not all(map(len, prompts)):
        raise ValueError("a prompt has no tokens: have the tokenizer begin with one (`add_bos_token`), or drop it")
    sequences = [np.concatenate([p, c]) for p, c in zip(prompts, continuations, strict=True)]
    scored: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * len(prompts)
    forwards = by_length([len(sequence) for sequence in sequences], size)
    if of_all_ranks is not None:
        forwards += [[]] * (of_all_ranks(len(forwards)) - len(forwards))
    for rows in forwards:
        ids = pad([sequences[row] for row in rows] or [[0, 0]], device)
        start = min((len(prompts[row]) for row in rows), default=1)
        lines = forward(ids, torch.ones_like(ids), ids.size(1) - start).float().cpu().numpy()
        for row, line in zip(rows, lines[: len(rows)], strict=True):
            scored[row] = line[len(prompts[row]) - start :][: len(continuations[row])]
        if take is not None:
            take(rows)
    return scored


def flush_left(
    forward: Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor | None, ...]],
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    multiple: int = 1,
) -> tuple[torch.Tensor | None, ...]:
    """What a forward gives for rows as TRL has padded them, prompts on the left and completions on the right; the
    forward itself has rows as [`narrow_logprobs`] lays them out.

    Args:
        forward (callable): from input ids and attention mask, of shape `(rows, tokens)`, and how many tokens at the end
            are scored, to tensors of shape `(rows, scored)`, or `None`.
        input_ids, attention_mask (`torch.Tensor` of shape `(rows, tokens)`): TRL's.
        logits_to_keep (`int`): columns of the completions.
        multiple (`int`, *optional*): what the width is rounded up to.

    Returns:
        Tensors of shape `(rows, logits_to_keep)`, zero where the mask is.
    """
    width, device = input_ids.size(1), input_ids.device
    begin = width - logits_to_keep
    lengths, prompts = attention_mask.sum(1), attention_mask[:, :begin].sum(1)
    longest, shortest_prompt = torch.stack([lengths.max(), prompts.min()]).tolist()
    longest = max(longest, shortest_prompt + 1)  # one token is scored, where all completions are masked
    longest = min(width, -(-longest // multiple) * multiple)
    source = (begin - prompts)[:, None] + torch.arange(longest, device=device)
    ids = input_ids.gather(1, source.clamp(max=width - 1))  # what comes behind a row is of no interest
    scored = longest - shortest_prompt
    results = forward(ids, torch.ones_like(ids), scored)
    target = (prompts - shortest_prompt)[:, None] + torch.arange(logits_to_keep, device=device)
    masked = attention_mask[:, begin:] == 0
    return tuple(
        line if line is None else line.gather(1, target.clamp(max=scored - 1)).masked_fill(masked, 0.0)
        for line in results
    )


def depends_on_width(config: PreTrainedConfig) -> bool:
    """Whether what a model makes of a row depends on the padding of a forward: rotary positions that follow its longest
    row, as in dynamic scaling and LongRoPE, or attention that is scaled by the number of a position, as in Llama 4."""
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    kinds = [parameters, *(kind for kind in parameters.values() if isinstance(kind, dict))]  # one for a kind of layer
    follows = any(kind.get("rope_type") in ("dynamic", "longrope") for kind in kinds)
    scaled = any(kind.get("llama_4_scaling_beta") is not None for kind in kinds)
    return follows or scaled or bool(getattr(text, "attn_temperature_tuning", False))


# Kinds of models that see padding in spite of the attention mask: recurrent ones, those that number positions from it,
# and Doge, which is not causal without one. Found in transformers 5.15, by comparing rows alone with the same padded.
_SEES_PADDING = {
    "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "biogpt", "blenderbot", "blenderbot-small",
    "cpmant", "ctrl", "doge", "electra", "ernie", "git", "gpt2", "gpt_bigcode", "gpt_neo", "marian", "mbart",
    "megatron-bert", "mvp", "openai-gpt", "pegasus", "plbart", "recurrent_gemma", "rembert", "roc_bert", "roformer",
    "rwkv", "trocr", "whisper", "xglm", "xlm", "xlstm",
}  # fmt: skip
_LEARNED_POSITIONS = {"wpe", "positions_embed"}  # names of their tables, in models of GPT-2's kind


def sees_padding(model: nn.Module, config: PreTrainedConfig) -> bool:
    """Whether what a model makes of a row depends on padding that the attention mask leaves out."""
    text = config.get_text_config()
    return (
        text.model_type in _SEES_PADDING
        or (text.model_type.startswith("lfm2") and bool(getattr(text, "conv_bias", False)))
        or any(name.rpartition(".")[2] in _LEARNED_POSITIONS for name, _ in model.named_modules())
    )


def pad(rows: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Ragged rows as one integer tensor of shape `(batch, tokens)`, with zeros behind."""
    tensors = [torch.as_tensor(row, dtype=torch.long) for row in rows]
    return pad_sequence(tensors, batch_first=True).to(device)
