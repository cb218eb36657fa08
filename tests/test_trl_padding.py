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
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trl_integration.padding import by_length, depends_on_width, flush_left, narrow_logprobs, sees_padding

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


# What makes an architecture tiny, by the names that configs have for it.
TINY = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    head_dim=16, vocab_size=60, max_position_embeddings=128, n_embd=32, n_layer=2, n_head=2, n_positions=128,
    n_inner=48, d_model=32, n_layers=2, n_heads=2, num_layers=2, num_heads=2, ffn_dim=48, word_embed_proj_dim=32,
    attention_types=[[["global"], 2]], num_experts=4, num_local_experts=4, num_experts_per_tok=2, n_routed_experts=4,
    moe_intermediate_size=16, n_shared_experts=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8,
    qk_nope_head_dim=8, v_head_dim=16, first_k_dense_replace=1, n_group=1, topk_group=1, rotary_dim=8, dff=48,
    decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=48, encoder_layers=2, encoder_attention_heads=2,
    encoder_ffn_dim=48, embedding_size=32, lru_width=32, attention_hidden_size=32, pad_token_id=0, bos_token_id=1,
    eos_token_id=2, rotary_emb_dim=16, shared_expert_intermediate_size=16, hidden_dropout=0.0, state_size=8, dim=32,
    is_decoder=True, emb_dim=32, mamba_n_heads=4, mamba_d_head=16, mamba_d_ssm=64, mamba_n_groups=1, mamba_d_state=8,
)  # fmt: skip
MADE = 110  # kinds of models at least that these names make tiny


def tiny_models():
    """Causal language models of every kind that transformers has and that can be made tiny, by their kind."""
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        config_class = CONFIG_MAPPING[kind]
        for without in ((), ("head_dim",), ("num_key_value_heads",)):
            try:
                default = config_class()
                sizes = {name: size for name, size in TINY.items() if hasattr(default, name) and name not in without}
                config = config_class(**sizes)
                with torch.device("meta"):
                    weights = sum(map(torch.numel, AutoModelForCausalLM.from_config(config).parameters()))
                if weights > 2_000_000:
                    break
                torch.manual_seed(0)
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
            except Exception:
                continue
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    if weight.ndim > 1 or "bias" in name:
                        weight.normal_(0, 0.2)
            yield kind, model
            break


@pytest.mark.slow
def test_every_kind_of_model_that_sees_padding_is_known():
    """A row alone, after padding that the mask leaves out, and before tokens that a causal model does not see."""
    row, padding = torch.randint(5, 60, (1, 12), generator=torch.Generator().manual_seed(1)), 5
    before = torch.cat([torch.zeros(1, padding, dtype=torch.long), row], 1)
    mask = (torch.arange(before.size(1)) >= padding).long()[None]
    behind = torch.cat([row, row[:, :padding]], 1)
    made, wrong = 0, []
    for kind, model in tiny_models():
        try:
            with torch.no_grad():
                alone = model(input_ids=row, attention_mask=torch.ones_like(row)).logits
                padded = model(input_ids=before, attention_mask=mask).logits[:, padding:]
                followed = model(input_ids=behind, attention_mask=torch.ones_like(behind)).logits[:, : row.size(1)]
        except Exception:
            continue
        made += 1
        apart = max((other.log_softmax(-1) - alone.log_softmax(-1)).abs().max().item() for other in (padded, followed))
        if not apart < 2e-3 and not sees_padding(model, model.config):
            wrong.append(f"{kind}: {apart:.2g} nats")
    assert not wrong
    assert made >= MADE
