"""Acceptance: how much of a draft the current policy keeps.

The speculative rule is SPEC-RL's (arXiv 2509.23232): token i of a draft, which had probability p_i under the policy
that wrote it and has q_i under the current one, is accepted where

    log u_i <= log l + log q_i - log p_i,        u_i uniform on (0, 1), l the lenience,

and the verified prefix ends before the first token that is not. Random and full reuse are the baselines that the
paper compares it with. Under every rule a prefix ends before a token that the current policy cannot sample at all,
because a cut of the support (top-k, top-p, min-p) leaves it no probability.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from specrl_plugins.setting import check_number


class ReuseRule(StrEnum):
    """How the length of the reused prefix is decided."""

    SPECULATIVE = "speculative"
    RANDOM = "random"
    FULL = "full"

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise ValueError(f"rule is one of {', '.join(cls)}, not {value!r}")


class Stream:
    """Independent uses of the uniforms of one (seed, prompt, slot, step)."""

    ACCEPT = 0
    REFRESH = 1
    PRUNE = 2


class _Local(threading.local):
    """A generator for each thread, whose state is set anew for each use; making one takes longer than its numbers."""

    def __init__(self):
        self.philox = np.random.Philox(0)


_local = _Local()


def uniforms(seed: int, prompt: bytes, slot: int, step: int, count: int, stream: int = Stream.ACCEPT) -> NDArray:
    """Uniforms on the open interval (0, 1) that depend on nothing but the arguments.

    Philox4x64 with the prompt as its 128-bit key; slot, step and seed sit in the counter words that counting never
    reaches, so no two (seed, prompt, slot, step, stream) share a number.

    Returns:
        `NDArray[np.float64]` of shape `(count,)`.
    """
    word = (1 << 64) - 1
    _local.philox.state = {
        "bit_generator": "Philox",
        "state": {
            "key": struct.unpack("<2Q", prompt),
            "counter": (0, (stream << 48 | slot) & word, step & word, seed & word),
        },
        "buffer": (0, 0, 0, 0),
        "buffer_pos": 4,  # nothing is left in the buffer
        "has_uint32": 0,
        "uinteger": 0,
    }
    # 52 random bits and a half, which is exact: neither 0 (its log is infinite) nor 1 can come out.
    return ((_local.philox.random_raw(count) >> np.uint64(12)) + 0.5) * 2.0**-52


def verified_prefix_lengths(
    old_logprobs: Sequence[NDArray], new_logprobs: Sequence[NDArray], draws: Sequence[NDArray], log_lenience: float
) -> NDArray:
    """Tokens before the first rejected one, for each draft of a ragged batch, by SPEC-RL's rule.

    Args:
        old_logprobs, new_logprobs (`batch` arrays of shape `(tokens,)`):
            log p and log q of each draft token, nats. log p is finite; log q may be minus infinity, which no lenience
            accepts. A draft may be empty.
        draws (`batch` arrays of shape `(tokens,)`):
            Uniforms on (0, 1).
        log_lenience (`float`):
            log l, nats: 0 is the classical speculative rule, infinity accepts all that can be sampled, minus infinity
            nothing.

    Returns:
        `NDArray[np.int64]` of shape `(batch,)`.
    """
    prefixes = np.empty(len(draws), np.int64)
    with np.errstate(invalid="ignore"):  # infinite lenience of an impossible token: not a number, so not accepted
        # Row by row: what one needs fits the processor's cache, which a whole batch does not.
        for row, (old, new, draw) in enumerate(zip(old_logprobs, new_logprobs, draws, strict=True)):
            prefixes[row] = first(~(np.log(draw) <= log_lenience + new.astype(np.float64) - old))
    return prefixes


def first(flags: NDArray[np.bool_]) -> int:
    """Place of the first true value, of shape `(tokens,)`; where there is none, how many values there are."""
    place = flags.tobytes().find(1)  # faster than `any` and `argmax`
    return place if place >= 0 else len(flags)


def possible_length(logprobs: NDArray) -> int:
    """Tokens before the first one without probability, of log-probs of shape `(tokens,)`."""
    return first(logprobs == -np.inf)


@dataclass(frozen=True)
class ReusePolicy:
    """Which drafts are looked at, and how much of each is kept.

    Args:
        rule (`ReuseRule`, *optional*, defaults to `"speculative"`):
            How the reused prefix is decided.
        log_lenience (`float`, *optional*, defaults to `0.0`):
            log l of the speculative rule, nats.
        refresh_rate (`float`, *optional*, defaults to `0.0`):
            Share of rows that ignore their draft and are sampled afresh, so that learning never feeds on old samples
            alone.
        carry_limit (`int`, *optional*):
            Most visits that a token is carried over. A response begins with its oldest token, so one that is too old
            makes the whole row fresh. `None` sets no limit.
        seed (`int`, *optional*, defaults to `0`):
            Seed of every decision here.

    Raises:
        ValueError: a setting is out of its range.
    """

    rule: ReuseRule = ReuseRule.SPECULATIVE
    log_lenience: float = 0.0
    refresh_rate: float = 0.0
    carry_limit: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", ReuseRule(self.rule))
        check_number("log_lenience", self.log_lenience, "a number of nats", lambda value: value == value)
        share = "a share of rows, between 0 and 1"
        check_number("refresh_rate", self.refresh_rate, share, lambda value: 0 <= value <= 1)
        if self.carry_limit is not None:
            visits = "a whole number of visits, at least 1"
            check_number("carry_limit", self.carry_limit, visits, lambda value: value >= 1, whole=True)

    def refreshes(self, prompt: bytes, slot: int, step: int) -> bool:
        """Whether a row ignores its draft at this step."""
        if self.refresh_rate == 0.0:
            return False
        return uniforms(self.seed, prompt, slot, step, 1, Stream.REFRESH)[0] < self.refresh_rate

    def outlived(self, ages: NDArray) -> bool:
        """Whether a draft with these token ages, visits, of shape `(tokens,)`, was carried over often enough."""
        return self.carry_limit is not None and int(ages.max()) >= self.carry_limit

    def behaviour_logprobs(self, old: NDArray, new: NDArray) -> NDArray:
        """Log-probs of kept tokens under the policy that wrote them, bounded by the rule that kept them.

        A draft token is written with probability p and kept with probability min(1, l q / p): it ends up in a response
        with min(p, l q). Random and full reuse keep tokens without looking at q, so that p it is.

        Args:
            old, new (`NDArray` of shape `(tokens,)`): log p and log q, nats, finite.
        """
        return old if self.rule is not ReuseRule.SPECULATIVE else np.minimum(old, self.log_lenience + new)

    def prefix_lengths(
        self, rows: Sequence[tuple[bytes, int]], step: int, old: Sequence[NDArray], new: Sequence[NDArray]
    ) -> NDArray:
        """Reused tokens of each draft.

        Args:
            rows (`batch` pairs): prompt key and slot of each draft.
            step (`int`): optimizer step the rollout is for.
            old, new (`batch` arrays of shape `(tokens,)`): log p, finite, and log q, nats.

        Returns:
            `NDArray[np.int64]` of shape `(batch,)`.
        """
        lengths = np.array([len(row) for row in old], dtype=np.int64)
        if self.rule is ReuseRule.SPECULATIVE:
            draws = [uniforms(self.seed, *row, step, n) for row, n in zip(rows, lengths, strict=True)]
            return verified_prefix_lengths(old, new, draws, self.log_lenience)
        possible = np.array([possible_length(row) for row in new], dtype=np.int64)
        if self.rule is ReuseRule.FULL:
            return possible
        # Cut uniformly: each length from 0 to all is as likely.
        draw = np.array([uniforms(self.seed, *row, step, 1)[0] for row in rows])
        return np.minimum(np.floor(draw * (lengths + 1)).astype(np.int64), possible)
