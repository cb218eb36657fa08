"""What speculative rollouts refuse or warn about when a trainer is built."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from datasets import Dataset
from torch import nn
from trl import is_conversational

from specrl_plugins.rollout import Mode
from specrl_plugins.vllm_drafting import MOST_TOKENS
from trl_integration.micro_batches import loss_type, unknown_loss, unskippable
from trl_integration.padding import depends_on_width, sees_padding

logger = logging.getLogger(__name__)

# Of a model's own generation config: what TRL overrides, and what does not change the distribution.
_NOT_SHAPING = {
    "temperature", "top_p", "top_k", "repetition_penalty", "do_sample", "max_length", "max_new_tokens", "use_cache",
    "cache_implementation", "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version",
    "return_dict_in_generate", "disable_compile",
}  # fmt: skip


class UnsupportedSetting(ValueError):
    """A setting under which speculative rollouts would be wrong."""


def check_config(args: Any) -> None:
    """Refuse settings of the config that cannot be done right.

    Args:
        args (`SpecGRPOConfig` or `SpecRLOOConfig`): the config.

    Raises:
        UnsupportedSetting: naming every such setting, why, and what to do.
    """
    _refuse(args, _unsupported_settings(args))


def check_trainer(trainer: Any) -> None:
    """Refuse what can only be seen on a built trainer, see [`check_config`]."""
    _refuse(trainer.args, _unsupported_parts(trainer))


def _refuse(args: Any, reasons: Iterator[str]) -> None:
    if lines := list(reasons):
        flags = [flag for flag in ("use_spec_rollout", "spec_prune") if getattr(args, flag)]
        on, off = (" and ".join(f"`{flag}={value}`" for flag in flags) for value in (True, False))
        verb = "does" if len(flags) == 1 else "do"
        raise UnsupportedSetting(
            f"{on} {verb} not work with:\n  " + "\n  ".join(lines) + f"\nChange these, or set {off}."
        )


def _unsupported_settings(args: Any) -> Iterator[str]:
    above_cache = args.cache_directory().absolute().parents if args.use_spec_rollout else ()
    if args.push_to_hub and Path(args.output_dir).absolute() in above_cache:
        yield (
            "`push_to_hub=True` with the cache below `output_dir`: all of it would be uploaded. Set `spec_cache_dir` "
            "to a folder elsewhere."
        )
    if args.max_completion_length is None:
        yield "`max_completion_length=None`: a response that was cut is continued up to this cap. Set one."
        return
    if args.spec_prune and args.spec_prune_detection_length >= args.max_completion_length:
        yield (
            f"`spec_prune_detection_length={args.spec_prune_detection_length}` with "
            f"`max_completion_length={args.max_completion_length}`: every completion would end before it is judged. "
            "Set it to where most are still going on."
        )
    if args.spec_prune and args.pruning_settings().starts(args.num_generations) == args.num_generations:
        yield (
            f"`spec_prune_oversample={args.spec_prune_oversample}` with `num_generations={args.num_generations}`: no "
            "more would start than survive. Raise it."
        )
    if args.spec_prune and args.spec_verifier == "engine":
        yield "`spec_prune=True` with `spec_verifier='engine'`: completions are judged by the trainer's forward."
    if args.spec_verifier == "engine" and not args.use_vllm:
        yield "`spec_verifier='engine'` without `use_vllm=True`: there is no engine. Use `'trainer'`."
    yield from _unsupported_drafts(args)
    yield from _unsupported_distribution(args)
    if args.repetition_penalty != 1.0:
        yield (
            f"`repetition_penalty={args.repetition_penalty}`: the penalised distribution that is sampled is not the "
            "one that is scored."
        )
    # RLOO has no such correction.
    corrects = args.use_vllm and getattr(args, "vllm_importance_sampling_correction", False)
    if args.spec_reused_logprobs == "behaviour" and not corrects:
        yield (
            "`spec_reused_logprobs='behaviour'` without TRL's importance-sampling correction, which alone uses it: use "
            "`'verified'`, or GRPO with `use_vllm=True` and `vllm_importance_sampling_correction=True`."
        )
    if args.use_vllm and args.vllm_structured_outputs_regex is not None:
        yield "`vllm_structured_outputs_regex`: the constrained distribution is not the one that is scored."
    if args.generation_kwargs:
        yield (
            f"`generation_kwargs={args.generation_kwargs}`: they may change what is sampled in ways that are not "
            "scored."
        )


def _unsupported_drafts(args: Any) -> Iterator[str]:
    tokens = args.drafting().most_tokens
    if args.spec_mode == Mode.EXACT and not tokens:
        yield "`spec_mode='exact'` with `spec_draft_tokens=0`: nothing would be gained. Set it to 1 or more."
    if not tokens:
        return
    drafts = f"`spec_mode={args.spec_mode!r}` with `spec_draft_tokens={tokens}`"
    if not args.use_spec_rollout:
        yield f"{drafts} and `use_spec_rollout=False`: there are no past completions to draft from."
    if not args.use_vllm or args.vllm_mode != "colocate":
        yield f"{drafts}, but for vLLM in this process: set `use_vllm=True` and `vllm_mode='colocate'`."
    if tokens > MOST_TOKENS:
        yield f"{drafts}: vLLM verifies at most {MOST_TOKENS} tokens in a step."
    if args.spec_vllm_speculative_config is not None:
        yield f"{drafts} and `spec_vllm_speculative_config`: an engine drafts in one way. Leave either out."
    if args.min_p:
        yield f"{drafts} and `min_p={args.min_p}`, which vLLM does not apply to draft tokens. Leave either out."


def _unsupported_distribution(args: Any) -> Iterator[str]:
    """Temperature and cuts of the support that are out of range, or that the verifier does not know of."""
    # vLLM lifts what is below 0.01 to it (0.29), and a temperature of zero has no log-probs.
    lowest = 0.01 if args.use_vllm else 0.0
    temperature_fits = lowest < args.temperature < math.inf or args.temperature == lowest > 0
    ranges = {
        "temperature": (temperature_fits, f"a number {'from 0.01 on' if args.use_vllm else 'above 0'}"),
        # Left open, transformers fills in its default of 50, or what the model's own config says.
        "top_k": (isinstance(args.top_k, int) and args.top_k >= 0, "a whole number of tokens; 0 keeps all"),
        "top_p": (args.top_p is not None and 0 < args.top_p <= 1, "above 0 and at most 1; 1 keeps all"),
        "min_p": (args.min_p is None or 0 <= args.min_p <= 1, "between 0 and 1; 0 keeps all"),
    }
    for name, (fits, allowed) in ranges.items():
        if not fits:
            yield f"`{name}={getattr(args, name)}`: the sampled distribution is known where this is {allowed}."
    if args.spec_verifier == "engine":
        neutral = {"temperature": (1.0,), "top_k": (0,), "top_p": (1.0,), "min_p": (0.0, None)}
        for name, values in neutral.items():
            if ranges[name][0] and (value := getattr(args, name)) not in values:
                yield (
                    f"`spec_verifier='engine'` with `{name}={value}`: vLLM's log-probs of a given text are of the "
                    "model's own distribution, without temperature and with every token. Use `'trainer'`."
                )


def _unsupported_parts(trainer: Any) -> Iterator[str]:
    if trainer._is_vlm:
        yield "a model that takes images: pass a tokenizer as `processing_class`, and a text model."
    for column in {"image", "images"} & set(getattr(trainer.train_dataset, "column_names", None) or ()):
        yield (
            f"a data set with a column `{column}`: prompts are known by their token ids, which do not tell images "
            "apart. Remove the column."
        )
    fields = set(trainer._tokenizer.model_input_names) - {"input_ids", "attention_mask"}
    if fields and not trainer.use_vllm and _is_conversational(trainer.train_dataset):  # TRL drops those of plain text
        yield made_up(fields)
    if getattr(trainer, "rollout_func", None) is not None:
        yield "`rollout_func`: it bypasses the trainer's own rollout, which is what is reused."
    if sees_padding(trainer.model, trainer.model.config):
        yield (
            f"a model ({trainer.model.config.model_type}) that sees padding in spite of the attention mask: past "
            "completions would score otherwise than they were sampled. Use one with rotary positions and attention."
        )
    if is_peft_model(trainer.model) and trainer.model.active_peft_config.is_prompt_learning:
        kind = trainer.model.active_peft_config.peft_type.value.lower()
        yield (
            f"PEFT's {kind}: TRL's padding stands between its virtual tokens and a prompt, so that what a row means "
            "depends on the others of its batch. Use LoRA."
        )
    if trainer.args.spec_skip_zero_advantage:
        if not trainer.args.spec_trim_padding:
            yield "`spec_skip_zero_advantage=True` with `spec_trim_padding=False`: micro-batches are then TRL's own."
        elif why := keeps_padding(trainer):
            yield f"`spec_skip_zero_advantage=True`, since micro-batches are TRL's own here: {why}."
        for part in unskippable(trainer):
            yield f"`spec_skip_zero_advantage=True` with {part}: rows without advantage count in it."
    fsdp = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if trainer.use_vllm and fsdp is not None and fsdp.fsdp_version == 1:
        yield (
            "`use_vllm=True` with FSDP 1: TRL sends vLLM the weights of wrapped layers alone, so that it samples with "
            "old embeddings and an old head. Use FSDP 2 (`fsdp_version: 2`)."
        )
    if not trainer.use_vllm:  # `generate` fills what TRL leaves open from the model's own config, then from defaults
        for name, value in trainer.model.generation_config.to_diff_dict().items():
            if value and name not in _NOT_SHAPING and not name.startswith(("_", "output_")):
                yield f"`{name}={value}` in the model's `generation_config`: it may change what is sampled. Unset it."


def keeps_padding(trainer: Any) -> str | None:
    """Why the passes over a generation batch keep TRL's padding: what they give depends on it."""
    if depends_on_width(trainer.model.config):
        return "the model's positions depend on the width of a batch"
    if trainer.args.neftune_noise_alpha:
        return f"`neftune_noise_alpha={trainer.args.neftune_noise_alpha}`, noise that depends on the width of a batch"
    if loss := unknown_loss(trainer):
        return f"{loss}, so that it may depend on what shares a micro-batch, and on its padding"
    if loss_type(trainer) == "vespo" and trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        low, high = trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max
        by_token = trainer.vllm_importance_sampling_mode.startswith("token")
        if by_token and not (low or 0) <= 1 <= (math.inf if high is None else high):
            return "`loss_type='vespo'` sums importance-sampling ratios that are clipped away from 1, padding included"
    return None


