"""Rollouts of a real policy at the cost of a large one: TRL's own, with reuse, and with drafts inside of the engine.

    python benchmarks/rollouts.py --model MODEL --output OUT [--widen 4 8] [--rows 128 512] [--caps 512]

The small model is warmed up on worked solutions (`warm_up.py`), and trained by TRL's GRPO for one epoch. That makes two
checkpoints, one visit of the prompts apart. The older one writes the responses that the cache holds. The newer one is
made K times as wide (`widen.py`), the same policy at the price of a large one. It rolls the same prompts out, in one
engine:

    plain       TRL's own call, and what it then does to the log-probs
    cold        the plugin with an empty cache, as in a first epoch
    trainer     reuse, drafts verified by the trainer's forward         engine   by the engine
    limit       what reuse could cost at best: drafts prefilled, then what a reuse run generated decoded, both bare

and in an engine that drafts from past responses, which vLLM runs by its older runner:

    asleep      cold, without any draft: what the other runner costs
    exact-N     the exact mode: drafts while at most N rows are running
    rest-N      reuse, verified by the engine, with such drafts for what is left to generate

OUT/measurements.jsonl has a line for each measurement as soon as it is made; the same command goes on with what is
missing. OUT/summary.json has medians, and plain's seconds over those of each kind. `--model tiny` rehearses on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import core
import numpy as np
import replay_rollouts
import tasks
from train_side_by_side import _free_port, _prepare_vllm

GENERATIONS = 8
OLD_STEP, NEW_STEP = 1, 2
PLAIN_KINDS = ("plain", "cold", "trainer", "engine", "limit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a checkpoint, or `tiny`")
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument("--widen", type=int, nargs="+", default=[4, 8], metavar="K", help="times as wide (default 4 8)")
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 512], help="responses at once (default 128 512)")
    parser.add_argument("--caps", type=int, nargs="+", default=[512], help="most tokens of a response (default 512)")
    parser.add_argument(
        "--gates", type=int, nargs="+", default=[32, 512], help="most running rows that are drafted for"
    )
    parser.add_argument("--draft_tokens", type=int, default=16, help="most tokens of a draft in a step (default 16)")
    parser.add_argument("--kinds", nargs="+", help="what is measured (default: all)")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--task", choices=("totals", "sorting", "counting"), default="totals")
    parser.add_argument("--terms", type=int, default=24, help="length of each problem, and so of its answer")
    parser.add_argument("--warm_up", type=float, default=0.12, help="expected reward to begin with")
    parser.add_argument("--warm_up_problems", type=int, default=4000)
    parser.add_argument("--warm_up_steps", type=int, default=1000, help="most steps of the warm-up")
    parser.add_argument("--warm_up_learning_rate", type=float, default=1e-4)
    parser.add_argument("--learning_rate", type=float, default=6e-6, help="of the epoch between the two visits")
    parser.add_argument("--commit", help="what is measured, where the checkout has no history to ask")
    parser.add_argument("--single", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.single:
        job, *rest = options.single
        dict(checkpoints=checkpoints, responses=responses, measure=measure)[job](options, *rest)
        return
    for job, last in (("checkpoints", "new/tokenizer_config.json"), ("responses", "responses.npz")):
        if not (options.output / last).is_file():
            _process(job)
    for times in options.widen:
        for engine in ("plain", "drafting"):
            if _missing(options, times, engine):
                _process("measure", str(times), engine)
                summarise(options)
        shutil.rmtree(options.output / f"wide-{times}", ignore_errors=True)
    print((options.output / "summary.json").read_text())


def _process(*job: str) -> None:
    """A job in a process of its own: engines leave memory behind."""
    code = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--single", *job]).returncode
    if code:
        sys.exit(f"{' '.join(job)} ended with exit code {code}")


def problems(options: argparse.Namespace, count: int, seed: int = 0) -> tasks.Task:
    return getattr(tasks, options.task)(count, seed=seed, terms=options.terms)


# -- two visits


def checkpoints(options: argparse.Namespace) -> None:
    """The small model as it was at the first visit of the prompts, and as it is at the second."""
    import torch
    from tiny_model import tiny_model
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from warm_up import warm_up

    old, new, on_gpu = options.output / "old", options.output / "new", torch.cuda.is_available()
    if options.model == "tiny":
        model, tokenizer = tiny_model()
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)  # as TRL trains
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    if not (old / "warm_up.json").is_file():
        warm_up(
            model, tokenizer, problems(options, options.warm_up_problems, seed=1), problems(options, 128, seed=2),
            old, options.warm_up, options.warm_up_steps, options.warm_up_learning_rate,
        )  # fmt: skip
    task = problems(options, max(options.rows) // GENERATIONS)
    at_once = min(64, max(options.rows))
    settings = dict(
        output_dir=str(options.output / "epoch"), per_device_train_batch_size=at_once, num_generations=GENERATIONS,
        gradient_accumulation_steps=max(1, max(options.rows) // at_once // 2), num_train_epochs=1,
        max_completion_length=min(options.caps), learning_rate=options.learning_rate, lr_scheduler_type="constant",
        gradient_checkpointing=False, save_strategy="no", report_to="none", disable_tqdm=True, bf16=on_gpu,
        use_cpu=not on_gpu,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=str(old),
        args=GRPOConfig(**settings),
        reward_funcs=task,
        train_dataset=task.dataset(),
        processing_class=AutoTokenizer.from_pretrained(old, padding_side="left"),
    )
    trainer.train()
    trainer.model.save_pretrained(new)
    AutoTokenizer.from_pretrained(old).save_pretrained(new)  # last: the checkpoint is whole


def prompts_of(options: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """Token ids of the prompts, each as often as it is sampled, of the largest batch."""
    task = problems(options, max(options.rows) // GENERATIONS)
    ids = [tokenizer.apply_chat_template(p, add_generation_prompt=True, return_dict=False) for p in task.prompts]
    return [prompt for prompt in ids for _ in range(GENERATIONS)]


def engine_of(options: argparse.Namespace, model: Path, longest: int, **changes: Any) -> Any:
    """As TRL 1.16 builds a colocated engine."""
    os.environ["MASTER_PORT"] = str(_free_port())
    import torch
    from trl.generation import vllm_generation

    settings: dict[str, Any] = dict(
        model=str(model), max_model_len=longest + 1, max_num_seqs=max(options.rows), seed=0,
        distributed_executor_backend="external_launcher", max_num_batched_tokens=4096,
        logprobs_mode="processed_logprobs", gpu_memory_utilization=0.6,
    )  # fmt: skip
    if torch.cuda.is_available():
        settings["dtype"] = "bfloat16"
    return vllm_generation.LLM(**settings | changes)  # which a CPU build needs to have repaired


def sampling_params(cap: int, **changes: Any) -> Any:
    """As TRL 1.16 asks for completions."""
    from vllm import SamplingParams

    trl = dict(n=1, repetition_penalty=1.0, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, logprobs=0)
    return SamplingParams(**(trl | dict(max_tokens=cap) | changes))


def responses(options: argparse.Namespace) -> None:
    """What the older policy wrote, to the longest cap; the wide model would have written the same."""
    _prepare_vllm()
    from transformers import AutoTokenizer

    from specrl_plugins.vllm import VLLMEngine

    prompts, cap = prompts_of(options, AutoTokenizer.from_pretrained(options.output / "old")), max(options.caps)
    llm = engine_of(options, options.output / "old", max(map(len, prompts)) + cap)
    made = VLLMEngine(llm, sampling_params(cap)).generate(prompts, [cap] * len(prompts))
    np.savez(
        options.output / "responses.npz",
        lengths=[len(one.tokens) for one in made],
        tokens=np.concatenate([one.tokens for one in made]),
        logprobs=np.concatenate([one.logprobs for one in made]),
        ended=[one.finish_reason == "stop" for one in made],
    )


# -- measuring


def _kinds(options: argparse.Namespace, engine: str) -> list[str]:
    drafting = ["asleep", *(f"{kind}-{gate}" for kind in ("exact", "rest") for gate in options.gates)]
    kinds = PLAIN_KINDS if engine == "plain" else drafting
    return [kind for kind in kinds if options.kinds is None or kind in options.kinds]


def _wanted(options: argparse.Namespace, times: int, engine: str) -> list[dict[str, Any]]:
    return [
        dict(widen=times, rows=rows, cap=cap, kind=kind, repeat=repeat)
        for repeat in range(options.repeats)
        for cap in options.caps
        for rows in options.rows
        for kind in _kinds(options, engine)[:: -1 if repeat % 2 and engine == "drafting" else 1]
    ]


def _measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    path = options.output / "measurements.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def _missing(options: argparse.Namespace, times: int, engine: str) -> list[dict[str, Any]]:
    done = _measured(options)
    return [wanted for wanted in _wanted(options, times, engine) if not any(wanted.items() <= m.items() for m in done)]


def measure(options: argparse.Namespace, times: str, engine: str) -> None:
    """All that is missing of one width and one engine."""
    _prepare_vllm()
    from widen import write_widened

    wide = options.output / f"wide-{times}"
    if not (wide / "tokenizer_config.json").is_file():
        write_widened(options.output / "new", wide, int(times), "auto" if options.model == "tiny" else "bfloat16")
    with tempfile.TemporaryDirectory() as directory:
        visit = Visit(options, wide, engine == "drafting", Path(directory))
        visit.measure("asleep" if engine == "drafting" else "plain", min(16, min(options.rows)), min(options.caps))
        for wanted in _missing(options, int(times), engine):
            found = visit.measure(wanted["kind"], wanted["rows"], wanted["cap"])
            line = wanted | {key: round(value, 4) for key, value in found.items()}
            with (options.output / "measurements.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(line, flush=True)


class Visit:
    """The second visit of the prompts, by a wide policy.

    Args:
        options (`argparse.Namespace`): of the command line.
        model (`Path`): the wide checkpoint.
        drafting (`bool`): whether the engine drafts from past responses.
        directory (`Path`): where caches are put.
    """

    def __init__(self, options: argparse.Namespace, model: Path, drafting: bool, directory: Path):
        from transformers import AutoTokenizer

        from specrl_plugins import prompt_key
        from specrl_plugins.book_proposer import speculative_config
        from specrl_plugins.trajectory import assign_slots

        self.options, self.directory = options, directory
        self.tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
        self.prompts = prompts_of(options, self.tokenizer)
        self.keys = [prompt_key(prompt) for prompt in self.prompts]
        self.slots = assign_slots(self.keys)
        self.past = np.load(options.output / "responses.npz")
        self.task = problems(options, max(options.rows) // GENERATIONS)
        on_gpu = options.model != "tiny"
        self.trainer = None if drafting else self._trainer(model, on_gpu)
        longest = max(map(len, self.prompts)) + max(options.caps)
        changes = dict(speculative_config=speculative_config(options.draft_tokens)) if drafting else {}
        self.llm = engine_of(options, model, longest, **changes)
        self.remaining: dict[tuple[int, int], Any] = {}  # what a reuse run went on with, for the limit

    def _trainer(self, model: Path, on_gpu: bool) -> Any:
        """For its forward, with the micro-batch that TRL has at this size."""
        from trl_integration import SpecGRPOConfig, SpecGRPOTrainer

        args = SpecGRPOConfig(
            output_dir=str(self.directory / "trainer"), use_spec_rollout=True, per_device_train_batch_size=16,
            num_generations=GENERATIONS, report_to="none", bf16=on_gpu, use_cpu=not on_gpu,
            model_init_kwargs=dict(dtype="bfloat16" if on_gpu else "float32"),
        )  # fmt: skip
        return SpecGRPOTrainer(
            model=str(model), args=args, reward_funcs=self.task, train_dataset=self.task.dataset(),
            processing_class=self.tokenizer,
        )  # fmt: skip

    def trajectories(self, rows: int, cap: int) -> list[Any]:
        """The past responses to the first rows, cut to the cap."""
        from specrl_plugins import Trajectory

        ends = np.cumsum(self.past["lengths"])
        found = []
        for row, (end, length) in enumerate(zip(ends[:rows].tolist(), self.past["lengths"].tolist(), strict=False)):
            kept = min(length, cap)
            part = slice(end - length, end - length + kept)
            ended = bool(self.past["ended"][row]) and kept == length
            found.append(
                Trajectory(
                    self.keys[row], self.slots[row], self.past["tokens"][part],
                    np.minimum(self.past["logprobs"][part], 0), np.zeros(kept, np.uint16),
                    "stop" if ended else "length", cap, OLD_STEP,
                )
            )  # fmt: skip
        return found

    def measure(self, kind: str, rows: int, cap: int) -> dict[str, float]:
        """Seconds, tokens and the mean reward of one rollout."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache is in use: the measurement before did not end")
        gc.collect()
        name, _, gate = kind.partition("-")
        if name == "plain":
            return self.plain(rows, cap)
        if name == "limit":
            return self.limit(rows, cap)
        return self.roll_out(name, rows, cap, int(gate or 0))

    def plain(self, rows: int, cap: int) -> dict[str, float]:
        from trl.generation.vllm_generation import extract_logprobs

        start = time.perf_counter()
        requests = [{"prompt_token_ids": prompt} for prompt in self.prompts[:rows]]
        outputs = self.llm.generate(requests, sampling_params=sampling_params(cap), use_tqdm=False)
        generated = time.perf_counter()
        ids = [list(output.outputs[0].token_ids) for output in outputs]
        extract_logprobs(outputs)
        end = time.perf_counter()
        lengths = [len(row) for row in ids]
        return {
            "total_s": end - start, "generate_s": generated - start, "tokens": sum(lengths),
            "generated_tokens": sum(lengths), "longest_generated": max(lengths), "reward": self.reward(ids),
        }  # fmt: skip

    def roll_out(self, kind: str, rows: int, cap: int, gate: int) -> dict[str, float]:
        from specrl_plugins import ReusePolicy, SpeculativeRollout, TrajectoryCache, VerificationGuard
        from specrl_plugins.rollout import Drafting, Mode
        from specrl_plugins.vllm import VLLMEngine

        engine: Any = VLLMEngine(self.llm, sampling_params(cap))
        if kind == "trainer":
            assert self.trainer is not None
            engine.score = self.trainer.spec_score
        with (
            tempfile.TemporaryDirectory(dir=self.directory) as directory,
            TrajectoryCache(directory, core.settings(len(self.tokenizer))) as cache,
        ):
            if kind not in ("cold", "asleep"):
                cache.put_many(self.trajectories(rows, cap))
            rollout = SpeculativeRollout(
                cache, ReusePolicy(), len(self.tokenizer), VerificationGuard(may_pause=False),
                mode=Mode.EXACT if kind == "exact" else Mode.REUSE,
                drafting=Drafting(self.options.draft_tokens, gate) if gate else None,
            )  # fmt: skip
            start = time.perf_counter()
            done = rollout.run(engine, self.prompts[:rows], cap, NEW_STEP)
            ids = [response.tokens.tolist() for response in done.responses]  # what the trainer is handed
            _ = [response.logprobs.tolist() for response in done.responses]
            rollout.store(done, rewards=[0.0] * rows)
            total = time.perf_counter() - start
        counts, made = done.counts, [len(r.tokens) - r.prefix for r in done.responses]
        if kind in ("trainer", "engine"):
            self.remaining[rows, cap] = [
                (r.draft_tokens, r.prefix, n) for r, n in zip(done.responses, made, strict=True)
            ]
        found = {name: getattr(counts, name) for name in ("lookup_s", "verify_s", "generate_s", "store_s")}
        return found | {
            "total_s": total, "tokens": counts.completion_tokens, "generated_tokens": counts.generated_tokens,
            "longest_generated": max(made), "reused_tokens": counts.reused_tokens,
            "draft_tokens": counts.drafted_tokens, "engine_drafted_tokens": counts.engine_drafted_tokens,
            "engine_accepted_tokens": counts.engine_accepted_tokens, "reward": self.reward(ids),
        }  # fmt: skip

    def limit(self, rows: int, cap: int) -> dict[str, float]:
        """Of the reuse run before: its drafts prefilled, and as many tokens decoded after the prefixes it kept."""
        drafts = self.remaining[rows, cap]
        prompts = self.prompts[:rows]
        whole = [p + tokens.tolist() for p, (tokens, _, _) in zip(prompts, drafts, strict=True)]
        begun = [p + tokens[:prefix].tolist() for p, (tokens, prefix, _) in zip(prompts, drafts, strict=True)]
        bare = dict(logprobs=None, detokenize=False, ignore_eos=True)
        start = time.perf_counter()
        params = sampling_params(1, **bare)
        self.llm.generate([{"prompt_token_ids": ids} for ids in whole], sampling_params=params, use_tqdm=False)
        prefilled = time.perf_counter()
        left = [(ids, count) for ids, (_, _, count) in zip(begun, drafts, strict=True) if count][::-1]
        self.llm.generate(
            [{"prompt_token_ids": ids} for ids, _ in left],
            sampling_params=[sampling_params(count, **bare) for _, count in left],
            use_tqdm=False,
        )
        end = time.perf_counter()
        return {"total_s": end - start, "prefill_s": prefilled - start, "generate_s": end - prefilled}

    def reward(self, ids: Sequence[list[int]]) -> float:
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return statistics.mean(self.task.score(text, row // GENERATIONS) for row, text in enumerate(texts))


def summarise(options: argparse.Namespace) -> None:
    """Medians of each setting, and plain's seconds over those of each kind, of the same repeat."""
    measured = _measured(options)
    settings: dict[str, Any] = {}
    for times, rows, cap in dict.fromkeys((m["widen"], m["rows"], m["cap"]) for m in measured):
        of_all = [m for m in measured if (m["widen"], m["rows"], m["cap"]) == (times, rows, cap)]
        of_kind = {k: [m for m in of_all if m["kind"] == k] for k in dict.fromkeys(m["kind"] for m in of_all)}

        def median(kind: str, read: Callable[[dict[str, Any]], float], of_kind: Any = of_kind) -> float:
            return float(f"{statistics.median(map(read, of_kind[kind])):.4g}")

        plain = {m["repeat"]: m["total_s"] for m in of_kind.get("plain", [])}
        setting = settings[f"{times}-wide-{rows}-rows-{cap}-tokens"] = {
            "medians": {
                kind: {
                    name: median(kind, lambda m, name=name: m[name])
                    for name in dict.fromkeys(name for m in lines for name in m)
                    if name not in ("widen", "rows", "cap", "kind", "repeat")
                }
                for kind, lines in of_kind.items()
            }
        }
        for kind, lines in of_kind.items():
            ratios = [plain[m["repeat"]] / m["total_s"] for m in lines if m["repeat"] in plain]
            if ratios and kind != "plain":
                setting.setdefault("speedup", {})[kind] = float(f"{statistics.median(ratios):.4g}")
                setting.setdefault("speedups", {})[kind] = [float(f"{ratio:.4g}") for ratio in ratios]
    found = replay_rollouts.header(options.model, options.commit or core.commit()) | {"settings": settings}
    path = options.output / "summary.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found, indent=1) + "\n")
    os.replace(part, path)


if __name__ == "__main__":
    main()
