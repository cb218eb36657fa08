"""Counts and the metrics made of them."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from specrl_plugins import RolloutCounts
from specrl_plugins.metrics import totals

BATCH = RolloutCounts(
    rows=10,
    completion_tokens=200,
    generated_tokens=150,
    reused_tokens=50,
    draft_rows=8,
    verified_rows=5,
    drafted_tokens=100,
    reuse_rows=4,
    full_reuse_rows=1,
    log_ratio_sum=-5.0,
    age_sum=75,
    reuse_reward_sum=3.0,
    reuse_rewards=4,
    fresh_reward_sum=1.0,
    fresh_rewards=5,
    refreshed_rows=2,
    outlived_rows=1,
    dropped_vocabulary=1,
    dropped_length=2,
    dropped_nonfinite=3,
    unstored_rows=1,
    corrupt_rows=4,
    paused_rows=2,
    corrected_rows=8,
    masked_rows=2,
    exchanged_bytes=2**19,
    judged_rows=8,
    pruned_rows=2,
    went_on_rows=3,
    went_on_tokens=60,
    lookup_s=0.1,
    verify_s=0.4,
    generate_s=2.0,
    store_s=0.2,
    spared_s=0.3,
    judge_s=0.5,
    learn_s=0.6,
)


def test_ratios_have_the_denominators_that_they_name():
    metrics = BATCH.metrics()
    expected = {
        "reused_token_fraction": 0.25,
        "draft_hit_rate": 1.0,
        "draft_accept_rate": 0.5,
        "full_reuse_rate": 0.1,
        "fresh_row_rate": 0.6,
        "prefix_length_mean": 10.0,
        "generated_tokens": 150,
        "reused_tokens": 50,
        "log_ratio_mean": -0.1,
        "draft_age_mean": 1.5,
        "reward_gap": 0.75 - 0.2,
        "refresh_rate": 0.2,
        "outlived_rate": 0.1,
        "paused_rate": 0.2,
        "dropped_drafts": 6,
        "unstored_rows": 1,
        "corrupt_rows": 4,
        "masked_row_rate": 0.25,
        "exchanged_mib": 0.5,
        "time/lookup_s": 0.1,
        "time/verify_s": 0.4,
        "time/generate_s": 2.0,
        "time/store_s": 0.2,
        "time/spared_s": 0.3,
    }
    pruning = {"pruned_fraction": 0.25, "saved_tokens": 2 * 20, "time/judge_s": 0.5, "time/learn_s": 0.6}
    named = {f"spec/{name}": value for name, value in expected.items()}
    named |= {f"prune/{name}": value for name, value in pruning.items()}
    assert metrics == pytest.approx(named)


def test_every_metric_is_documented():
    """Each by its whole name, once, in the first column of the table."""
    documented = re.findall(r"^ *\| `([^`]+)` \| \S", RolloutCounts.metrics.__doc__, re.MULTILINE)
    assert sorted(documented) == sorted(BATCH.metrics())
    rows = re.findall(r"^ *\|.*$", RolloutCounts.metrics.__doc__, re.MULTILINE)
    assert len(rows) == len(documented) + 2  # with the head of the table


def test_counts_add_up_before_ratios_are_taken():
    """A mean of ratios would give 0.375."""
    small = RolloutCounts(rows=1, completion_tokens=10, reused_tokens=5)
    both = BATCH + small
    assert both.metrics()["spec/reused_token_fraction"] == pytest.approx(55 / 210)
    for f in fields(RolloutCounts):
        assert getattr(both, f.name) == getattr(BATCH, f.name) + getattr(small, f.name)
    assert sum([BATCH, small], RolloutCounts()) == both


def test_ranks_add_up_rows_and_pass_seconds_side_by_side():
    both = totals([BATCH, BATCH])
    assert (both.rows, both.generated_tokens, both.log_ratio_sum) == (20, 300, -10.0)
    assert (both.verify_s, both.generate_s, both.spared_s) == (BATCH.verify_s, BATCH.generate_s, BATCH.spared_s)
    assert both.metrics()["spec/reused_token_fraction"] == BATCH.metrics()["spec/reused_token_fraction"]
    assert (both.metrics()["spec/masked_row_rate"], both.metrics()["spec/exchanged_mib"]) == (0.25, 1.0)


def test_ratio_without_denominator_is_left_out():
    metrics = RolloutCounts(rows=4, completion_tokens=40, generated_tokens=40).metrics()
    for name in ("draft_accept_rate", "prefix_length_mean", "log_ratio_mean", "draft_age_mean", "reward_gap"):
        assert f"spec/{name}" not in metrics
    assert metrics["spec/reused_token_fraction"] == 0 and metrics["spec/fresh_row_rate"] == 1
    assert "spec/draft_hit_rate" not in RolloutCounts().metrics()


def test_seconds_are_net_of_what_the_trainer_was_spared():
    assert BATCH.seconds == pytest.approx(0.1 + 0.4 + 2.0 + 0.2 + 0.5 + 0.6 - 0.3)
