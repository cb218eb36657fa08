"""Ranks that roll out together: here threads of one process, which gather as processes do."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tabular import TabularEngine
from test_rollout import OLD, PROMPTS, SETTINGS, Broken, damage_rows, visit

from specrl_plugins import ReusePolicy, SpeculativeRollout, TrajectoryCache, VerificationGuard
from specrl_plugins.ranks import OneRank, leads_node, own_rows, together

ROWS = 16


class Idle(Broken):
    """Takes part where another rank has something to generate."""

    def generate(self, contexts, budgets):
        return super().generate(contexts, budgets) if contexts else []


class ThreadRank:
    """One of several ranks; a gather that not all of them call breaks after some seconds."""

    def __init__(self, index, board, barrier):
        self.index, self.nodes, self._board, self._barrier = index, [0] * len(board), board, barrier

    def gather(self, mine):
        self._board[self.index] = mine
        self._barrier.wait(10)
        everyone = list(self._board)
        self._barrier.wait(10)
        return everyone


def on_ranks(count, work):
    """What `work(rank)` returned or raised on each of `count` ranks."""
    board, barrier = [None] * count, threading.Barrier(count)

    def run(index):
        try:
            return work(ThreadRank(index, board, barrier))
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def visits(directory, rows, bad):
    """A visit of `rows` prompts on each of two ranks, and a second one with `bad[rank]` broken scores."""

    def work(rank):
        with TrajectoryCache(directory, SETTINGS) as cache:
            guard = VerificationGuard(may_pause=False)
            rollout = SpeculativeRollout(cache, ReusePolicy(), len(OLD), guard, rank)
            prompts = PROMPTS[rank.index * rows : (rank.index + 1) * rows]
            visit(rollout, TabularEngine(OLD, seed=rank.index), prompts)
            return rollout.run(Idle(OLD, bad_scores=bad[rank.index]), prompts, 12, step=2).counts.draft_rows

    return on_ranks(2, work)


def test_a_broken_scorer_is_refused_by_all_ranks_or_none(tmp_path):
    assert visits(tmp_path / "half", ROWS, bad=(ROWS, 0)) == [ROWS, ROWS]
    more = visits(tmp_path / "more", ROWS, bad=(ROWS, 1))
    assert [type(seen) for seen in more] == [ValueError, ValueError]
    assert all(f"{ROWS + 1} of {2 * ROWS} drafts" in str(seen) for seen in more)
    # Too few on each rank to condemn it, enough on both.
    few = visits(tmp_path / "few", ROWS // 2, bad=(ROWS // 2, ROWS // 2))
    assert [type(seen) for seen in few] == [ValueError, ValueError]


@pytest.mark.parametrize(("bad", "refused"), [((ROWS, 0), False), ((ROWS, 1), True)])
def test_a_broken_sampler_is_refused_by_all_ranks_or_none(tmp_path, bad, refused):
    def work(rank):
        with TrajectoryCache(tmp_path, SETTINGS) as cache:
            rollout = SpeculativeRollout(cache, ReusePolicy(), len(OLD), ranks=rank)
            prompts = PROMPTS[rank.index * ROWS : (rank.index + 1) * ROWS]
            visit(rollout, Idle(OLD, bad_samples=bad[rank.index]), prompts)
            return len(cache)

    seen = on_ranks(2, work)
    if refused:
        assert all(f"{ROWS + 1} of {2 * ROWS} responses" in str(error) for error in seen)
    else:
        assert seen == [ROWS, ROWS]
    with TrajectoryCache(tmp_path) as cache:
        assert len(cache) == ROWS - refused  # what is good is stored


def test_damaged_rows_add_up_over_ranks(tmp_path):
    def work(rank, step):
        with TrajectoryCache(tmp_path, SETTINGS) as cache:
            guard = VerificationGuard(may_pause=False)
            rollout = SpeculativeRollout(cache, ReusePolicy(), len(OLD), guard, rank)
            prompts = PROMPTS[rank.index * ROWS : (rank.index + 1) * ROWS]
            visit(rollout, Idle(OLD), prompts, step=step)
            return rollout.take_metrics()["spec/corrupt_rows"]

    assert on_ranks(2, lambda rank: work(rank, 1)) == [0, 0]
    with TrajectoryCache(tmp_path, SETTINGS) as cache:
        damage_rows(cache, 2 * ROWS - 3)  # some of each rank's
    assert on_ranks(2, lambda rank: work(rank, 2)) == [2 * ROWS - 3] * 2


def test_what_fails_on_one_rank_fails_on_all():
    def work(rank):
        return together(rank, lambda: 1 // rank.index)  # fails on the first

    first, second, third = on_ranks(3, work)
    assert isinstance(first, ZeroDivisionError)
    for seen in second, third:
        assert isinstance(seen, RuntimeError) and "ZeroDivisionError" in str(seen)
    assert on_ranks(2, lambda rank: together(rank, lambda: rank.index)) == [0, 1]


def test_rows_and_leaders():
    rank = OneRank()
    assert leads_node(rank) and own_rows(rank, rank.gather([7, 8])) == slice(0, 2)
    second = ThreadRank(1, [None, None, None], None)
    second.nodes = [0, 0, 1]
    assert not leads_node(second)
    assert own_rows(second, [[1, 2], [3], [4]]) == slice(2, 3)


def test_nodes_are_told_by_the_numbers_of_ranks_on_them():
    pytest.importorskip("trl")
    from trl_integration.checks import UnsupportedSetting
    from trl_integration.ranks import nodes_of

    assert nodes_of([0]) == [0]
    assert nodes_of([0, 1, 0, 1, 2]) == [0, 0, 1, 1, 1]
    for dealt in ([0, 0, 1, 1], [1, 0], [0, 2, 1]):
        with pytest.raises(UnsupportedSetting, match="node by node"):
            nodes_of(dealt)
