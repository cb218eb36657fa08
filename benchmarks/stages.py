"""What each step of a run took, plain or with reuse, measured alike: seconds of its stages, freshness of its samples.

It wraps methods of the trainer from outside, so that it belongs to the benchmark and not to the product.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import TrainerCallback

from specrl_plugins import Rollout

# Rows are told apart by the visits that their oldest token was carried over, up to this many.
_OLDEST = 4


class StepMeter(TrainerCallback):
    """Logs, with TRL's own metrics of a step:

    | key | meaning |
    | --- | --- |
    | `stage/rollout_s` | seconds from prompts to completions; looking up, verifying and assembling included |
    | `stage/sync_s` | seconds of handing the weights to vLLM |
    | `stage/old_logprobs_s` | seconds of TRL's pass for the old log-probs; with reuse, of the rows not yet known |
    | `stage/rewards_s` | seconds of the rewards |
    | `stage/store_s` | seconds of storing trajectories |
    | `stage/update_s` | seconds of loss, backward pass and optimizer |
    | `stage/step_s` | seconds of the whole step |
    | `policy/expected_reward` | what `judge` says of the policy after the step; its time is not counted |
    | `samples/share_age0` ... `4` | rows by the visits that their oldest token was carried over (4: or more) / rows |
    | `samples/advantage_age0` ... `4` | their mean distance from the mean reward of their prompt |
    | `samples/bias_age0` ... `4` | the same with its sign: above 0 where what is carried over is the better half |
    | `samples/surprise_age0` ... `4` | their tokens' mean -log q, nats: what is left to learn from them |

    Args:
        trainer: of TRL, not yet trained.
        judge (callable, *optional*): expected reward of a model.
    """

    def __init__(self, trainer: Any, judge: Callable[[Any], float] | None = None):
        self.trainer = trainer
        self.judge = judge
        self.seconds: dict[str, float] = defaultdict(float)
        self._within: list[str] = []
        self._began = 0.0
        self._time(trainer, "_generate_and_score_completions", "experience")
        self._time(trainer, "_generate_single_turn", "rollout")
        self._time(trainer, "_calculate_rewards", "rewards")
        # In a rollout it verifies, in the loss it is part of the update.
        self._time(
            trainer,
            "_get_per_token_logps_and_entropies",
            "old_logprobs",
            lambda: self._within == ["experience"] and not torch.is_grad_enabled(),
        )
        if trainer.use_vllm:
            self._time(trainer.vllm_generation, "sync_weights", "sync")
        if trainer.spec_rollout is not None:
            self._time(trainer.spec_rollout, "store", "store")
            store = trainer.spec_rollout.store

            def watched(rollout: Rollout, logprobs: Any = None, rewards: Any = None) -> None:
                self._log("samples", samples_by_age(rollout, rewards))
                store(rollout, logprobs, rewards)

            trainer.spec_rollout.store = watched

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds.clear()
        self._began = _now()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        step, spent = _now() - self._began, self.seconds
        stages = {name: spent[name] for name in ("sync", "old_logprobs", "rewards", "store")}
        stages |= {"rollout": spent["rollout"] - spent["sync"], "update": step - spent["experience"], "step": step}
        self._log("stage", {f"{name}_s": value for name, value in stages.items()})
        if self.judge is not None:
            self._log("policy", {"expected_reward": self.judge(model)})
        if self.trainer.spec_rollout is None:  # what `specrl report` reads of a plain run
            self.trainer._metrics["train"]["rollout/seconds"].append(stages["rollout"])

    def _log(self, group: str, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.trainer._metrics["train"][f"{group}/{name}"].append(value)

    def _time(self, owner: Any, name: str, stage: str, counts: Callable[[], bool] = lambda: True) -> None:
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if not counts():
                return method(*args, **kwargs)
            self._within.append(stage)
            start = _now()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds[stage] += _now() - start
                self._within.pop()

        setattr(owner, name, timed)


def samples_by_age(rollout: Rollout, rewards: Sequence[float]) -> dict[str, float]:
    """What rows have to teach, by how often they were carried over: the keys `samples/` of [`StepMeter`]."""
    scores = np.array(rewards)
    groups: dict[bytes, list[int]] = defaultdict(list)
    for row, response in enumerate(rollout.responses):
        groups[response.key].append(row)
    advantages = scores - [scores[groups[response.key]].mean() for response in rollout.responses]
    ages = np.array([min(int(response.ages[0]), _OLDEST) for response in rollout.responses])
    surprises = np.array([-float(response.logprobs.mean()) for response in rollout.responses])
    found: dict[str, float] = {}
    for age in range(_OLDEST + 1):
        rows: NDArray[np.bool_] = ages == age
        found[f"share_age{age}"] = float(rows.mean())
        if rows.any():
            found[f"advantage_age{age}"] = float(np.abs(advantages[rows]).mean())
            found[f"bias_age{age}"] = float(advantages[rows].mean())
            found[f"surprise_age{age}"] = float(surprises[rows].mean())
    return found


def _now() -> float:
    """Seconds, once the GPU has done what it was asked."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
