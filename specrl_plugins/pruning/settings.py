"""Settings of pruning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specrl_plugins.setting import check_number


@dataclass(frozen=True)
class PruningSettings:
    """When responses are judged, how many are given up, and what the rest should look like.

    Args:
        detection_length (`int`, *optional*, defaults to `512`):
            Tokens of a response after which it is judged.
        oversample (`float`, *optional*, defaults to `2.0`):
            Responses that start for each one that is trained on; one in so many survives.
        target_share (`float`, *optional*, defaults to `0.5`):
            Share of successes that the survivors of a group should have.
        warmup_steps (`int`, *optional*, defaults to `20`):
            Steps in which the head learns and nothing is pruned.
        success_reward (`float`, *optional*, defaults to `0.5`):
            A response whose reward is above this is a success.
        control_share (`float`, *optional*, defaults to `0.1`):
            Share of groups whose survivors are drawn blindly. They show what the policy is like without pruning, and
            keep every response's chance to be labelled above zero.

    Raises:
        ValueError: a setting is out of its range.
    """

    detection_length: int = 512
    oversample: float = 2.0
    target_share: float = 0.5
    warmup_steps: int = 20
    success_reward: float = 0.5
    control_share: float = 0.1

    def __post_init__(self) -> None:
        checks: list[tuple[str, str, Callable[[Any], bool], bool]] = [
            ("detection_length", "a whole number of tokens, at least 1", lambda value: value >= 1, True),
            (
                "oversample",
                "how many responses start for each one that is trained on, at least 1",
                lambda value: 1 <= value < float("inf"),
                False,
            ),
            (
                "target_share",
                "a share of successes, between 0 and 1 (neither)",
                lambda value: 0 < value < 1,
                False,
            ),
            ("warmup_steps", "a whole number of steps, at least 0", lambda value: value >= 0, True),
            ("success_reward", "a reward, a finite number", lambda value: abs(value) < float("inf"), False),
            ("control_share", "a share of groups, between 0 and 1", lambda value: 0 <= value <= 1, False),
        ]
        for name, allowed, fits, whole in checks:
            check_number(name, getattr(self, name), allowed, fits, whole)

    def starts(self, survivors: int) -> int:
        """Responses that start where `survivors` are to be trained on."""
        return max(survivors, round(survivors * self.oversample))
