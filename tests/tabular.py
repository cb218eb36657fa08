"""An exact engine: the policy is a table of chances of the next token given the last one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specrl_plugins import Continuation


def random_table(vocab: int, seed: int, sharpness: float = 1.0) -> np.ndarray:
    """Chances of shape `(last token, next token)`."""
    weights = np.exp(sharpness * np.random.default_rng(seed).normal(size=(vocab, vocab)))
    return weights / weights.sum(1, keepdims=True)


def likeliest(table: np.ndarray, k: int) -> np.ndarray:
    """The table cut to the `k` likeliest next tokens."""
    kept = np.where(table >= np.sort(table, 1)[:, -k, None], table, 0)
    return kept / kept.sum(1, keepdims=True)


class TabularEngine:
    """Samples from a table and scores by it.

    Args:
        table: chances of shape `(last token, next token)`.
        ends: ids that end a response.
        seed: of its sampling.
        max_context: most tokens of prompt and response.
        max_scored: most tokens of prompt and draft; as many by default.
    """

    def __init__(
        self,
        table: np.ndarray,
        ends: Sequence[int] = (0,),
        seed: int = 0,
        max_context: int | None = None,
        max_scored: int | None = None,
    ):
        self.table = table
        self.ends = set(ends)
        self.max_context = max_context
        self.max_scored = max_context if max_scored is None else max_scored
        self.generate_calls: list[int] = []
        self.score_calls: list[int] = []
        with np.errstate(divide="ignore"):  # a table may be cut
            self._logs = np.log(table).astype(np.float32)
        self._rng = np.random.default_rng(seed)

    def logprobs(self, prompt: Sequence[int], tokens: np.ndarray) -> np.ndarray:
        last = np.concatenate([[prompt[-1]], tokens[:-1]]).astype(int)
        return self._logs[last, tokens]

    def score(self, prompts, continuations):
        self.score_calls.append(len(prompts))
        if self.max_scored is not None:
            assert all(
                len(p) + len(tokens) <= self.max_scored for p, tokens in zip(prompts, continuations, strict=True)
            )
        return [self.logprobs(prompt, tokens) for prompt, tokens in zip(prompts, continuations, strict=True)]

    def generate(self, contexts, budgets):
        self.generate_calls.append(len(contexts))
        assert len(contexts) == len(budgets) > 0 and min(budgets) > 0
        if self.max_context is not None:
            rooms = [self.max_context - len(context) for context in contexts]
            assert min(rooms) > 0, "a context leaves no room"
            budgets = np.minimum(budgets, rooms)
        cumulative = np.cumsum(self.table, axis=1)
        last = np.array([context[-1] for context in contexts])
        rows: list[list[int]] = [[] for _ in contexts]
        going = np.arange(len(contexts))
        while len(going):
            draws = self._rng.random((len(going), 1))
            chosen = np.minimum((draws > cumulative[last[going]]).sum(1), len(self.table) - 1)
            last[going] = chosen
            for row, token in zip(going, chosen.tolist(), strict=True):
                rows[row].append(token)
            going = np.array([r for r in going if rows[r][-1] not in self.ends and len(rows[r]) < budgets[r]], int)
        return [
            Continuation(
                tokens=np.array(row, np.int32),
                logprobs=self.logprobs(context, np.array(row, np.int32)),
                finish_reason="stop" if row[-1] in self.ends else "length",
            )
            for context, row in zip(contexts, rows, strict=True)
        ]
