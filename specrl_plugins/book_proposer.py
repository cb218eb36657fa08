"""vLLM's drafts out of a draft book: what its `speculative_config` names as a `custom_class`.

vLLM 0.26 to 0.33 build such a class in the process of the model runner, for its older runner alone; 0.34 has none. No
vLLM is imported here, so that settings can be checked anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from specrl_plugins.draft_book import DraftBook

_open: list[DraftBook] = []


def speculative_config(most_tokens: int) -> dict[str, Any]:
    """How an engine is told to draft from books, at most so many tokens a step."""
    proposer = f"{BookProposer.__module__}.{BookProposer.__name__}"
    return {"method": "custom_class", "model": proposer, "num_speculative_tokens": most_tokens}


@contextmanager
def drafting_from(book: DraftBook) -> Iterator[None]:
    """While open, engines of this process that were told so draft from this book."""
    _open.append(book)
    try:
        yield
    finally:
        _open.pop()


class BookProposer:
    """See [`speculative_config`]. Without an open book nothing is drafted."""

    def __init__(self, vllm_config: Any):
        self.max_model_len = vllm_config.model_config.max_model_len

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """There are no weights."""

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """Drafts of all rows.

        vLLM 0.26 passes the number of draft tokens, its input batch and the sampled tokens; 0.29 the sampled tokens,
        and of the input batch what is needed: the number of tokens of each row, and the tokens.
        """
        given = [argument for argument in args if not isinstance(argument, int)]
        (batch,) = [argument for argument in given if hasattr(argument, "token_ids_cpu")] or [None]
        sampled = next(argument for argument in given if argument is not batch)
        if batch is None:
            _, lengths, tokens = given[:3]
        else:
            lengths, tokens = batch.num_tokens_no_spec, batch.token_ids_cpu
        if isinstance(sampled, list):
            new = np.fromiter(map(len, sampled), np.int64, len(sampled))
        else:  # an array, in which -1 stands for no token
            new = (np.asarray(sampled) >= 0).sum(1)
        if not _open:
            return [[] for _ in new]
        drafts = _open[-1].propose(tokens, lengths, new)
        # vLLM takes no draft that reaches beyond what the model can see.
        room = (self.max_model_len - 1 - np.asarray(lengths[: len(new)])).tolist()
        return [draft[: max(0, most)] for draft, most in zip(drafts, room, strict=True)]
