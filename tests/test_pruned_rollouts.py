"""Pruning in the rollout, against an exact engine whose responses show at their fourth token what will come of them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from frequencies import SURPRISE, homogeneity
from tabular import TabularEngine, random_table
from test_ranks import on_ranks

pytest.importorskip("torch")

from specrl_plugins import (
    Fingerprint,
    ReusePolicy,
    SpeculativeRollout,
    TrajectoryCache,
    VerificationGuard,
    prompt_key,
)
from specrl_plugins.no_cache import NoCache
from specrl_plugins.pruning import GroupPruning, Pruner, PruningSettings

VOCAB, CAP, LENGTH, SAMPLES = 8, 10, 4, 6
TABLE = random_table(VOCAB, 1)
PROMPTS = [[1 + i % 7, i % VOCAB] for i in range(12) for _ in range(SAMPLES)]
MODEL = Fingerprint(model="table", tokenizer="none", vocab_size=VOCAB, scorer="table")
SETTINGS = PruningSettings(detection_length=LENGTH, warmup_steps=4, control_share=0.0)


class Telling(TabularEngine):
    """Its hidden state is the token that it stands on, with noise. Takes part where other ranks have rows."""

    def observe(self, prompts, continuations):
        states = np.eye(VOCAB, dtype=np.float32)[[int(tokens[-1]) for tokens in continuations]]
        noise = self._rng.normal(scale=0.1, size=states.shape).astype(np.float32)
        return self.score(prompts, continuations), states.reshape(len(prompts), VOCAB) + noise

    def score(self, prompts, continuations):
        return super().score(prompts, continuations) if prompts else []

    def generate(self, contexts, budgets):
        return super().generate(contexts, budgets) if contexts else []


def succeeds(response) -> bool:
    """What the head has to find out: the token at the detection length, or the last one before, is even."""
    return int(response.tokens[:LENGTH][-1]) % 2 == 0


def rewards(done):
    return [float(succeeds(response)) for response in done.responses]


def speculative(cache, ranks=None, settings=SETTINGS, **policy) -> SpeculativeRollout:
    pruner = Pruner(VOCAB, settings, seed=0)
    guard = VerificationGuard(may_pause=False)
    return SpeculativeRollout(cache, ReusePolicy(**policy), VOCAB, guard, ranks, GroupPruning(pruner, ranks))


def visit(rollout, engine, step, prompts=PROMPTS):
    done = rollout.run(engine, prompts, CAP, step)
    rollout.store(done, rewards=rewards(done))
    return done


@pytest.fixture
def warm(tmp_path):
    """A rollout whose pruner has learned, and its engine."""
    cache = TrajectoryCache(tmp_path, MODEL)
    rollout, engine = speculative(cache, refresh_rate=1.0), Telling(TABLE)
    for step in range(1, SETTINGS.warmup_steps + 1):
        done = visit(rollout, engine, step)
        assert len(done.responses) == done.counts.rows == done.counts.judged_rows and not done.pruned
    assert rollout.pruning.pruner.ready
    return rollout, engine


def test_while_it_learns_nothing_more_is_started(warm):
    rollout, _ = warm
    metrics = rollout.take_metrics()
    assert metrics["prune/pruned_fraction"] == metrics["prune/saved_tokens"] == 0
    assert metrics["prune/head_auc"] > 0.6
    assert set(metrics) >= {"prune/time/judge_s", "prune/time/learn_s", "prune/calibration_error"}


def test_each_row_gets_a_survivor_of_its_prompt(warm):
    rollout, engine = warm
    done = visit(rollout, engine, step=5)
    assert [response.prompt for response in done.responses] == PROMPTS
    everything = done.responses + done.pruned
    assert done.counts.rows == len(everything) == 2 * len(PROMPTS)
    assert Counter(response.key for response in everything) == {
        key: 2 * count for key, count in Counter(map(prompt_key, PROMPTS)).items()
    }
    assert len({(response.key, response.slot) for response in everything}) == len(everything)


def test_what_is_given_up_ends_at_the_detection_length(warm):
    rollout, engine = warm
    done = visit(rollout, engine, step=5)
    given_up = [response for response in done.pruned if response.finish_reason == "pruned"]
    assert done.counts.pruned_rows == len(given_up) > len(PROMPTS) // 4
    assert all(len(response.tokens) == LENGTH for response in given_up)
    assert all(response.finish_reason in ("stop", "length") for response in done.responses)
    beyond = [len(response.tokens) - LENGTH for response in done.responses if len(response.tokens) > LENGTH]
    assert (done.counts.went_on_rows, done.counts.went_on_tokens) == (len(beyond), sum(beyond))
    assert done.counts.generated_tokens == sum(len(response.tokens) for response in done.responses + done.pruned)
    for response in done.responses + done.pruned:
        np.testing.assert_array_equal(response.logprobs, engine.logprobs(response.prompt, response.tokens))


def test_survivors_are_nearer_to_the_target_than_all_that_started(warm):
    """Over 12 groups and 10 steps: how much of a group's distance from one half is made up. Blind draws make up none.

    The standard error is that of blind draws of 6 of 12, for the distances that there were; the threshold is 4 of them.
    """
    rollout, engine = warm
    distance, moved = [], []
    for step in range(5, 15):
        done = visit(rollout, engine, step)
        for key in {response.key for response in done.responses}:
            kept = [succeeds(response) for response in done.responses if response.key == key]
            started = kept + [succeeds(response) for response in done.pruned if response.key == key]
            distance.append(0.5 - np.mean(started))
            moved.append(np.mean(kept) - np.mean(started))
    distance, moved = np.array(distance), np.array(moved)
    made_up = moved @ distance / (distance @ distance)
    # The mean of k of 2 k numbers that are 0 or 1, drawn without replacement, has the variance s (1 - s) / (2 k - 1).
    variance = (0.25 - distance**2) / (2 * SAMPLES - 1)
    assert made_up > 4 * np.sqrt((distance**2 * variance).sum()) / (distance @ distance)


def test_what_was_given_up_is_a_draft_and_never_a_response(warm):
    rollout, engine = warm
    done = visit(rollout, engine, step=5)
    rollout.policy = ReusePolicy(rule="full")
    again = visit(rollout, engine, step=6)
    slots = {(r.key, r.slot): r for r in again.responses + again.pruned}
    given_up = [response for response in done.pruned if response.finish_reason == "pruned"]
    assert given_up
    for response in given_up:
        after = slots[response.key, response.slot]
        np.testing.assert_array_equal(after.tokens[: after.prefix], response.tokens)
        assert len(after.tokens) > LENGTH or after.finish_reason == "pruned"
    # All were known up to where they are judged: only what survives is generated, in one call.
    calls = engine.generate_calls[-1:]
    assert calls == [sum(r.prefix == LENGTH < len(r.tokens) for r in again.responses)]


def test_long_prefixes_are_judged_before_a_token_is_generated(warm):
    rollout, engine = warm
    rollout.policy = ReusePolicy(rule="full")
    visit(rollout, engine, step=5)
    calls = len(engine.generate_calls)
    done = visit(rollout, engine, step=6)  # by now a draft of each is known up to where it is judged
    assert all(response.prefix >= min(LENGTH, len(response.tokens)) for response in done.responses + done.pruned)
    assert len(engine.generate_calls) == calls + 1  # the survivors' call
    # A response that was whole before is never stored as one that was given up.
    assert all(response.finish_reason != "pruned" for response in done.pruned if response.draft.finish_reason == "stop")


class Recorded(Pruner):
    """Keeps what it was told."""

    def judge(self, hidden, groups, finished, survivors, step):
        judgement = super().judge(hidden, groups, finished, survivors, step)
        self.judged = (np.array(groups), np.array(finished), judgement)
        return judgement

    def learn(self, *told):
        self.told = told
        super().learn(*told)


def test_the_pruner_is_told_what_it_has_to_know(warm):
    rollout, engine = warm
    old = rollout.pruning.pruner
    rollout.pruning.pruner = new = Recorded(VOCAB, SETTINGS, seed=0)
    new.load_state_dict(old.state_dict())
    done = visit(rollout, engine, step=5)
    groups, finished, judgement = new.judged
    slots = {(r.key, r.slot): r for r in done.responses + done.pruned}
    rows = [slots[row] for row, _ in sorted(done.judged.rows.items(), key=lambda item: item[1])]
    assert [row.key for row in rows] == groups.tolist()
    shorter = [len(row.tokens) < LENGTH or (len(row.tokens) == LENGTH and row.finish_reason == "stop") for row in rows]
    assert finished.tolist() == shorter and 0 < sum(shorter) < len(rows)
    hidden, scores, chances, control, known, told_groups, ended = new.told
    kept = [done.judged.rows[response.key, response.slot] for response in done.responses]
    assert told_groups == [response.key for response in done.responses] and known.tolist() == rewards(done)
    np.testing.assert_array_equal(hidden, done.judged.hidden[kept])
    for told, of_all in (
        (scores, judgement.scores),
        (chances, judgement.probabilities),
        (control, judgement.control),
        (ended, finished),
    ):
        np.testing.assert_array_equal(told, of_all[kept])
    assert 0 < chances.min() < chances.max() <= 1


class OtherScorer(Telling):
    """Scores a tenth of a nat below what it says of its own samples, as an engine beside a trainer may."""

    def score(self, prompts, continuations):
        return [scores - np.float32(0.1) for scores in super().score(prompts, continuations)]


def test_what_was_given_up_is_stored_with_the_log_probs_of_the_scorer(warm):
    rollout, _ = warm
    engine = OtherScorer(TABLE, seed=3)
    rollout.policy = ReusePolicy(rule="full")
    for step in (5, 6):
        done = visit(rollout, engine, step)
        assert done.pruned
        for response in done.pruned:
            (expected,) = engine.score([response.prompt], [response.tokens])
            np.testing.assert_allclose(response.logprobs, expected, atol=1e-6)


def test_costs_are_of_what_is_trained_on(warm):
    rollout, engine = warm
    done = visit(rollout, engine, step=5)
    counts = done.counts
    assert counts.trained_tokens == sum(len(response.tokens) for response in done.responses)
    assert counts.given_up_tokens == sum(len(response.tokens) for response in done.pruned) > 0
    stages = {name: value for name, value in vars(counts).items() if name.endswith("_s")}
    assert counts.seconds == pytest.approx(sum(stages.values()) - counts.step_s)


@pytest.mark.slow
def test_two_legs_sample_what_one_leg_does():
    """10,000 rows each way: lengths, and tokens after the halt, by chi-square of homogeneity, deviate below 4."""
    prompts = [[3, 5]] * 10000
    one = SpeculativeRollout(NoCache(), ReusePolicy(), VOCAB).run(TabularEngine(TABLE, seed=1), prompts, CAP, step=1)
    two = speculative(NoCache()).run(Telling(TABLE, seed=2), prompts, CAP, step=1)
    assert two.counts.went_on_rows > 0 and not two.pruned

    def lengths(done):
        return np.bincount([len(response.tokens) for response in done.responses], minlength=CAP + 1)[1:]

    def next_tokens(done):
        tokens = [response.tokens[LENGTH] for response in done.responses if len(response.tokens) > LENGTH]
        return np.bincount(tokens, minlength=VOCAB)

    assert homogeneity(lengths(one), lengths(two)) < SURPRISE
    assert homogeneity(next_tokens(one), next_tokens(two)) < SURPRISE


def test_pruning_without_a_cache():
    rollout, engine = speculative(NoCache()), Telling(TABLE)
    for step in range(1, 8):
        done = visit(rollout, engine, step)
        assert not done.counts.draft_rows and not done.counts.unstored_rows
    assert done.counts.pruned_rows > 0 and len(rollout.cache) == 0


@pytest.mark.parametrize("ranks", [2, 3])
def test_groups_that_straddle_ranks(tmp_path, ranks):
    """Every rank gets as many survivors of each prompt as it brought rows; nobody's response is lost or doubled."""
    bounds = np.linspace(0, len(PROMPTS), ranks + 1).astype(int) - np.array([0, *[2] * (ranks - 1), 0])

    def work(rank):
        with TrajectoryCache(tmp_path, MODEL) as cache:
            rollout, engine = speculative(cache, rank), Telling(TABLE, seed=rank.index)
            prompts = PROMPTS[bounds[rank.index] : bounds[rank.index + 1]]
            visits = [visit(rollout, engine, step, prompts) for step in range(1, 8)]
            for done in visits:
                assert [response.prompt for response in done.responses] == prompts
            return visits, rollout.total, rollout.pruning.pruner._steps

    seen = on_ranks(ranks, work)
    assert not [failure for failure in seen if isinstance(failure, Exception)], seen
    totals = [vars(total) for _, total, _ in seen]
    for total in totals:
        for name in ("rows", "generated_tokens", "reused_tokens", "pruned_rows", "completion_tokens"):
            assert total[name] == totals[0][name]
    assert totals[0]["pruned_rows"] > 0
    # The first rank's pruner learns, and decides for all.
    assert [steps for _, _, steps in seen] == [7] + [0] * (ranks - 1)
    last = [done[-1] for done, _, _ in seen]
    everything = [(r.key, r.slot) for done in last for r in done.responses + done.pruned]
    assert len(everything) == len(set(everything)) == 2 * len(PROMPTS)
