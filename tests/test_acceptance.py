"""Acceptance: its random numbers, its rule against a plain loop, its rates against their closed forms."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from frequencies import SURPRISE, binomial, chi_square, kolmogorov, surprise_of_tokens
from hypothesis import given
from hypothesis import strategies as st

from specrl_plugins import ReusePolicy, ReuseRule, prompt_key
from specrl_plugins.acceptance import uniforms, verified_prefix_lengths

PROMPT = prompt_key([1, 2, 3])
OTHER = prompt_key([1, 2, 4])


def plain_prefix(old, new, draws, log_lenience):
    """The rule, read token by token from its definition."""
    for i, (p, q, u) in enumerate(zip(old, new, draws, strict=True)):
        if not math.log(u) <= log_lenience + float(q) - float(p):
            return i
    return len(draws)


# -- uniforms


def test_uniforms_are_the_same_on_every_call():
    assert np.array_equal(uniforms(1, PROMPT, 2, 3, 50), uniforms(1, PROMPT, 2, 3, 50))


def test_uniforms_keep_their_values_across_releases():
    """A run that resumes under another release meets the same luck."""
    expected = [0.07798307, 0.35231502, 0.60654798, 0.82525527, 0.02645482]
    np.testing.assert_allclose(uniforms(1, PROMPT, 2, 3, 5), expected, atol=1e-8)


def test_threads_draw_at_once():
    """A thread keeps its generator, and no two threads may use one."""

    def draw(slot):
        return [uniforms(0, PROMPT, slot, step, 2000) for step in range(50)]

    with ThreadPoolExecutor(4) as pool:
        drawn = list(pool.map(draw, range(8)))
    assert np.array_equal(drawn, [draw(slot) for slot in range(8)])


def test_shorter_draw_is_a_prefix_of_a_longer_one():
    longest = uniforms(0, PROMPT, 0, 1, 100)
    for count in range(100):
        assert np.array_equal(uniforms(0, PROMPT, 0, 1, count), longest[:count])


@pytest.mark.parametrize(
    "other",
    [
        (1, PROMPT, 0, 0),
        (0, OTHER, 0, 0),
        (0, PROMPT, 1, 0),
        (0, PROMPT, 0, 1),
        (0, PROMPT, 0, 0, 1),
        (-1, PROMPT, 0, 0),
    ],
    ids=["seed", "prompt", "slot", "step", "stream", "negative seed"],
)
def test_uniforms_share_no_number_between_keys(other):
    seed, prompt, slot, step, *stream = other
    a = uniforms(0, PROMPT, 0, 0, 1000)
    b = uniforms(seed, prompt, slot, step, 1000, *stream)
    assert not set(a.tolist()) & set(b.tolist())


def test_no_argument_can_stand_in_for_another():
    """Exchanging seed, slot, step and stream gives other numbers: each has a counter word of its own."""
    seen = {
        uniforms(seed, PROMPT, slot, step, 1, stream)[0]
        for seed in range(4)
        for slot in range(4)
        for step in range(4)
        for stream in range(4)
    }
    assert len(seen) == 4**4


@given(
    seed=st.integers(-(2**70), 2**70),
    prompt=st.binary(min_size=16, max_size=16),
    slot=st.integers(0, 2**40),
    step=st.integers(0, 2**40),
)
def test_uniforms_lie_strictly_between_zero_and_one(seed, prompt, slot, step):
    draw = uniforms(seed, prompt, slot, step, 64)
    assert draw.dtype == np.float64
    assert (draw > 0).all() and (draw < 1).all()


@pytest.mark.parametrize("bits", [0, 1, 2**64 - 1, 2**64 - 2**11], ids=hex)
def test_extreme_bits_stay_strictly_between_zero_and_one(bits, monkeypatch):
    """A billion draws would not reach the ends, so the generator is replaced by one that returns them."""

    class Extreme:
        def __init__(self, **_):
            pass

        def random_raw(self, count):
            return np.full(count, bits, np.uint64)

    monkeypatch.setattr(np.random, "Philox", Extreme)
    assert 0 < uniforms(0, PROMPT, 0, 0, 1)[0] < 1


@pytest.mark.parametrize("along", ["tokens", "slots", "steps", "prompts", "seeds"])
def test_uniforms_are_uniform(along):
    """Kolmogorov-Smirnov on 20,000 numbers (4,000 keys where they vary), below 2.2: a chance of 1 in 8,000."""
    draws = {
        "tokens": lambda: uniforms(0, PROMPT, 0, 0, 20000),
        "slots": lambda: [uniforms(0, PROMPT, i, 0, 1)[0] for i in range(4000)],
        "steps": lambda: [uniforms(0, PROMPT, 0, i, 1)[0] for i in range(4000)],
        "prompts": lambda: [uniforms(0, prompt_key([i]), 0, 0, 1)[0] for i in range(4000)],
        "seeds": lambda: [uniforms(i, PROMPT, 0, 0, 1)[0] for i in range(4000)],
    }
    assert kolmogorov(np.array(draws[along]())) < 2.2


def test_neighbouring_uniforms_are_uncorrelated():
    """20,000 numbers: the correlation of neighbours times sqrt(n) is a standard normal deviate, below 4."""
    for draw in (uniforms(0, PROMPT, 0, 0, 20000), np.array([uniforms(0, PROMPT, 0, i, 1)[0] for i in range(4000)])):
        assert abs(np.corrcoef(draw[:-1], draw[1:])[0, 1]) * math.sqrt(len(draw)) < SURPRISE


# -- the speculative rule

logprob = st.one_of(st.floats(-20, 0, width=32), st.sampled_from([0.0, -1e30, -100.0]))
uniform = st.one_of(st.floats(1e-12, 1 - 1e-12), st.sampled_from([2.0**-53, 1 - 2.0**-53, 0.5]))
# The current policy may be unable to sample a token.
drafts = st.lists(st.lists(st.tuples(logprob, logprob | st.just(-math.inf), uniform), max_size=12), max_size=8)


@given(drafts, st.sampled_from([0.0, 0.5, -0.7, math.inf, -math.inf]))
def test_prefixes_equal_those_of_a_plain_loop(batch, log_lenience):
    old = [np.array([p for p, _, _ in row], np.float32) for row in batch]
    new = [np.array([q for _, q, _ in row], np.float32) for row in batch]
    draws = [np.array([u for _, _, u in row], np.float64) for row in batch]
    prefixes = verified_prefix_lengths(old, new, draws, log_lenience)
    assert prefixes.dtype == np.int64
    assert prefixes.tolist() == [plain_prefix(*row, log_lenience) for row in zip(old, new, draws, strict=True)]


def test_first_rejection_counts_however_much_is_accepted_after_it():
    old, draws = np.zeros(5, np.float32), np.full(5, 0.5)
    new = np.array([0, 0, -5, 0, 0], np.float32)
    assert verified_prefix_lengths([old], [new], [draws], 0.0).tolist() == [2]


def test_empty_rows_between_full_ones():
    rows = [np.zeros(n, np.float32) for n in (0, 3, 0, 0, 2, 0)]
    draws = [np.full(len(row), 0.5) for row in rows]
    assert verified_prefix_lengths(rows, rows, draws, 0.0).tolist() == [0, 3, 0, 0, 2, 0]
    assert verified_prefix_lengths([], [], [], 0.0).tolist() == []
    assert verified_prefix_lengths(rows[:1], rows[:1], draws[:1], -math.inf).tolist() == [0]


def test_infinite_lenience_accepts_all_and_none():
    old, new = [np.zeros(4, np.float32)], [np.full(4, -1e30, np.float32)]
    draws = [np.full(4, 1 - 2.0**-53)]
    assert verified_prefix_lengths(old, new, draws, math.inf).tolist() == [4]
    assert verified_prefix_lengths(new, old, [np.full(4, 2.0**-53)], -math.inf).tolist() == [0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("rule", "log_lenience"),
    [("speculative", -math.inf), ("speculative", 0.0), ("speculative", math.inf), ("random", 0.0), ("full", 0.0)],
)
def test_no_rule_keeps_a_token_that_the_current_policy_cannot_sample(rule, log_lenience):
    policy = ReusePolicy(rule=rule, log_lenience=log_lenience)
    keys = [(PROMPT, slot) for slot in range(60)]
    old = np.full(5, -1.0, np.float32)
    possible = np.full(5, -1.0, np.float32)
    impossible = np.array([-1, -1, -math.inf, -1, -math.inf], np.float32)
    uncut = policy.prefix_lengths(keys, 1, [old] * 60, [possible] * 60)
    cut = policy.prefix_lengths(keys, 1, [old] * 60, [impossible] * 60)
    assert cut.tolist() == np.minimum(uncut, 2).tolist()
    assert policy.prefix_lengths(keys[:1], 1, [old], [np.full(5, -np.inf, np.float32)]).tolist() == [0]


# -- all rules


def kept_by_definition(rule, log_lenience, old, new, seed, key, step):
    """The prefix of one draft, read token by token from the definition of its rule."""
    possible = [float(q) > -math.inf for q in new]
    if rule == "speculative":
        return plain_prefix(old, new, uniforms(seed, *key, step, len(old)), log_lenience)
    cut = len(old)
    if rule == "random":
        (u,) = uniforms(seed, *key, step, 1)
        cut = next(k for k in range(len(old) + 1) if u < (k + 1) / (len(old) + 1))
    return possible.index(False) if not all(possible[:cut]) else cut


@given(
    batch=st.lists(st.lists(st.tuples(logprob, logprob | st.just(-math.inf)), max_size=12), max_size=8),
    rule=st.sampled_from(list(ReuseRule)),
    log_lenience=st.sampled_from([0.0, 0.5, -0.7, math.inf, -math.inf]),
    seed=st.integers(0, 2**32),
    step=st.integers(1, 2**20),
)
def test_every_rule_keeps_what_its_definition_says(batch, rule, log_lenience, seed, step):
    old = [np.array([p for p, _ in row], np.float32) for row in batch]
    new = [np.array([q for _, q in row], np.float32) for row in batch]
    keys = [(PROMPT, slot) for slot in range(len(batch))]
    prefixes = ReusePolicy(rule=rule, log_lenience=log_lenience, seed=seed).prefix_lengths(keys, step, old, new)
    assert prefixes.dtype == np.int64
    assert prefixes.tolist() == [
        kept_by_definition(rule, log_lenience, *row, seed, key, step) for *row, key in zip(old, new, keys, strict=True)
    ]


def prefix_chances(rule, log_lenience, old, new):
    """Chances of each prefix length, of shape `(tokens + 1,)`, in closed form.

    At least the first k of n tokens are kept with chance prod min(1, l q / p) over these by the speculative rule, with
    1 - k / (n + 1) by random reuse, and surely by full reuse; the latter two where the current policy can sample them.
    """
    n = len(old)
    if rule == "speculative":
        at_least = np.cumprod(np.minimum(1, np.exp(log_lenience + new.astype(float) - old)))
    else:
        at_least = 1 - np.arange(1, n + 1) / (n + 1) if rule == "random" else np.ones(n)
        at_least = at_least * np.cumprod(new > -np.inf)
    return -np.diff([1, *at_least, 0])


@pytest.mark.parametrize(
    ("rule", "log_lenience"),
    [("speculative", 0.0), ("speculative", 0.5), ("speculative", -0.5), ("random", 0.0), ("full", 0.0)],
)
def test_prefixes_have_the_distribution_of_their_closed_form(rule, log_lenience):
    """40 drafts of 1 to 12 tokens with random p and q, a quarter of them with a token that q cannot sample; 4,000 rows
    of each. Chi-square over the prefix lengths: the deviate of each draft, and that of all together, is below 4. No
    length comes out that has no chance, and every row has the only one where there is but one.
    """
    rows, deviates = 4000, []
    keys = [(PROMPT, slot) for slot in range(rows)]
    for seed in range(40):
        rng = np.random.default_rng(seed)
        length = int(rng.integers(1, 13))
        old = np.log(rng.uniform(0.05, 1, length)).astype(np.float32)
        new = np.log(rng.uniform(0.05, 1, length)).astype(np.float32)
        if seed % 4 == 0:
            new[rng.integers(length)] = -np.inf
        policy = ReusePolicy(rule=rule, log_lenience=log_lenience, seed=seed)
        prefixes = policy.prefix_lengths(keys, 1 + seed, [old] * rows, [new] * rows)
        chances = prefix_chances(rule, log_lenience, old, new)
        if rows * (1 - chances.max()) < 10:  # too few others for a test of frequencies
            assert (chances[prefixes] > 0).all() and (prefixes != chances.argmax()).sum() < 40
        else:
            deviates.append(surprise_of_tokens(prefixes, chances))
    assert len(deviates) > 30 or rule == "full"
    assert max(deviates, default=0) < SURPRISE
    assert abs(sum(deviates)) / math.sqrt(max(len(deviates), 1)) < SURPRISE


# -- the other rules


def test_random_rule_cuts_uniformly():
    """Chi-square over the 8 possible cuts of 7 tokens, 16,000 rows, seed 0, deviate below 4."""
    rows = 16000
    draft = np.zeros(7, np.float32)
    policy = ReusePolicy(rule="random")
    cuts = policy.prefix_lengths([(PROMPT, slot) for slot in range(rows)], 1, [draft] * rows, [draft - 50] * rows)
    assert chi_square(np.bincount(cuts, minlength=8), np.full(8, rows / 8)) < SURPRISE


def test_full_rule_keeps_everything():
    drafts = [np.zeros(n, np.float32) for n in (3, 1, 7)]
    unlikely = [draft - 50 for draft in drafts]
    keys = [(PROMPT, slot) for slot in range(3)]
    assert ReusePolicy(rule="full").prefix_lengths(keys, 1, drafts, unlikely).tolist() == [3, 1, 7]


@pytest.mark.parametrize("rule", list(ReuseRule))
def test_prefixes_do_not_depend_on_the_batch(rule):
    rng = np.random.default_rng(0)
    old = [-rng.exponential(1, rng.integers(1, 20)).astype(np.float32) for _ in range(60)]
    new = [p + rng.normal(0, 0.3, len(p)).astype(np.float32) for p in old]
    keys = [(prompt_key([i // 4]), i % 4) for i in range(60)]
    policy = ReusePolicy(rule=rule, log_lenience=0.1)
    whole = policy.prefix_lengths(keys, 5, old, new)
    order = rng.permutation(60)
    shuffled = policy.prefix_lengths([keys[i] for i in order], 5, [old[i] for i in order], [new[i] for i in order])
    assert np.array_equal(shuffled, whole[order])
    alone = [policy.prefix_lengths(keys[i : i + 1], 5, old[i : i + 1], new[i : i + 1])[0] for i in range(60)]
    assert np.array_equal(alone, whole)


@pytest.mark.parametrize("rule", ["speculative", "random"])
def test_luck_changes_from_step_to_step(rule):
    """With one step's luck for all, a row that was unlucky once would be unlucky for ever."""
    old, new = np.full(20, -1, np.float32), np.full(20, -1.2, np.float32)
    prefixes = {
        ReusePolicy(rule=rule, log_lenience=0).prefix_lengths([(PROMPT, 0)], s, [old], [new])[0] for s in range(40)
    }
    assert len(prefixes) > 5