def made_up(fields: Iterable[str]) -> str:
    """Why a tokenizer that returns these beside the ids is refused."""
    return (
        f"a tokenizer that returns {', '.join(sorted(fields))}: these would have to be made up for reused tokens. "
        "Remove them from its `model_input_names`."
    )


def _is_conversational(dataset: Any) -> bool:
    return isinstance(dataset, Dataset) and len(dataset) > 0 and is_conversational(dataset[0])


def epochs(trainer: Any) -> float | None:
    """How often training will see each prompt; `None` where the data set has no length."""
    if not isinstance(trainer.train_dataset, Dataset):
        return None
    args = trainer.args
    if args.max_steps <= 0:
        return args.num_train_epochs
    prompts_a_step = (
        args.per_device_train_batch_size
        * args.world_size
        * args.gradient_accumulation_steps
        / (args.num_generations * args.num_iterations)
    )
    return args.max_steps * prompts_a_step / len(trainer.train_dataset)


def warm_share(trainer: Any, epoch: float, cached: bool) -> float | None:
    """Share of the rollouts from `epoch` on whose prompts have been met before, so that they can reuse anything.

    Args:
        trainer: a TRL trainer.
        epoch (`float`): where training starts.
        cached (`bool`): whether the cache holds what came before; else one epoch from here on has nothing to reuse.
    """
    seen = epochs(trainer)
    if seen is None or seen <= epoch:
        return None
    warm_from = max(1.0, epoch) if cached else epoch + 1.0
    return max(0.0, seen - warm_from) / (seen - epoch)


