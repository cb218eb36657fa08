"""The guard, fed with counts: no clock."""

from __future__ import annotations

import pytest

from specrl_plugins import RolloutCounts, VerificationGuard


def plain(seconds: float) -> RolloutCounts:
    return RolloutCounts(rows=10, completion_tokens=100, generated_tokens=100, generate_s=seconds / 2, step_s=seconds)


def reusing(seconds: float, redrawn: float = 1.0) -> RolloutCounts:
    """With drafts in half of the rows, whose rewards are drawn anew to such an extent."""
    return RolloutCounts(
        rows=10, completion_tokens=100, generated_tokens=75, reused_tokens=25, verified_rows=5, reuse_rows=5,
        reuse_rewards=5, fresh_rewards=5, reward_changes=5, reward_change_sum=redrawn * 5, reward_spread_sum=5.0,
        generate_s=seconds / 2, step_s=seconds,
    )  # fmt: skip


def first(counts: RolloutCounts) -> RolloutCounts:
    """The same batch as the first of a run: nothing was stored before."""
    counts.step_s = 0.0
    return counts


def feed(guard, *batches):
    """Whether the guard pauses after each batch."""
    paused = []
    for batch in batches:
        guard.observe(batch)
        paused.append(guard.paused)
    return paused


def test_reuse_that_pays_is_never_paused():
    guard = VerificationGuard()
    assert not any(feed(guard, *[plain(2.0)] * 4, *[reusing(1.0)] * 20))


def test_reuse_that_costs_more_is_paused_once_measured():
    guard = VerificationGuard(samples=3)
    assert feed(guard, *[plain(1.0)] * 3, *[reusing(2.0)] * 3) == [False] * 5 + [True]


@pytest.mark.parametrize(
    ("redrawn", "seconds", "paused"),
    [(1.0, 0.95, False), (1.0, 1.05, True), (0.5, 0.9, False), (0.5, 0.97, True), (0.0, 0.85, False), (0.0, 0.9, True)],
)
def test_a_step_counts_for_what_is_new_in_it_and_three_quarters_of_the_rest(redrawn, seconds, paused):
    """Half of the rows reuse: with all of their rewards those of last time, a step is to take an eighth less."""
    guard = VerificationGuard()
    assert feed(guard, *[plain(1.0)] * 3, *[reusing(seconds, redrawn)] * 3)[-1] is paused


@pytest.mark.parametrize(("seconds", "paused"), [(0.7, False), (0.8, True)])
def test_without_rewards_what_is_generated_is_what_is_new(seconds, paused):
    unknown = reusing(seconds)
    unknown.reward_changes = 0
    assert feed(VerificationGuard(repeated=0.0), *[plain(1.0)] * 3, *[unknown] * 3)[-1] is paused


def test_reuse_without_anything_new_never_pays():
    nothing = reusing(0.001)
    nothing.reward_changes, nothing.reused_tokens, nothing.generated_tokens = 0, 100, 0
    assert feed(VerificationGuard(samples=1, repeated=0.0), plain(1.0), nothing)[-1]


def test_one_slow_batch_decides_nothing():
    guard = VerificationGuard(samples=3)
    assert not any(feed(guard, *[plain(1.0)] * 2, plain(0.1), *[reusing(0.5), reusing(90.0), *[reusing(0.5)] * 7] * 3))


def test_steps_in_which_most_rows_start_afresh_count():
    """With a carry-over limit they come again and again: without every third step reuse would seem to pay."""
    guard = VerificationGuard(samples=3, repeated=0.0)
    batches = [reusing(0.6, redrawn=0.4), reusing(0.6, redrawn=0.4), reusing(1.2, redrawn=0.4)] * 3
    assert feed(guard, *[plain(1.0)] * 4, *batches)[-1]


def test_a_verdict_goes_by_nine_batches_where_there_are_as_many():
    """A third of them a little slower than it pays."""
    guard = VerificationGuard(samples=3)
    assert not any(feed(guard, *[plain(1.0)] * 9, *[reusing(0.8)] * 6, *[reusing(1.2)] * 3))
    assert feed(guard, *[reusing(1.2)] * 3)[-1]


