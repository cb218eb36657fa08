"""TRL's trainers with speculative rollouts, and without padding in their forwards.

Six of TRL's private methods are overridden, all of them here, as read in TRL 1.16.0; each override calls the original:

- `_generate_single_turn`: token ids of prompts in, completions out. The rollout; with tools, TRL calls it once more for
  each later turn, and those calls are its own.
- `_get_per_token_logps_and_entropies`: the trainer's forward. It verifies drafts. In the passes over a generation
  batch, for the old log-probs and those of the reference, forwards are as narrow as those of verification, and rows
  that this has scored are not computed again. In the update rows stand at the left.
- `_calculate_rewards`: read, to store a reward with its trajectory.
- `_generate_and_score_completions`: encloses these; a rollout is stored when it returns. Old log-probs that the loss
  can do without are taken out of what it gives.
- `_prepare_inputs`: encloses that; of the micro-batches that it has cut out of a generation batch and keeps in
  `_buffered_inputs`, the one of `_step` first, narrow ones are made.
- `_compute_loss`: makes up for rows that were left out of a micro-batch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import is_peft_model
from numpy.typing import NDArray
from torch.distributed.fsdp import FSDPModule
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOTrainer, RLOOTrainer
from trl.models.utils import disable_gradient_checkpointing

from specrl_plugins import (
    CacheError,
    Continuation,
    Fingerprint,
    Rollout,
    SpeculativeRollout,
    TrajectoryCache,
    VerificationGuard,
    prompt_key,
)
from specrl_plugins.book_proposer import speculative_config
from specrl_plugins.fingerprint import tokenizer_hash
from specrl_plugins.no_cache import NoCache
from specrl_plugins.pruning import GroupPruning, Pruner
from specrl_plugins.rollout import Mode
from trl_integration.callback import SpecRolloutCallback, load_pruner
from trl_integration.checks import (
    UnsupportedSetting,
    check_config,
    check_trainer,
    keeps_padding,
    made_up,
    warn_of_little_use,
)
from trl_integration.config import SpecGRPOConfig, SpecRLOOConfig, SpecRolloutArguments
from trl_integration.continuous_batching import recorded_generate_batch
from trl_integration.distribution import SampledDistribution
from trl_integration.engine_settings import engine_settings, refuse_wrong_drafting
from trl_integration.hidden_states import last_hidden_states
from trl_integration.micro_batches import LOSS_SCALE, Batch, MicroBatches, unknown_loss, untrimmable
from trl_integration.padding import narrow_logprobs
from trl_integration.pending import PendingBatch, old_logprobs_wanted
from trl_integration.ranks import EngineRanks, TrainingRanks
from trl_integration.sampling import recorded_generate

if TYPE_CHECKING:
    from specrl_plugins.intercept import Intercepted

logger = logging.getLogger(__name__)


class _TrainerEngine:
    """The trainer as the engine of a rollout: its forward scores and observes, its rollout call generates, from drafts
    too where that is vLLM's."""

    def __init__(
        self,
        trainer: SpecRolloutMixin,
        generate: Callable[..., list[Continuation]],
        generate_from_drafts: Callable[..., list[Continuation]] | None = None,
    ):
        self.trainer = trainer
        self.generate = generate
        self.generate_from_drafts = generate_from_drafts
        # What verifying a draft has shown of its head, by prompt and head: it need not be computed again.
        self._observed: dict[tuple[bytes, bytes], tuple[NDArray, NDArray]] = {}

    @property
    def max_context(self) -> int | None:
        return self.trainer.spec_max_model_len

    @property
    def max_scored(self) -> int | None:
        return self.max_context

    def score(self, prompts: Sequence[list[int]], continuations: Sequence[NDArray[np.int32]]) -> list[NDArray]:
        if not self.trainer.args.spec_prune:
            return self.trainer.spec_score(prompts, continuations)
        length = self.trainer.args.spec_prune_detection_length
        scored, states = self.trainer.spec_observe(prompts, continuations, length)
        for prompt, tokens, logprobs, state in zip(prompts, continuations, scored, states, strict=True):
            self._observed[prompt_key(prompt), tokens[:length].tobytes()] = logprobs[:length], state
        return scored

    def observe(
        self, prompts: Sequence[list[int]], continuations: Sequence[NDArray[np.int32]]
    ) -> tuple[list[NDArray], NDArray[np.float32]]:
        heads = [(prompt_key(prompt), tokens.tobytes()) for prompt, tokens in zip(prompts, continuations, strict=True)]
        new = [row for row, head in enumerate(heads) if head not in self._observed]
        scored, states = self.trainer.spec_observe([prompts[row] for row in new], [continuations[row] for row in new])
        for row, logprobs, state in zip(new, scored, states, strict=True):
            self._observed[heads[row]] = logprobs, state
        seen = [self._observed[head] for head in heads]
        return [logprobs for logprobs, _ in seen], np.array([state for _, state in seen], np.float32)


