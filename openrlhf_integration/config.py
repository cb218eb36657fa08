"""Settings of speculative rollouts and of online pruning, and their command-line flags."""

from __future__ import annotations

import argparse
import difflib
import json
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from specrl_plugins import ReusePolicy, ReuseRule
from specrl_plugins.pruning import PruningSettings


@dataclass(frozen=True)
class SpecSettings:
    r"""
    Settings of speculative rollouts and of online pruning. Each is a flag, `--spec.rule` or `--spec_rule`; the first
    is `--use_spec_rollout`.

    Parameters:
        use_spec_rollout (`bool`, *optional*, defaults to `False`):
            Whether to reuse past responses.
        rule (`str`, *optional*, defaults to `"speculative"`):
            How much of a past response is reused: `"speculative"` keeps its verified prefix (SPEC-RL), `"random"`
            cuts it at random, `"full"` keeps all of it. The last two are baselines for comparison.
        log_lenience (`float`, *optional*, defaults to `0.0`):
            Log of the lenience l of the speculative rule, in nats.
        refresh_rate (`float`, *optional*, defaults to `0.1`):
            Share of rows that are sampled afresh whatever the cache holds.
        carry_limit (`int`, *optional*, defaults to `2`):
            Most visits of a prompt that a token is carried over before its row is sampled afresh. 0 sets no limit.
        cache_dir (`str`, *optional*):
            Folder of the trajectory cache, on the head node. Defaults to `spec_cache` in `--ckpt.output_dir`.
        cache_max_mib (`float`, *optional*, defaults to `4096`):
            Size of the cache in MiB above which the least recently used trajectories are forgotten.
        guard (`bool`, *optional*, defaults to `True`):
            Whether to pause reuse for some batches where a step with it is measured to take longer than what it
            teaches is worth.
        vllm_speculative_config (`dict`, *optional*):
            What the vLLM engines get as their `speculative_config`, which OpenRLHF does not pass on: how they draft
            what is left to generate. They sample from the policy all the same. Works with reuse and with pruning.
        prune (`bool`, *optional*, defaults to `False`):
            Whether to prune rollouts online: `--rollout.n_samples_per_prompt` responses to a prompt are trained on,
            more are started, and those that look like teaching least are given up on the way. Works with reuse and
            without.
        prune_detection_length (`int`, *optional*, defaults to `512`):
            Tokens of a response after which it is judged.
        prune_oversample (`float`, *optional*, defaults to `2.0`):
            Responses that are started for each one that is trained on.
        prune_target_share (`float`, *optional*, defaults to `0.5`):
            Share of successes that the responses that are trained on should have, where that can be had.
        prune_warmup_steps (`int`, *optional*, defaults to `20`):
            Rollouts from which the judge learns before it may prune. Until then no more are started than are trained
            on.
        prune_success_reward (`float`, *optional*, defaults to `0.5`):
            A response whose reward is above this is a success.

    Raises:
        ValueError: a setting is out of its range; the message names the flag.
    """

    use_spec_rollout: bool = field(
        default=False,
        metadata={
            "help": "Reuse past responses. Without it and without --spec.prune OpenRLHF runs untouched.",
            "action": "store_true",
        },
    )
    rule: str = field(
        default="speculative",
        metadata={
            "help": "How much of a past response is reused: its verified prefix ('speculative', SPEC-RL), up to a "
            "random cut ('random') or all of it ('full'). The last two are baselines.",
            "type": str,
            "choices": [rule.value for rule in ReuseRule],
        },
    )
    log_lenience: float = field(
        default=0.0,
        metadata={
            "help": "Log of the lenience of the speculative rule, in nats. 0 is the classical speculative rule; more "
            "reuses more and is further off policy.",
            "type": float,
        },
    )
    refresh_rate: float = field(
        default=0.1,
        metadata={"help": "Share of rows that are sampled afresh whatever the cache holds.", "type": float},
    )
    carry_limit: int = field(
        default=2,
        metadata={
            "help": "Most visits of a prompt that a token is carried over before its row is sampled afresh. 0 sets no "
            "limit.",
            "type": int,
        },
    )
    cache_dir: str | None = field(
        default=None,
        metadata={
            "help": "Folder of the trajectory cache, on the head node. Not set: `spec_cache` in `--ckpt.output_dir`.",
            "type": str,
        },
    )
    cache_max_mib: float = field(
        default=4096.0,
        metadata={
            "help": "Size of the cache in MiB above which the least recently used trajectories are forgotten.",
            "type": float,
        },
    )
    guard: bool = field(
        default=True,
        metadata={
            "help": "Whether to pause reuse for some batches where a step with it is measured to take longer than what "
            "it teaches is worth ('true' or 'false'). The pauses depend on timing: switch it off for runs that must "
            "repeat exactly.",
            "type": lambda text: _boolean(text),
        },
    )
    vllm_speculative_config: dict | None = field(
        default=None,
        metadata={
            "help": "`speculative_config` of the vLLM engines, as JSON: how they draft what is left to generate, for "
            'instance \'{"method": "suffix", "num_speculative_tokens": 16}\'. They sample from the policy all the '
            "same.",
            "type": lambda text: _json_object(text),
        },
    )
    prune: bool = field(
        default=False,
        metadata={
            "help": "Prune rollouts online: --rollout.n_samples_per_prompt responses to a prompt are trained on, more "
            "are started, and those that look like teaching least are given up on the way.",
            "action": "store_true",
        },
    )
    prune_detection_length: int = field(
        default=512, metadata={"help": "Tokens of a response after which it is judged.", "type": int}
    )
    prune_oversample: float = field(
        default=2.0, metadata={"help": "Responses that are started for each one that is trained on.", "type": float}
    )
    prune_target_share: float = field(
        default=0.5,
        metadata={
            "help": "Share of successes that the responses that are trained on should have, where that can be had.",
            "type": float,
        },
    )
    prune_warmup_steps: int = field(
        default=20,
        metadata={
            "help": "Rollouts from which the judge learns before it may prune. Until then no more are started than are "
            "trained on.",
            "type": int,
        },
    )
    prune_success_reward: float = field(
        default=0.5, metadata={"help": "A response whose reward is above this is a success.", "type": float}
    )

    def __post_init__(self) -> None:
        if self.cache_max_mib <= 0:
            raise ValueError(f"`--spec.cache_max_mib` is a size in MiB, above 0, not {self.cache_max_mib}.")
        try:
            self.reuse_policy(seed=0)
        except ValueError as error:  # it begins with the setting's name in the core
            raise ValueError(f"--spec.{error}") from error
        if self.log_lenience < 0:  # the core knows what it means, but a user who sets it means something else
            raise ValueError(f"--spec.log_lenience is 0 or more nats (the log of a factor), not {self.log_lenience}")
        try:
            self.pruning_settings()
        except ValueError as error:  # likewise
            raise ValueError(f"--spec.prune_{error}") from error

    def reuse_policy(self, seed: int) -> ReusePolicy:
        """The core's policy of these settings."""
        return ReusePolicy(
            rule=ReuseRule(self.rule),
            log_lenience=self.log_lenience,
            refresh_rate=self.refresh_rate,
            carry_limit=self.carry_limit or None,
            seed=seed,
        )

    def pruning_settings(self) -> PruningSettings:
        """The pruner's settings of these."""
        return PruningSettings(
            detection_length=self.prune_detection_length,
            oversample=self.prune_oversample,
            target_share=self.prune_target_share,
            warmup_steps=self.prune_warmup_steps,
            success_reward=self.prune_success_reward,
        )

    def cache_directory(self, output_dir: str) -> Path:
        """Folder of the trajectory cache, absolute: the actor that owns it runs in a directory of its own."""
        return Path(self.cache_dir or Path(output_dir) / "spec_cache").absolute()


