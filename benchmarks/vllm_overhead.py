"""What vLLM's Python code costs around the model, and what scoring and continuing find in its prefix cache.

No GPU is needed: the model is the tiny one of `replay_rollouts.py`, and CPU seconds of this process are given, so that
other work on the machine matters less. Medians of five.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive VLLM_ENABLE_V1_MULTIPROCESSING=0 python benchmarks/vllm_overhead.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from replay_rollouts import SHAPES, save_model
from vllm import LLM, SamplingParams
from vllm.logprobs import create_prompt_logprobs, create_sample_logprobs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from specrl_plugins.vllm.engine import continuing_params, scores, scoring_params
from specrl_plugins.vllm.logprobs import filed_fast

REPEATS = 5


def cpu_seconds(*works: Callable[[], Any]) -> list[float]:
    """Median CPU seconds of each of some pieces of work, which take turns."""
    taken: list[list[float]] = [[] for _ in works]
    for _ in range(REPEATS + 1):
        for work, seconds in zip(works, taken, strict=True):
            start = time.process_time()
            work()
            seconds.append(time.process_time() - start)
    return [statistics.median(seconds[1:]) for seconds in taken]  # the first one warms up


def scoring() -> None:
    """A million tokens of scored drafts, without any engine: filed by vLLM, filed fast, read."""
    rows, tokens = 1000, 1000
    answer = LogprobsTensors(
        torch.randint(0, 150_000, (tokens, 1)), -torch.rand(tokens, 1), torch.randint(0, 9, (tokens,))
    )
    ids = answer.logprob_token_ids[:, 0].numpy().astype(np.int32)

    def file(fast: bool) -> list[Any]:
        with filed_fast() if fast else nullcontext():
            processors = [
                LogprobsProcessor(None, None, create_prompt_logprobs(True), None, None, 0) for _ in range(rows)
            ]
            for processor in processors:
                processor._update_prompt_logprobs(answer)
        return [SimpleNamespace(prompt_logprobs=processor.prompt_logprobs) for processor in processors]

    outputs = file(fast=True)
    slow, fast, read = cpu_seconds(
        lambda: file(fast=False), lambda: file(fast=True), lambda: [scores(output, ids) for output in outputs]
    )
    print(f"a million scored tokens: filed by vLLM {slow:.2f} s, filed fast {fast:.2f} s, read {read:.3f} s")


def filing() -> None:
    """A sampled token's log-prob, without any engine: filed by vLLM, filed fast."""
    tokens = 100_000
    answer = LogprobsLists(np.array([[7]]), np.array([[-1.0]], np.float32), np.array([3]), None)

    def file(fast: bool) -> None:
        with filed_fast() if fast else nullcontext():
            processor = LogprobsProcessor(None, create_sample_logprobs(True), None, 0.0, 0, None)
            for _ in range(tokens):
                processor._update_sample_logprobs(answer)

    slow, fast = cpu_seconds(lambda: file(fast=False), lambda: file(fast=True))
    print(f"microseconds to file a sampled token: by vLLM {slow / tokens * 1e6:.2f}, fast {fast / tokens * 1e6:.2f}")


def engine(model: str, kv_mib: int, block_size: int | None = None) -> LLM:
    return LLM(
        model=model,
        load_format="dummy",
        max_model_len=1024,
        max_num_seqs=256,
        max_num_batched_tokens=4096,
        block_size=block_size,
        logprobs_mode="processed_logprobs",
        **SHAPES["tiny"].engine | dict(kv_cache_memory_bytes=kv_mib << 20),
    )


