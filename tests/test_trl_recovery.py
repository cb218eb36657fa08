"""TRL training that is killed and resumed, through `trainer.train()`: as if nothing had happened."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("trl")

from conftest import same
from trl_kills import Moment, run

from specrl_plugins import TrajectoryCache

pytestmark = [pytest.mark.trl, pytest.mark.slow]

STEPS = 12  # four epochs of three, with a checkpoint every four steps


@pytest.fixture(scope="module")
def unharmed(tiny_model, tmp_path_factory):
    """A run that nobody killed: what it logged and sampled, by step, and its directory."""
    output = tmp_path_factory.mktemp("unharmed")
    _, records = run(tiny_model, output)
    assert sorted(records) == list(range(1, STEPS + 1))
    assert records[STEPS]["spec/reused_token_fraction"] > 0
    return records, output


def check_same(records, expected, first=1, last=STEPS):
    for step in range(first, last + 1):
        if step in records:
            assert records[step].items() <= expected[step].items(), step


def check_same_cache(output: Path, expected: Path, step: int = STEPS):
    """At `step`: a run without reuse leaves a cache as it is, also what a killed process put there after `step`."""
    with TrajectoryCache(output / "spec_cache") as ours, TrajectoryCache(expected / "spec_cache") as theirs:
        ours.rewind(step)
        both = [sorted(cache, key=lambda t: (t.prompt, t.slot)) for cache in (ours, theirs)]
        assert ours.verify()[1] == ours.corrupt == 0
    assert len(both[0]) == 24 and all(same(a, b) for a, b in zip(*both, strict=True))


def moments(seed: int) -> list[Moment]:
    """Six kills: before the first checkpoint, between two, while storing and while saving. Delays are in seconds."""
    rng = random.Random(seed)
    return [
        Moment(rng.choice(["reward", "store", "end"]), rng.randrange(1, 4), rng.uniform(0, 0.05)),
        Moment("save", 4, rng.uniform(0, 0.03)),
        Moment("store", rng.randrange(5, 8), rng.uniform(0, 0.01)),
        Moment("end", rng.randrange(6, 8), rng.uniform(0, 0.2)),
        Moment("save", 8, rng.uniform(0, 0.03)),
        Moment(rng.choice(["reward", "store"]), rng.randrange(9, 12), rng.uniform(0, 0.02)),
    ]


@pytest.mark.parametrize("seed", range(2))
def test_a_run_that_is_killed_and_resumed_ends_as_if_it_had_not_been(tiny_model, tmp_path, unharmed, seed):
    """Completions and metrics of every step, those included that are done again, and the cache at the end."""
    expected, directory = unharmed
    output = tmp_path / "run"
    for moment in moments(seed):
        _, records = run(tiny_model, output, moment)
        check_same(records, expected)
        assert not list((output / "spec_cache").glob("damaged-*"))
    _, records = run(tiny_model, output)
    assert max(records) == STEPS
    check_same(records, expected)
    check_same_cache(output, directory)


def test_the_flag_is_switched_on_and_off_in_a_run_that_is_killed(tiny_model, tmp_path):
    """Plain up to the first checkpoint, with reuse up to the second, plain to the end; with and without kills."""
    plain = dict(use_spec_rollout=False)
    expected = {}
    for changes, until in ((plain, 4), ({}, 8), (plain, None)):
        start, records = run(tiny_model, tmp_path / "stopped", until=until, **changes)
        expected |= records
    assert start == 8 and expected[8]["spec/reused_token_fraction"] > 0 and "spec/draft_hit_rate" not in expected[9]

    output = tmp_path / "killed"
    for changes, moment, first, last in (
        (plain, Moment("reward", 6, 0.01), 0, 4),
        ({}, Moment("store", 7, 0.003), 4, 8),
        ({}, Moment("end", 9, 0.01), 4, 8),
        (plain, Moment("end", 10, 0.01), 8, 12),
        (plain, None, 8, 12),
    ):
        start, records = run(tiny_model, output, moment, **changes)
        assert start == first
        check_same(records, expected, last=last)
    assert max(records) == STEPS
    check_same_cache(output, tmp_path / "stopped", 8)
