"""The guard, fed with counts: no clock."""

from __future__ import annotations

import pytest

from specrl_plugins import RolloutCounts, VerificationGuard


def plain(seconds: float) -> RolloutCounts:
    return RolloutCounts(rows=1, completion_tokens=100, generate_s=seconds)


def reusing(seconds: float) -> RolloutCounts:
    return RolloutCounts(rows=1, completion_tokens=100, verified_rows=1, generate_s=seconds - 0.25, verify_s=0.25)


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
    assert feed(guard, *[plain(1.0)] * 4, *[reusing(2.0)] * 3) == [False] * 6 + [True]


@pytest.mark.parametrize(("cost", "paused"), [(0.85, False), (0.95, True), (1.05, True)])
def test_reuse_that_saves_too_little_is_paused(cost, paused):
    """What is reused teaches less: with nothing saved, it is a loss."""
    guard = VerificationGuard(saving=0.1)
    assert feed(guard, *[plain(1.0)] * 4, *[reusing(cost)] * 5)[-3] is paused


def test_one_slow_batch_decides_nothing():
    guard = VerificationGuard(samples=3)
    assert not any(feed(guard, *[plain(1.0)] * 4, *[reusing(0.5), reusing(90.0), reusing(0.5)] * 5))


def test_first_batch_is_no_reference_where_there_is_another():
    """It also pays for compilation: with its 10 s for a reference, reuse at 3 s would seem to pay."""
    guard = VerificationGuard()
    feed(guard, plain(10.0), plain(1.0))
    assert guard.plain_cost == pytest.approx(0.01)
    assert feed(guard, *[reusing(3.0)] * 3)[-1]
    alone = VerificationGuard()
    assert not any(feed(alone, plain(10.0), *[reusing(3.0)] * 9))
    assert alone.plain_cost == pytest.approx(0.1)


def test_a_run_that_begins_with_drafts_judges_only_once_it_has_a_plain_batch():
    """A resumed run: its first batch already reuses, and is no measure of a plain one."""
    guard = VerificationGuard(samples=2)
    assert not any(feed(guard, *[reusing(2.0)] * 9))
    assert guard.plain_cost is None
    assert feed(guard, plain(1.0), reusing(2.0)) == [False, True]


def test_pause_lasts_its_batches_then_reuse_gets_another_chance():
    guard = VerificationGuard(samples=2, pause=4)
    feed(guard, *[plain(1.0)] * 3, *[reusing(2.0)] * 2)
    assert feed(guard, *[plain(1.0)] * 4) == [True, True, True, False]
    assert feed(guard, *[reusing(0.5)] * 6) == [False] * 6


def test_pauses_double_up_to_the_longest_and_begin_anew_after_a_success():
    guard = VerificationGuard(samples=1, pause=2, longest_pause=8)
    feed(guard, plain(1.0), plain(1.0))

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
    guard = VerificationGuard(samples=3, pause=1)
    feed(guard, *[plain(1.0)] * 4, *[reusing(2.0)] * 3)
    assert guard.paused
    feed(guard, plain(5.0))
    assert guard.plain_cost == pytest.approx(0.05)
    assert feed(guard, *[reusing(2.0)] * 3) == [False] * 3


def test_what_the_trainer_is_spared_counts_for_reuse():
    guard = VerificationGuard(samples=1)
    feed(guard, plain(1.0), plain(1.0))
    spared = reusing(1.3)
    spared.spared_s = 0.5
    assert feed(guard, spared) == [False]


def test_guard_that_may_not_pause_only_measures():
    guard = VerificationGuard(samples=1, may_pause=False)
    assert not any(feed(guard, plain(1.0), plain(1.0), *[reusing(9.0)] * 9))
    assert guard.plain_cost == pytest.approx(0.01)


def test_empty_batch_measures_nothing():
    guard = VerificationGuard()
    guard.observe(RolloutCounts())
    assert guard.plain_cost is None


def test_pause_is_announced_with_both_costs(caplog):
    feed(VerificationGuard(samples=1, pause=7), plain(1.0), plain(1.0), reusing(2.0))
    assert "20.00 ms with reuse and 10.00 ms without" in caplog.text
    assert "save 10%" in caplog.text and "7 batches" in caplog.text