class SpecRolloutMixin:
    """Speculative rollouts for TRL's online trainers. Goes before one of them in the bases of a class.

    Attributes:
        spec_rollout (`SpeculativeRollout`, *optional*):
            The core. `None` where neither `use_spec_rollout` nor `spec_prune` is set: then every method here is TRL's.
    """

    _config_class: type[SpecRolloutArguments]
    # Whether TRL's `_generate_single_turn` returns the sampling log-probs beside the ids.
    _single_turn_returns_logprobs: bool
    # What stands where TRL calls vLLM.
    _intercepted: Intercepted

    def __init__(self, *args: Any, **kwargs: Any):
        config = kwargs.get("args") or next((arg for arg in args if isinstance(arg, SpecRolloutArguments)), None)
        self.spec_rollout: SpeculativeRollout | None = None
        self._pending = PendingBatch()
        self._micro_batches: MicroBatches | None = None  # `None`: all passes keep TRL's padding
        self._updates = False  # while the loss of an update, or what it is compared with, is computed
        self._warned_untrimmed = False
        if not isinstance(config, SpecRolloutArguments):
            logger.warning(
                "%s has no config with `use_spec_rollout`, so that it trains as TRL's own trainer does. Pass %s(..., "
                "use_spec_rollout=True) as `args`.",
                type(self).__name__,
                self._config_class.__name__,
            )
            super().__init__(*args, **kwargs)
            return
        if not isinstance(config, self._config_class):
            given, wanted = type(config).__name__, self._config_class.__name__
            raise TypeError(f"{type(self).__name__} takes a {wanted} as `args`, not a {given}.")
        active = config.use_spec_rollout or config.spec_prune
        if active:
            check_config(config)
        drafting = config.spec_vllm_speculative_config
        if active and config.drafting().most_tokens:
            drafting = speculative_config(config.drafting().most_tokens)
        with nullcontext() if drafting is None else engine_settings(speculative_config=drafting):
            super().__init__(*args, **kwargs)
        if drafting is not None:
            refuse_wrong_drafting()
        if not active:
            if config.spec_skip_zero_advantage:
                logger.warning(
                    "`spec_skip_zero_advantage=True` does nothing without `use_spec_rollout=True` or "
                    "`spec_prune=True`: the trainer is TRL's own."
                )
            return
        check_trainer(self)
        warn_of_little_use(self)
        sampler = "vllm" if self.use_vllm else "transformers"
        self._sampled = SampledDistribution(self.temperature, self.top_k, self.top_p, self.min_p, sampler)
        fingerprint, ranks = self._fingerprint(), TrainingRanks(self.accelerator)
        cache = NoCache()
        if config.use_spec_rollout:
            directory = config.cache_directory(ranks.nodes[ranks.index])
            try:
                cache = TrajectoryCache(directory, fingerprint, config.spec_cache_max_mib)
            except CacheError as error:
                raise CacheError(f"`spec_cache_dir`, by default in `output_dir`: {error}") from None
        self.spec_rollout = SpeculativeRollout(
            cache=cache,
            policy=config.reuse_policy(),
            vocab_size=fingerprint.vocab_size,
            guard=VerificationGuard(may_pause=config.spec_guard),
            ranks=ranks,
            pruning=GroupPruning(self._pruner(config), ranks) if config.spec_prune else None,
            mode=Mode(config.spec_mode),
            drafting=config.drafting(),
        )
        self.spec_max_model_len: int | None = None
        if self.use_vllm:
            self._intercept_vllm(ranks)
        model = self.accelerator.unwrap_model(self.model)
        self._adapters = _adapters(model) if is_peft_model(model) else None
        if config.spec_trim_padding and not keeps_padding(self):
            self._micro_batches = MicroBatches.of(self, ranks.gather)
        self.add_callback(SpecRolloutCallback(self))

    def _intercept_vllm(self, ranks: TrainingRanks) -> None:
        """Put a stand-in where TRL calls vLLM: the engine of this process, or what reaches the server for all ranks."""
        generation = self.vllm_generation
        if self.vllm_mode == "server":
            from trl_integration.server import InterceptedGeneration, ServerEngine

            engine = ServerEngine(generation, self.eos_token_ids, ranks)
            self.vllm_generation = self._intercepted = InterceptedGeneration(generation, engine)
            self.spec_max_model_len = engine.max_model_len
        else:
            from specrl_plugins.vllm import InterceptedLLM

            shared = EngineRanks(generation.tp_group) if generation.tensor_parallel_size > 1 else None
            self.spec_max_model_len = generation.llm.llm_engine.model_config.max_model_len
            generation.llm = self._intercepted = InterceptedLLM(generation.llm, shared)

    def _pruner(self, config: SpecRolloutArguments) -> Pruner:
        return Pruner(
            self.model.config.get_text_config().hidden_size,
            config.pruning_settings(),
            seed=self.args.seed,
            device=self.accelerator.device,
        )

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As TRL's; a pruner goes on from what it had learned at the checkpoint."""
        core = self.spec_rollout
        if core is not None and core.pruning is not None and resume_from_checkpoint:
            last = resume_from_checkpoint is True
            checkpoint = get_last_checkpoint(self.args.output_dir) if last else resume_from_checkpoint
            if checkpoint is not None and self.accelerator.is_main_process:  # whose pruner decides for all
                load_pruner(core.pruning.pruner, checkpoint)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _fingerprint(self) -> Fingerprint:
        vocabulary = self._tokenizer.get_vocab()
        return Fingerprint(
            model=str(self.model.config.name_or_path),
            tokenizer=tokenizer_hash(self._tokenizer),
            # Embeddings are often padded beyond the tokenizer; an engine refuses such an id in a prompt.
            vocab_size=min(self.model.config.get_text_config().vocab_size, max(vocabulary.values()) + 1),
            scorer="trainer" if self.args.spec_verifier == "trainer" else "vllm",
            sampling={
                "temperature": self.temperature,
                "top_p": self.top_p,
                "top_k": self.top_k,
                "min_p": self.min_p,
                "repetition_penalty": self.repetition_penalty,
                "eos_token_ids": sorted(self.eos_token_ids),
            }
            # Libraries cut the support in different orders.
            | ({"sampler": self._sampled.sampler} if self._sampled.truncated else {}),
        )

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal_fields: dict, *args: Any, **kwargs: Any
    ) -> Any:
        single_turn = super()._generate_single_turn
        # Where this batch has its rollout, TRL goes on after the calls of tools: a prompt with their results in it.
        evaluation = not self.model.training
        if self.spec_rollout is None or evaluation or self._pending.rollout is not None:
            output = single_turn(prompt_ids, images, multimodal_fields, *args, **kwargs)
            if self.spec_rollout is not None and evaluation:
                self.model.eval()  # continuous batching ends in training mode, where the next batch would be a rollout
            return output
        if multimodal_fields and not self.use_vllm:  # of a data set that could not be looked at before
            raise UnsupportedSetting(f"`use_spec_rollout=True` does not work with {made_up(multimodal_fields)}")
        if images:
            raise UnsupportedSetting(
                "`use_spec_rollout=True` does not work with images in prompts: these are known by their token ids, "
                "which do not tell images apart."
            )
        rollout = self._pending.rollout = self._roll_out(
            prompt_ids, lambda contexts: single_turn(contexts, images, multimodal_fields, *args, **kwargs)
        )
        completion_ids = [response.tokens.tolist() for response in rollout.responses]
        if not self._single_turn_returns_logprobs:
            return completion_ids
        return completion_ids, self._sampling_logprobs(rollout) if self.use_vllm else None

    def _sampling_logprobs(self, rollout: Rollout) -> list[list[float]]:
        """What TRL's importance-sampling correction is told.

        Verified: reused tokens count as sampled by the policy that verified them, so that their ratio is 1 with the
        trainer as the verifier, and that of engine against trainer with the engine.
        """
        assert self.spec_rollout is not None
        if self.args.spec_reused_logprobs == "verified":
            return [response.logprobs.tolist() for response in rollout.responses]
        policy = self.spec_rollout.policy
        return [response.behaviour_logprobs(policy).tolist() for response in rollout.responses]

    def _roll_out(self, prompts: list[list[int]], single_turn: Callable[[list[list[int]]], Any]) -> Rollout:
        """One rollout of the core, with TRL's `_generate_single_turn` as what generates."""
        assert self.spec_rollout is not None
        core, cap, step = self.spec_rollout, self.max_completion_length, self.state.global_step + 1
        if not self.use_vllm:

            def generate(contexts: Sequence[list[int]], budgets: Sequence[int]) -> list[Continuation]:
                model = self.accelerator.unwrap_model(self.model_wrapped)
                # Other ranks generate: a sharded model needs all of them.
                rows, budgets = (contexts, budgets) if contexts else ([[self._tokenizer.pad_token_id]], [1])
                if self.use_transformers_continuous_batching:
                    recording = recorded_generate_batch(model, budgets, self.eos_token_ids)
                else:
                    recording = recorded_generate(model, budgets, self.eos_token_ids, self._sampled.warpers)
                with recording as recorder:
                    single_turn(list(rows))
                return recorder.continuations()[: len(contexts)]

            return core.run(_TrainerEngine(self, generate), prompts, cap, step)

        vllm = self._intercepted
        if self.args.spec_verifier == "engine":  # verify and continue while the engine is awake
            return vllm.run_instead(lambda engine: core.run(engine, prompts, cap, step), lambda: single_turn(prompts))

        beside: list[float] = []  # seconds of TRL's own, call by call

        def generate_by(method: str, contexts: Sequence[list[int]], *rest: Any) -> list[Continuation]:
            vllm.framework_s = 0.0
            continuations = vllm.run_instead(
                lambda engine: getattr(engine, method)(contexts, *rest), lambda: single_turn(list(contexts))
            )
            beside.append(vllm.framework_s)
            return continuations

        engine = _TrainerEngine(self, partial(generate_by, "generate"), partial(generate_by, "generate_from_drafts"))
        rollout = core.run(engine, prompts, cap, step)
        rollout.counts.generate_s -= sum(beside[:1])  # pushing weights, waking up: a plain rollout has it once too
        return rollout

    def spec_score(
        self, prompts: Sequence[list[int]], continuations: Sequence[NDArray[np.int32]]
    ) -> list[NDArray[np.float32]]:
        """Log-probs of continuations by the trainer's forward, see [`specrl_plugins.Engine.score`]."""
        return self._spec_forward(prompts, continuations)

    def spec_observe(
        self, prompts: Sequence[list[int]], continuations: Sequence[NDArray[np.int32]], length: int | None = None
    ) -> tuple[list[NDArray[np.float32]], NDArray[np.float32]]:
        """Log-probs as [`spec_score`], and hidden states, see [`specrl_plugins.engine.ObservingEngine.observe`].

        Args:
            prompts (`batch` lists of `prompt tokens` ids).
            continuations (`batch` arrays of shape `(tokens,)`).
            length (`int`, *optional*): number, from 1, of the token whose state is wanted, in continuations that are
                longer. Defaults to the last one of each.
        """
        hidden = np.empty((len(prompts), self.model.config.get_text_config().hidden_size), np.float32)
        ends = [len(tokens) if length is None else min(len(tokens), length) for tokens in continuations]
        with last_hidden_states(self.accelerator.unwrap_model(self.model)) as states:

            def take(rows: list[int]) -> None:
                columns = [len(prompts[row]) + ends[row] - 1 for row in rows]
                hidden[rows] = states[-1][range(len(rows)), columns].float().cpu().numpy()
                states.clear()

            return self._spec_forward(prompts, continuations, take), hidden

    def _spec_forward(
        self,
        prompts: Sequence[list[int]],
        continuations: Sequence[NDArray[np.int32]],
        take: Callable[[list[int]], None] | None = None,
    ) -> list[NDArray[np.float32]]:
        """Log-probs of continuations under the distribution that is sampled.

        Where its support is cut (top-k, top-p, min-p) they differ from those that TRL's own forward returns and TRL's
        loss is made of, which know of the temperature only.
        """
        if not self._sampled.truncated:
            return self._narrow_forwards(prompts, continuations, take=take)
        assert self.spec_rollout is not None
        lengths = [len(prompt) + len(tokens) for prompt, tokens in zip(prompts, continuations, strict=True)]
        longest = max(self.spec_rollout.ranks.gather(max(lengths, default=1)))
        at_once = self._sampled.rows_at_once(longest, self.model.config.get_text_config().vocab_size)
        return self._narrow_forwards(prompts, continuations, self._sampled.logprobs, at_once, take)

    def _narrow_forwards(
        self,
        prompts: Sequence[list[int] | NDArray[np.integer]],
        continuations: Sequence[NDArray[np.int32]],
        forward: Callable[..., torch.Tensor] | None = None,
        at_once: int | None = None,
        take: Callable[[list[int]], None] | None = None,
        model: Any = None,
    ) -> list[NDArray[np.float32]]:
        """See [`narrow_logprobs`]: by TRL's own forward, unless another one is given, and `at_once` rows at most. Of
        the policy, unless another model is given."""
        assert self.spec_rollout is not None
        ranks, rows = self.spec_rollout.ranks, self.args.per_device_train_batch_size
        model = self.model if model is None else model

        def logprobs(ids: torch.Tensor, mask: torch.Tensor, keep: int) -> torch.Tensor:
            if forward is None:
                return super(SpecRolloutMixin, self)._get_per_token_logps_and_entropies(model, ids, mask, keep)[0]
            with self.accelerator.autocast():
                return forward(model, ids, mask, keep)

        with self._scoring():
            scored = narrow_logprobs(
                logprobs,
                prompts,
                continuations,
                rows if at_once is None else min(rows, at_once),
                self.accelerator.device,
                lambda forwards: max(ranks.gather(forwards)),
                take,
            )
        if model is self.model:
            _shard_again(model)
        return scored

    @contextmanager
    def _scoring(self) -> Iterator[None]:
        """As TRL scores: without gradients, and without the warning of checkpoints that are made for none."""
        without_checkpoints = disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs)
        with torch.no_grad(), without_checkpoints:
            yield

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        def by_trl(ids: torch.Tensor, mask: torch.Tensor, keep: int) -> Any:
            return super(SpecRolloutMixin, self)._get_per_token_logps_and_entropies(
                model, ids, mask, keep, *args, **kwargs
            )

        rows = (input_ids, attention_mask, logits_to_keep)
        if self._pending.rollout is None:
            # The update; or an evaluation, which is TRL's, as is what brings columns of its own along.
            if self._micro_batches is None or not self._updates or any(map(torch.is_tensor, kwargs.values())):
                return by_trl(*rows)
            return self._micro_batches.forward(by_trl, *rows)
        # Between a rollout and its being stored TRL makes a pass over the policy, for the old log-probs, and one over
        # the reference. A reward function may ask for something else meanwhile.
        begins = input_ids.size(1) - logits_to_keep
        if kwargs.get("compute_entropy") or not self._pending.is_in(
            input_ids.cpu().numpy(), attention_mask[:, :begins].cpu().numpy()
        ):
            return by_trl(*rows)
        if self._is_policy(model):
            return self._old_logprobs(by_trl, *rows)
        if self._micro_batches is None:
            return by_trl(*rows)
        lengths = attention_mask[:, -logits_to_keep:].sum(1).tolist()
        return self._fill_in([None] * len(lengths), *rows, lengths, model), None, None

    def _old_logprobs(
        self, by_trl: Callable[..., Any], input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int
    ) -> tuple[torch.Tensor, None, None]:
        """TRL's pass for the old log-probs, see [`old_logprobs_wanted`]."""
        rollout = self._pending.rollout
        assert rollout is not None
        completion_mask = attention_mask[:, -logits_to_keep:]
        wanted = old_logprobs_wanted(
            rollout.responses, completion_mask.sum(1).tolist(), self.args.spec_verifier, self._sampled.truncated
        )
        if self._micro_batches is not None:
            self._count_spared(rollout, wanted.known)
            logprobs = self._fill_in(
                wanted.known, input_ids, attention_mask, logits_to_keep, wanted.lengths, self.model
            )
        elif wanted.for_cache:
            columns = torch.arange(logits_to_keep, device=attention_mask.device)
            mask = columns < torch.tensor(wanted.lengths, device=attention_mask.device)[:, None]
            mask = torch.cat([attention_mask[:, :-logits_to_keep], mask.to(attention_mask.dtype)], 1)
            logprobs = by_trl(input_ids, mask, logits_to_keep)[0]
        else:
            return by_trl(input_ids, attention_mask, logits_to_keep)
        if wanted.for_cache:
            turns = [len(response.tokens) for response in rollout.responses]  # rows may go on, with what tools answered
            lines = logprobs.float().cpu().numpy()
            self._pending.scored = [line[:turn] for line, turn in zip(lines, turns, strict=True)]
        return logprobs * completion_mask, None, None

    def _fill_in(
        self,
        known: list[NDArray[np.float32] | None],
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        lengths: list[int],
        model: Any,
    ) -> torch.Tensor:
        """Log-probs of completions as TRL has padded them, where some rows are known; zero beyond `lengths` tokens."""
        ids = input_ids.cpu().numpy()
        begins = ids.shape[1] - logits_to_keep
        starts = (begins - attention_mask[:, :begins].sum(1)).tolist()
        unknown = [row for row, length in enumerate(lengths) if length and known[row] is None]
        computed = self._narrow_forwards(
            [ids[row, starts[row] : begins] for row in unknown],
            [ids[row, begins : begins + lengths[row]] for row in unknown],
            model=model,
        )
        filled = np.zeros((len(ids), logits_to_keep), np.float32)
        for row, logprobs in [*enumerate(known), *zip(unknown, computed, strict=True)]:
            if logprobs is not None:
                filled[row, : lengths[row]] = logprobs
        return torch.from_numpy(filled).to(input_ids.device)

    @property
    def _loss_takes_old_logprobs(self) -> bool:
        """Whether TRL's loss sets its log-probs against those of before the update: RLOO's does, GRPO's where a rollout
        serves several updates.

        Then they are made in the micro-batches of the update: from forwards of another width, or from verification,
        they differ by the rounding of bf16, and ratios would not begin at 1.
        """
        if isinstance(self, RLOOTrainer):
            return True
        rollout_steps = self.args.steps_per_generation * self.num_iterations
        return self.args.gradient_accumulation_steps % rollout_steps != 0

    def _is_policy(self, model: Any) -> bool:
        """Whether it is the policy: TRL has a PEFT model be its own reference, by switching its adapter."""
        if model is not self.model:
            return False
        model = self.accelerator.unwrap_model(model)
        return not is_peft_model(model) or _adapters(model) == self._adapters

    @staticmethod
    def _count_spared(rollout: Rollout, known: list[NDArray[np.float32] | None]) -> None:
        """Rows that are known spare their share of the seconds that verifying took."""
        verified = [r for r in rollout.responses + rollout.pruned if r.draft is not None]
        rows = zip(rollout.responses, known, strict=True)
        spared = sum(len(r.prompt) + len(r.tokens) for r, logprobs in rows if logprobs is not None)
        if spared:
            scored = sum(len(r.prompt) + len(r.draft_tokens) for r in verified)
            rollout.counts.spared_s += rollout.counts.verify_s * spared / scored

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        rewards_per_func = super()._calculate_rewards(*args, **kwargs)
        if self._pending.rollout is not None:
            weights = self.reward_weights.to(rewards_per_func.device)
            rewards = (rewards_per_func * weights).nansum(1)
            rewards[rewards_per_func.isnan().all(1)] = torch.nan
            rows = len(self._pending.rollout.responses)  # TRL gathers the rewards of all ranks
            start = self.accelerator.process_index * rows
            self._pending.rewards = rewards[start : start + rows].tolist()
        return rewards_per_func

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._pending = PendingBatch()  # an interrupted step may have left its own
        output = super()._generate_and_score_completions(inputs)
        pending, self._pending = self._pending, PendingBatch()
        if self.spec_rollout is not None and pending.rollout is not None:
            scored = pending.scored
            stored_by_trainer = self.args.use_spec_rollout and self.args.spec_verifier == "trainer"
            if scored is None and self.use_vllm and stored_by_trainer:
                scored = self._score_generated(pending.rollout)
            _count_masked(pending.rollout, output)
            self.spec_rollout.store(pending.rollout, scored, pending.rewards)
        return output

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """One micro-batch; a generation batch is made, and cut into all of its own, where there is none."""
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self._micro_batches is None or self._buffered_inputs is before:
            return inputs
        self._buffered_inputs = self._trim(self._buffered_inputs, self._micro_batches)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _trim(self, batches: list[Batch], narrow: MicroBatches) -> list[Batch]:
        """The micro-batches of the update, with old log-probs that were made in them where the loss takes any."""
        assert self.spec_rollout is not None
        if why := unknown_loss(self) or untrimmable(batches):  # it may have been replaced since the trainer was built
            if not self._warned_untrimmed:
                logger.warning("Padding: this generation batch keeps TRL's, and all of its rows, since %s.", why)
            self._warned_untrimmed = True
            return batches
        rows = sum(len(batch["advantages"]) for batch in batches)
        if not self._loss_takes_old_logprobs:  # vLLM's samples were corrected by them, and the loss has its own
            batches = [{key: batch[key] for key in batch if key != "old_per_token_logps"} for batch in batches]
        batches = narrow(batches, self.args.gradient_accumulation_steps)
        left_out = rows - sum(len(batch["advantages"]) for batch in batches)
        counts = self.spec_rollout.ranks.gather((*narrow.tokens(batches), left_out, rows))
        real, computed, left_out, rows = np.sum(counts, axis=0).tolist()
        self._metrics["train"]["spec/update/real_token_share"].append(real / computed)
        if self.args.spec_skip_zero_advantage:
            self._metrics["train"]["spec/update/skipped_row_share"].append(left_out / rows)
        if self._loss_takes_old_logprobs:
            with self._scoring(), self._update():
                for batch in batches:
                    self._renew_old_logprobs(batch)
        return batches

    def _renew_old_logprobs(self, batch: Batch) -> None:
        mask = batch["completion_mask"]
        logprobs = self._get_per_token_logps_and_entropies(
            self.model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1),
            torch.cat([batch["prompt_mask"], mask], 1),
            mask.size(1),
        )[0]
        if "old_logps" in batch:  # RLOO's are of whole completions
            batch["old_logps"] = (logprobs * mask).sum(1)
        else:
            batch["old_per_token_logps"] = logprobs

    def _compute_loss(self, model: Any, inputs: Batch) -> torch.Tensor:
        with self._update() if LOSS_SCALE in inputs else nullcontext():
            return super()._compute_loss(model, inputs) * inputs.get(LOSS_SCALE, 1.0)

    @contextmanager
    def _update(self) -> Iterator[None]:
        """While open, forwards are those of the update."""
        self._updates = True
        try:
            yield
        finally:
            self._updates = False

    def _score_generated(self, rollout: Rollout) -> list[NDArray[np.float32]]:
        """Log-probs by the trainer where TRL did not ask for them: those of the engine may not be mixed with them."""
        start = time.perf_counter()
        unknown = [r for r in rollout.responses if not r.reused_whole]
        computed = iter(self.spec_score([r.prompt for r in unknown], [r.tokens for r in unknown]))
        scored = [r.logprobs if r.reused_whole else next(computed) for r in rollout.responses]
        rollout.counts.verify_s += time.perf_counter() - start
        return scored

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # Where a run ends with an evaluation its summary comes in evaluation mode: TRL would take it for one, and lose
        # what was not logged before.
        ended_evaluating = self.spec_rollout is not None and "train_runtime" in logs and not self.model.training
        if ended_evaluating:
            self.model.train()
        if self.spec_rollout is not None and self.model.training:
            for name, value in self.spec_rollout.take_metrics().items():
                self._metrics["train"][name].append(value)
        super().log(logs, start_time)
        if ended_evaluating:
            self.model.eval()


