"""What the hidden states of partial rollouts cost: from the engine that is writing them, against a plain forward.

An engine samples `--prompts` times `--samples` rollouts of `--tokens` tokens, as long as they are when they are judged.
Then, in turns, `--repeats` times after one to warm up:

- `tap`: their last hidden states, from the engine, whose prefix cache holds all but the last blocks of them.
- `tap_uncached`: the same, after the prefix cache was reset.
- `forward`: the same states by a transformers forward without the LM head, in batches of `--batch` rows.

`difference` is the largest difference between a state of `tap` and of `forward`, `scale` the largest value. The model
is random, of 9.1 million parameters, or `--model`. Prints one JSON object.

    OMP_NUM_THREADS=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_LOGGING_LEVEL=ERROR PYTHONPATH=. \
        python benchmarks/hidden_states.py
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from functools import partial

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams

from specrl_plugins.vllm import HiddenStates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8, help="rollouts of a prompt")
    parser.add_argument("--prompt_tokens", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=412, help="tokens of a rollout when it is judged")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        report = measure(options.model or build_model(directory), options)
    print(json.dumps(vars(options) | report | {"cpus": os.cpu_count(), "machine": platform.machine()}, indent=2))


def build_model(directory: str) -> str:
    """A random Llama of 9.1 million parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def measure(model: str, options: argparse.Namespace) -> dict[str, object]:
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        max_model_len=options.prompt_tokens + options.tokens + 1,
        gpu_memory_utilization=0.5,
        enforce_eager=not torch.cuda.is_available(),
        dtype=options.dtype,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, options.dtype)).to(device)
    states = HiddenStates(llm)

    rng = np.random.default_rng(0)
    prompts = rng.integers(3, policy.config.vocab_size, (options.prompts, options.prompt_tokens)).tolist()
    prompts = [prompt for prompt in prompts for _ in range(options.samples)]

    def sample() -> list[list[int]]:
        params = SamplingParams(max_tokens=options.tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling_params=params, use_tqdm=False)
        return [p + list(o.outputs[0].token_ids) for p, o in zip(prompts, outputs, strict=True)]

    def forward(contexts: list[list[int]]) -> np.ndarray:
        parts = torch.tensor(contexts, device=device).split(options.batch)
        with torch.inference_mode():
            return torch.cat([policy.model(part).last_hidden_state[:, -1].float().cpu() for part in parts]).numpy()

    seconds: dict[str, list[float]] = {name: [] for name in ("sample", "tap", "tap_uncached", "forward")}

    def timed(name: str, work):
        start = time.perf_counter()
        result = work()
        seconds[name].append(time.perf_counter() - start)
        return result

    for _ in range(options.repeats + 1):
        assert llm.reset_prefix_cache()
        contexts = timed("sample", sample)
        tapped = timed("tap", partial(states.of, contexts))
        assert llm.reset_prefix_cache()
        timed("tap_uncached", partial(states.of, contexts))
        expected = timed("forward", partial(forward, contexts))
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in policy.parameters()),
        "block_size": llm.llm_engine.vllm_config.cache_config.block_size,
        "difference": float(np.abs(tapped - expected).max()),
        "scale": float(np.abs(expected).max()),
        "median_s": {name: round(statistics.median(values[1:]), 4) for name, values in seconds.items()},
        "seconds": {name: [round(value, 4) for value in values] for name, values in seconds.items()},
    }


if __name__ == "__main__":
    main()
