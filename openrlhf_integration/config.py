"""Settings of speculative rollouts, and their command-line flags."""

from __future__ import annotations

import argparse
import difflib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from specrl_plugins import ReusePolicy, ReuseRule


@dataclass(frozen=True)
class SpecSettings:
    r"""
    Settings of speculative rollouts. Each is a flag, `--spec.rule` or `--spec_rule`.

    Parameters:
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
            Whether to pause reuse for some batches where verifying is measured to cost more than it saves.

    Raises:
        ValueError: a setting is out of its range; the message names the flag.
    """

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
            "help": "Whether to pause reuse for some batches where verifying is measured to cost more than it saves "
            "('true' or 'false'). The pauses depend on timing: switch it off for runs that must repeat exactly.",
            "type": lambda text: _boolean(text),
        },
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

    def reuse_policy(self, seed: int) -> ReusePolicy:
        """The core's policy of these settings."""
        return ReusePolicy(
            rule=ReuseRule(self.rule),
            log_lenience=self.log_lenience,
            refresh_rate=self.refresh_rate,
            carry_limit=self.carry_limit or None,
            seed=seed,
        )

    def cache_directory(self, output_dir: str) -> Path:
        """Folder of the trajectory cache, absolute: the actor that owns it runs in a directory of its own."""
        return Path(self.cache_dir or Path(output_dir) / "spec_cache").absolute()


def spec_parser() -> argparse.ArgumentParser:
    """A parser of our flags alone."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    group = parser.add_argument_group("speculative rollouts")
    group.add_argument(
        "--use_spec_rollout",
        action="store_true",
        help="Reuse past responses. Without it OpenRLHF runs untouched.",
    )
    for setting in fields(SpecSettings):
        group.add_argument(
            f"--spec.{setting.name}",
            f"--spec_{setting.name}",
            dest=setting.name,
            default=setting.default,
            metavar=None if "choices" in setting.metadata else setting.name.upper(),
            **setting.metadata,
        )
    return parser


def split_arguments(arguments: list[str]) -> tuple[SpecSettings | None, list[str]]:
    """Take our flags out of a command line.

    Returns:
        The settings, `None` without `--use_spec_rollout`, and what is left for OpenRLHF's own parser.
    """
    parser = spec_parser()
    ours, rest = parser.parse_known_args(arguments)
    for argument in rest:
        if argument.startswith(("--spec.", "--spec_")):
            name = argument.partition("=")[0].replace("_", ".", 1)
            known = [f"--spec.{setting.name}" for setting in fields(SpecSettings)]
            guess = difflib.get_close_matches(name, known, n=1)
            parser.error(f"there is no {argument}" + (f": did you mean {guess[0]}?" if guess else ""))
    values: dict[str, Any] = vars(ours)
    use = values.pop("use_spec_rollout")
    try:
        settings = SpecSettings(**values)
    except ValueError as error:
        parser.error(str(error))
    return (settings if use else None), rest


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected 'true' or 'false', not {text!r}")
    return text.lower() == "true"
