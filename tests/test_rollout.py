"""The rollout, against an exact engine: what it reuses, what it samples, what it stores."""

from __future__ import annotations

import logging
import math
import sqlite3
import tempfile
from contextlib import closing, nullcontext

import numpy as np
import pytest
from conftest import make_trajectory
from disk import full_disk
from frequencies import SURPRISE, chi_square
from hypothesis import given, settings
from hypothesis import strategies as st
from tabular import TabularEngine, likeliest, random_table

from specrl_plugins import (
    Fingerprint,
    ReusePolicy,
    SpeculativeRollout,
    TrajectoryCache,
    VerificationGuard,
    prompt_key,
)
from specrl_plugins.acceptance import uniforms
from specrl_plugins.cache import FILE_NAME
from specrl_plugins.response import count_rewards

VOCAB = 8
OLD, NEW = random_table(VOCAB, 1), random_table(VOCAB, 2)
PROMPTS = [[i % VOCAB, 1 + i % 7] for i in range(40)]
SETTINGS = Fingerprint(model="table", tokenizer="none", vocab_size=VOCAB, scorer="table")


def speculative(directory, vocab_size=VOCAB, **policy) -> SpeculativeRollout:
    cache = TrajectoryCache(directory, SETTINGS)
    return SpeculativeRollout(cache, ReusePolicy(**policy), vocab_size, VerificationGuard(may_pause=False))


def visit(rollout, engine, prompts=PROMPTS, cap=12, step=1):
    """One rollout, stored."""
    done = rollout.run(engine, prompts, cap, step)
    rollout.store(done)
    return done


def check_responses(done, engine):
    """What must hold for every response, whatever it was made from."""
    assert len(done.responses) == done.counts.rows
    for response in done.responses:
        tokens, prefix = response.tokens, response.prefix
        assert 0 < len(tokens) <= done.cap
        assert len(tokens) == len(response.logprobs) == len(response.ages)
        np.testing.assert_array_equal(response.logprobs, engine.logprobs(response.prompt, tokens))
        np.testing.assert_array_equal(tokens[:prefix], response.draft_tokens[:prefix])
        assert not response.ages[prefix:].any()
        if prefix:
            np.testing.assert_array_equal(response.ages[:prefix], response.draft.ages[:prefix] + 1)
        assert not set(tokens[:-1].tolist()) & engine.ends
        if response.finish_reason == "stop":
            assert int(tokens[-1]) in engine.ends
        else:
            assert int(tokens[-1]) not in engine.ends
            assert response.finish_reason == "pruned" or len(tokens) == done.cap


# -- what is reused


def test_first_epoch_reuses_nothing(tmp_path):
    engine = TabularEngine(OLD)
    rollout = speculative(tmp_path)
    done = visit(rollout, engine)
    check_responses(done, engine)
    assert engine.score_calls == [] and engine.generate_calls == [len(PROMPTS)]
    assert done.counts.reused_tokens == done.counts.draft_rows == done.counts.verified_rows == 0
    assert done.counts.generated_tokens == done.counts.completion_tokens > 0
    assert len(rollout.cache) == len(PROMPTS)


def test_unchanged_policy_reuses_everything_at_lenience_one(tmp_path):
    engine = TabularEngine(OLD)
    rollout = speculative(tmp_path, log_lenience=0.0)
    first = visit(rollout, engine)
    second = visit(rollout, engine, step=2)
    check_responses(second, engine)
    assert engine.generate_calls == [len(PROMPTS)] and engine.score_calls == [len(PROMPTS)]
    for before, after in zip(first.responses, second.responses, strict=True):
        np.testing.assert_array_equal(before.tokens, after.tokens)
        assert before.finish_reason == after.finish_reason and after.reused_whole
    assert second.counts.full_reuse_rows == second.counts.reuse_rows == len(PROMPTS)
    assert second.counts.reused_tokens == second.counts.completion_tokens


def test_no_lenience_reuses_nothing(tmp_path):
    rollout = speculative(tmp_path, log_lenience=-math.inf)
    visit(rollout, TabularEngine(OLD))
    done = visit(rollout, TabularEngine(OLD), step=2)
    assert done.counts.verified_rows == len(PROMPTS) and done.counts.reused_tokens == 0


