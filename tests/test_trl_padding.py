"""Narrow forwards: the same log-probs, less padding."""

from __future__ import annotations

import pytest

pytest.importorskip("trl")

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Llama4TextConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    Qwen3NextConfig,
)

from trl_integration.padding import by_length, depends_on_width, flush_left, narrow_logprobs

DYNAMIC = dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0)

pytestmark = pytest.mark.trl


def test_forwards_are_of_similar_length_and_hold_every_row_once():
    assert by_length([5, 1, 4, 2, 3], 2) == [[1, 3, 4], [2, 0]]
    assert by_length([10] * 9 + [80], 1) == [[*range(8)], [8], [9]]
    assert by_length([1000] * 9 + [1100] * 3 + [2000], 8) == [[*range(9)], [9, 10, 11], [12]]
    assert by_length([], 2) == []


@pytest.mark.parametrize("scale", [20, 2000])
@pytest.mark.parametrize("size", [1, 3, 16])
def test_forwards_are_bounded_in_tokens_and_in_padding(size, scale):
    lengths = (1 + np.random.default_rng(size).exponential(scale, 500).astype(int)).tolist()
    forwards = by_length(lengths, size)
    assert sorted(row for rows in forwards for row in rows) == list(range(500))
    widths = [max(lengths[row] for row in rows) for rows in forwards]
    assert widths == sorted(widths)
    for rows, width in zip(forwards, widths, strict=True):
        tokens = len(rows) * width
        assert tokens <= size * max(lengths)
        assert tokens <= 4096 or sum(lengths[row] for row in rows) >= 15 / 16 * tokens
    assert len(forwards) < 500 / size + 8


