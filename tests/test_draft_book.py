"""The draft book: rows are known again, follow their past responses, and find them again."""

from __future__ import annotations

import numpy as np
import pytest

from specrl_plugins.draft_book import DraftBook

PAST = np.arange(100, 140, dtype=np.int32)
OTHER = np.arange(200, 240, dtype=np.int32)


class Rows:
    """An engine's batch: contexts and what has been sampled after them, a row each."""

    def __init__(self, contexts, most=128):
        self.tokens = np.zeros((len(contexts), most), np.int32)
        self.lengths = np.zeros(len(contexts), np.int64)
        for row, context in enumerate(contexts):
            self.tokens[row, : len(context)] = context
            self.lengths[row] = len(context)

    def step(self, book, *sampled):
        """Sample these tokens in each row, and have drafts proposed."""
        for row, new in enumerate(sampled):
            self.tokens[row, self.lengths[row] : self.lengths[row] + len(new)] = new
            self.lengths[row] += len(new)
        return book.propose(self.tokens, self.lengths, np.array([len(new) for new in sampled]))

    def swap(self, a, b):
        self.tokens[[a, b]], self.lengths[[a, b]] = self.tokens[[b, a]], self.lengths[[b, a]]


def book(contexts, keys, drafts, most_tokens=4, most_rows=8):
    return DraftBook(contexts, keys, drafts, most_tokens, most_rows)


def test_a_row_that_goes_as_before_is_drafted_to_the_end():
    rows, past = Rows([[1, 2]]), book([[1, 2]], [b"a"], [PAST[:7]])
    assert rows.step(past, [100]) == [[101, 102, 103, 104]]
    assert rows.step(past, [101, 102, 103, 104, 105]) == [[106]]
    assert rows.step(past, [106, 7]) == [[]]
    assert rows.step(past, [8]) == [[]]
    assert (past.drafted_tokens, past.accepted_tokens) == (5, 5)


def test_after_another_token_it_tries_a_little_and_then_more():
    rows, past = Rows([[1, 2]]), book([[1, 2]], [b"a"], [PAST])
    rows.step(past, [100])
    assert rows.step(past, [101, 7]) == [[103]]
    assert rows.step(past, [103, 104]) == [[105, 106, 107]]  # three as expected
    assert rows.step(past, [105, 106, 107, 108]) == [[109, 110, 111, 112]]


def test_it_is_found_again_where_tokens_came_between():
    rows, past = Rows([[1, 2]]), book([[1, 2]], [b"a"], [PAST])
    rows.step(past, [100])
    rows.step(past, [7])
    rows.step(past, [8])
    rows.step(past, [101])
    rows.step(past, [102])
    assert rows.step(past, [103]) == [[104, 105, 106]]  # three last tokens are found


def test_a_row_takes_up_the_response_of_another_sample_of_its_prompt_but_not_of_another_prompt():
    contexts = [[1, 2], [1, 2], [1, 3]]
    past, rows = book(contexts, [b"a", b"a", b"b"], [PAST, OTHER, PAST]), Rows(contexts)
    assert rows.step(past, [100], [200], [7]) == [[101, 102, 103, 104], [201, 202, 203, 204], [101]]
    for token in (210, 211, 212):
        drafts = rows.step(past, [token], [5], [token])
    assert drafts[0] == [213, 214, 215] and drafts[2] in ([], [104])


def test_samples_of_a_prompt_begin_by_a_response_each():
    contexts = [[1, 2]] * 2
    past = book(contexts, [b"a"] * 2, [PAST, OTHER])
    assert Rows(contexts).step(past, [100], [200]) == [[101, 102, 103, 104], [201, 202, 203, 204]]


def test_rows_that_were_moved_are_known_again():
    contexts = [[1, 2], [1, 3]]
    past, rows = book(contexts, [b"a", b"b"], [PAST, OTHER]), Rows(contexts)
    rows.step(past, PAST[:6].tolist(), OTHER[:6].tolist())
    rows.swap(0, 1)
    assert rows.step(past, [206], [106]) == [[207, 208, 209, 210], [107, 108, 109, 110]]


def test_contexts_that_begin_alike_are_told_apart():
    long = list(range(1, 60))
    contexts = [long, [*long, 60], [*long, 61]]
    past, rows = book(contexts, [b"a", b"b", b"c"], [PAST, OTHER, PAST + 200]), Rows(contexts)
    assert [draft[0] for draft in rows.step(past, [100], [200], [300])] == [101, 201, 301]


def test_it_sleeps_while_many_rows_run_and_wakes_up_in_the_middle():
    contexts = [[1, 2], [1, 3]]
    past, rows = book(contexts, [b"a", b"b"], [PAST, OTHER], most_rows=1), Rows(contexts)
    for token in range(10):
        assert rows.step(past, [100 + token], [200 + token]) == [[], []]
    assert rows.step(past, [], [210]) == [[], [211, 212, 213, 214]]
    assert past.drafted_tokens == 4


def test_rows_in_the_middle_of_their_context_and_rows_that_are_not_known_get_nothing():
    past, rows = book([[1, 2]], [b"a"], [PAST]), Rows([[1], [9, 9, 9]])
    assert rows.step(past, [], [100]) == [[], []]
    assert book([[1, 2]], [b"a"], [PAST[:0]]).propose(Rows([[1, 2, 3]]).tokens, np.array([3]), np.array([1])) == [[]]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_an_engine_does_drafts_are_tokens_of_past_responses(seed):
    """Rows begin, are moved, are cut short and end at random, over few tokens, so that tails are found by chance."""
    rng = np.random.default_rng(seed)
    samples = int(rng.integers(1, 4))
    contexts = [rng.integers(0, 3, rng.integers(1, 6)).tolist() for _ in range(5) for _ in range(samples)]
    keys = [bytes([*context, 9]) for context in contexts]
    past = [rng.integers(10, 14, rng.integers(0, 30)).astype(np.int32) for _ in contexts]
    most = int(rng.integers(1, 6))
    draft_book = book(contexts, keys, past, most, most_rows=int(rng.integers(1, 12)))
    texts = ["".join(map(chr, tokens)) for tokens in past]
    waiting, running = list(range(len(contexts))), []
    tokens, lengths, drafts = np.zeros((8, 64), np.int32), np.zeros(8, np.int64), []
    while waiting or running:
        while waiting and len(running) < 8:
            row = waiting.pop(0)
            tokens[len(running), : len(contexts[row])], lengths[len(running)] = contexts[row], len(contexts[row])
            running.append(row)
        new = []
        for row in range(len(running)):
            draft = drafts[row] if row < len(drafts) else []
            sampled = [*draft[: rng.integers(0, len(draft) + 1)], int(rng.integers(10, 14))]
            sampled = sampled[: rng.integers(0, 2) * len(sampled)]
            tokens[row, lengths[row] : lengths[row] + len(sampled)] = sampled
            lengths[row] += len(sampled)
            new.append(len(sampled))
        drafts = draft_book.propose(tokens, lengths, np.array(new))
        for row, draft in enumerate(drafts):
            assert len(draft) <= most and (new[row] or not draft)
            of_prompt = [text for text, key in zip(texts, keys, strict=True) if key == keys[running[row]]]
            assert not draft or any("".join(map(chr, draft)) in text for text in of_prompt)
        for row in reversed(range(len(running))):
            if lengths[row] > 50 or rng.random() < 0.05:
                last = len(running) - 1  # as vLLM does: the last row takes the place of one that ended
                running[row], drafts[row] = running[last], drafts[last]
                tokens[row], lengths[row] = tokens[last], lengths[last]
                running.pop()
                drafts.pop()
