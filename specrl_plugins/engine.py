"""What a rollout needs of an inference engine: scoring and generating."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specrl_plugins.trajectory import FinishReason


@dataclass(frozen=True, slots=True, eq=False)
class Continuation:
    """What an engine generated after one context.

    Args:
        tokens (`NDArray[np.int32]` of shape `(tokens,)`): at least one token.
        logprobs (`NDArray[np.float32]` of shape `(tokens,)`): nats, under the distribution that was sampled.
        finish_reason (`"stop"` or `"length"`): whether it ended by itself or used up its budget.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish_reason: FinishReason


class Engine(Protocol):
    """The current policy, ready to score and to sample. Its two log-probs are of the same distribution."""

    @property
    def max_context(self) -> int | None:
        """Most tokens of prompt and response together; `None` if unlimited."""
        ...

    @property
    def max_scored(self) -> int | None:
        """Most tokens of prompt and draft together that it can score, at most `max_context`; `None` if unlimited."""
        ...

    def score(self, prompts: Sequence[list[int]], continuations: Sequence[NDArray[np.int32]]) -> list[NDArray]:
        """Log-probs of given continuations after given prompts.

        Args:
            prompts (`batch` lists of `prompt tokens` ids).
            continuations (`batch` arrays of shape `(tokens,)`): each of at least one token.

        Returns:
            `batch` arrays of shape `(tokens,)`, `float32`, nats. Minus infinity is the log-prob of a token that the
            policy cannot sample (top-k, top-p or min-p leaves it out); NaN or infinity marks one that could not be
            scored.
        """
        ...

    def generate(self, contexts: Sequence[list[int]], budgets: Sequence[int]) -> list[Continuation]:
        """Continue each of a batch of token sequences by sampling.

        Args:
            contexts (`batch` lists of `context tokens` ids): prompt and what is kept of a response.
            budgets (`Sequence[int]` of length `batch`): most tokens to generate for each, at least 1.
        """
        ...


@dataclass(slots=True, eq=False)
class Drafts:
    """What the rows of a batch are expected to go on with, and what came of it.

    Args:
        keys (`batch` keys): the prompt of each row; rows of one prompt may draft from all of its drafts.
        tokens (`batch` arrays of shape `(tokens,)`, `int32`): what each is expected to go on with; empty where nothing
            is known.
        most_tokens (`int`): tokens of the longest draft in a step of the engine.
        most_rows (`int`): nothing is drafted while more rows than these are running.
        drafted (`int`), accepted (`int`): tokens that the engine drafted, and those of them that it sampled.
    """

    keys: Sequence[bytes]
    tokens: Sequence[NDArray[np.int32]]
    most_tokens: int
    most_rows: int
    drafted: int = 0
    accepted: int = 0


class DraftingEngine(Engine, Protocol):
    """An engine that verifies drafts while it generates. What it samples is the policy's, whatever the drafts."""

    def generate_from_drafts(
        self, contexts: Sequence[list[int]], budgets: Sequence[int], drafts: Drafts
    ) -> list[Continuation]:
        """As [`generate`], in fewer steps where the drafts are right. What came of them is counted in `drafts`."""
        ...


class ObservingEngine(Engine, Protocol):
    """An engine that shows what the policy holds of a response so far. Online pruning judges by it."""

    def observe(
        self, prompts: Sequence[list[int]], continuations: Sequence[NDArray[np.int32]]
    ) -> tuple[list[NDArray], NDArray[np.float32]]:
        """Log-probs of given continuations after given prompts, and the policy's state at their ends.

        Args:
            prompts (`batch` lists of `prompt tokens` ids).
            continuations (`batch` arrays of shape `(tokens,)`): each of at least one token.

        Returns:
            The log-probs, as [`score`] returns them, and an array of shape `(batch, hidden)`, `float32`: the last
            layer's hidden state at the last token of each.
        """
        ...
