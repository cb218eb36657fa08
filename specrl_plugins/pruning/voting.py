"""Votes of candidates, weighed by their scores."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import TypeVar

Answer = TypeVar("Answer", bound=Hashable)


def weighted_vote(candidates: Sequence[Answer | None], scores: Sequence[float]) -> Answer | None:
    """The answer whose candidates have the highest sum of scores.

    With equal scores this is the majority vote.

    Args:
        candidates (`Sequence` of length `candidates`): answers that can be compared and hashed; `None` for a response
            without one, which does not vote.
        scores (`Sequence[float]` of length `candidates`): what each vote weighs, such as the quality head's score.

    Returns:
        The answer, of those with equal sums the first seen; `None` where nobody votes.

    Raises:
        ValueError: the lengths differ, or a score is not a finite number.
    """
    sums: dict[Answer, float] = {}
    for candidate, score in zip(candidates, scores, strict=True):
        if not math.isfinite(score):
            raise ValueError(f"a vote weighs a finite number, not {score}")
        if candidate is not None:
            sums[candidate] = sums.get(candidate, 0.0) + float(score)
    return max(sums, key=sums.__getitem__, default=None)
