"""Rows of similar length share a forward: the same log-probs, less padding."""

from __future__ import annotations

import pytest

pytest.importorskip("trl")

import torch

from trl_integration.padding import by_length, logprobs_by_length, pad

pytestmark = pytest.mark.trl


def test_batches_are_of_similar_length_and_hold_every_row_once():
    assert by_length([5, 1, 4, 2, 3], 2) == [[1, 3], [4, 2], [0]]
    assert by_length([], 2) == []


@pytest.mark.parametrize("size", [1, 3, 16])
@pytest.mark.parametrize("wanted", [range(8), [6, 1, 3], []], ids=["all", "some", "none"])
def test_log_probs_are_those_of_the_padded_forward(wanted, size):
    prompts, completions = [4, 2, 9, 2, 5, 5, 1, 3], [7, 1, 3, 20, 2, 0, 6, 6]  # of one row nothing is left
    torch.manual_seed(0)
    rows = [[torch.randint(1, 50, (n,)) for n in counts] for counts in (prompts, completions)]
    sides = list(zip(rows, ("left", "right"), strict=True))
    ids = torch.cat([pad(part, 0, side, torch.device("cpu")) for part, side in sides], 1)
    mask = torch.cat(
        [pad([torch.ones(len(row)) for row in part], 0, side, torch.device("cpu")) for part, side in sides], 1
    )
    computed = []

    def forward(ids, mask, keep):
        """Of all that came before, as a model's are, and of nothing that is masked."""
        computed.append(ids.numel())
        assert len(ids) <= size and mask[:, 0].any()
        return (-(ids * mask).cumsum(1).float() * mask)[:, -keep:], None, None

    found = logprobs_by_length(forward, ids, mask, 20, list(wanted), size)
    narrow = sum(computed)
    size = len(ids)
    whole, _, _ = forward(ids, mask, 20)
    absent = [row for row in range(len(ids)) if row not in wanted]
    whole[absent] = 0
    assert found.dtype == torch.float32 and torch.equal(found, whole)
    assert narrow <= len(wanted) * ids.size(1)