@pytest.mark.slow
@pytest.mark.parametrize("log_lenience", [0.0, 0.5])
def test_first_token_has_the_distribution_that_the_method_implies(tmp_path, log_lenience):
    """P(x) = min(p, l q)(x) + (1 - sum min(p, l q)) q(x).

    20,000 samples of one prompt, drafted under p and rolled out under q; chi-square over the vocabulary, deviate
    below 4. The same samples are far from q (above 10), so the test tells the two apart.
    """
    rows, prompt = 20000, [3, 5]
    p, q = OLD[5], NEW[5]
    rollout = speculative(tmp_path, log_lenience=log_lenience)
    visit(rollout, TabularEngine(OLD, seed=1), [prompt] * rows, cap=1)
    done = rollout.run(TabularEngine(NEW, seed=2), [prompt] * rows, cap=1, step=2)
    accepted = np.minimum(p, math.exp(log_lenience) * q)
    expected = accepted + (1 - accepted.sum()) * q
    counts = np.bincount([response.tokens[0] for response in done.responses], minlength=VOCAB)
    assert chi_square(counts, rows * expected) < SURPRISE
    assert chi_square(counts, rows * q) > 10


@pytest.mark.slow
@pytest.mark.parametrize("log_lenience", [0.0, 0.5])
def test_with_a_cut_support_the_first_token_has_that_distribution_too(tmp_path, log_lenience):
    """As above, p and q cut to their 4 likeliest tokens: what q cannot sample never comes out.

    20,000 samples; chi-square over what q can sample, deviate below 4. The cuts differ, so drafts hold such tokens.
    """
    rows, prompt = 20000, [3, 5]
    old, new = likeliest(OLD, 4), likeliest(NEW, 4)
    p, q = old[5], new[5]
    assert ((p > 0) & (q == 0)).any() and ((p > 0) & (q > 0)).any()
    rollout = speculative(tmp_path, log_lenience=log_lenience)
    visit(rollout, TabularEngine(old, seed=1), [prompt] * rows, cap=1)
    done = rollout.run(TabularEngine(new, seed=2), [prompt] * rows, cap=1, step=2)
    accepted = np.minimum(p, math.exp(log_lenience) * q)
    expected = accepted + (1 - accepted.sum()) * q
    counts = np.bincount([response.tokens[0] for response in done.responses], minlength=VOCAB)
    assert not counts[q == 0].any()
    assert chi_square(counts[q > 0], rows * expected[q > 0]) < SURPRISE
    assert chi_square(counts[q > 0], rows * q[q > 0]) > 10
    assert done.counts.dropped_nonfinite == 0 and math.isfinite(done.counts.log_ratio_sum)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rule", ["speculative", "random", "full"])
def test_with_a_cut_support_every_kept_token_is_one_that_can_be_sampled(tmp_path, rule):
    old, new = TabularEngine(likeliest(OLD, 4)), TabularEngine(likeliest(NEW, 4))
    rollout = speculative(tmp_path, rule=rule)
    visit(rollout, old)
    done = visit(rollout, new, step=2)
    check_responses(done, new)
    assert all(np.isfinite(response.logprobs).all() for response in done.responses)
    assert any(np.isneginf(response.draft_logprobs).any() for response in done.responses)
    counts = done.counts
    assert counts.verified_rows == len(PROMPTS) and counts.reused_tokens > 0 and counts.unstored_rows == 0
    assert math.isfinite(counts.log_ratio_sum)


def test_prefix_is_what_the_rule_says_token_by_token(tmp_path):
    rollout = speculative(tmp_path, log_lenience=0.3, seed=11)
    first = visit(rollout, TabularEngine(OLD))
    done = rollout.run(TabularEngine(NEW, seed=1), PROMPTS, 12, step=2)
    for before, response in zip(first.responses, done.responses, strict=True):
        old = np.log(OLD).astype(np.float32)
        new = np.log(NEW).astype(np.float32)
        prefix, last = 0, response.prompt[-1]
        draws = uniforms(11, prompt_key(response.prompt), response.slot, 2, len(before.tokens))
        for token, u in zip(before.tokens.tolist(), draws, strict=True):
            if math.log(u) > 0.3 + float(new[last, token]) - float(old[last, token]):
                break
            prefix, last = prefix + 1, token
        assert response.prefix == prefix
    assert len({response.prefix for response in done.responses}) > 3


def test_verification_does_not_depend_on_the_batch(tmp_path):
    rollout = speculative(tmp_path)
    visit(rollout, TabularEngine(OLD))

    def prefixes(prompts):
        done = rollout.run(TabularEngine(NEW), prompts, 12, step=2)
        return {
            response.key: (response.prefix, tuple(response.tokens[: response.prefix])) for response in done.responses
        }

    whole = prefixes(PROMPTS)
    assert prefixes(PROMPTS[::-1]) == whole
    assert prefixes(PROMPTS[:13]) | prefixes(PROMPTS[13:]) == whole


