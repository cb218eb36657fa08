"""A trajectory: what one sample of a prompt was, under which policy, and how likely."""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["stop", "length", "pruned"]
FINISH_REASONS: tuple[str, ...] = get_args(FinishReason)

# Rounding can lift the log-prob of a certain token a little above zero.
MAX_LOGPROB = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One past response to a prompt, as it was sampled.

    Args:
        prompt (`bytes`):
            128-bit key of the prompt, see [`prompt_key`].
        slot (`int`):
            Which of the prompt's samples this is, from 0.
        tokens (`NDArray[np.int32]` of shape `(tokens,)`):
            Token ids of the response, its end token included if it reached one.
        logprobs (`NDArray[np.float32]` of shape `(tokens,)`):
            Log-probability of each token in nats, under the distribution that is sampled, by the policy of `step`.
        ages (`NDArray[np.uint16]` of shape `(tokens,)`):
            Visits of the prompt since each token was sampled: 0 for a token sampled at this visit.
        finish_reason (`"stop"`, `"length"` or `"pruned"`):
            Whether the response ended by itself, was cut by its cap, or was given up.
        cap (`int`):
            Most tokens that the response was allowed.
        step (`int`):
            Number, from 1, of the optimizer step that the response was made for.
        reward (`float`, *optional*):
            Its reward, if known.

    Raises:
        ValueError: a field is out of range, the arrays differ in length, or a log-prob is not finite.
    """

    prompt: bytes
    slot: int
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    ages: NDArray[np.uint16]
    finish_reason: FinishReason
    cap: int
    step: int
    reward: float | None = None

    def __post_init__(self) -> None:
        if len(self.prompt) != 16:
            raise ValueError(f"a prompt key has 16 bytes, not {len(self.prompt)}")
        if self.slot < 0 or self.step < 0:
            raise ValueError(f"slot ({self.slot}) and step ({self.step}) count from 0")
        if self.finish_reason not in FINISH_REASONS:
            raise ValueError(f"finish reason {self.finish_reason!r} is none of {', '.join(FINISH_REASONS)}")
        if not 0 < len(self.tokens) <= self.cap:
            raise ValueError(f"a response has 1 to {self.cap} tokens (its cap), not {len(self.tokens)}")
        if not len(self.tokens) == len(self.logprobs) == len(self.ages):
            raise ValueError(
                f"{len(self.tokens)} tokens, {len(self.logprobs)} log-probs and {len(self.ages)} ages do not match"
            )
        if self.tokens.min() < 0:
            raise ValueError("a token id is negative")
        if not -np.inf < self.logprobs.min() <= self.logprobs.max() <= MAX_LOGPROB:  # nor is a NaN
            raise ValueError("a log-prob is not finite or is above zero")
        if self.reward is not None and math.isnan(self.reward):  # SQLite would make it NULL
            raise ValueError("the reward is not a number; one that is not known is None")


def prompt_key(token_ids: Sequence[int]) -> bytes:
    """128-bit key of a prompt: BLAKE2b of its token ids as little-endian 32-bit integers.

    Args:
        token_ids (`Sequence[int]` of length `tokens`): the prompt, as the model sees it.
    """
    return hashlib.blake2b(struct.pack(f"<{len(token_ids)}i", *token_ids), digest_size=16).digest()


def assign_slots(prompts: Sequence[bytes]) -> list[int]:
    """Slot of each row: how many rows before it, in the whole batch, have the same prompt.

    Args:
        prompts (`Sequence[bytes]` of length `batch`): prompt keys.
    """
    seen: Counter[bytes] = Counter()
    slots = []
    for prompt in prompts:
        slots.append(seen[prompt])
        seen[prompt] += 1
    return slots