def sampling(llm: LLM) -> None:
    """CPU time of a sampled token, the tiny model's included: as TRL asks, as we ask, without log-probs."""
    rng = np.random.default_rng(0)
    rows, tokens = 256, 100
    requests: list[Any] = [{"prompt_token_ids": rng.integers(0, 2048, 32).tolist()} for _ in range(rows)]
    trl = SamplingParams(max_tokens=tokens, temperature=1.0, logprobs=0, ignore_eos=True)
    bare = SamplingParams(max_tokens=tokens, temperature=1.0, ignore_eos=True, detokenize=False)

    def generate(params: SamplingParams, fast: bool = False) -> None:
        llm.reset_prefix_cache()
        with filed_fast() if fast else nullcontext():
            llm.generate(requests, sampling_params=params, use_tqdm=False)

    ours = continuing_params(trl, tokens)
    names = ("as TRL asks", "flat and without text", "the same filed fast", "without log-probs")
    taken = cpu_seconds(
        lambda: generate(trl), lambda: generate(ours), lambda: generate(ours, fast=True), lambda: generate(bare)
    )
    figures = ", ".join(f"{name} {s / rows / tokens * 1e6:.1f}" for name, s in zip(names, taken, strict=True))
    print(f"microseconds a sampled token: {figures}")


def order(llm: LLM) -> None:
    """Share of the continuations' contexts that scoring left in the prefix cache, by the order they are asked in."""
    rng = np.random.default_rng(0)
    contexts, halves = [], []
    for _ in range(24):
        prompt = rng.integers(0, 2048, 32).tolist()
        for _ in range(8):
            draft = rng.integers(0, 2048, int(rng.integers(200, 900))).tolist()
            contexts.append(prompt + draft)
            halves.append(prompt + draft[: int(rng.integers(0, len(draft) + 1))])
    params = SamplingParams(max_tokens=16, temperature=1.0, ignore_eos=True, detokenize=False)
    shares = []
    for step in (1, -1):
        llm.reset_prefix_cache()
        scored: list[Any] = [{"prompt_token_ids": context} for context in contexts]
        llm.generate(scored, sampling_params=scoring_params(), use_tqdm=False)
        asked: list[Any] = [{"prompt_token_ids": half} for half in halves[::step]]
        outputs = llm.generate(asked, sampling_params=params, use_tqdm=False)
        shares.append(sum(output.num_cached_tokens or 0 for output in outputs) / sum(map(len, halves)))
    held = llm.llm_engine.vllm_config.cache_config
    room = held.num_gpu_blocks * held.block_size
    print(
        f"KV cache of {room / sum(map(len, contexts)):.2f} of the scored tokens: "
        f"found {shares[0]:.0%} in the order of scoring, {shares[1]:.0%} in reverse"
    )


def shared_prompts(llm: LLM) -> None:
    """What it costs to score the samples of some prompts, with each prompt computed for each sample, or once."""
    rng = np.random.default_rng(0)
    for prompt_tokens, draft_tokens in ((160, 844), (82, 33)):
        contexts = []
        for _ in range(8):
            prompt = rng.integers(0, 2048, prompt_tokens).tolist()
            contexts += [prompt + rng.integers(0, 2048, draft_tokens).tolist() for _ in range(8)]
        requests: list[Any] = [{"prompt_token_ids": context} for context in contexts]
        computed: dict[bool, int] = {}

        def score(read_cache: bool, requests: list[Any] = requests, computed: dict[bool, int] = computed) -> None:
            llm.reset_prefix_cache()
            with filed_fast():
                outputs = llm.generate(requests, sampling_params=scoring_params(read_cache), use_tqdm=False)
            computed[read_cache] = sum(len(o.prompt_token_ids or []) - (o.num_cached_tokens or 0) for o in outputs)

        every, once = cpu_seconds(lambda score=score: score(False), lambda score=score: score(True))
        print(
            f"scoring 8 samples of {draft_tokens} tokens after each of 8 prompts of {prompt_tokens}: {computed[False]} "
            f"tokens computed in {every:.2f} s, with the prefix cache {computed[True]} in {once:.2f} s"
        )


def main() -> None:
    scoring()
    filing()
    with tempfile.TemporaryDirectory() as directory:
        save_model(SHAPES["tiny"], Path(directory))
        sampling(engine(directory, 256))
        shared_prompts(engine(directory, 256, block_size=32))  # the smallest that a CPU engine takes
        for kv_mib in (32, 64, 96, 160):
            order(engine(directory, kv_mib))


if __name__ == "__main__":
    main()
