"""A generation batch from TRL's rollout call until its rollout is stored, and what of its log-probs is known before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specrl_plugins import Rollout
from specrl_plugins.response import Response


@dataclass(eq=False)
class PendingBatch:
    """What TRL has let be seen of the generation batch that it is making.

    Args:
        rollout (`Rollout`, *optional*): once TRL has asked for it.
        scored (`batch` arrays of shape `(tokens,)`, *optional*): its log-probs by the trainer's forward, nats, where
            TRL's pass for the old log-probs made what the cache keeps.
        rewards (`list[float]` of length `batch`, *optional*): once TRL has them.
    """

    rollout: Rollout | None = None
    scored: list[NDArray[np.float32]] | None = None
    rewards: list[float] | None = None

    def is_in(self, ids: NDArray[np.integer], prompt_mask: NDArray[np.integer]) -> bool:
        """Whether the rows of a forward are those of the rollout: its prompts, and after them its responses, which may
        go on with what tools answered.

        Args:
            ids (`NDArray` of shape `(rows, tokens)`): prompts padded on the left, completions on the right.
            prompt_mask (`NDArray` of shape `(rows, prompt columns)`): which of the first columns are in a prompt.
        """
        responses = self.rollout.responses if self.rollout is not None else []
        if not responses or len(ids) != len(responses):
            return False
        begins, lengths = prompt_mask.shape[1], prompt_mask.sum(1).tolist()
        return all(
            np.array_equal(row[begins - length : begins], response.prompt)
            and np.array_equal(row[begins : begins + len(response.tokens)], response.tokens)
            for row, length, response in zip(ids, lengths, responses, strict=True)
        )


@dataclass(frozen=True)
class OldLogprobs:
    """What TRL's pass for the old log-probs is asked for.

    Args:
        lengths (`list[int]` of length `batch`): tokens of each completion whose log-probs are wanted.
        known (`batch` arrays of shape `(tokens,)`, or `None`): log-probs that need no second forward, nats.
        for_cache (`bool`): whether the cache keeps the result.
    """

    lengths: list[int]
    known: list[NDArray[np.float32] | None]
    for_cache: bool


def old_logprobs_wanted(
    responses: Sequence[Response], lengths: Sequence[int], verifier: str, truncated: bool
) -> OldLogprobs:
    """Which rows verification has scored already, and what the pass has to give.

    | verified by | support of the distribution | a row is known where | the cache keeps the pass |
    | --- | --- | --- | --- |
    | the engine | | never: the engine's log-probs are others | no |
    | the trainer | cut (top-k, top-p, min-p) | never: verification scores what is sampled, the pass the whole | no |
    | the trainer | whole | nothing of it was generated, and the pass is asked for all of it and for no more | yes |

    Args:
        responses (`list[Response]` of length `batch`): of the rollout.
        lengths (`list[int]` of length `batch`): tokens of each row that TRL's mask leaves in. More than its response
            has where a tool answered and the row went on; 0 where TRL masks a row that was cut.
        verifier (`str`): `"trainer"` or `"engine"`.
        truncated (`bool`): whether the support of the sampled distribution is cut.
    """
    if verifier != "trainer" or truncated:
        return OldLogprobs(list(lengths), [None] * len(responses), for_cache=False)
    # Of rows that TRL masks the cache wants the log-probs all the same.
    wanted = [max(length, len(response.tokens)) for response, length in zip(responses, lengths, strict=True)]
    known = [
        response.logprobs if response.reused_whole and len(response.tokens) == length else None
        for response, length in zip(responses, wanted, strict=True)
    ]
    return OldLogprobs(wanted, known, for_cache=True)