def spec_parser() -> argparse.ArgumentParser:
    """A parser of our flags alone."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    group = parser.add_argument_group("speculative rollouts and online pruning")
    for setting in fields(SpecSettings):
        group.add_argument(*_flags(setting.name), dest=setting.name, default=setting.default, **_options(setting))
    return parser


def split_arguments(arguments: list[str]) -> tuple[SpecSettings | None, list[str]]:
    """Take our flags out of a command line.

    Returns:
        The settings, `None` with neither `--use_spec_rollout` nor `--spec.prune`, and what is left for OpenRLHF's own
        parser.
    """
    parser = spec_parser()
    ours, rest = parser.parse_known_args(arguments)
    for argument in rest:
        if argument.startswith(("--spec.", "--spec_")):
            name = argument.partition("=")[0].replace("_", ".", 1)
            known = [_flags(setting.name)[0] for setting in fields(SpecSettings)]
            guess = difflib.get_close_matches(name, known, n=1)
            parser.error(f"there is no {argument}" + (f": did you mean {guess[0]}?" if guess else ""))
    try:
        settings = SpecSettings(**vars(ours))
    except ValueError as error:
        parser.error(str(error))
    active = settings.use_spec_rollout or settings.prune
    if settings.vllm_speculative_config is not None and not active:
        parser.error("--spec.vllm_speculative_config comes with --use_spec_rollout or --spec.prune")
    return (settings if active else None), rest


def _flags(setting: str) -> list[str]:
    """What a setting is called on the command line."""
    return ["--use_spec_rollout"] if setting == "use_spec_rollout" else [f"--spec.{setting}", f"--spec_{setting}"]


def _options(setting: Field) -> dict[str, Any]:
    """How its value is read and shown."""
    takes_any = not {"choices", "action"} & set(setting.metadata)
    return dict(setting.metadata) | ({"metavar": setting.name.upper()} if takes_any else {})


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected 'true' or 'false', not {text!r}")
    return text.lower() == "true"


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, not {text!r}")
    return value
