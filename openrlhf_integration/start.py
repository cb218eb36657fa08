"""What is said and started before the first engine."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from openrlhf_integration.cache_actor import Rules, start_cache
from specrl_plugins import Fingerprint
from specrl_plugins.fingerprint import content_hash


def announce(args: Any) -> None:
    """Say what will be done, and what was changed for it.

    Args:
        args (`SimpleNamespace`): OpenRLHF's arguments, nested, with ours as `args.spec`.
    """
    spec = args.spec
    print(
        f"Speculative rollouts: {spec.rule} reuse, log-lenience {spec.log_lenience:g}, refresh rate "
        f"{spec.refresh_rate:g}, verified by vLLM. Trajectory cache: {spec.cache_directory(args.ckpt.output_dir)}."
    )
    if not args.vllm.enable_prefix_caching:
        print(
            "Speculative rollouts: --vllm.enable_prefix_caching was turned on. Verifying a response leaves its keys "
            "and values there, from which the continuation goes on."
        )


def start_cache_of(args: Any) -> Any:
    """Start the cache actor of a run; see [`start_cache`]."""
    fingerprint = fingerprint_of(args.actor.model_name_or_path, not args.data.disable_fast_tokenizer)
    rules = Rules(args.spec.reuse_policy(args.train.seed), fingerprint.vocab_size, args.spec.guard)
    return start_cache(args.spec.cache_directory(args.ckpt.output_dir), fingerprint, args.spec.cache_max_mib, rules)


def fingerprint_of(model: str, use_fast: bool) -> Fingerprint:
    """What the trajectories of a run depend on.

    Args:
        model (`str`): name or path of the policy.
        use_fast (`bool`): which kind of tokenizer OpenRLHF loads.
    """
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=True, use_fast=use_fast)
    config = AutoConfig.from_pretrained(model, trust_remote_code=True)
    try:
        eos = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # it has none of its own
        eos = config.get_text_config().eos_token_id
    vocabulary = tokenizer.get_vocab()
    return Fingerprint(
        model=str(model),
        tokenizer=content_hash(vocabulary),
        # Embeddings are often padded beyond the tokenizer; an engine refuses such an id in a prompt.
        vocab_size=min(config.get_text_config().vocab_size, max(vocabulary.values()) + 1),
        scorer="vllm",
        sampling={
            "temperature": 1.0,
            "top_p": 1.0,
            # vLLM stops at these and at the tokenizer's own.
            "eos_token_ids": sorted({tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}),
        },
    )
