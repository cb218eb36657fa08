"""The trajectory cache of a whole run: one Ray actor on the head node owns it, engines and trainers talk to that.

A prompt meets another engine, perhaps on another node, every epoch. So the file has one owner. An engine asks for all
drafts of a prompt in one call, and hands its new trajectories back in one.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from specrl_plugins import Fingerprint, ReusePolicy, Trajectory, TrajectoryCache
from specrl_plugins.cache import CacheWriteError

logger = logging.getLogger(__name__)

ACTOR_NAME = "specrl_rollout_cache"


@dataclass(frozen=True)
class Rules:
    """What is the same for all rollouts of a run.

    Args:
        policy (`ReusePolicy`): which drafts are looked at, and how much of each is kept.
        vocab_size (`int`): token ids from here on do not exist in the model.
        guard (`bool`): whether reuse pauses while it does not pay.
    """

    policy: ReusePolicy
    vocab_size: int
    guard: bool


@dataclass(frozen=True)
class Visit:
    """What an engine needs to know of a prompt.

    Args:
        step (`int`): number, from 1, of the optimizer step that its responses are for.
        first_slot (`int`): slot of its first sample; the others follow.
        drafts (`list` of `Trajectory`, *optional*): one a sample, `None` for a miss.
        paused (`bool`): whether no drafts were looked up, because verifying does not pay at present.
        seconds (`float`): that the look-up took, for all samples, without what the engine waits besides.
    """

    step: int
    first_slot: int
    drafts: list[Trajectory | None]
    paused: bool
    seconds: float


class RolloutCache:
    """The actor. One batch of prompts at a time is rolled out: [`begin`] says what it is.

    Args:
        directory (`Path`): folder of the cache.
        fingerprint (`Fingerprint`): what its trajectories depend on.
        max_mib (`float`): size above which the least recently used are forgotten.
        rules (`Rules`): of this run.
    """

    def __init__(self, directory: Path, fingerprint: Fingerprint, max_mib: float, rules: Rules):
        self._cache = TrajectoryCache(directory, fingerprint, max_mib)
        self._cache.claim()
        self._rules = rules
        self._policy_step = 0  # optimizer steps behind the weights that the engines have
        self._training = False
        self._paused = False
        self._slots: Counter[bytes] = Counter()  # of each prompt in this batch, how many are taken
        self._warned_unstored = False

    def rules(self) -> Rules:
        return self._rules

    def rewind(self, step: int) -> int:
        """Training starts at optimizer step `step`: forget what is newer; returns how many trajectories that were."""
        self._policy_step = step
        forgotten = self._cache.rewind(step)
        if forgotten:
            logger.warning(
                "%d trajectories in %s are newer than step %d, where training starts, and were forgotten.",
                forgotten,
                self._cache.directory,
                step,
            )
        return forgotten

    def policy_is(self, step: int) -> None:
        """The engines have the weights after optimizer step `step`."""
        self._policy_step = step

    def begin(self, training: bool, paused: bool = False) -> None:
        """A batch of prompts begins: for training or for evaluation, with drafts or, while `paused`, without."""
        self._training, self._paused = training, paused
        self._slots.clear()

    def visit(self, prompt: bytes, samples: int) -> Visit | None:
        """Drafts for the samples of a prompt; `None` in evaluation, which neither reads nor writes."""
        if not self._training:
            return None
        start = time.perf_counter()
        first = self._slots[prompt]  # a prompt that is twice in a batch goes on where it left off
        self._slots[prompt] += samples
        drafts: list[Trajectory | None] = [None] * samples
        if not self._paused:
            drafts = self._cache.get_many([(prompt, first + sample) for sample in range(samples)])
        return Visit(self._policy_step + 1, first, drafts, self._paused, time.perf_counter() - start)

    def store(self, trajectories: list[Trajectory]) -> tuple[bool, float]:
        """Keep the trajectories of a prompt, all of them or, where the disk refuses, none; returns which.

        Returns:
            Whether they are stored, and the seconds that it took.
        """
        start = time.perf_counter()
        try:
            self._cache.put_many(trajectories)
        except CacheWriteError as error:  # training goes on: what is not stored is only sampled again
            if not self._warned_unstored:
                self._warned_unstored = True
                logger.warning("%s. Training goes on; these prompts will be sampled afresh.", error)
            return False, time.perf_counter() - start
        return True, time.perf_counter() - start

    def size(self) -> tuple[int, float]:
        """Trajectories that are stored, and their size on disk in MiB."""
        return len(self._cache), self._cache.mib


class CacheSize:
    """What the ledger asks of a cache, answered by the actor."""

    def __init__(self, actor: Any):
        self.actor = actor

    def __len__(self) -> int:
        return ray.get(self.actor.size.remote())[0]

    @property
    def mib(self) -> float:
        return ray.get(self.actor.size.remote())[1]


def start_cache(directory: Path, fingerprint: Fingerprint, max_mib: float, rules: Rules) -> Any:
    """Start the actor on the head node; it lives as long as the handle that is returned.

    Raises:
        RuntimeError: the cache cannot be opened; the message says why and what to do.
    """
    options = {"name": ACTOR_NAME, "num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}
    actor_class: Any = ray.remote(RolloutCache)
    actor = actor_class.options(**options).remote(directory, fingerprint, max_mib, rules)
    try:
        ray.get(actor.rules.remote())
    except ray.exceptions.ActorDiedError as error:
        raise RuntimeError(f"The trajectory cache of `--use_spec_rollout` did not start.\n{error}") from error
    return actor


def running_cache() -> Any:
    """The actor of this run, from any of its processes."""
    return ray.get_actor(ACTOR_NAME)