def warn_of_little_use(trainer: Any) -> None:
    """Warn where there is little or nothing to reuse: prompts that are met once, scores that dropout blurs."""
    if not trainer.args.disable_dropout and any(
        isinstance(module, nn.Dropout) and module.p > 0 for module in trainer.model.modules()
    ):
        logger.warning(
            "The model has dropout, so the same tokens score differently each time, and drafts are rejected for "
            "nothing. Set `disable_dropout=True`."
        )
    if trainer.args.neftune_noise_alpha:
        logger.warning(
            "`neftune_noise_alpha=%s`: past completions are scored with that noise, too, and rejected for nothing.",
            trainer.args.neftune_noise_alpha,
        )
    if trainer.args.spec_prune and trainer.use_vllm and getattr(trainer.args, "vllm_enable_sleep_mode", False):
        logger.warning(
            "`spec_prune=True` with `vllm_enable_sleep_mode=True`: the engine sleeps while responses are judged, so "
            "that it gets its weights twice a rollout and survivors are read again from their start."
        )
    seen = epochs(trainer) if trainer.args.use_spec_rollout else None
    if seen is not None and math.ceil(seen) <= 1:
        logger.warning(
            "`use_spec_rollout=True` cannot help here: training sees each prompt %.2g times. Reuse begins when a "
            "prompt comes back (`num_train_epochs`, `max_steps`).",
            seen,
        )