def _adapters(model: Any) -> tuple[bool, list[str]]:
    """Whether adapters of a PEFT model are in use, and which."""
    status = model.get_model_status()
    return status.enabled, status.active_adapters


def _count_masked(rollout: Rollout, output: dict[str, Any]) -> None:
    """Count the rows that TRL's importance-sampling correction leaves out of the loss: all their ratios are 0."""
    ratio = output.get("importance_sampling_ratio")
    if ratio is not None:  # of shape (batch, tokens), or (batch, 1) in its sequence modes
        mask = (output["completion_mask"] * output.get("tool_mask", 1)).bool()  # what a tool answered has ratio 1
        in_loss = mask.any(1)  # `mask_truncated_completions` has left out others before
        rollout.counts.corrected_rows += int(in_loss.sum())
        rollout.counts.masked_rows += int((((ratio == 0) | ~mask).all(1) & in_loss).sum())


def _shard_again(model: Any) -> None:
    """Shard the weights that FSDP 2 keeps whole for a backward: TRL expects shards when it sends them to vLLM."""
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    head = model.get_output_embeddings()
    if head in sharded and torch.__version__ < "2.13":
        # Modules that are sharded together wait until all have run, and TRL computes the head without running it.
        with torch.no_grad():
            head(torch.zeros(1, head.in_features, device=head.weight.device, dtype=head.weight.dtype))
    for module in sharded:
        module.reshard()


class SpecGRPOTrainer(SpecRolloutMixin, GRPOTrainer):
    """[`~trl.GRPOTrainer`] that reuses past completions where its config, a [`SpecGRPOConfig`], says so."""

    _config_class = SpecGRPOConfig
    _single_turn_returns_logprobs = True


class SpecRLOOTrainer(SpecRolloutMixin, RLOOTrainer):
    """[`~trl.RLOOTrainer`] that reuses past completions where its config, a [`SpecRLOOConfig`], says so."""

    _config_class = SpecRLOOConfig
    _single_turn_returns_logprobs = False
