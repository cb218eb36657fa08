"""What a rollout costs beside the model: OpenRLHF's rollout phase, plain and with everything reused, on a CPU.

A Llama of one narrow layer that knows the first 512 tokens of MODEL's tokenizer, so that hardly anything but the
handling of prompts, drafts and responses takes time. All runs are OpenRLHF's samples generator and executor and a vLLM
engine in an actor, under Ray; the engines are those of the tests. `reuse_tokenizer_sent` sends the tokenizer with each
prompt, as OpenRLHF does. Prints one JSON object.

    PYTHONPATH=.:tests:tests/shims python benchmarks/openrlhf_actor.py --model MODEL
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import ray
import torch
from openrlhf.trainer.ppo_trainer import prepare_datasets
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
from openrlhf.utils import get_strategy, get_tokenizer
from openrlhf_runs import CpuPlainActor, CpuRolloutActor, create_engines, flags, parse, start_ray
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from openrlhf_integration.samples_generator import SpecSamplesGenerator
from openrlhf_integration.start import start_cache_of

SPEC = ["--use_spec_rollout", "--spec.rule", "full", "--spec.refresh_rate", "0", "--spec.carry_limit", "0"]
SPEC += ["--spec.guard", "false"]  # so that everything is reused in all steps but the first


class TokenizerSent(SpecSamplesGenerator):
    """As OpenRLHF's own: a copy of the tokenizer with each prompt."""

    _dispatch_prompts_to_vllm = SamplesGenerator._dispatch_prompts_to_vllm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="whose tokenizer is used")
    parser.add_argument("--prompts", type=int, default=64, help="prompts of a step")
    parser.add_argument("--samples", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--tokens", type=int, default=100, help="most tokens of a response")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each run; one more warms it up")
    options = parser.parse_args()
    start_ray()
    with tempfile.TemporaryDirectory() as directory:
        model = narrow_model(options.model, Path(directory) / "model")
        args = parse(
            flags(
                model,
                Path(directory),
                *SPEC,
                prompts=[f"{n:08d}" for n in range(options.prompts)],
                data__max_len=256,
                rollout__max_new_tokens=options.tokens,
                rollout__batch_size=options.prompts,
                rollout__n_samples_per_prompt=options.samples,
            )
        )
        cache = start_cache_of(args)
        runs = {
            "plain": steps_of(args, SamplesGenerator, CpuPlainActor, options),
            "reuse": steps_of(args, SpecSamplesGenerator, CpuRolloutActor, options, cache),
            "reuse_tokenizer_sent": steps_of(args, TokenizerSent, CpuRolloutActor, options, cache),
        }
    medians = {name: statistics.median(seconds) for name, seconds in runs.items()}
    report = vars(options) | {
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "tokenizer_size": len(AutoTokenizer.from_pretrained(options.model)),
        **{f"{name}_step_s": [round(s, 2) for s in seconds] for name, seconds in runs.items()},
        **{f"{name}_median_s": round(s, 2) for name, s in medians.items()},
        **{f"{name}_over_reuse": round(s / medians["reuse"], 2) for name, s in medians.items() if name != "reuse"},
    }
    print(json.dumps(report))
    ray.shutdown()


def narrow_model(model: str, directory: Path) -> str:
    """Save a Llama of one layer of width 32 with the tokenizer of `model`."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=min(512, len(tokenizer)),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=256,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def steps_of(args, generator_class, actor_class, options, cache=None) -> list[float]:
    """Seconds of each rollout phase."""
    if cache is not None:
        ray.get(cache.rewind.remote(0))
    engines = create_engines(args, actor_class)
    strategy = get_strategy(args)
    tokenizer = get_tokenizer(args.actor.model_name_or_path, None, "left", strategy)
    dataloader, eval_dataloader, _ = prepare_datasets(strategy, tokenizer)
    generator = generator_class(strategy, dataloader, eval_dataloader, tokenizer, engines)
    seconds = []  # the first step warms up, and finds the cache empty
    while len(seconds) <= options.steps:
        if cache is not None:
            ray.get(cache.policy_is.remote(len(seconds)))
        start = time.perf_counter()
        samples, *_ = generator.generate_samples(max_len=256, max_new_tokens=options.tokens, temperature=1.0, top_p=1.0)
        if not samples:  # the data set is through, and begins again
            continue
        seconds.append(time.perf_counter() - start)
        if cache is not None:
            assert (samples.metrics["spec/generated_tokens"] == 0) == (len(seconds) > 1)
    for engine in engines:
        ray.kill(engine)
    return seconds[1:]


if __name__ == "__main__":
    main()
