"""What speculative rollouts do and say at the start of training, at each log and at the end."""

from __future__ import annotations

import json
import logging
import math
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from specrl_plugins import ReuseRule, RolloutCounts
from specrl_plugins.cache import CacheWriteError
from specrl_plugins.pruning import Pruner, PruningSettings
from specrl_plugins.ranks import leads_node, together
from specrl_plugins.report import RUN_LOG
from specrl_plugins.rollout import Mode
from trl_integration.checks import keeps_padding, warm_share
from trl_integration.micro_batches import coupling

logger = logging.getLogger(__name__)

PRUNER_FILE = "spec_pruner.pt"
"""What a pruner has learned, in the folder of a checkpoint."""


class RunLog(TrainerCallback):
    """Appends what the trainer logs to `specrl.jsonl` in the output directory, one JSON object a line.

    It is what `specrl report` reads. It can be added to any trainer, to compare a plain run with one that reuses. TRL
    logs neither the tokens nor the seconds of its rollouts: the tokens are worked out from their mean length.
    """

    def __init__(self) -> None:
        # Forward passes that were trained on, and of these those before the last log. They go on over a second
        # `train()`, as TRL's own count does, and begin anew in a run that is resumed.
        self._passes = self._logged = 0

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._passes += 1

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._passes += 1

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        path = Path(args.output_dir or ".") / RUN_LOG
        line = json.dumps(
            {"step": state.global_step, "epoch": state.epoch, **self._completion_tokens(args, logs), **logs},
            default=float,
        )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(line + "\n")
        except OSError as error:  # a full disk must not end a training run
            logger.warning("step %d was not logged to %s: %s", state.global_step, path, error)

    def _completion_tokens(self, args: TrainingArguments, logs: dict[str, Any]) -> dict[str, float]:
        """Tokens of all completions since the log before."""
        if "completions/mean_length" not in logs:  # an evaluation, or the end
            return {}
        before, self._logged = self._logged, self._passes
        passes_a_batch = getattr(args, "steps_per_generation", args.gradient_accumulation_steps)
        passes = passes_a_batch * getattr(args, "num_iterations", 1)  # that a rollout serves
        rollouts = math.ceil(self._passes / passes) - math.ceil(before / passes)
        rows = args.per_device_train_batch_size * args.world_size * passes_a_batch
        return {"rollout/completion_tokens": rollouts * rows * logs["completions/mean_length"]}