def rows_of(prompt_lengths, lengths):
    """Random token ids of prompts and continuations."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 50, n).tolist() for n in prompt_lengths]
    return prompts, [rng.integers(1, 50, n).astype(np.int32) for n in lengths]


@pytest.mark.parametrize("size", [1, 3, 16])
def test_log_probs_are_those_of_each_row_alone(size):
    prompts, continuations = rows_of([4, 2, 9, 2, 5, 5, 1, 3], [7, 1, 3, 20, 2, 1, 6, 6])
    computed, taken = [], []

    def forward(ids, mask, keep):
        """Of all that came before, as a model's are."""
        computed.append(ids.shape)
        assert mask.all() and 0 < keep < ids.size(1) and len(ids) * ids.size(1) <= size * 22
        return -ids.cumsum(1).float()[:, -keep:]

    device = torch.device("cpu")
    found = narrow_logprobs(forward, prompts, continuations, size, device, lambda forwards: forwards + 2, taken.append)
    for prompt, tokens, logprobs in zip(prompts, continuations, found, strict=True):
        alone = -np.cumsum([*prompt, *tokens])[len(prompt) :]
        assert logprobs.dtype == np.float32 and logprobs.tolist() == alone.tolist()
    assert len(computed) == len(taken) and taken[-2:] == [[], []]  # what other ranks need
    assert narrow_logprobs(forward, [], [], size, device) == []


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(ValueError, match="add_bos_token"):
        narrow_logprobs(None, [[1], []], [np.array([1]), np.array([1])], 2, torch.device("cpu"))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "kind", [LlamaConfig, Gemma3TextConfig, Qwen3NextConfig, MixtralConfig], ids=lambda k: k.__name__
)
def test_what_stands_behind_a_row_changes_nothing(kind, attention):
    """Of models with full, sliding and linear attention, and with experts."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2)
    sizes |= dict(num_key_value_heads=1, head_dim=16, sliding_window=4, max_position_embeddings=64)
    model = AutoModelForCausalLM.from_config(kind(**sizes), attn_implementation=attention).eval()

    def forward(ids, mask, keep):
        logprobs = model(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)[:, :-1]
        return logprobs.gather(2, ids[:, 1:, None])[:, -keep:, 0]

    prompts, continuations = rows_of([4, 2, 9, 5, 1], [7, 1, 3, 20, 2])
    device = torch.device("cpu")
    with torch.no_grad():
        together = narrow_logprobs(forward, prompts, continuations, 16, device)
        alone = narrow_logprobs(forward, prompts, continuations, 1, device)
        padded = flush_left(lambda *rows: (forward(*rows), None), *trls_layout(prompts, continuations))
    assert np.allclose(np.concatenate(together), np.concatenate(alone), atol=1e-5)
    assert padded[1] is None
    for line, expected in zip(padded[0].numpy(), alone, strict=True):
        assert np.allclose(line[: len(expected)], expected, atol=1e-5) and not line[len(expected) :].any()


def trls_layout(prompts, continuations):
    """Ids and mask of rows as TRL pads them, and the columns of the continuations."""
    wide, long = max(map(len, prompts)) + 2, max(map(len, continuations)) + 3
    ids, mask = torch.full((len(prompts), wide + long), 7), torch.zeros(len(prompts), wide + long, dtype=torch.long)
    for row, (prompt, tokens) in enumerate(zip(prompts, continuations, strict=True)):
        there = slice(wide - len(prompt), wide + len(tokens))
        ids[row, there], mask[row, there] = torch.tensor([*prompt, *tokens.tolist()]), 1
    return ids, mask, long


@pytest.mark.parametrize("multiple", [1, 8])
def test_rows_at_the_left_keep_their_gradient(multiple):
    """And rows of which nothing is in the mask are zero, where all are so too."""
    prompts, continuations = rows_of([4, 2, 9, 5], [7, 1, 3, 4])
    ids, mask, keep = trls_layout(prompts, continuations)
    mask[2, -keep:] = 0  # as TRL masks a completion that was cut
    weights = torch.randn(50, dtype=torch.float64, requires_grad=True)
    widths = []

    def forward(ids, mask, keep):
        widths.append(ids.size(1))
        return (weights[ids].cumsum(1)[:, -keep:],)

    (lines,) = flush_left(forward, ids, mask, keep, multiple)
    assert widths == [11 if multiple == 1 else 16]
    expected = [
        weights[torch.tensor([*p, *c.tolist()])].cumsum(0)[len(p) :]
        for p, c in zip(prompts, continuations, strict=True)
    ]
    for row, line in enumerate(expected):
        torch.testing.assert_close(lines[row, : len(line)], line * (row != 2))
    found = torch.autograd.grad(lines.sum(), weights)[0]
    torch.testing.assert_close(found, torch.autograd.grad(sum(expected[row].sum() for row in (0, 1, 3)), weights)[0])
    mask[:, -keep:] = 0
    (lines,) = flush_left(forward, ids, mask, keep, multiple)
    assert lines.shape == (4, keep) and not lines.any()


def test_positions_that_depend_on_the_width_are_known():
    factors = dict(rope_type="longrope", short_factor=[1.0] * 8, long_factor=[2.0] * 8, rope_theta=10000.0)
    sizes = dict(hidden_size=64, num_attention_heads=4)
    longrope = Phi3Config(**sizes, original_max_position_embeddings=24, rope_parameters=factors)
    assert depends_on_width(longrope) and depends_on_width(LlamaConfig(rope_parameters=DYNAMIC))
    linear = LlamaConfig(rope_parameters=DYNAMIC | dict(rope_type="linear"))
    assert not any(map(depends_on_width, (LlamaConfig(), linear, Gemma3TextConfig())))
    scaled = dict(rope_type="default", rope_theta=10000.0, llama_4_scaling_beta=0.1)  # attention, by the position
    assert depends_on_width(LlamaConfig(rope_parameters=scaled)) and depends_on_width(Llama4TextConfig())
    by_layer = {"sliding_attention": dict(rope_type="default", rope_theta=1e4), "full_attention": DYNAMIC}
    assert depends_on_width(Gemma3TextConfig(rope_parameters=by_layer))
