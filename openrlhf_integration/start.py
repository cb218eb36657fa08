"""What is said and started before the first engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from openrlhf_integration.cache_actor import Rules, start_cache
from specrl_plugins import Fingerprint
from specrl_plugins.fingerprint import tokenizer_hash
from specrl_plugins.pruning import Pruner


def announce(args: Any) -> None:
    """Say what will be done, and what was changed for it.

    Args:
        args (`SimpleNamespace`): OpenRLHF's arguments, nested, with ours as `args.spec`.
    """
    spec = args.spec
    if spec.prune:
        settings, trained = spec.pruning_settings(), args.rollout.n_samples_per_prompt
        print(
            f"Online pruning: {settings.starts(trained)} responses to a prompt start and {trained} of them survive, "
            f"judged after {settings.detection_length} tokens; {settings.warmup_steps} rollouts of warm-up."
        )
    if spec.use_spec_rollout:
        print(
            f"Speculative rollouts: {spec.rule} reuse, log-lenience {spec.log_lenience:g}, refresh rate "
            f"{spec.refresh_rate:g}, verified by vLLM. Trajectory cache: {spec.cache_directory(args.ckpt.output_dir)}."
        )
    if not args.vllm.enable_prefix_caching:
        print(
            "--vllm.enable_prefix_caching was turned on. Verifying or judging a response leaves its keys and values "
            "there, from which the continuation goes on."
        )


def start_cache_of(args: Any) -> Any:
    """Start the cache actor of a run; see [`start_cache`]."""
    spec, model = args.spec, args.actor.model_name_or_path
    fingerprint = fingerprint_of(model, not args.data.disable_fast_tokenizer)
    rules = Rules(
        policy=spec.reuse_policy(args.train.seed),
        vocab_size=fingerprint.vocab_size,
        guard=spec.guard,
        reuse=spec.use_spec_rollout,
        pruning=spec.pruning_settings() if spec.prune else None,
        temperature=args.rollout.temperature,
        top_p=args.rollout.top_p,
        speculative_config=spec.vllm_speculative_config,
    )
    pruner = None
    if spec.prune:
        hidden_size = AutoConfig.from_pretrained(model, trust_remote_code=True).get_text_config().hidden_size
        pruner = Pruner(hidden_size, spec.pruning_settings(), seed=args.train.seed)
    return start_cache(
        spec.cache_directory(args.ckpt.output_dir),
        fingerprint,
        spec.cache_max_mib,
        rules,
        pruner,
        Path(args.ckpt.path).absolute() / "spec_pruner",
    )


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
        tokenizer=tokenizer_hash(tokenizer),
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
