"""Rows of similar length share a forward: the same log-probs, less padding."""

from __future__ import annotations

import pytest

pytest.importorskip("trl")

import torch
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config

from trl_integration.padding import by_length, depends_on_width, logprobs_by_length, pad

DYNAMIC = dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0)

pytestmark = pytest.mark.trl


def test_batches_are_of_similar_length_and_hold_every_row_once():
    assert by_length([5, 1, 4, 2, 3], 2) == [[1, 3], [4, 2], [0]]
    assert by_length([], 2) == []


@pytest.mark.parametrize("trim", [True, False])
@pytest.mark.parametrize("size", [1, 3, 16])
@pytest.mark.parametrize("wanted", [range(8), [6, 1, 3], []], ids=["all", "some", "none"])
def test_log_probs_are_those_of_the_padded_forward(wanted, size, trim):
    prompts, completions = [4, 2, 9, 2, 5, 5, 1, 3], [7, 1, 3, 20, 2, 0, 6, 6]  # of one row nothing is left
    torch.manual_seed(0)
    rows = [[torch.randint(1, 50, (n,)) for n in counts] for counts in (prompts, completions)]
    sides = list(zip(rows, ("left", "right"), strict=True))
    ids = torch.cat([pad(part, 0, side, torch.device("cpu")) for part, side in sides], 1)
    mask = torch.cat(
        [pad([torch.ones(len(row)) for row in part], 0, side, torch.device("cpu")) for part, side in sides], 1
    )
    computed, width = [], ids.size(1)

    def forward(ids, mask, keep):
        """Of all that came before, as a model's are, and of nothing that is masked."""
        computed.append(ids.numel())
        assert len(ids) <= size and (mask[:, 0].any() if trim else ids.size(1) == width)
        return (-(ids * mask).cumsum(1).float() * mask)[:, -keep:], None, None

    found = logprobs_by_length(forward, ids, mask, 20, list(wanted), size, trim)
    narrow = sum(computed)
    size = len(ids)
    whole, _, _ = forward(ids, mask, 20)
    absent = [row for row in range(len(ids)) if row not in wanted]
    whole[absent] = 0
    assert found.dtype == torch.float32 and torch.equal(found, whole)
    assert narrow <= len(wanted) * ids.size(1)


def test_positions_that_depend_on_the_width_are_known():
    factors = dict(rope_type="longrope", short_factor=[1.0] * 8, long_factor=[2.0] * 8, rope_theta=10000.0)
    sizes = dict(hidden_size=64, num_attention_heads=4)
    longrope = Phi3Config(**sizes, original_max_position_embeddings=24, rope_parameters=factors)
    assert depends_on_width(longrope) and depends_on_width(LlamaConfig(rope_parameters=DYNAMIC))
    linear = LlamaConfig(rope_parameters=DYNAMIC | dict(rope_type="linear"))
    assert not any(map(depends_on_width, (LlamaConfig(), linear, Gemma3TextConfig())))
    by_layer = {"sliding_attention": dict(rope_type="default", rope_theta=1e4), "full_attention": DYNAMIC}
    assert depends_on_width(Gemma3TextConfig(rope_parameters=by_layer))
