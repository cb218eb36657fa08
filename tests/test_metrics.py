"""Counts and the metrics made of them."""

from __future__ import annotations

import math
import re
from dataclasses import fields, replace

import numpy as np
import pytest

from specrl_plugins import Response, RolloutCounts, Trajectory
from specrl_plugins.metrics import totals
from specrl_plugins.response import count_rewards

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
    reward_change_sum=0.9,
    reward_changes=3,
    reward_spread_sum=4.2,
    reward_spread_rows=7,
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
    step_s=5.0,
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
        "new_reward_fraction": (6 + 4 * 0.3 / 0.6) / 10,
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
    assert metrics["spec/new_reward_fraction"] == 1  # nothing is reused
    assert "spec/new_reward_fraction" not in replace(BATCH, reward_changes=0).metrics()  # rewards are not known
    assert "spec/draft_hit_rate" not in RolloutCounts().metrics()


def test_seconds_are_net_of_what_the_trainer_was_spared():
    assert BATCH.seconds == pytest.approx(0.1 + 0.4 + 2.0 + 0.2 + 0.5 + 0.6 - 0.3)


def test_a_row_with_reuse_is_as_new_as_its_reward():
    alike = replace(BATCH, reward_spread_sum=0.0)  # all responses to a prompt earn the same
    assert alike.reward_redrawn is None and alike.new_reward_fraction is None
    assert replace(BATCH, reward_change_sum=99.0).new_reward_fraction == 1
    assert replace(BATCH, reward_change_sum=0.0).new_reward_fraction == pytest.approx(0.6)
    assert RolloutCounts().new_reward_fraction is None


def test_how_much_of_rewards_is_drawn_anew_is_measured():
    """Where a share of the rows keeps the reward of its draft and the others draw from the same distribution, by
    prompts that differ more than responses do; the estimate is within 0.05 (its standard error is 0.015)."""
    rng = np.random.default_rng(0)
    for share in (0.0, 0.3, 1.0):
        counts = RolloutCounts()
        for prompt in range(400):
            chance, key = rng.random(), prompt.to_bytes(16, "big")
            old = rng.random(8) < chance
            drawn = rng.random(8) < share
            new = np.where(drawn, rng.random(8) < chance, old)
            responses = [Response([1], key, slot, draft=trajectory(key, slot, reward=r)) for slot, r in enumerate(old)]
            for response in responses:
                response.prefix = 1
            count_rewards(responses, new.tolist(), counts)
        assert counts.reward_changes == counts.reuse_rewards == 3200
        assert counts.reward_redrawn == pytest.approx(share, abs=0.05)


def test_rewards_that_are_not_known_count_for_nothing():
    counts = RolloutCounts()
    key = bytes(16)
    rows = [
        Response([1], key, slot, draft=trajectory(key, slot, reward)) for slot, reward in enumerate([None, 1.0, 1.0])
    ]
    for row in rows:
        row.prefix = 1
    count_rewards(rows, [1.0, math.nan, 0.0], counts)
    assert (counts.reuse_rewards, counts.reward_changes, counts.reward_change_sum) == (2, 1, 0.5)
    assert (counts.reward_spread_rows, counts.reward_spread_sum) == (1, 0.5)


def trajectory(prompt, slot, reward):
    one = np.zeros(1)
    return Trajectory(
        prompt, slot, one.astype(np.int32), one.astype(np.float32), one.astype(np.uint16), "stop", 1, 1,
        reward=None if reward is None else float(reward),
    )  # fmt: skip