class SpecRolloutCallback(RunLog):
    """Rewinds the cache to where training starts, announces what will be done, and sums it up."""

    def __init__(self, trainer: Any):
        super().__init__()
        self.trainer = trainer
        self._first_epoch = 0.0
        self._warned_no_draft = self._warned_masked = False
        self._step_ended_at: float | None = None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._step_ended_at is not None:  # since then: logging, an evaluation, a checkpoint, the end of a run
            self.trainer.spec_rollout.leave_out(time.perf_counter() - self._step_ended_at)
        self._step_ended_at = None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        super().on_step_end(args, state, control, **kwargs)
        self._step_ended_at = time.perf_counter()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        core = self.trainer.spec_rollout
        core.total = RolloutCounts()  # of this run: the trainer may have trained before
        self._first_epoch = state.epoch or 0.0
        together(core.ranks, lambda: self._prepare(state.global_step))  # nobody looks anything up before
        core.cache.checkpoint(state.global_step, forget=False)
        if not state.is_world_process_zero:
            return
        if core.pruning is not None:
            self._announce_pruning(args, core.pruning.settings)
        if args.use_spec_rollout:  # type: ignore[attr-defined]
            self._announce_reuse(args)
        if args.spec_trim_padding:  # type: ignore[attr-defined]
            self._announce_padding()

    def _announce_padding(self) -> None:
        """Say what is trimmed, and what is not."""
        if why := keeps_padding(self.trainer):
            print(f"Padding: the update and the passes before it keep TRL's, since {why}.")
            return
        if reasons := coupling(self.trainer):
            print(
                "Padding: micro-batches are trimmed, and rows stay in that to which TRL deals them, since the loss of "
                f"a row depends on the others there: {'; '.join(reasons)}."
            )
        else:
            print("Padding: left out of the update and of the passes before it, with TRL's gradients.")

    @staticmethod
    def _announce_pruning(args: TrainingArguments, settings: PruningSettings) -> None:
        trained = args.num_generations  # type: ignore[attr-defined]
        print(
            f"Online pruning: {settings.starts(trained)} completions of a prompt start and {trained} of them survive, "
            f"judged after {settings.detection_length} tokens; {settings.warmup_steps} rollouts of warm-up."
        )

    def _announce_reuse(self, args: TrainingArguments) -> None:
        core = self.trainer.spec_rollout
        if len(set(core.ranks.nodes)) > 1 and args.spec_cache_dir is None:  # type: ignore[attr-defined]
            logger.warning(
                "The caches of %d nodes lie beside each other in `output_dir`. If that is a network file system, on "
                "which SQLite does not work, set `spec_cache_dir` to a folder on each node's own disk.",
                len(set(core.ranks.nodes)),
            )
        policy, share = core.policy, warm_share(self.trainer, self._first_epoch, len(core.cache) > 0)
        lenience = f"log-lenience {policy.log_lenience:g}, " if policy.rule is ReuseRule.SPECULATIVE else ""
        how = (
            f"{policy.rule} reuse, {lenience}refresh rate {policy.refresh_rate:g}, verified by the "
            f"{args.spec_verifier}"  # type: ignore[attr-defined]
        )
        if core.mode is Mode.EXACT:
            how = "exact, every completion is sampled afresh"
        if drafting := core.drafting.most_tokens:
            how += f"; the engine drafts {drafting} tokens at most while {core.drafting.most_rows} rows or fewer run"
        print(f"Speculative rollouts: {how}.")
        print(
            f"Trajectory cache: {core.cache.directory} ({len(core.cache)} trajectories)"
            + ("." if share is None else f"; {share:.0%} of the rollouts are of prompts met before and can reuse them.")
        )

    def _prepare(self, step: int) -> None:
        core = self.trainer.spec_rollout
        if not leads_node(core.ranks):
            return
        core.cache.claim()
        # A killed run leaves trajectories newer than its checkpoint, and an earlier run in the same directory leaves
        # all of its own: step numbers begin anew, so they would pass for newer than they are.
        if forgotten := core.cache.rewind(step):
            logger.warning(
                "%d trajectories in %s are newer than step %d, where training starts, and were forgotten.",
                forgotten,
                core.cache.directory,
                step,
            )

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        super().on_log(args, state, control, logs=logs, **kwargs)
        masked = (logs or {}).get("spec/masked_row_rate", 0.0)
        if masked > 0.5 and not self._warned_masked:
            self._warned_masked = True
            logger.warning(
                "TRL's importance-sampling correction leaves %.0f%% of the rows out of the loss. In its modes for "
                "whole sequences, small differences add up over a long response. Use "
                "`spec_reused_logprobs='verified'`, or `vllm_importance_sampling_mode='token_truncate'`.",
                100 * masked,
            )
        total = self.trainer.spec_rollout.total
        if (
            not self._warned_no_draft
            and args.use_spec_rollout  # type: ignore[attr-defined]
            and (state.epoch or 0) - self._first_epoch > 1.5
            and not total.draft_rows
            and not total.paused_rows
        ):
            self._warned_no_draft = True
            if total.mostly_unstored:  # the prompts may well have come back
                logger.warning(
                    "After %.1f epochs nothing can be reused: %d of %d completions were not cached. Their log-probs "
                    "were not finite (have the weights diverged?), or the disk refused them.",
                    state.epoch,
                    total.unstored_rows,
                    total.rows,
                )
                return
            logger.warning(
                "After %.1f epochs no prompt has come back with the same token ids, so nothing can be reused. Does the "
                "data set change its prompts (shuffled options, random examples)?",
                state.epoch,
            )

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        core = self.trainer.spec_rollout
        if core.pruning is not None:
            checkpoint = Path(args.output_dir or ".") / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            together(core.ranks, lambda: self._save_pruner(checkpoint))
        # Once all ranks are here, the checkpoint is whole. If one is killed before, the cache is still as the one
        # before it needs it.
        core.ranks.gather(None)
        try:
            core.cache.checkpoint(state.global_step, forget=leads_node(core.ranks))
        except CacheWriteError as error:  # only room that is not freed
            logger.warning("%s", error)

    def _save_pruner(self, checkpoint: Path) -> None:
        core = self.trainer.spec_rollout
        if core.ranks.index == 0:  # the one that decides
            core.pruning.pruner.save(checkpoint / PRUNER_FILE)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        core = self.trainer.spec_rollout
        if state.is_world_process_zero and core.total.completion_tokens:
            print()  # a progress bar may still have the line
            if args.use_spec_rollout:  # type: ignore[attr-defined]
                print(summary(core.total, core.guard.plain_cost))
            if core.pruning is not None:
                print(pruning_summary(core.total))
        core.cache.release()


def load_pruner(pruner: Pruner, checkpoint: str | Path) -> None:
    """Let a pruner go on from what it had learned at a checkpoint; one that was made without a pruner leaves it new."""
    path = Path(checkpoint) / PRUNER_FILE
    if path.is_file():
        pruner.load(path)
    else:
        logger.warning("%s has no %s: pruning begins with a warm-up of its own.", checkpoint, PRUNER_FILE)


def summary(total: RolloutCounts, plain_cost: float | None) -> str:
    """A few lines on a whole run.

    Args:
        total (`RolloutCounts`): its counts.
        plain_cost (`float`, *optional*): seconds that a completion token cost without drafts.
    """
    share = total.reused_tokens / total.completion_tokens
    lines = [
        f"Speculative rollouts: {total.generated_tokens} tokens generated, {total.reused_tokens} reused ({share:.0%}).",
        f"  generating {total.generate_s:.1f} s, verifying {total.verify_s:.1f} s (of which {total.spared_s:.1f} s "
        f"spared the trainer), looking up and storing {total.lookup_s + total.store_s:.1f} s",
    ]
    if total.engine_drafted_tokens:
        lines.append(
            f"  of those generated {total.engine_accepted_tokens} were drafted by the engine, which drafted "
            f"{total.engine_drafted_tokens}"
        )
    if total.corrupt_rows:
        lines.append(f"  {total.corrupt_rows} rows of the cache were damaged and were not used")
    if plain_cost is not None:
        saved = plain_cost * total.completion_tokens - total.seconds
        lines.append(
            f"  estimated time saved: {saved:.1f} s of {plain_cost * total.completion_tokens:.1f} s, at the "
            f"{1e3 * plain_cost:.2f} ms that a token cost without reuse"
        )
    return "\n".join(lines)


def pruning_summary(total: RolloutCounts) -> str:
    """A few lines on what was pruned in a whole run.

    Args:
        total (`RolloutCounts`): its counts.
    """
    saved = total.metrics()["prune/saved_tokens"]
    return (
        f"Online pruning: {total.pruned_rows} of {total.judged_rows} completions given up.\n"
        f"  about {saved:.0f} tokens not generated beside {total.generated_tokens} that were; judging "
        f"{total.judge_s:.1f} s, learning to {total.learn_s:.1f} s"
    )
