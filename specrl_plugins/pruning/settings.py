"""Settings of pruning."""

from __future__ import annotations

from dataclasses import dataclass


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
        if not _whole(self.detection_length) or self.detection_length < 1:
            raise ValueError(f"detection_length is a whole number of tokens, at least 1, not {self.detection_length}")
        if not 1.0 <= self.oversample < float("inf"):
            raise ValueError(
                f"oversample is how many responses start for each one that is trained on, at least 1, "
                f"not {self.oversample}"
            )
        if not 0.0 < self.target_share < 1.0:
            raise ValueError(
                f"target_share is a share of successes, between 0 and 1 (neither), not {self.target_share}"
            )
        if not _whole(self.warmup_steps) or self.warmup_steps < 0:
            raise ValueError(f"warmup_steps is a whole number of steps, at least 0, not {self.warmup_steps}")
        if not abs(self.success_reward) < float("inf"):
            raise ValueError(f"success_reward is a reward, a finite number, not {self.success_reward}")
        if not 0.0 <= self.control_share <= 1.0:
            raise ValueError(f"control_share is a share of groups, between 0 and 1, not {self.control_share}")

    def starts(self, survivors: int) -> int:
        """Responses that start where `survivors` are to be trained on."""
        return max(survivors, round(survivors * self.oversample))


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
