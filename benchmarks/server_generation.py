"""What generating through vLLM's server costs: TRL's own one call for a batch against ours with a budget a row.

Three batches of the same prompts, in turns, each a number of times after one to warm up:

- `trl`: `VLLMClient.generate` as TRL's trainers call it, all rows with the same budget.
- `equal`: the rollout engine, all rows with that budget: a first epoch.
- `mixed`: the rollout engine, each prompt's samples with budgets of their own, as after reuse; `a_row` sends the same
  rows as one request each, `longest` as one call of TRL's with the longest budget, which generates what nobody needs.

Ends are ignored, so that every row takes its whole budget and runs do the same work. Prints one JSON object.

    PYTHONPATH=.:tests python benchmarks/server_generation.py --model MODEL
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoTokenizer
from trl.generation.vllm_client import VLLMClient
from vllm_server import serve

from specrl_plugins.ranks import OneRank
from trl_integration.server import ServerEngine


class EndsIgnored(VLLMClient):
    """TRL's client, but responses use up their budgets."""

    def generate(self, *args, **kwargs):
        return super().generate(*args, **kwargs, generation_kwargs={"ignore_eos": True})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--prompt_tokens", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a response")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, serve(options.model, Path(directory) / "log") as address:
        seconds = measure(EndsIgnored(base_url=address), options)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    report = vars(options) | {
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "load_average": round(os.getloadavg()[0], 1),
        **{f"{name}_s": [round(s, 3) for s in values] for name, values in seconds.items()},
        **{f"{name}_median_s": round(s, 3) for name, s in medians.items()},
        "equal_over_trl": round(medians["equal"] / medians["trl"], 3),
        **{f"{name}_over_mixed": round(medians[name] / medians["mixed"], 3) for name in ("a_row", "longest")},
    }
    print(json.dumps(report))


def measure(client: VLLMClient, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each repeat of each batch."""
    rng = random.Random(0)
    vocabulary = len(AutoTokenizer.from_pretrained(options.model))
    prompts = [[rng.randrange(10, vocabulary) for _ in range(options.prompt_tokens)] for _ in range(options.prompts)]
    rows = [prompt for prompt in prompts for _ in range(options.samples)]
    # What is kept of a response becomes part of the context.
    kept = [rng.randrange(options.tokens) for _ in rows]
    contexts = [row + rng.choices(range(10, vocabulary), k=k) for row, k in zip(rows, kept, strict=True)]
    budgets = [options.tokens - k for k in kept]
    neutral: dict[str, Any] = dict(repetition_penalty=1.0, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, logprobs=0)
    engine = ServerEngine(SimpleNamespace(vllm_client=client, **neutral), [], OneRank())  # type: ignore[arg-type]

    def a_row() -> None:
        with ThreadPoolExecutor(len(contexts)) as pool:
            list(pool.map(lambda c, b: client.generate([c], max_tokens=b, **neutral), contexts, budgets))

    batches: dict[str, Callable[[], object]] = {
        "trl": lambda: client.generate(prompts, n=options.samples, max_tokens=options.tokens, **neutral),
        "equal": lambda: engine.generate(rows, [options.tokens] * len(rows)),
        "mixed": lambda: engine.generate(contexts, budgets),
        "a_row": a_row,
        "longest": lambda: client.generate(contexts, max_tokens=max(budgets), **neutral),
    }
    seconds: dict[str, list[float]] = {name: [] for name in batches}
    for repeat in range(options.repeats + 1):
        for name, run in batches.items():
            client.reset_prefix_cache()  # as after each update of the weights
            start = time.perf_counter()
            run()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    main()
