"""Which rows are scored before TRL asks for the old log-probs, and by whom."""

from __future__ import annotations

import pytest

pytest.importorskip("trl")

import numpy as np

from specrl_plugins.response import Response
from trl_integration.pending import old_logprobs_wanted

pytestmark = pytest.mark.trl


def response(tokens, prefix):
    """A response of which the first `prefix` tokens are reused."""
    logprobs = -np.arange(1, tokens + 1, dtype=np.float32)
    return Response([1, 2], b"prompt", 0, prefix=prefix, tokens=np.arange(tokens, dtype=np.int32), logprobs=logprobs)


@pytest.mark.parametrize(
    ("tokens", "prefix", "in_mask", "wanted", "known"),
    [
        (5, 0, 5, 5, False),  # sampled afresh
        (5, 3, 5, 5, False),  # reused in part: what was generated is scored by nobody yet
        (5, 5, 5, 5, True),  # reused whole
        (5, 5, 9, 9, False),  # and then a tool answered, and the row went on
        (5, 3, 9, 9, False),
        (5, 5, 0, 5, True),  # masked by TRL, as one that was cut; the cache keeps it all the same
        (5, 3, 0, 5, False),
        (0, 0, 0, 0, False),
    ],
)
def test_with_the_trainer_as_the_verifier(tokens, prefix, in_mask, wanted, known):
    row = response(tokens, prefix)
    found = old_logprobs_wanted([row], [in_mask], "trainer", truncated=False)
    assert found.lengths == [wanted] and found.for_cache
    assert (found.known[0] is row.logprobs) if known else (found.known == [None])


@pytest.mark.parametrize(("verifier", "truncated"), [("engine", False), ("trainer", True), ("engine", True)])
@pytest.mark.parametrize(("prefix", "in_mask"), [(5, 5), (0, 5), (5, 9), (5, 0)])
def test_where_what_was_verified_is_not_what_the_pass_gives(verifier, truncated, prefix, in_mask):
    """By another inference path, or of the distribution that was cut: TRL's mask is what counts."""
    found = old_logprobs_wanted([response(5, prefix)], [in_mask], verifier, truncated)
    assert (found.lengths, found.known, found.for_cache) == ([in_mask], [None], False)


def test_rows_are_decided_on_one_by_one():
    rows = [response(3, 3), response(4, 1), response(2, 2)]
    found = old_logprobs_wanted(rows, [3, 4, 6], "trainer", truncated=False)
    assert found.lengths == [3, 4, 6]
    assert [logprobs is not None for logprobs in found.known] == [True, False, False]
