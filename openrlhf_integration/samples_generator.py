"""OpenRLHF's samples generator, which also tells the cache what a batch is for and adds up what came of it.

Overridden, of `SamplesGenerator` (openrlhf 0.11.2, `openrlhf/trainer/ppo_utils/samples_generator.py`):

- `generate_samples`, `generate_eval_samples`: whether a batch is for training.
- `_generate_vllm`: encloses a batch of prompts, with its dynamic filtering.
- `_dispatch_prompts_to_vllm`: sends prompts to the engines, each with the tokenizer. Here they have it already.
- `_process_response_into_experience`: sees every response, before filtering drops it.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import ray
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

from openrlhf_integration.cache_actor import CacheSize, Rules, running_cache
from openrlhf_integration.rollout_actor import COUNTS_KEY
from specrl_plugins import RolloutCounts, VerificationGuard
from specrl_plugins.ledger import RolloutLedger
from specrl_plugins.rollout import refuse_broken_sampler, refuse_broken_scorer

logger = logging.getLogger(__name__)


class RolloutSamples(list[Experience]):
    """Samples for one training step, with the metrics of the rollouts behind them.

    So the metrics reach the trainer together with the samples, be it in this process or through a queue.
    """

    def __init__(self, samples: list[Experience], metrics: dict[str, float]):
        super().__init__(samples)
        self.metrics = metrics

    def __reduce__(self) -> tuple:
        return RolloutSamples, (list(self), self.metrics)


class SpecSamplesGenerator(SamplesGenerator):
    """[`SamplesGenerator`] whose engines reuse past responses or prune. Takes the same arguments."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._cache = running_cache()
        rules: Rules = ray.get(self._cache.rules.remote())
        self._reuse = rules.reuse
        self.ledger = RolloutLedger(CacheSize(self._cache), VerificationGuard(may_pause=rules.guard))
        # With a copy for each prompt, as OpenRLHF sends them, engines spend longer on unpacking than on verifying.
        tokenizer = ray.put(self.tokenizer)
        self._holding = [engine.hold_tokenizer.remote(tokenizer) for engine in self.vllm_engines]
        self._counts = RolloutCounts()
        self._training = True
        self._epochs = 0

    @classmethod
    def in_place_of(cls, generator: SamplesGenerator) -> SpecSamplesGenerator:
        """One with the same data, tokenizer and engines."""
        return cls(
            strategy=generator.strategy,
            prompts_dataloader=generator.prompts_dataloader,
            eval_dataloader=generator.eval_dataloader,
            tokenizer=generator.tokenizer,
            vllm_engines=generator.vllm_engines,
        )

    def generate_eval_samples(self, **generate_kwargs: Any) -> list[Experience]:
        self._training, start = False, time.perf_counter()
        try:
            return super().generate_eval_samples(**generate_kwargs)
        finally:
            self._training = True
            self.ledger.leave_out(time.perf_counter() - start)

    def generate_samples(self, **generate_kwargs: Any) -> tuple[list[Experience], float | None, int, bool]:
        samples, pass_rate, consumed, exhausted = super().generate_samples(**generate_kwargs)
        if samples:  # else the next training step gets the metrics
            samples = RolloutSamples(samples, self.ledger.take_metrics())
        return samples, pass_rate, consumed, exhausted

    def _generate_vllm(
        self, dataloader_iter: Any, num_prompts: int, dynamic_filtering: bool, **generate_kwargs: Any
    ) -> tuple[list[Experience], int, bool]:
        ray.get(self._cache.begin.remote(self._training, self.ledger.guard.paused))
        self._counts = RolloutCounts()
        start = time.perf_counter()
        batch = super()._generate_vllm(dataloader_iter, num_prompts, dynamic_filtering, **generate_kwargs)
        if self._training:
            if self._counts.rows:
                refuse_broken_scorer(self._counts)
                share_out_seconds(self._counts, time.perf_counter() - start)
                self._counts.step_s = self.ledger.lap()
                self.ledger.observe(self._counts)
                refuse_broken_sampler(self._counts)
            *_, exhausted = batch
            self._epochs += exhausted
            if exhausted:
                self._warn_without_drafts()
        return batch

    def _dispatch_prompts_to_vllm(self, *args: Any, **kwargs: Any) -> list[Any]:
        ray.get(self._holding)
        tokenizer, self.tokenizer = self.tokenizer, None
        try:
            return super()._dispatch_prompts_to_vllm(*args, **kwargs)
        finally:
            self.tokenizer = tokenizer

    def _process_response_into_experience(self, response: dict[str, Any], **generate_kwargs: Any) -> Experience:
        self._counts += response.pop(COUNTS_KEY)
        return super()._process_response_into_experience(response, **generate_kwargs)

    def _warn_without_drafts(self) -> None:
        total = self.ledger.total
        if total.mostly_unstored:  # that is why, and the ledger says so
            return
        if self._reuse and self._epochs == 2 and not total.draft_rows and not total.paused_rows:
            logger.warning(
                "After %d epochs no prompt has come back with the same token ids, so nothing can be reused. Does the "
                "data set or the agent change its prompts, or change the sampling parameters?",
                self._epochs,
            )


def share_out_seconds(counts: RolloutCounts, wall_s: float) -> None:
    """Make the stages of a batch add up to its `wall_s` seconds.

    The cache answers one call at a time, so that its seconds passed as they are. Many requests are in flight at once:
    of what is left, verifying, generating and judging get shares in the proportion of what requests spent in each.
    """
    left_s = max(wall_s - counts.lookup_s - counts.store_s, 0.0)
    spent = (counts.verify_s, counts.generate_s, counts.judge_s)
    counts.verify_s, counts.generate_s, counts.judge_s = (left_s * s / sum(spent) for s in spent)