@given(
    seed=st.integers(0, 2**16),
    caps=st.tuples(st.integers(1, 14), st.integers(1, 14)),
    ends=st.sets(st.integers(0, VOCAB - 1), max_size=3),
    log_lenience=st.sampled_from([-math.inf, 0.0, 0.5, math.inf]),
    rule=st.sampled_from(["speculative", "random", "full"]),
    group=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_response_is_the_prefix_of_its_draft_and_a_continuation(seed, caps, ends, log_lenience, rule, group):
    """Any drafts, any prefixes, caps that grew, shrank or stayed, any number of end tokens."""
    prompts = [prompt for prompt in PROMPTS[: 12 // group] for _ in range(group)]
    before, after = TabularEngine(OLD, ends, seed), TabularEngine(NEW, ends, seed + 1)
    with tempfile.TemporaryDirectory() as directory:
        rollout = speculative(directory, log_lenience=log_lenience, rule=rule, seed=seed)
        drafts = visit(rollout, before, prompts, caps[0])
        done = visit(rollout, after, prompts, caps[1], step=2)
        rollout.cache.close()
    check_responses(drafts, before)
    check_responses(done, after)
    unfinished = sum(r.prefix < len(r.tokens) for r in done.responses)
    assert after.generate_calls == ([unfinished] if unfinished else [])
    assert after.score_calls == [len(prompts)]
    for draft, response in zip(drafts.responses, done.responses, strict=True):
        np.testing.assert_array_equal(response.draft_tokens, draft.tokens[: caps[1]])
        if rule == "full" or (rule == "speculative" and log_lenience == math.inf):
            assert response.prefix == len(response.draft_tokens)
    assert done.counts.completion_tokens == done.counts.reused_tokens + done.counts.generated_tokens


def test_finished_draft_is_not_finished_under_a_smaller_cap(tmp_path):
    """Cut before its end token, a draft ends by its length; under its own cap it ends by itself."""
    rollout = speculative(tmp_path, rule="full")
    draft = make_trajectory(PROMPTS[0], tokens=np.array([1, 2, 3, 0], np.int32), length=4, cap=8)
    rollout.cache.put_many([draft])
    for cap, reason, length in [(3, "length", 3), (4, "stop", 4), (8, "stop", 4)]:
        response = rollout.run(TabularEngine(NEW), PROMPTS[:1], cap, step=2).responses[0]
        assert (response.finish_reason, len(response.tokens)) == (reason, length)


def test_all_rows_that_go_on_share_one_call(tmp_path):
    rollout = speculative(tmp_path, log_lenience=0.0)
    visit(rollout, TabularEngine(OLD), PROMPTS[:30])
    engine = TabularEngine(NEW)
    done = rollout.run(engine, PROMPTS, 12, step=2)  # drafts rejected early, late, not at all, and no draft
    assert engine.score_calls == [30]
    assert engine.generate_calls == [sum(not response.reused_whole for response in done.responses)]


# -- which drafts are looked at


def test_carry_limit_makes_old_drafts_fresh(tmp_path):
    rollout = speculative(tmp_path, rule="full", carry_limit=2)
    engine = TabularEngine(OLD)
    outlived = [visit(rollout, engine, step=step).counts.outlived_rows for step in range(1, 7)]
    assert outlived == [0, 0, 0, len(PROMPTS), 0, 0]


def test_refresh_rate_samples_some_rows_afresh(tmp_path):
    rollout = speculative(tmp_path, rule="full", refresh_rate=0.5)
    visit(rollout, TabularEngine(OLD))
    done = visit(rollout, TabularEngine(OLD), step=2)
    counts = done.counts
    assert 0 < counts.refreshed_rows < counts.draft_rows == len(PROMPTS)
    assert counts.verified_rows == counts.reuse_rows == len(PROMPTS) - counts.refreshed_rows
    for response in done.responses:
        refreshed = rollout.policy.refreshes(response.key, response.slot, 2)
        assert (response.draft is None) == refreshed == (response.prefix == 0)


def test_repeated_prompts_have_slots_of_their_own(tmp_path):
    rollout = speculative(tmp_path, rule="full")
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[0], PROMPTS[0], PROMPTS[1], PROMPTS[0]]
    first = visit(rollout, TabularEngine(OLD), prompts)
    assert [response.slot for response in first.responses] == [0, 0, 1, 2, 1, 3]
    assert len(rollout.cache) == 6
    more = rollout.run(TabularEngine(OLD), [*prompts, PROMPTS[0]], 12, step=2)
    assert [response.draft is None for response in more.responses] == [False] * 6 + [True]
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(first.responses, more.responses[:6], strict=True))


def test_ids_beyond_the_vocabulary_are_not_reused(tmp_path):
    rollout = speculative(tmp_path, rule="full")
    draft = make_trajectory(PROMPTS[0], tokens=np.array([1, 2, VOCAB, 3], np.int32), length=4)
    rollout.cache.put_many([draft])
    engine = TabularEngine(NEW)
    done = rollout.run(engine, PROMPTS[:2], 12, step=2)
    assert engine.score_calls == [] and done.counts.dropped_vocabulary == 1
    assert done.counts.metrics()["spec/dropped_drafts"] == 1
    # Cut before that token, the draft can be used.
    assert rollout.run(engine, PROMPTS[:1], 2, step=2).counts.reused_tokens == 2


@pytest.mark.parametrize("beyond", [0, 1])
@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_draft_is_reused_as_far_as_it_can_be_scored(tmp_path, finish_reason, beyond):
    """A prompt of 2 tokens and a draft of 6, in engines that score 2 tokens or more, and hold `beyond` tokens more."""
    rollout = speculative(tmp_path, rule="full")
    tokens = np.array([3, 3, 3, 3, 3, 0 if finish_reason == "stop" else 3], np.int32)
    rollout.cache.put_many([make_trajectory(PROMPTS[0], tokens=tokens, length=6, finish_reason=finish_reason)])
    for scored in range(2, 10):
        engine = TabularEngine(NEW, max_context=scored + beyond, max_scored=scored)
        if scored + beyond == 2:
            continue  # no engine is asked to answer a prompt that fills its context
        done = rollout.run(engine, PROMPTS[:1], 12, step=2)
        (response,) = done.responses
        assert response.prefix == min(scored - 2, 6) == done.counts.reused_tokens
        assert done.counts.dropped_length == (scored == 2)
        assert len(response.tokens) <= scored + beyond - 2
        whole = finish_reason == "stop" and scored >= 8
        assert response.finish_reason == "stop" if whole else len(response.tokens) > response.prefix or not beyond


@pytest.mark.parametrize("cap", [6, 12])
def test_responses_that_reach_the_end_of_the_context_stay_as_long_and_are_reused(tmp_path, cap):
    """An engine that cannot score its last token, as vLLM's, and answers that never end before it."""
    engine = TabularEngine(OLD, ends=(), max_context=8, max_scored=7)
    rollout = speculative(tmp_path)
    for step in range(1, 8):
        done = visit(rollout, engine, cap=cap, step=step)
        assert all(len(r.tokens) == 6 and r.finish_reason == "length" for r in done.responses)
        assert done.counts.reused_tokens == (step > 1) * 5 * len(PROMPTS)


def test_full_context_ends_a_response_by_length(tmp_path):
    engine = TabularEngine(OLD, ends=(), max_context=7)
    rollout = speculative(tmp_path, rule="random")
    for step in range(1, 5):
        done = visit(rollout, engine, cap=12, step=step)
        assert all(len(r.tokens) == 5 and r.finish_reason == "length" for r in done.responses)


class Broken(TabularEngine):
    """Scores some rows as not a number, or samples such log-probs."""

    def __init__(self, *args, bad_scores=0, bad_samples=0, value=math.nan, **options):
        super().__init__(*args, **options)
        self.bad_scores, self.bad_samples, self.value = bad_scores, bad_samples, value

    def score(self, prompts, continuations):
        scored = super().score(prompts, continuations)
        for row in scored[: self.bad_scores]:
            row[-1] = self.value
        return scored

    def generate(self, contexts, budgets):
        done = super().generate(contexts, budgets)
        for continuation in done[: self.bad_samples]:
            continuation.logprobs[0] = self.value
        return done


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_draft_whose_score_is_no_log_prob_is_not_reused(tmp_path, value):
    rollout = speculative(tmp_path, rule="full")
    visit(rollout, TabularEngine(OLD))
    done = rollout.run(Broken(OLD, bad_scores=3, value=value), PROMPTS, 12, step=2)
    assert done.counts.dropped_nonfinite == 3 and done.counts.verified_rows == len(PROMPTS) - 3
    assert [response.prefix > 0 for response in done.responses] == [False] * 3 + [True] * (len(PROMPTS) - 3)


def test_broken_scorer_is_an_error(tmp_path):
    rollout = speculative(tmp_path)
    visit(rollout, TabularEngine(OLD))
    half = len(PROMPTS) // 2
    rollout.run(Broken(OLD, bad_scores=half), PROMPTS, 12, step=2)
    with pytest.raises(ValueError, match=f"{half + 1} of {len(PROMPTS)} drafts"):
        rollout.run(Broken(OLD, bad_scores=half + 1), PROMPTS, 12, step=2)
    rollout.run(Broken(OLD, bad_scores=15), PROMPTS[:15], 12, step=2)  # too few rows to condemn it


def test_drafts_that_cannot_be_sampled_any_more_are_rejected_and_no_sign_of_a_broken_scorer(tmp_path):
    rollout = speculative(tmp_path)
    visit(rollout, TabularEngine(OLD))
    done = rollout.run(Broken(OLD, bad_scores=len(PROMPTS), value=-math.inf), PROMPTS, 12, step=2)
    assert done.counts.dropped_nonfinite == 0 and done.counts.verified_rows == len(PROMPTS)
    assert all(response.prefix < len(response.draft_tokens) for response in done.responses)


def test_scorer_that_returns_another_length_is_an_error(tmp_path):
    class Short(TabularEngine):
        def score(self, prompts, continuations):
            return [row[:-1] for row in super().score(prompts, continuations)]

    rollout = speculative(tmp_path)
    visit(rollout, TabularEngine(OLD))
    with pytest.raises(ValueError, match="draft tokens"):
        rollout.run(Short(OLD), PROMPTS, 12, step=2)


# -- what is stored


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_broken_sampler_is_an_error(tmp_path, value):
    """As for scores: most rows of a batch of 16 or more. What is good of the batch is stored all the same."""
    rollout = speculative(tmp_path, refresh_rate=1.0)
    half = len(PROMPTS) // 2
    visit(rollout, Broken(OLD, bad_samples=half, value=value))
    with pytest.raises(ValueError, match=f"{half + 1} of {len(PROMPTS)} responses"):
        visit(rollout, Broken(OLD, bad_samples=half + 1, value=value), step=2)
    assert rollout.total.rows == 2 * len(PROMPTS) and rollout.total.nonfinite_rows == 2 * half + 1
    assert sum(trajectory.step == 2 for trajectory in rollout.cache) == half - 1
    visit(rollout, Broken(OLD, bad_samples=15, value=value), PROMPTS[:15], step=3)  # too few rows to condemn it


def test_rows_that_the_disk_refuses_are_no_sign_of_a_broken_sampler(tmp_path):
    rollout = speculative(tmp_path)
    done = rollout.run(TabularEngine(OLD), PROMPTS, 12, step=1)
    with full_disk():
        rollout.store(done)
    assert (done.counts.unstored_rows, done.counts.nonfinite_rows) == (len(PROMPTS), 0)


@pytest.mark.parametrize("reason", ["not finite", "disk"])
def test_whatever_keeps_responses_from_being_stored_is_said_once(tmp_path, caplog, reason):
    """In batches too small for an error, too."""
    rollout = speculative(tmp_path)
    engine = TabularEngine(OLD) if reason == "disk" else Broken(OLD, bad_samples=15)
    text = {"not finite": "log-probs are NaN or infinite", "disk": "cache could not be written"}[reason]
    with full_disk() if reason == "disk" else nullcontext():
        for step in range(1, 10):
            assert ("no response was stored" in caplog.text) == (step > 5)
            visit(rollout, engine, PROMPTS[:15], step=step)
    (record,) = (record for record in caplog.records if "in a row" in record.message)
    assert "5 batches" in record.message and text in record.message
    assert rollout.total.mostly_unstored


def test_a_batch_of_which_something_is_stored_is_not_warned_about(tmp_path, caplog):
    rollout = speculative(tmp_path, refresh_rate=1.0)
    for step in range(1, 13):
        visit(rollout, Broken(OLD, bad_samples=15 - (step % 5 == 0)), PROMPTS[:15], step=step)
    assert "no response was stored" not in caplog.text


def test_response_whose_logprobs_are_not_finite_is_not_stored(tmp_path):
    rollout = speculative(tmp_path)
    done = visit(rollout, Broken(OLD, bad_samples=3))
    assert done.counts.unstored_rows == 3 and len(rollout.cache) == len(PROMPTS) - 3
    found = rollout.cache.get_many([(response.key, response.slot) for response in done.responses])
    assert [trajectory is None for trajectory in found] == [True] * 3 + [False] * (len(PROMPTS) - 3)


def test_response_is_stored_up_to_where_the_scorer_gives_no_chance(tmp_path):
    """An engine and a scorer that differ by rounding differ about the last token that a cut of the support keeps."""
    rollout = speculative(tmp_path, rule="full")
    done = rollout.run(TabularEngine(OLD), PROMPTS, 12, step=1)
    rescored = [response.logprobs.copy() for response in done.responses]
    rows = [row for row, response in enumerate(done.responses) if len(response.tokens) > 3][:3]
    rescored[rows[0]][2:] = -math.inf
    rescored[rows[1]][0] = -math.inf  # nothing is left of it
    rescored[rows[2]][1:] = math.nan, *[-math.inf] * (len(rescored[rows[2]]) - 2)
    rollout.store(done, logprobs=rescored)
    found = rollout.cache.get_many([(response.key, response.slot) for response in done.responses])
    assert found[rows[1]] is None and found[rows[2]] is None and done.counts.unstored_rows == 2
    cut, whole = found[rows[0]], done.responses[rows[0]]
    assert (len(cut.tokens), cut.finish_reason) == (2, "length")
    np.testing.assert_array_equal(cut.tokens, whole.tokens[:2])
    # The next visit goes on from there.
    again = rollout.run(TabularEngine(OLD), PROMPTS, 12, step=2).responses
    assert again[rows[0]].prefix == 2 < len(again[rows[0]].tokens)
    assert again[rows[1]].prefix == 0


def test_stored_trajectory_is_the_response(tmp_path):
    rollout = speculative(tmp_path)
    visit(rollout, TabularEngine(OLD))
    done = rollout.run(TabularEngine(NEW), PROMPTS, 12, step=7)
    rewards = np.arange(len(PROMPTS)) / 10
    rewards[3] = math.nan
    rollout.store(done, rewards=rewards)
    found = rollout.cache.get_many([(response.key, response.slot) for response in done.responses])
    for row, (response, stored) in enumerate(zip(done.responses, found, strict=True)):
        for name in ("tokens", "ages"):
            np.testing.assert_array_equal(getattr(stored, name), getattr(response, name))
        np.testing.assert_allclose(stored.logprobs, response.logprobs, atol=2**-16)
        assert (stored.finish_reason, stored.cap, stored.step) == (response.finish_reason, 12, 7)
        assert stored.reward == (None if row == 3 else rewards[row])


def test_better_known_logprobs_replace_those_of_generation(tmp_path):
    rollout = speculative(tmp_path)
    done = rollout.run(TabularEngine(OLD), PROMPTS[:4], 12, step=1)
    rescored = [response.logprobs - 0.25 for response in done.responses]
    rescored[1] = None
    rescored[2] = np.full(len(done.responses[2].tokens), np.nan, np.float32)
    rescored[3] = np.full(len(done.responses[3].tokens), 1e-5)  # rounding above zero
    rollout.store(done, logprobs=rescored)
    found = rollout.cache.get_many([(response.key, 0) for response in done.responses])
    np.testing.assert_allclose(found[0].logprobs, rescored[0], atol=2**-16)
    np.testing.assert_allclose(found[1].logprobs, done.responses[1].logprobs, atol=2**-16)
    assert found[2] is None and done.counts.unstored_rows == 1
    assert not found[3].logprobs.any()


def test_nothing_is_stored_before_store(tmp_path):
    rollout = speculative(tmp_path)
    rollout.run(TabularEngine(OLD), PROMPTS, 12, step=1)
    assert len(rollout.cache) == 0 and rollout.take_metrics() == {}


def test_full_disk_does_not_stop_training(tmp_path, caplog):
    rollout = speculative(tmp_path, rule="full")
    visit(rollout, TabularEngine(OLD), PROMPTS[:5])
    done = rollout.run(TabularEngine(OLD), PROMPTS, 12, step=2)
    with full_disk():
        rollout.store(done)
        rollout.store(done)
    assert done.counts.unstored_rows == 2 * len(PROMPTS)
    assert caplog.text.count("Training goes on") == 1
    assert len(rollout.cache) == 5
    rollout.store(done)
    assert len(rollout.cache) == len(PROMPTS)


def test_damaged_cache_does_not_stop_training(tmp_path):
    rollout = speculative(tmp_path, rule="full")
    engine = TabularEngine(OLD)
    visit(rollout, engine)
    rollout.cache.close()
    content = bytearray(rollout.cache.path.read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)  # every page but the schema's
    rollout.cache.path.write_bytes(content)
    for step in (2, 3):
        check_responses(visit(rollout, engine, step=step), engine)
        rollout.take_metrics()
    assert rollout.take_metrics() == {}
    assert visit(rollout, engine, step=4).counts.reuse_rows == len(PROMPTS)
    assert len(list(tmp_path.glob("damaged-*.sqlite"))) == 1


def damage_rows(cache, count):
    """Change what a number of rows say, which their checksums then show."""
    cache.close()
    with closing(sqlite3.connect(cache.path)) as db, db:
        db.execute("UPDATE payloads SET cap = cap + 1 WHERE id IN (SELECT id FROM payloads LIMIT ?)", (count,))


def test_damaged_rows_are_misses_and_counted_once(tmp_path):
    rollout = speculative(tmp_path, rule="full")
    engine = TabularEngine(OLD)
    visit(rollout, engine)
    damage_rows(rollout.cache, 7)
    counts = visit(rollout, engine, step=2).counts
    assert (counts.corrupt_rows, counts.draft_rows) == (7, len(PROMPTS) - 7)
    assert visit(rollout, engine, step=3).counts.corrupt_rows == 0
    assert rollout.take_metrics()["spec/corrupt_rows"] == rollout.total.corrupt_rows == 7


def test_a_damaged_file_counts_whenever_it_is_found(tmp_path):
    (tmp_path / FILE_NAME).write_bytes(b"no database" * 1000)
    rollout = speculative(tmp_path)  # when it is opened
    assert visit(rollout, TabularEngine(OLD)).counts.corrupt_rows == 1
    rollout.cache.close()
    rollout.cache.path.write_bytes(b"no database" * 1000)
    assert visit(rollout, TabularEngine(OLD), step=2).counts.corrupt_rows == 1


# -- metrics


def test_counts_are_those_of_the_responses(tmp_path):
    rollout = speculative(tmp_path)
    first = visit(rollout, TabularEngine(OLD), PROMPTS[:30])
    done = rollout.run(TabularEngine(NEW), PROMPTS, 12, step=2)
    rewards = np.linspace(-1, 1, len(PROMPTS))
    rewards[::5] = math.nan
    rollout.store(done, rewards=rewards)
    rows, counts = done.responses, done.counts
    reused = np.array([row.prefix > 0 for row in rows])
    known = ~np.isnan(rewards)
    ratio = sum(float((r.logprobs[: r.prefix] - r.draft.logprobs[: r.prefix]).sum()) for r in rows if r.prefix)
    assert counts.rows == len(PROMPTS) and counts.draft_rows == counts.verified_rows == 30
    assert counts.drafted_tokens == sum(len(response.tokens) for response in first.responses)
    assert counts.reused_tokens == sum(row.prefix for row in rows)
    assert counts.generated_tokens == sum(len(row.tokens) - row.prefix for row in rows)
    assert counts.completion_tokens == sum(len(row.tokens) for row in rows)
    assert counts.full_reuse_rows == sum(row.prefix == len(row.tokens) for row in rows)
    assert counts.reuse_rows == reused.sum()
    assert counts.age_sum == counts.reused_tokens  # every reused token is one visit old
    assert counts.log_ratio_sum == pytest.approx(ratio)
    assert (counts.reuse_rewards, counts.fresh_rewards) == ((reused & known).sum(), (~reused & known).sum())
    metrics = counts.metrics()
    assert metrics["spec/reward_gap"] == pytest.approx(rewards[reused & known].mean() - rewards[~reused & known].mean())
    assert metrics["spec/reused_token_fraction"] == counts.reused_tokens / counts.completion_tokens
    assert metrics["spec/draft_hit_rate"] == 30 / 40
    assert metrics["spec/draft_age_mean"] == 1


def test_counts_of_two_half_batches_add_up_to_those_of_the_whole(tmp_path):
    """The new policy is all but deterministic, so that both ways sample the same continuations."""
    sharp = random_table(VOCAB, 2, sharpness=200)
    engine = TabularEngine(0.5 * OLD + 0.5 * sharp)
    rollout = speculative(tmp_path)
    visit(rollout, TabularEngine(OLD))

    def counts(prompts, rewards):
        done = rollout.run(engine_of_halves(), prompts, 12, step=2)
        count_rewards(done.responses, rewards, done.counts)
        return done.counts

    def engine_of_halves():
        # Scores by a policy near the old one, so that something is reused, and continues by the sharp one.
        deterministic = TabularEngine(sharp + 1e-300)
        deterministic.score = engine.score
        return deterministic

    rewards = np.linspace(0, 1, len(PROMPTS))
    whole = counts(PROMPTS, rewards)
    halves = counts(PROMPTS[:17], rewards[:17]) + counts(PROMPTS[17:], rewards[17:])
    assert 0 < whole.reused_tokens < whole.completion_tokens
    for name, value in vars(whole).items():
        if not name.endswith("_s"):
            assert getattr(halves, name) == pytest.approx(value), name


def test_metrics_are_taken_once_and_cover_all_batches_since(tmp_path):
    rollout = speculative(tmp_path, rule="full")
    engine = TabularEngine(OLD)
    visit(rollout, engine)
    visit(rollout, engine, step=2)
    metrics = rollout.take_metrics()
    assert metrics["spec/draft_hit_rate"] == 0.5 and metrics["spec/cache_rows"] == len(PROMPTS)
    assert 0 < metrics["spec/cache_mib"] < 1
    assert rollout.take_metrics() == {}
    assert rollout.total.rows == 2 * len(PROMPTS)


@pytest.mark.parametrize(
    ("rule", "log_lenience", "text"), [("full", 0, "all was reused"), ("speculative", -math.inf, "rejected")]
)
def test_one_sided_reuse_is_said_aloud_once(tmp_path, caplog, rule, log_lenience, text):
    rollout = speculative(tmp_path, rule=rule, log_lenience=log_lenience)
    engine = TabularEngine(OLD)
    with caplog.at_level(logging.WARNING):
        for step in range(1, 6):
            visit(rollout, engine, step=step)
        assert text not in caplog.text
        for step in range(6, 10):
            visit(rollout, engine, step=step)
    assert caplog.text.count(text) == 1


@pytest.mark.parametrize("reason", ["length", "vocabulary", "nonfinite", "rejected", "mixed"])
def test_whatever_keeps_drafts_from_being_reused_is_said_once(tmp_path, caplog, reason):
    """Batches of 15 rows, too small for broken scores to be an error."""
    prompts, text = PROMPTS[:15], reason
    rollout = speculative(tmp_path)
    engine = TabularEngine(OLD)
    if reason == "length":
        engine, text = TabularEngine(OLD, max_context=3, max_scored=2), "longer context"
    elif reason == "vocabulary":
        rollout.vocab_size, text = 0, "token ids"
    elif reason == "nonfinite":
        engine = Broken(OLD, bad_scores=15)
        text = "NaN or infinite under the current policy"
    elif reason == "rejected":
        rollout.policy = ReusePolicy(log_lenience=-math.inf)
    else:  # half is left aside, most of the rest has no scores
        rollout.policy = ReusePolicy(refresh_rate=0.4, log_lenience=-math.inf)
        engine, text = Broken(OLD, bad_scores=5), "NaN or infinite under the current policy"
    for step in range(1, 13):
        if step <= 6:
            assert "in a row" not in caplog.text
        visit(rollout, engine, prompts, cap=12, step=step)
    assert rollout.total.draft_rows == 11 * 15 and rollout.total.reused_tokens == 0
    (record,) = (record for record in caplog.records if "in a row" in record.message)
    assert "5 batches" in record.message and "nothing was reused" in record.message and text in record.message


@pytest.mark.parametrize("policy", [dict(carry_limit=1), dict(refresh_rate=1.0)])
def test_drafts_that_settings_leave_aside_are_not_warned_about(tmp_path, caplog, policy):
    """An epoch of 8 batches whose drafts were all carried over as often as they may be is as it should be."""
    rollout = speculative(tmp_path, **policy)
    engine = TabularEngine(OLD)
    for epoch in range(3):
        for batch in range(8):
            visit(rollout, engine, PROMPTS[batch * 5 : batch * 5 + 5], step=8 * epoch + batch + 1)
    assert rollout.total.outlived_rows + rollout.total.refreshed_rows >= len(PROMPTS)
    assert "nothing was reused" not in caplog.text


def test_paused_guard_looks_nothing_up_but_goes_on_storing(tmp_path):
    rollout = speculative(tmp_path, rule="full")
    engine = TabularEngine(OLD)
    rollout.guard = VerificationGuard(samples=1)
    visit(rollout, engine, step=1)
    visit(rollout, engine, step=2)  # with drafts at once: a batch without is needed to compare with
    assert rollout.guard.paused
    done = visit(rollout, engine, step=3)
    assert done.counts.paused_rows == len(PROMPTS) and done.counts.draft_rows == 0
    assert done.counts.metrics()["spec/paused_rate"] == 1
    assert "spec/draft_hit_rate" not in done.counts.metrics()  # nobody looked
    assert rollout.cache.stats().oldest_step == 3


def test_a_batch_of_the_same_step_is_no_draft(tmp_path):
    rollout = speculative(tmp_path, rule="full")
    engine = TabularEngine(OLD)
    visit(rollout, engine, step=3)
    same = visit(rollout, engine, step=3).counts
    assert same.reused_tokens == 0 and same.metrics()["spec/draft_hit_rate"] == 0
    assert visit(rollout, engine, step=4).counts.reused_tokens > 0


def test_nothing_then_everything_reused_is_not_one_sided(tmp_path, caplog):
    rollout = speculative(tmp_path, log_lenience=-math.inf)
    engine = TabularEngine(OLD)
    with caplog.at_level(logging.WARNING):
        for step in range(1, 6):  # four batches with nothing, after the first
            visit(rollout, engine, step=step)
        rollout.policy = ReusePolicy(rule="full")
        for step in range(6, 10):  # four with everything
            visit(rollout, engine, step=step)
    assert "in a row" not in caplog.text
