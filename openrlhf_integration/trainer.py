"""OpenRLHF's trainers, synchronous and asynchronous, which keep the cache informed and log what was reused and what
was pruned.

Overridden (openrlhf 0.11.2, `openrlhf/trainer/ppo_trainer.py` and `ppo_trainer_async.py`):

- `BasePPOTrainer.train_step`: the metrics of its samples join the status that every tracker logs.
- `BasePPOTrainer.broadcast_to_vllm`: the engines have the weights of another step now.
- `BasePPOTrainer.init_checkpoint_states`: training starts at the step of a checkpoint, or at 0.
- `BasePPOTrainer.save_logs_and_checkpoints`, `BasePPOTrainer.save_best_checkpoint`: the cache and the pruner keep what
  a checkpoint needs.
- `PPOTrainer.__init__`, `GenerateSamplesActor.__init__`: make our samples generator.
- `TrainingActor.__init__`, `TrainingActor.broadcast_to_vllm`: only passed on, see there.
- `PPOTrainerAsync.__init__`: starts the two actors of asynchronous training.
"""

from __future__ import annotations

from typing import Any

import openrlhf.trainer.ppo_trainer_async as asynchronous
import ray
from openrlhf.trainer.ppo_trainer import BasePPOTrainer, PPOTrainer
from openrlhf.trainer.ppo_trainer_async import GenerateSamplesActor, PPOTrainerAsync, TrainingActor

from openrlhf_integration.cache_actor import running_cache
from openrlhf_integration.samples_generator import RolloutSamples, SpecSamplesGenerator
from openrlhf_integration.seams import in_place_of, plain


class SpecTrainer(BasePPOTrainer):
    """What both trainers share. Comes after OpenRLHF's own trainer in the bases of a class.

    So the asynchronous trainer tells the cache of new weights while it still holds the lock that keeps rollouts out.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._cache = running_cache()
        self._policy_step = 0  # optimizer steps behind the weights of the next broadcast
        self._pruner_metrics: dict[str, float] = {}

    def init_checkpoint_states(self) -> dict[str, Any]:
        states = super().init_checkpoint_states()
        self._policy_step = states["global_step"]
        ray.get(self._cache.rewind.remote(self._policy_step))
        return states

    def save_logs_and_checkpoints(self, global_step: int, *args: Any, **kwargs: Any) -> None:
        super().save_logs_and_checkpoints(global_step, *args, **kwargs)
        settings: Any = self.args
        if global_step % settings.ckpt.save_steps == 0:  # OpenRLHF's own condition; the checkpoint is whole now
            ray.get(self._cache.checkpoint.remote(global_step))

    def save_best_checkpoint(
        self, eval_metrics: Any, global_step: int, client_states: dict[str, Any] | None = None
    ) -> None:
        before = self.best_eval_metric_value
        super().save_best_checkpoint(eval_metrics, global_step, client_states)
        if client_states and self.best_eval_metric_value > before:  # OpenRLHF's own condition
            ray.get(self._cache.checkpoint.remote(client_states["global_step"]))

    def train_step(self, rollout_samples: RolloutSamples, global_step: int) -> tuple[dict[str, Any], int]:
        self._policy_step = global_step + 1
        status, global_step = super().train_step(rollout_samples, global_step)
        return status | rollout_samples.metrics | self._pruner_metrics, global_step

    def broadcast_to_vllm(self) -> None:
        super().broadcast_to_vllm()
        self._pruner_metrics = ray.get(self._cache.policy_is.remote(self._policy_step))


class SpecPPOTrainer(plain(PPOTrainer), SpecTrainer):
    """[`PPOTrainer`] that reuses past responses or prunes. Takes the same arguments."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.samples_generator = SpecSamplesGenerator.in_place_of(self.samples_generator)


class SpecTrainingActor(plain(TrainingActor), SpecTrainer):
    """The half of the asynchronous trainer that trains."""

    # Ray copies inherited methods into the class that it sends to a worker, and with one that calls `super()` goes a
    # copy of OpenRLHF's class, which is not the one that is imported there. A method that is found here is not copied.

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)

    def broadcast_to_vllm(self) -> None:
        super().broadcast_to_vllm()


class SpecGenerateSamplesActor(plain(GenerateSamplesActor)):
    """The half of the asynchronous trainer that rolls out."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.samples_generator = SpecSamplesGenerator.in_place_of(self.samples_generator)


class SpecPPOTrainerAsync(plain(PPOTrainerAsync)):
    """[`PPOTrainerAsync`] that reuses past responses or prunes. Takes the same arguments."""

    def __init__(self, *args: Any, **kwargs: Any):
        with in_place_of(
            asynchronous,
            GenerateSamplesActor=ray.remote(SpecGenerateSamplesActor),
            TrainingActor=ray.remote(SpecTrainingActor),
        ):
            super().__init__(*args, **kwargs)
