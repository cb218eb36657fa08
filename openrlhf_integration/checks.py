"""What speculative rollouts refuse or warn about before anything is started."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

logger = logging.getLogger(__name__)


class UnsupportedSetting(ValueError):
    """A setting under which speculative rollouts would be wrong."""


def check_args(args: Any) -> None:
    """Refuse OpenRLHF settings that cannot be done right; warn where there is nothing to gain.

    Args:
        args (`SimpleNamespace`): OpenRLHF's arguments, nested, with ours as `args.spec`.

    Raises:
        UnsupportedSetting: naming every such flag, why, and what to do.
    """
    if lines := list(_unsupported_settings(args)):
        raise UnsupportedSetting(
            "`--use_spec_rollout` does not work with:\n  " + "\n  ".join(lines) + "\nChange these, or leave "
            "`--use_spec_rollout` out."
        )
    if args.train.num_episodes <= 1:
        logger.warning(
            "`--use_spec_rollout` cannot help here: each prompt is met once. Reuse begins when a prompt comes back "
            "(`--train.num_episodes` above 1)."
        )


def _unsupported_settings(args: Any) -> Iterator[str]:
    if not args.vllm.num_engines:
        yield "`--vllm.num_engines 0`: vLLM verifies and continues. Set it to 1 or more."
    if args.train.partial_rollout_enable:
        yield (
            "`--train.partial_rollout_enable`: its responses mix the policies of several steps, so that the stored "
            "log-probs would be of neither. Leave it out."
        )
    if args.rollout.temperature != 1.0:
        yield (
            f"`--rollout.temperature {args.rollout.temperature}`: vLLM scores past responses without temperature. Set "
            "it to 1."
        )
    if args.rollout.top_p < 1.0:
        yield (
            f"`--rollout.top_p {args.rollout.top_p}`: the truncated distribution that is sampled is not the one that "
            "is scored. Set it to 1."
        )
    if args.train.full_determinism_enable and args.spec.guard:
        yield (
            "`--train.full_determinism_enable` with `--spec.guard true`: its pauses depend on timing, so that runs "
            "would not repeat. Set `--spec.guard false`."
        )