def test_the_first_batch_is_no_reference():
    """It also pays for compilation: with its 10 s for a reference, reuse at 3 s would seem to pay."""
    guard = VerificationGuard()
    feed(guard, first(plain(10.0)), *[plain(1.0)] * 3)
    assert guard.plain_cost == pytest.approx(0.005)
    assert feed(guard, *[reusing(3.0)] * 3)[-1]


@pytest.mark.parametrize("begin", [[first(plain(10.0))], [first(reusing(10.0))], []])
@pytest.mark.parametrize("pays", [True, False])
def test_where_plain_batches_are_missing_some_are_made(begin, pays):
    """Prompts that come back at once, or a resumed run, whose first batch reuses already."""
    guard = VerificationGuard(samples=3, pause=4)
    before = feed(guard, *begin, *[reusing(0.5 if pays else 2.0)] * 3)
    assert before == [False] * (len(begin) + 2) + [True]
    assert feed(guard, *[plain(1.0)] * 3) == [True, True, not pays]
    assert guard.plain_cost == (pytest.approx(0.005) if pays else guard._first_cost)


def test_the_cost_of_the_first_batch_is_known_where_there_is_no_other():
    alone, reused = VerificationGuard(), VerificationGuard()
    feed(alone, first(plain(10.0)))
    feed(reused, first(reusing(10.0)))
    assert alone.plain_cost == pytest.approx(0.05) and reused.plain_cost is None


def test_pause_lasts_its_batches_then_reuse_gets_another_chance():
    guard = VerificationGuard(samples=2, pause=4)
    feed(guard, *[plain(1.0)] * 3, *[reusing(2.0)] * 2)
    assert feed(guard, *[plain(1.0)] * 4) == [True, True, True, False]
    assert feed(guard, *[reusing(0.5)] * 6) == [False] * 6


def test_pauses_double_up_to_the_longest_and_begin_anew_after_a_success():
    guard = VerificationGuard(samples=1, pause=2, longest_pause=8)
    feed(guard, plain(1.0))

    def fail_and_count():
        guard.observe(reusing(2.0))
        batches = 0
        while guard.paused:
            guard.observe(plain(1.0))
            batches += 1
        return batches

    assert [fail_and_count() for _ in range(5)] == [2, 4, 8, 8, 8]
    guard.observe(reusing(0.5))
    assert fail_and_count() == 2


def test_plain_cost_is_measured_anew_during_a_pause():
    """Responses grew: what reuse costs now is little beside what sampling costs now."""
    guard = VerificationGuard(samples=3, pause=3)
    feed(guard, *[plain(1.0)] * 4, *[reusing(2.0)] * 3)
    assert guard.paused
    feed(guard, *[plain(5.0)] * 3)
    assert guard.plain_cost == pytest.approx(0.025)
    assert feed(guard, *[reusing(2.0)] * 3) == [False] * 3


def test_plain_batches_are_measured_anew_now_and_then_while_reuse_pays():
    """Responses grew shorter: what was dear once is cheap now."""
    guard = VerificationGuard(samples=2, longest_pause=8)
    feed(guard, plain(4.0), plain(4.0))
    assert feed(guard, *[reusing(2.0)] * 10) == [False] * 9 + [True]
    assert feed(guard, plain(1.0), plain(1.0)) == [True, True]  # which is the verdict
    assert guard.plain_cost is None


def test_guard_that_may_not_pause_only_measures():
    guard = VerificationGuard(samples=1, may_pause=False)
    assert not any(feed(guard, plain(1.0), *[reusing(9.0)] * 9))
    assert guard.plain_cost == pytest.approx(0.005)


def test_empty_batch_measures_nothing():
    guard = VerificationGuard()
    guard.observe(RolloutCounts(step_s=1.0))
    assert guard.plain_cost is None


def test_pause_is_announced_with_both_costs(caplog):
    feed(VerificationGuard(samples=1, pause=7), plain(1.0), reusing(2.0, redrawn=0.5))
    assert "20.000 ms a completion token with it and 10.000 ms without" in caplog.text
    assert "94% of what one without does" in caplog.text and "7 batches" in caplog.text