# -- which drafts are looked at


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_refresh_rate_is_its_share_of_rows(rate):
    """10,000 rows over slots and steps, binomial deviate below 4."""
    policy = ReusePolicy(refresh_rate=rate)
    refreshed = sum(policy.refreshes(PROMPT, slot, step) for slot in range(100) for step in range(100))
    assert binomial(refreshed, 10000, rate) < SURPRISE


def test_refresh_rate_of_none_and_all():
    keys = [(PROMPT, slot, step) for slot in range(10) for step in range(10)]
    assert not any(ReusePolicy(refresh_rate=0.0).refreshes(*key) for key in keys)
    assert all(ReusePolicy(refresh_rate=1.0).refreshes(*key) for key in keys)


def test_refreshing_says_nothing_about_acceptance():
    """Rows that escape the refresh must not be the lucky ones: mean first uniform of 4,000 steps, deviate below 4."""
    policy = ReusePolicy(refresh_rate=0.5)
    spared = [uniforms(0, PROMPT, 0, s, 1)[0] for s in range(4000) if not policy.refreshes(PROMPT, 0, s)]
    assert abs(np.mean(spared) - 0.5) / math.sqrt(1 / 12 / len(spared)) < SURPRISE


@pytest.mark.parametrize(("ages", "outlived"), [([0, 0], False), ([2, 1], False), ([3, 0], True), ([9, 9], True)])
def test_draft_outlives_its_carry_limit(ages, outlived):
    assert ReusePolicy(carry_limit=3).outlived(np.array(ages, np.uint16)) is outlived
    assert not ReusePolicy().outlived(np.array(ages, np.uint16))


@pytest.mark.parametrize(
    ("setting", "value", "name"),
    [
        ("refresh_rate", -0.1, "refresh_rate"),
        ("refresh_rate", 1.1, "refresh_rate"),
        ("refresh_rate", math.nan, "refresh_rate"),
        ("refresh_rate", "0.1", "refresh_rate is a share of rows, between 0 and 1, not '0.1'"),
        ("refresh_rate", None, "refresh_rate"),
        ("refresh_rate", True, "refresh_rate"),
        ("carry_limit", 0, "carry_limit"),
        ("carry_limit", 1.5, "carry_limit"),
        ("carry_limit", "2", "carry_limit"),
        ("log_lenience", math.nan, "log_lenience"),
        ("log_lenience", "0", "log_lenience is a number of nats, not '0'"),
        ("rule", "sometimes", "sometimes"),
    ],
)
def test_settings_out_of_range_are_refused(setting, value, name):
    with pytest.raises(ValueError, match=name):
        ReusePolicy(**{setting: value})
