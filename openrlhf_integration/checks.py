"""What speculative rollouts and online pruning refuse or warn about before anything is started."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from specrl_plugins.vllm_drafting import check_speculative_config

logger = logging.getLogger(__name__)


class UnsupportedSetting(ValueError):
    """A setting under which speculative rollouts or online pruning would be wrong."""


def check_args(args: Any) -> None:
    """Refuse OpenRLHF settings that cannot be done right; warn where there is nothing to gain.

    Args:
        args (`SimpleNamespace`): OpenRLHF's arguments, nested, with ours as `args.spec`.

    Raises:
        UnsupportedSetting: naming every such flag, why, and what to do.
    """
    if lines := list(_unsupported_settings(args)):
        on = {"--use_spec_rollout": args.spec.use_spec_rollout, "--spec.prune": args.spec.prune}
        flags = " and ".join(f"`{flag}`" for flag, is_on in on.items() if is_on)
        raise UnsupportedSetting(
            f"{flags} cannot be done right with:\n  " + "\n  ".join(lines) + f"\nChange these, or leave {flags} out."
        )
    if args.spec.use_spec_rollout and args.train.num_episodes <= 1:
        logger.warning(
            "`--use_spec_rollout` cannot help here: each prompt is met once. Reuse begins when a prompt comes back "
            "(`--train.num_episodes` above 1)."
        )


def _unsupported_settings(args: Any) -> Iterator[str]:
    if not args.vllm.num_engines:
        yield "`--vllm.num_engines 0`: vLLM is what verifies, judges and continues. Set it to 1 or more."
    if args.spec.vllm_speculative_config is not None:
        try:
            check_speculative_config(args.spec.vllm_speculative_config, args.vllm.enable_sleep)
        except ValueError as error:
            yield f"`--spec.vllm_speculative_config`: it {error}"
    if args.train.partial_rollout_enable:
        yield (
            "`--train.partial_rollout_enable`: its responses mix the policies of several steps, so that stored "
            "log-probs and what responses are judged by would be of none. Leave it out."
        )
    if args.spec.use_spec_rollout:
        yield from _wrong_for_reuse(args)
    if args.spec.prune:
        yield from _wrong_for_pruning(args)


def _wrong_for_reuse(args: Any) -> Iterator[str]:
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


def _wrong_for_pruning(args: Any) -> Iterator[str]:
    name = "rollout.max_new_tokens" if args.rollout.max_new_tokens else "data.max_len"
    longest = args.rollout.max_new_tokens or args.data.max_len
    if args.spec.prune_detection_length >= longest:
        yield (
            f"`--spec.prune_detection_length {args.spec.prune_detection_length}` with `--{name} {longest}`: every "
            "response would end before it is judged. Set it to where most are still going on."
        )
    if not (args.reward.remote_url or args.train.agent_func_path):
        yield (
            "`--spec.prune` with a reward model on GPUs: the judge learns from rewards that come with the response. "
            "Give `--reward.remote_url` or `--train.agent_func_path`."
        )
