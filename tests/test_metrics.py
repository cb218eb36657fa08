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
    engine_drafted_tokens=60,
    engine_accepted_tokens=30,
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
    reward_changes=3,
    reward_change_sum=0.9,
    reward_spread_sum=1.8,
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
        "new_reward_fraction": 1 - (1 - 0.9 / 1.8) * 4 / 9,
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
        "engine_draft_accept_rate": 0.5,
        "engine_draft_fraction": 0.2,
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
    assert replace(BATCH, reward_spread_sum=0.0).new_reward_fraction is None  # all responses to a prompt earn the same
    assert replace(BATCH, reward_changes=1).new_reward_fraction is None  # of most rows it is not known
    assert replace(BATCH, reward_change_sum=99.0).new_reward_fraction == 1
    assert replace(BATCH, reward_change_sum=0.0).new_reward_fraction == pytest.approx(5 / 9)
    assert RolloutCounts().new_reward_fraction is None


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("drawn", [0.0, 0.3, 1.0])
def test_how_much_of_rewards_is_drawn_anew_is_measured(drawn, ranks):
    """A share of the rows with reuse draws from its prompt's distribution, the others keep the reward of their draft.
    Half of the prompts reuse, whose rewards are spread otherwise than those of the others; the samples of a prompt may
    all be on different ranks. The estimate is within 0.04 (its standard error is 0.01)."""
    rng = np.random.default_rng(0)
    rows = [[] for _ in range(ranks)]
    for prompt in range(800):
        reuses, key = prompt % 2 == 0, prompt.to_bytes(16, "big")
        chance = rng.random() if reuses else 0.01
        old = (rng.random(8) < chance).astype(float)
        new = np.where(rng.random(8) < drawn, rng.random(8) < chance, old)
        for slot in range(8):
            response = Response([1], key, slot, draft=trajectory(key, slot, old[slot]), prefix=int(reuses))
            rows[slot % ranks].append((response, float(new[slot])))
    counts = RolloutCounts(rows=6400, reuse_rows=3200)
    for rank, own in enumerate(rows):
        others = [(r.key, reward) for other in range(ranks) if other != rank for r, reward in rows[other]]
        count_rewards([r for r, _ in own], [reward for _, reward in own], counts, others)
    assert counts.reward_changes == counts.reuse_rewards == counts.fresh_rewards == 3200
    assert counts.new_reward_fraction == pytest.approx(0.5 + 0.5 * drawn, abs=0.02)


def test_rewards_that_are_not_known_count_for_nothing():
    counts, key = RolloutCounts(), bytes(16)
    before, rewards = [None, 1.0, 1.0, 0.5, math.inf], [1.0, math.nan, 0.0, math.inf, 1.0]
    rows = [Response([1], key, slot, draft=trajectory(key, slot, old), prefix=1) for slot, old in enumerate(before)]
    count_rewards([*rows, Response([2], bytes(15) + b"2", 0)], [*rewards, 0.0], counts)
    assert (counts.reuse_rewards, counts.fresh_rewards, counts.reward_changes) == (4, 1, 1)
    assert (counts.reward_change_sum, counts.reward_spread_sum) == (0.5, pytest.approx(np.var([1, 0, 1], ddof=1)))
    alone = RolloutCounts(rows=1, reuse_rows=1)  # with nothing to compare it with
    count_rewards(rows[2:3], [0.0], alone)
    assert alone.reward_changes == 0 and alone.new_reward_fraction is None


def trajectory(prompt, slot, reward):
    one = np.zeros(1)
    return Trajectory(
        prompt, slot, one.astype(np.int32), one.astype(np.float32), one.astype(np.uint16), "stop", 1, 1,
        reward=None if reward is None else float(reward),
    )  # fmt: skip
