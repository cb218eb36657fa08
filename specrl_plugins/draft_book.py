"""The draft book: past responses of a batch, from which an engine drafts what each row may go on with.

An engine that verifies drafts inside of its own decoding samples from the policy whatever it is given: a token x of a
draft is accepted with its probability p(x), and else the next token is sampled from p without x (Leviathan et al. 2023,
arXiv 2211.17192, with a draft that is certain of itself). So a mistake here costs time and changes no distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# Where a row has left its past response, the last tokens are looked for in the past responses to its prompt: so many,
# the longer first. Few are found by chance, many seldom again.
_TAILS = (6, 3)
_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that its powers have inverses modulo 2**64
_SIGNATURE = 4  # last tokens by which a row is known again from step to step


class DraftBook:
    """Past responses by the context that they, or what is left of them, followed.

    Rows are those of an engine's batch: an engine moves requests between rows, and tells neither which request a row
    has nor where its prompt ends. So a row is known by its beginning.

    Args:
        contexts (`batch` lists of `context tokens` ids):
            What the engine is given to continue. A context that is sampled several times occurs as often.
        keys (`batch` values): the prompt of each; rows of one prompt draft from the past responses of all of them.
        drafts (`batch` arrays of shape `(tokens,)`, `int32`):
            What each row is expected to go on with; empty where nothing is known.
        most_tokens (`int`): tokens of the longest draft of a step.
        most_rows (`int`): nothing is drafted while more rows are running.
    """

    def __init__(
        self,
        contexts: Sequence[list[int]],
        keys: Sequence[bytes],
        drafts: Sequence[NDArray[np.int32]],
        most_tokens: int,
        most_rows: int,
    ):
        self.most_tokens = most_tokens
        self.most_rows = most_rows
        self.drafted_tokens = self.accepted_tokens = 0  # proposed, and sampled as proposed
        groups = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        of_row = np.array([groups[key] for key in keys], np.int64)
        self._lay_out(drafts, of_row)
        self._index(of_row)
        self._know_contexts(contexts, of_row)
        self._forget(0)

    def _lay_out(self, drafts: Sequence[NDArray[np.int32]], of_row: NDArray) -> None:
        """All drafts end to end, each with a gap behind it that no token is equal to."""
        lengths = np.array([len(draft) for draft in drafts], np.int64)
        self._starts = np.concatenate([[0], np.cumsum(lengths + 1)])[:-1]
        size = int((lengths + 1).sum())
        self._tokens = np.full(size + self.most_tokens + 1, -1, np.int32)  # so that no window reaches beyond
        self._stops = np.zeros(size + 1, np.int64)
        for start, length, draft in zip(self._starts.tolist(), lengths.tolist(), drafts, strict=True):
            self._tokens[start : start + length] = draft
            self._stops[start : start + length + 1] = start + length
        self._groups = np.repeat(of_row, lengths + 1)
        self._places = np.arange(size) - np.repeat(self._starts, lengths + 1)

    def _index(self, of_row: NDArray) -> None:
        """For each length of a tail, hashes of all tails with their prompt, sorted, and the places behind them."""
        self._tails = []
        for size in _TAILS:
            (places,) = np.nonzero((self._places >= size) & (self._tokens[: len(self._places)] >= 0))
            windows = self._tokens[places[:, None] + np.arange(-size, 0)] if len(places) else np.empty((0, size))
            hashes = _hashes(windows, self._groups[places])
            order = np.argsort(hashes, kind="stable")
            self._tails.append((size, hashes[order], places[order]))

    def _know_contexts(self, contexts: Sequence[list[int]], of_row: NDArray) -> None:
        """Hash of each context; rows of the same context take its drafts in turns."""
        self._context_lengths = np.unique([len(context) for context in contexts])
        self._contexts: dict[tuple[int, int], list[int]] = {}
        for row, context in enumerate(contexts):
            hashed = int(_prefix_hashes(np.array(context, np.int32))[-1]) if context else 0
            self._contexts.setdefault((len(context), hashed), []).append(row)
        self._of_row = of_row

    def _forget(self, rows: int) -> None:
        """No row is known, of so many."""
        self._group = np.full(rows, -1, np.int64)
        self._pointer = np.full(rows, -1, np.int64)  # place of the token that is expected next; -1: none is
        self._run = np.zeros(rows, np.int64)  # tokens that came as expected, in a row
        self._length = np.full(rows, -1, np.int64)  # tokens at the last visit
        self._signature = np.full((rows, _SIGNATURE), -1, np.int32)  # the last of them

    def propose(self, tokens: NDArray[np.int32], lengths: NDArray, new: NDArray[np.int64]) -> list[list[int]]:
        """What each row may go on with.

        Args:
            tokens (`NDArray[np.int32]` of shape `(rows, most tokens)`): context and response so far of each row.
            lengths (`NDArray` of shape `(rows,)`): tokens of each, with the new ones.
            new (`NDArray[np.int64]` of shape `(rows,)`): tokens sampled in this step; 0 for a row in the middle of its
                context.

        Returns:
            `rows` lists of at most `most_tokens` ids.
        """
        drafts: list[list[int]] = [[] for _ in new]
        running = np.flatnonzero(new)
        self.accepted_tokens += int((new[running] - 1).sum())  # a step samples one token, and what it accepts
        if not len(running) or len(running) > self.most_rows or not self._contexts:
            return drafts
        if len(new) > len(self._group):
            self._forget(len(new))
        lengths = np.asarray(lengths[: len(new)], np.int64)
        self._follow(running, tokens, lengths, new)
        self._remember(running, tokens, lengths)
        pointers = self._pointer[running]
        room = np.where(pointers >= 0, self._stops[pointers] - pointers, 0)
        sizes = np.minimum(np.minimum(room, self._run[running]), self.most_tokens)
        self.drafted_tokens += int(sizes.sum())
        windows = self._tokens[np.maximum(pointers, 0)[:, None] + np.arange(self.most_tokens)].tolist()
        for row, window, size in zip(running.tolist(), windows, sizes.tolist(), strict=True):
            drafts[row] = window[:size]
        return drafts

    def _follow(self, running: NDArray, tokens: NDArray, lengths: NDArray, new: NDArray) -> None:
        """Move the pointer of each running row over its new tokens, or look for the place where it goes on."""
        before = lengths[running] - new[running]
        columns = np.maximum(before[:, None] + np.arange(-_SIGNATURE, 0), 0)
        same = (self._length[running] == before) & (
            (tokens[running[:, None], columns] == self._signature[running]).all(1)
        )
        for row in running[~same].tolist():
            self._meet(row, tokens[row], int(lengths[row] - new[row]))
        most = int(new[running].max())
        steps = np.arange(most)
        columns = np.minimum(before[:, None] + steps, tokens.shape[1] - 1)
        places = np.minimum(self._pointer[running][:, None] + steps, len(self._tokens) - 1)
        as_expected = (tokens[running[:, None], columns] == self._tokens[places]) | (steps >= new[running][:, None])
        kept = as_expected.all(1) & (self._pointer[running] >= 0)
        self._pointer[running[kept]] += new[running[kept]]
        self._run[running[kept]] += new[running[kept]]
        if len(lost := running[~kept]):
            self._find(lost, tokens, lengths, new)

    def _meet(self, row: int, tokens: NDArray, length: int) -> None:
        """Find out what a row is that was not here, or not in this row, at the step before.

        Args:
            length (`int`): its tokens before the new ones.
        """
        self._group[row], self._pointer[row], self._run[row] = -1, -1, 0
        possible = self._context_lengths[self._context_lengths <= length]
        if not len(possible):
            return
        hashes = _prefix_hashes(tokens[: possible[-1]])
        for size in possible[::-1].tolist():
            of_context = self._contexts.get((size, int(hashes[size - 1]) if size else 0))
            if of_context:
                break
        else:
            return
        self._group[row] = self._of_row[of_context[0]]
        if size == length:  # it has just begun, by a draft that no other row begins by
            draft = of_context[0]
            of_context.append(of_context.pop(0))
            self._pointer[row], self._run[row] = self._starts[draft], self.most_tokens

    def _find(self, rows: NDArray, tokens: NDArray, lengths: NDArray, new: NDArray) -> None:
        """Look the last tokens of rows up among the past responses to their prompts.

        Where they are not there, one token may stand for another: it is tried whether the rest goes on as before.
        """
        expected = self._pointer[rows] + new[rows]
        beyond = (self._pointer[rows] < 0) | (expected > self._stops[np.maximum(self._pointer[rows], 0)])
        pointers = np.where(beyond, -1, expected)
        runs = np.ones(len(rows), np.int64)
        unknown = self._group[rows] < 0
        for size, hashes, places in reversed(self._tails):  # the longest last: it is the surest
            columns = np.maximum(lengths[rows][:, None] + np.arange(-size, 0), 0)
            wanted = _hashes(tokens[rows[:, None], columns], self._group[rows])
            at = np.minimum(np.searchsorted(hashes, wanted), max(len(hashes) - 1, 0))
            found = (hashes[at] == wanted) & ~unknown if len(hashes) else np.zeros(len(rows), bool)
            pointers[found], runs[found] = places[at[found]], size
        self._pointer[rows] = np.where(unknown, -1, pointers)
        self._run[rows] = runs

    def _remember(self, running: NDArray, tokens: NDArray, lengths: NDArray) -> None:
        """How the running rows are known again at the next step."""
        self._length[running] = lengths[running]
        columns = np.maximum(lengths[running][:, None] + np.arange(-_SIGNATURE, 0), 0)
        self._signature[running] = tokens[running[:, None], columns]


def _hashes(windows: NDArray, groups: NDArray) -> NDArray[np.uint64]:
    """Of windows of tokens, `(windows, tokens)`, and the group of each."""
    with np.errstate(over="ignore"):
        powers = np.cumprod(np.full(windows.shape[1] + 1, _BASE))
        mixed = ((windows.astype(np.uint64) + np.uint64(1)) * powers[1:]).sum(1, dtype=np.uint64)
        return (mixed ^ (mixed >> np.uint64(29))) * _BASE + groups.astype(np.uint64) * powers[0]


def _prefix_hashes(tokens: NDArray[np.int32]) -> NDArray[np.uint64]:
    """Of all beginnings of a row of tokens, of shape `(tokens,)`."""
    with np.errstate(over="ignore"):
        powers = np.cumprod(np.full(len(tokens), _BASE))
        return np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * powers, dtype=np.uint64)
