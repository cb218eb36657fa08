"""The trajectory cache and the pruner of a whole run: one Ray actor on the head node owns them, engines and trainers
talk to that.

A prompt meets another engine, perhaps on another node, every epoch. So the file has one owner. An engine asks for all
drafts of a prompt in one call, and hands its new trajectories back in one. What one engine's responses teach the pruner
counts for all.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from numpy.typing import NDArray

from specrl_plugins import Fingerprint, ReusePolicy, Trajectory, TrajectoryCache
from specrl_plugins.cache import CacheWriteError
from specrl_plugins.no_cache import NoCache

if TYPE_CHECKING:  # PyTorch comes with it, which the actor needs only where it is given a pruner
    from specrl_plugins.pruning import Judgement, Pruner, PruningSettings

logger = logging.getLogger(__name__)

ACTOR_NAME = "specrl_rollout_cache"


@dataclass(frozen=True)
class Rules:
    """What is the same for all rollouts of a run.

    Args:
        policy (`ReusePolicy`): which drafts are looked at, and how much of each is kept.
        vocab_size (`int`): token ids from here on do not exist in the model.
        guard (`bool`): whether reuse pauses while it does not pay.
        reuse (`bool`, *optional*, defaults to `True`): whether responses are kept and reused at all.
        pruning (`PruningSettings`, *optional*): what is pruned. Defaults to nothing.
        temperature, top_p (`float`, *optional*, default to 1): what is sampled with in training.
        speculative_config (`dict`, *optional*): how engines draft, as vLLM takes it. Defaults to not at all.
    """

    policy: ReusePolicy
    vocab_size: int
    guard: bool
    reuse: bool = True
    pruning: PruningSettings | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    speculative_config: dict[str, Any] | None = None


@dataclass(frozen=True)
class Visit:
    """What an engine needs to know of a prompt.

    Args:
        step (`int`): number, from 1, of the optimizer step that its responses are for.
        first_slot (`int`): slot of its first sample; the others follow.
        drafts (`list` of `Trajectory`, *optional*): one a sample, `None` for a miss.
        paused (`bool`): whether no drafts were looked up, because verifying does not pay at present.
        seconds (`float`): that the look-up took, for all samples, without what the engine waits besides.
        corrupt (`int`): rows of the cache that did not check out, since the look-up before.
    """

    step: int
    first_slot: int
    drafts: list[Trajectory | None]
    paused: bool
    seconds: float
    corrupt: int


@dataclass(frozen=True)
class Lesson:
    """What became of the survivors of a group.

    Args:
        group (`bytes`): key of the group.
        hidden (`NDArray[np.float32]` of shape `(rows, hidden)`): what they were judged by.
        scores, probabilities, control, ended (`NDArray` of shape `(rows,)`): of their [`Judgement`].
        rewards (`NDArray[np.float64]` of shape `(rows,)`): NaN where unknown.
    """

    group: bytes
    hidden: NDArray[np.float32]
    scores: NDArray[np.float64]
    probabilities: NDArray[np.float64]
    control: NDArray[np.bool_]
    ended: NDArray[np.bool_]
    rewards: NDArray[np.float64]


class RolloutCache:
    """The actor. One batch of prompts at a time is rolled out: [`begin`] says what it is.

    Args:
        directory (`Path`): folder of the cache; not touched unless the rules say reuse.
        fingerprint (`Fingerprint`): what its trajectories depend on.
        max_mib (`float`): size above which the least recently used are forgotten.
        rules (`Rules`): of this run.
        pruner (`Pruner`, *optional*): where the rules say to prune.
        pruner_directory (`Path`, *optional*): folder of what it has learned, one file a checkpoint.
    """

    def __init__(
        self,
        directory: Path,
        fingerprint: Fingerprint,
        max_mib: float,
        rules: Rules,
        pruner: Pruner | None = None,
        pruner_directory: Path = Path("spec_pruner"),
    ):
        self._cache = TrajectoryCache(directory, fingerprint, max_mib) if rules.reuse else NoCache()
        self._cache.claim()
        self._rules = rules
        self._pruner = pruner
        self._pruner_directory = pruner_directory
        self._lessons: list[Lesson] = []  # of the latest batch
        self._learn_s = 0.0  # since the last update of the weights
        self._policy_step = 0  # optimizer steps behind the weights that the engines have
        self._training = False
        self._paused = False
        self._slots: Counter[bytes] = Counter()  # of each prompt in this batch, how many are taken
        self._warned_unstored = False
        self._corrupt_before = 0  # what the cache had counted at the look-up before

    def rules(self) -> Rules:
        return self._rules

    def rewind(self, step: int) -> int:
        """Training starts at optimizer step `step`: forget what is newer; returns how many trajectories that were.

        A pruner goes on from what it had learned at the checkpoint of that step.
        """
        self._policy_step = step
        if self._pruner is not None and step:
            self._load_pruner(self._pruner, step)
        forgotten = self._cache.rewind(step)
        self._cache.checkpoint(step)
        if forgotten:
            logger.warning(
                "%d trajectories in %s are newer than step %d, where training starts, and were forgotten.",
                forgotten,
                self._cache.directory,
                step,
            )
        return forgotten

    def checkpoint(self, step: int) -> None:
        """Training can be resumed from optimizer step `step` now, see [`TrajectoryCache.checkpoint`]."""
        if self._pruner is not None:
            self._pruner_directory.mkdir(parents=True, exist_ok=True)
            path = self._pruner_file(step)
            self._pruner.save(path)
            for earlier in set(self._pruner_directory.glob("*.pt")) - {path}:  # OpenRLHF goes on from its latest
                earlier.unlink()
        try:
            self._cache.checkpoint(step)
        except CacheWriteError as error:  # only room that is not freed
            logger.warning("%s", error)

    def policy_is(self, step: int) -> dict[str, float]:
        """The engines have the weights after optimizer step `step`.

        Returns:
            See [`Pruner.metrics`]; `prune/time/learn_s` comes with them. Empty without a pruner.
        """
        self._policy_step = step
        if self._pruner is None:
            return {}
        self._learn()
        seconds, self._learn_s = self._learn_s, 0.0
        return self._pruner.metrics() | {"prune/time/learn_s": seconds}

    def begin(self, training: bool, paused: bool = False) -> None:
        """A batch of prompts begins: for training or for evaluation, with drafts or, while `paused`, without."""
        self._learn()
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
        corrupt, self._corrupt_before = self._cache.corrupt - self._corrupt_before, self._cache.corrupt
        return Visit(self._policy_step + 1, first, drafts, self._paused, time.perf_counter() - start, corrupt)

    def starts(self, survivors: int) -> int | None:
        """How many samples of a prompt start where `survivors` are to be trained on; `None` where none are judged.

        Evaluation is left alone, and while the pruner is not ready no more start than are trained on.
        """
        if self._pruner is None or not self._training:
            return None
        return self._pruner.settings.starts(survivors) if self._pruner.ready else survivors

    def judge(self, group: bytes, hidden: NDArray[np.float32], ended: NDArray[np.bool_], survivors: int) -> Judgement:
        """Decide which samples of a group go on, see [`Pruner.judge`].

        Args:
            group (`bytes`): its key.
            hidden (`NDArray[np.float32]` of shape `(samples, hidden)`): NaN for a sample whose state is not known.
            ended (`NDArray[np.bool_]` of shape `(samples,)`): which ended before the detection length.
            survivors (`int`): how many go on.
        """
        assert self._pruner is not None
        step = self._policy_step + 1
        hidden = hidden.copy()  # what Ray hands over is read-only, of which PyTorch warns
        return self._pruner.judge(hidden, [group] * len(hidden), ended, {group: survivors}, step)

    def teach(self, lesson: Lesson) -> None:
        """The pruner will learn from this once the batch is over: when the next begins, or the weights change."""
        self._lessons.append(lesson)

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

    def _learn(self) -> None:
        """One step of the pruner, on the lessons of a batch in an order that does not depend on when they came."""
        lessons = sorted(self._lessons, key=lambda lesson: (lesson.group, lesson.hidden.tobytes()))
        self._lessons = []
        if self._pruner is None or not lessons:
            return
        start = time.perf_counter()
        self._pruner.learn(
            hidden=np.concatenate([lesson.hidden for lesson in lessons]),
            scores=np.concatenate([lesson.scores for lesson in lessons]),
            probabilities=np.concatenate([lesson.probabilities for lesson in lessons]),
            control=np.concatenate([lesson.control for lesson in lessons]),
            rewards=np.concatenate([lesson.rewards for lesson in lessons]),
            groups=[lesson.group for lesson in lessons for _ in lesson.rewards],
            ended=np.concatenate([lesson.ended for lesson in lessons]),
        )
        self._learn_s += time.perf_counter() - start

    def _load_pruner(self, pruner: Pruner, step: int) -> None:
        path = self._pruner_file(step)
        if path.is_file():
            pruner.load(path)
        else:
            logger.warning("There is no %s: pruning begins with a warm-up of its own.", path)

    def _pruner_file(self, step: int) -> Path:
        return self._pruner_directory / f"global_step{step}.pt"


class CacheSize:
    """What the ledger asks of a cache, answered by the actor."""

    def __init__(self, actor: Any):
        self.actor = actor

    def __len__(self) -> int:
        return ray.get(self.actor.size.remote())[0]

    @property
    def mib(self) -> float:
        return ray.get(self.actor.size.remote())[1]


def start_cache(*args: Any, **kwargs: Any) -> Any:
    """Start the actor on the head node, with the arguments of [`RolloutCache`]; it lives as long as the handle that is
    returned.

    Raises:
        RuntimeError: the cache cannot be opened; the message says why and what to do.
    """
    options = {"name": ACTOR_NAME, "num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}
    actor_class: Any = ray.remote(RolloutCache)
    actor = actor_class.options(**options).remote(*args, **kwargs)
    try:
        ray.get(actor.rules.remote())
    except ray.exceptions.ActorDiedError as error:
        raise RuntimeError(f"The trajectory cache did not start.\n{error}") from error
    return actor


def running_cache() -> Any:
    """The actor of this run, from any of its processes."""
    return ray.get_actor(ACTOR_NAME)
