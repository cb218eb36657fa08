"""GRPO with TRL, plain and with reuse, side by side on a task with long answers, over several seeds.

    python benchmarks/train_side_by_side.py --model MODEL --output OUT [--runs plain reuse lenience-0.2 ...]
        [--seeds 0 1 2] [--at_once 8] [settings of TRL ...]

One command does everything. The model is first warmed up on worked solutions, once for all runs, until it would earn a
reward of `--warm_up`. Then every run trains in a process of its own, seed by seed, on the same problems. A run is named
by what it changes of the shipped defaults, joined by `+`:

    plain            TRL without reuse            reuse            the shipped defaults
    lenience-X       log-lenience (0.2, inf)      engine           drafts verified by vLLM
    refresh-X        refresh rate                 sleep            vLLM's sleep mode
    carry-N          carry-over limit             random, full     the baselines among the reuse rules
    prune            online pruning               wide             twice the responses of a prompt
    guard            the guard, which may pause   twice            TRL's `num_iterations=2`
    suffix           vLLM drafts by suffixes

`lenience-0.2+carry-2` changes both; `plain+prune` prunes without reuse, `plain+twice` trains twice on every response,
in as many rollouts and twice the steps: TRL's own way to need fewer responses. Pruning starts twice the responses that
it trains on: it is to be compared with `plain+wide`, which trains on all of them. It judges after a quarter of the
longest completion, and warms up for 20 steps, unless told otherwise. The guard, which may pause reuse, is off unless it
is asked for: it looks at the clock. Each run leaves `OUT/NAME/seed-N/specrl.jsonl`, with the seconds of all stages and
the expected reward of the policy after each step, and `log.txt`; `OUT/summary.json` is rewritten whenever a run ends.
The same command again skips what is finished and goes on with what was cut off, from its last checkpoint (every 8
steps); other runs and seeds may be added to OUT, by one command at a time.

With `--at_once N` runs go side by side: one on each GPU first, and then several on a GPU, which gains little: each
takes nearly as much longer, and its seconds are not to be compared with those of a run that has its GPU to itself.
Whatever else is on the command line is passed to the config of every run, for instance `--learning_rate 1e-5`.
`--model tiny` makes a small model and trains it on the CPU, by transformers' `generate`.

With `--widen K` the model, once it is warmed up, is made K times as wide by `widen.py`, and every run trains the wide
one: it begins with the small model's answers, and takes the time and the memory of a large one. About 1/K of the
learning rate that suits the small model suits the wide one; the defaults do not go by K, so give `--learning_rate`.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

GENERATIONS = 8
NAMED: dict[str, dict[str, Any]] = {
    "plain": {"use_spec_rollout": "false"},
    "reuse": {},
    "engine": {"spec_verifier": "engine"},
    "sleep": {"vllm_enable_sleep_mode": "true"},
    "random": {"spec_rule": "random"},
    "full": {"spec_rule": "full"},
    "guard": {"spec_guard": "true"},
    "prune": {"spec_prune": "true"},
    "wide": {"num_generations": 2 * GENERATIONS},
    "twice": {"num_iterations": 2},
    "suffix": {"spec_vllm_speculative_config": '{"method": "suffix", "num_speculative_tokens": 16}'},
}
NUMBERED = {"lenience": "spec_log_lenience", "refresh": "spec_refresh_rate", "carry": "spec_carry_limit"}
COMMON = dict(
    num_generations=GENERATIONS, logging_steps=1, lr_scheduler_type="constant", gradient_checkpointing="false",
    spec_guard="false", save_strategy="steps", save_steps=8, save_total_limit=1, report_to="none", disable_tqdm="true",
)  # fmt: skip
# 1024 responses a step, two steps an epoch.
ON_GPU = dict(
    per_device_train_batch_size=64, gradient_accumulation_steps=16, num_train_epochs=16, max_completion_length=512,
    learning_rate=2e-5, use_vllm="true", vllm_mode="colocate", spec_prune_detection_length=128,
)  # fmt: skip
# The same batch in smaller parts, where runs share a GPU.
SHARING = dict(per_device_train_batch_size=16, gradient_accumulation_steps=64)
# As `sums` was measured first, with short answers.
SUMS = dict(
    per_device_train_batch_size=128, gradient_accumulation_steps=8, num_train_epochs=10, max_completion_length=128,
    learning_rate=1e-5, spec_prune_detection_length=32,
)  # fmt: skip
# 64 responses a step, four steps an epoch.
TINY = dict(
    per_device_train_batch_size=64, num_train_epochs=10, max_completion_length=112, learning_rate=2e-4, use_cpu="true",
    bf16="false", spec_prune_detection_length=28,
)  # fmt: skip
PROBLEM = dict(prompts=256, task="totals", warm_up_problems=4000)
TINY_PROBLEM = dict(prompts=32, task="counting", terms=20, digits=2, warm_up_problems=1200)
# What comes before all runs: its folder in OUT, and the file that it writes last.
PREPARATIONS = {"warm-up": ("warm_model", "warm_up.json"), "widening": ("wide_model", "tokenizer_config.json")}
# What the runs of one OUT must have in common.
SHARED = (
    "model", "task", "all_or_nothing", "prompts", "terms", "digits", "warm_up", "warm_up_problems",
    "warm_up_learning_rate", "widen",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", required=True, help="a checkpoint, or `tiny`")
    parser.add_argument("--output", type=Path, required=True, help="folder of all runs")
    parser.add_argument("--runs", nargs="+", type=run_name, default=["plain", "reuse"], metavar="RUN", help="see above")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="SEED", help="default: 0")
    parser.add_argument("--at_once", type=int, default=1, help="runs that go side by side (default 1)")
    parser.add_argument(
        "--task", choices=("totals", "sorting", "counting", "sums"), help="default: totals; tiny: counting"
    )
    parser.add_argument("--all_or_nothing", action="store_true", help="no reward for an answer that is right in part")
    parser.add_argument("--prompts", type=int, help="problems to train on (default 256; tiny: 32)")
    parser.add_argument("--terms", type=int, help="length of each problem (default: the task's)")
    parser.add_argument("--digits", type=int, help="of its numbers (default: the task's)")
    parser.add_argument("--warm_up", type=float, default=0.3, help="expected reward to begin with; 0: no warm-up")
    parser.add_argument("--warm_up_problems", type=int, help="default 4000; tiny: 1200")
    parser.add_argument("--warm_up_steps", type=int, default=1000, help="most steps of the warm-up")
    parser.add_argument("--warm_up_learning_rate", type=float, help="default 1e-4; tiny: 4e-3")
    parser.add_argument("--widen", type=int, metavar="K", help="train a model K times as wide, of the same function")
    parser.add_argument("--summary_only", action="store_true", help="rewrite OUT/summary.json and train nothing")
    parser.add_argument("--commit", help="what is measured, where the checkout has no history to ask")
    parser.add_argument("--single", help=argparse.SUPPRESS)
    options, settings = parser.parse_known_args()
    tiny = options.model == "tiny"
    for name, value in (TINY_PROBLEM if tiny else PROBLEM).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.warm_up_learning_rate = options.warm_up_learning_rate or (4e-3 if tiny else 1e-4)
    if options.task == "sums":
        options.warm_up = 0.0
    if tiny and not options.warm_up:
        parser.error("--model tiny cannot do without a warm-up: a task with worked solutions, and --warm_up above 0")
    if "--seed" in settings:
        parser.error("--seed: the seeds of the runs are given by --seeds")
    if options.single == "warm-up":
        warm_up(options)
    elif options.single == "widening":
        widen(options)
    elif options.single:
        name, seed = options.single.split("@")
        train(options, settings, name, int(seed))
    else:
        side_by_side(options, settings)


def run_name(name: str) -> str:
    settings_of(name)
    return name


def settings_of(name: str) -> dict[str, Any]:
    """Settings of TRL's config that a run's name stands for."""
    settings: dict[str, Any] = {"use_spec_rollout": "true"}
    for part in name.split("+"):
        kind, _, value = part.partition("-")
        if part in NAMED:
            settings |= NAMED[part]
        elif kind in NUMBERED and re.fullmatch(r"[\d.]+|inf", value):
            settings[NUMBERED[kind]] = value
        else:
            known = ", ".join([*NAMED, *(f"{kind}-NUMBER" for kind in NUMBERED)])
            raise argparse.ArgumentTypeError(f"a run is named by {known}, joined by +, not {part!r}")
    return settings


# -- all runs


def side_by_side(options: argparse.Namespace, settings: list[str]) -> None:
    """Warm up, then train whatever is not finished, and sum up."""
    from run_summary import table, write_summary

    options.output.mkdir(parents=True, exist_ok=True)
    _refuse_other_settings(options, settings)
    summarise = functools.partial(write_summary, options.output, shlex.join(sys.argv), options.commit)
    if options.summary_only:
        summarise()
        print(table(options.output))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended too
    for job, wanted in (("warm-up", options.warm_up), ("widening", options.widen)):
        last = _directory(options, job) / PREPARATIONS[job][1]
        if wanted and not last.is_file():
            _run_all(options, [job], 1, summarise)
            if not last.is_file():
                sys.exit(f"the {job} failed: see {last.with_name('log.txt')}")
    jobs = [f"{name}@{seed}" for seed in options.seeds for name in options.runs]
    finished = [job for job in jobs if (_directory(options, job) / "finished.json").is_file()]
    if finished:
        print("finished before:", ", ".join(finished), flush=True)
    _run_all(options, [job for job in jobs if job not in finished], options.at_once, summarise)
    print(table(options.output))


def _run_all(options: argparse.Namespace, jobs: list[str], at_once: int, summarise: Callable[[], None]) -> None:
    """Start a process for each job, `at_once` at a time, and wait for all.

    On a GPU the next process of a slot imports what it needs, for half a minute, while the one before it trains.
    """
    devices = _devices()
    on_one_device = math.ceil(min(at_once, len(jobs)) / max(1, len(devices)))
    waiting = list(jobs)
    slots: list[list[tuple[str, subprocess.Popen]]] = [[] for _ in range(at_once)]
    since = [time.perf_counter()] * at_once
    try:
        while waiting or any(slots):
            for ahead in range(2 if devices else 1):
                for number, slot in enumerate(slots):
                    if waiting and len(slot) <= ahead:
                        environment = {"ON_ONE_DEVICE": str(on_one_device), "AFTER": ""}
                        if devices:
                            environment["CUDA_VISIBLE_DEVICES"] = devices[number % len(devices)]
                        if slot:
                            environment["AFTER"] = str(slot[-1][1].pid)
                        else:
                            since[number] = time.perf_counter()
                        job = waiting.pop(0)
                        slot.append((job, _start(options, job, environment)))
            time.sleep(0.5)
            for number, slot in enumerate(slots):
                if slot and slot[0][1].poll() is not None:
                    job, process = slot.pop(0)
                    now = time.perf_counter()
                    print(f"{job}: {now - since[number]:.0f} s, exit code {process.returncode}", flush=True)
                    since[number] = now
                    summarise()
    finally:
        for slot in slots:
            for _, process in slot:
                process.terminate()
                process.wait()


def _start(options: argparse.Namespace, job: str, environment: dict[str, str]) -> subprocess.Popen:
    folder = _directory(options, job)
    if _checkpoint(folder) is None:
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut off
        folder.mkdir(parents=True)
    with (folder / "log.txt").open("a") as log:
        return subprocess.Popen(
            [sys.executable, __file__, "--single", job, *sys.argv[1:]],
            env=os.environ | environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _devices() -> list[str]:
    """GPUs that this process may use, as in `CUDA_VISIBLE_DEVICES`."""
    import torch

    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return visible.split(",")
    return [str(index) for index in range(torch.cuda.device_count())]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _directory(options: argparse.Namespace, job: str) -> Path:
    if job in PREPARATIONS:
        return options.output / PREPARATIONS[job][0]
    name, seed = job.split("@")
    return options.output / name / f"seed-{seed}"


def _checkpoint(directory: Path) -> Path | None:
    """The last whole checkpoint of a run that was cut off."""
    # The Trainer writes its state after everything else.
    whole = directory.glob("checkpoint-*/trainer_state.json")
    return max((path.parent for path in whole), key=lambda path: int(path.name.split("-")[1]), default=None)


def _refuse_other_settings(options: argparse.Namespace, settings: list[str]) -> None:
    path, now = options.output / "settings.json", {name: getattr(options, name) for name in SHARED} | {"TRL": settings}
    if not path.is_file():
        path.write_text(json.dumps(now, indent=1) + "\n")
    before = json.loads(path.read_text())
    other = [name for name in now if before.get(name) != now[name]]
    if other and not options.summary_only:
        sys.exit(f"{options.output} holds runs with other settings ({', '.join(other)}): choose another --output")


# -- one run, in a process of its own


def warm_up(options: argparse.Namespace) -> None:
    """Train the model until it is what all runs begin with, or what is widened for them."""
    import torch
    from tiny_model import tiny_model
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from warm_up import warm_up
    from widen import empty

    if options.model == "tiny":
        model, tokenizer = tiny_model()
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)  # as TRL trains
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    if options.widen:
        empty(model, options.widen)  # refuses before the training, not after it
    problems = functools.partial(_problems, options)
    warm_up(
        model, tokenizer, problems(options.warm_up_problems, seed=1), problems(128, seed=2),
        _directory(options, "warm-up"), options.warm_up, options.warm_up_steps, options.warm_up_learning_rate,
    )  # fmt: skip


def widen(options: argparse.Namespace) -> None:
    """Make the wide model that all runs begin with."""
    from widen import write_widened

    write_widened(_small_model(options), _directory(options, "widening"), options.widen)


def _small_model(options: argparse.Namespace) -> str:
    return str(_directory(options, "warm-up")) if options.warm_up else options.model


def train(options: argparse.Namespace, settings: list[str], name: str, seed: int) -> None:
    """One run."""
    if options.model != "tiny" or "--use_vllm" in settings:
        _prepare_vllm()
    import torch
    from solutions import Solutions, expected_reward
    from stages import StepMeter
    from transformers import AutoTokenizer, PrinterCallback
    from trl import TrlParser

    from trl_integration import RunLog, SpecGRPOConfig, SpecGRPOTrainer
    from trl_integration.engine_settings import engine_settings

    _wait_for(os.environ["AFTER"])
    os.environ["MASTER_PORT"] = str(_free_port())
    directory, on_one_device = _directory(options, f"{name}@{seed}"), int(os.environ["ON_ONE_DEVICE"])
    defaults = COMMON | (TINY if options.model == "tiny" else ON_GPU) | (SUMS if options.task == "sums" else {})
    shared = torch.cuda.is_available() and on_one_device > 1
    defaults |= (SHARING if shared else {}) | {"output_dir": directory}
    if "num_generations" in settings_of(name):  # of as many prompts a step
        defaults["gradient_accumulation_steps"] = 2 * int(defaults.get("gradient_accumulation_steps", 1))
    if torch.cuda.is_available():  # the engines and the trainers of all runs on it have to fit
        defaults["vllm_gpu_memory_utilization"] = 0.3 / on_one_device
    flags = [str(part) for key, value in defaults.items() for part in (f"--{key}", value)]
    chosen = [str(part) for key, value in settings_of(name).items() for part in (f"--{key}", value)]
    (args,) = TrlParser(SpecGRPOConfig).parse_args_and_config([*flags, *settings, *chosen, "--seed", str(seed)])
    model = str(_directory(options, "widening")) if options.widen else _small_model(options)
    task = _problems(options, options.prompts)
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    # Else an engine takes what it measures to be left of its share, and counts, or fails over, what the other runs on
    # the device take and give back meanwhile.
    share = args.vllm_gpu_memory_utilization
    unmeasured = {"kv_cache_memory_bytes": int(share * torch.cuda.mem_get_info()[1])} if shared else {}
    with engine_settings(**unmeasured):
        trainer = SpecGRPOTrainer(
            model=model, args=args, reward_funcs=task, train_dataset=task.dataset(), processing_class=tokenizer
        )
    trainer.remove_callback(PrinterCallback)
    judge = None
    if task.solutions is not None:
        judge = functools.partial(expected_reward, solutions=Solutions.of(task, tokenizer))
    trainer.add_callback(StepMeter(trainer, judge))
    if trainer.spec_rollout is None:
        trainer.add_callback(RunLog())
    checkpoint = _checkpoint(directory)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    (directory / "finished.json").write_text(json.dumps({"runs_on_one_device": on_one_device}) + "\n")
    for leftover in [args.cache_directory(), *directory.glob("checkpoint-*")]:
        shutil.rmtree(leftover, ignore_errors=True)


def _problems(options: argparse.Namespace, count: int, seed: int = 0) -> Any:
    """So many problems of the task that was asked for."""
    import tasks

    sizes = {name: value for name in ("terms", "digits") if (value := getattr(options, name)) is not None}
    task = getattr(tasks, options.task)(count, seed=seed, **sizes)
    return task.all_or_nothing() if options.all_or_nothing else task


def _wait_for(process: str) -> None:
    """Return once the process of this number, if any, is gone."""
    while process and Path(f"/proc/{process}").exists():
        time.sleep(0.2)


def _prepare_vllm() -> None:
    """Its external launcher wants to be told that it is alone; on a CPU it needs what the tests do to it."""
    for variable, value in dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1").items():
        os.environ.setdefault(variable, str(value))
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        sys.path.append(str(Path(__file__).parents[1] / "tests"))
        import vllm_cpu

        vllm_cpu.repair()


if __name__ == "__main__":
    main()
