"""Trajectories, their keys and their slots."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from dataclasses import fields

import numpy as np
import pytest
from conftest import make_trajectory
from hypothesis import given
from hypothesis import strategies as st

from specrl_plugins import Trajectory, prompt_key
from specrl_plugins.trajectory import assign_slots


def test_prompt_key_is_a_hash_of_the_ids_alone():
    ids = [1, 2, 70000]
    key = prompt_key(ids)
    assert key == hashlib.blake2b(struct.pack("<3i", *ids), digest_size=16).digest()
    assert key == prompt_key(tuple(ids)) == prompt_key(np.array(ids, np.int64))


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=6), unique_by=tuple, max_size=20))
def test_different_prompts_have_different_keys(prompts):
    assert len({prompt_key(prompt) for prompt in prompts}) == len(prompts)


def test_ids_are_not_run_together():
    assert len({prompt_key(ids) for ids in ([1, 23], [12, 3], [123], [0, 123], [123, 0])}) == 5


@given(st.lists(st.sampled_from([b"a", b"b", b"c"])))
def test_slots_of_a_prompt_count_its_rows(prompts):
    slots = assign_slots(prompts)
    assert len(set(zip(prompts, slots, strict=True))) == len(prompts)
    for prompt, count in Counter(prompts).items():
        assert [s for p, s in zip(prompts, slots, strict=True) if p == prompt] == list(range(count))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(finish_reason="eos"), "finish reason 'eos'"),
        (dict(cap=7), "1 to 7 tokens"),
        (dict(tokens=np.empty(0, np.int32)), "not 0"),
        (dict(tokens=np.arange(7, dtype=np.int32)), "do not match"),
        (dict(logprobs=np.full(7, -1, np.float32)), "do not match"),
        (dict(ages=np.zeros(9, np.uint16)), "do not match"),
        (dict(tokens=np.full(8, -1, np.int32)), "negative"),
        (dict(logprobs=np.full(8, np.nan, np.float32)), "not finite"),
        (dict(logprobs=np.full(8, -np.inf, np.float32)), "not finite"),
        (dict(logprobs=np.full(8, 0.1, np.float32)), "above zero"),
        (dict(reward=float("nan")), "reward"),
    ],
)
def test_what_no_response_can_be_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        make_trajectory(length=8, **change)


def test_edges_of_what_a_response_can_be():
    make_trajectory(length=8, cap=8, slot=0, step=0, reward=None)
    make_trajectory(length=1, logprobs=np.full(1, 1e-4, np.float32), reward=-float("inf"))


@pytest.mark.parametrize(
    ("name", "value", "words"), [("prompt", b"short", "16 bytes"), ("slot", -1, "slot"), ("step", -1, "step")]
)
def test_key_that_no_response_can_have_is_refused(name, value, words):
    good = make_trajectory()
    content = {f.name: getattr(good, f.name) for f in fields(Trajectory)}
    with pytest.raises(ValueError, match=words):
        Trajectory(**(content | {name: value}))
