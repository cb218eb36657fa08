"""What speculative rollouts refuse or warn about when a trainer is built."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

from datasets import Dataset
from torch import nn

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
    _refuse(_unsupported_settings(args))


def check_trainer(trainer: Any) -> None:
    """Refuse what can only be seen on a built trainer, see [`check_config`]."""
    _refuse(_unsupported_parts(trainer))


def _refuse(reasons: Iterator[str]) -> None:
    if lines := list(reasons):
        raise UnsupportedSetting(
            "`use_spec_rollout=True` does not work with:\n  " + "\n  ".join(lines) + "\nChange these, or set "
            "`use_spec_rollout=False`."
        )


def _unsupported_settings(args: Any) -> Iterator[str]:
    if args.use_vllm and args.vllm_mode != "colocate":
        yield f"`vllm_mode={args.vllm_mode!r}`: only a colocated engine can verify and continue (`'colocate'`)."
    if args.max_completion_length is None:
        yield "`max_completion_length=None`: a response that was cut is continued up to this cap. Set one."
    if args.spec_verifier == "engine" and not args.use_vllm:
        yield "`spec_verifier='engine'` without `use_vllm=True`: there is no engine. Use `'trainer'`."
    if args.spec_verifier == "engine" and args.temperature != 1.0:
        yield (
            f"`spec_verifier='engine'` with `temperature={args.temperature}`: vLLM scores without temperature. Use "
            "`'trainer'`."
        )
    # transformers takes an open top-k for its default of 50.
    for name, neutral in (("top_p", (1.0,)), ("top_k", (0,)), ("min_p", (0.0, None))):
        if (value := getattr(args, name)) not in neutral:
            yield f"`{name}={value}`: the truncated distribution that is sampled is not the one that is scored."
    if args.repetition_penalty != 1.0:
        yield (
            f"`repetition_penalty={args.repetition_penalty}`: the penalised distribution that is sampled is not the "
            "one that is scored."
        )
    if args.use_vllm and args.vllm_structured_outputs_regex is not None:
        yield "`vllm_structured_outputs_regex`: the constrained distribution is not the one that is scored."
    if args.generation_kwargs:
        yield (
            f"`generation_kwargs={args.generation_kwargs}`: they may change what is sampled in ways that are not "
            "scored."
        )


def _unsupported_parts(trainer: Any) -> Iterator[str]:
    if trainer._is_vlm:
        yield "a model that takes images: pass a tokenizer as `processing_class`, and a text model."
    if getattr(trainer, "rollout_func", None) is not None:
        yield "`rollout_func`: it bypasses the trainer's own rollout, which is what is reused."
    if not trainer.use_vllm:  # `generate` fills what TRL leaves open from the model's own config, then from defaults
        for name, value in trainer.model.generation_config.to_diff_dict().items():
            if value and name not in _NOT_SHAPING and not name.startswith(("_", "output_")):
                yield f"`{name}={value}` in the model's `generation_config`: it may change what is sampled. Unset it."


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


def warm_share(trainer: Any, epoch: float) -> float | None:
    """Share of the rollouts from `epoch` on that come after the first one, so that they can reuse anything."""
    seen = epochs(trainer)
    if seen is None or seen <= epoch:
        return None
    return max(0.0, seen - max(1.0, epoch)) / (seen - epoch)


def warn_of_little_use(trainer: Any) -> None:
    """Warn where there is little or nothing to reuse: prompts that are met once, scores that dropout blurs."""
    if not trainer.args.disable_dropout and any(
        isinstance(module, nn.Dropout) and module.p > 0 for module in trainer.model.modules()
    ):
        logger.warning(
            "The model has dropout, so the same tokens score differently each time, and drafts are rejected for "
            "nothing. Set `disable_dropout=True`."
        )
    seen = epochs(trainer)
    if seen is not None and math.ceil(seen) <= 1:
        logger.warning(
            "`use_spec_rollout=True` cannot help here: training sees each prompt %.2g times. Reuse begins when a "
            "prompt comes back (`num_train_epochs`, `max_steps`).",
            seen,
        )
