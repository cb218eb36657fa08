"""Train SmolLM2-135M-Instruct twice with TRL's GRPO, plain and with speculative rollouts, and compare.

    python -m examples.demo --output .demo

Same model, prompts, seed and settings in both runs; the only difference is the trainer's name and its flag.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, ProgressCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from examples.demo.smollm2 import build
from examples.demo.task import Sums
from specrl_plugins import report
from trl_integration import SpecGRPOConfig, SpecGRPOTrainer
from trl_integration.callback import RunLog


class Progress(ProgressCallback):
    """A progress bar that shows the reward and the share of reused tokens, not every metric."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.training_bar is not None and "reward" in logs:
            shown = {"reward": f"{logs['reward']:.2f}"}
            if "spec/reused_token_fraction" in logs:
                shown["reused"] = f"{logs['spec/reused_token_fraction']:.0%}"
            self.training_bar.set_postfix(shown)


class PlainRolloutMeter(TrainerCallback):
    """Adds the seconds of a plain run's rollouts to its log; those with reuse log their own."""

    def __init__(self, model: Any):
        self.seconds = 0.0
        self._generate: Callable[..., Any] = model.generate
        model.generate = self._timed

    def _timed(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        output = self._generate(*args, **kwargs)
        self.seconds += time.perf_counter() - start
        return output

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "completions/mean_length" in logs:
            logs["rollout/seconds"], self.seconds = self.seconds, 0.0


def train(name: str, reuse: bool, options: argparse.Namespace) -> Path:
    """One run; returns its output directory."""
    output = options.output / name
    shutil.rmtree(output, ignore_errors=True)
    settings: dict[str, Any] = dict(
        output_dir=str(output),
        per_device_train_batch_size=options.rows,
        num_generations=4,
        max_completion_length=options.cap,
        num_train_epochs=options.epochs,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        temperature=options.temperature,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=options.seed,
    )
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    sums = Sums(options.prompts)
    trainer_class, config = (SpecGRPOTrainer, SpecGRPOConfig) if reuse else (GRPOTrainer, GRPOConfig)
    if reuse:
        # Answers this short cost about as much to verify as to write again: without the guard, which would pause reuse
        # by the clock, the demo shows the same on every machine.
        settings |= dict(use_spec_rollout=True, spec_guard=False)
    trainer = trainer_class(
        model=model,
        args=config(**settings),
        reward_funcs=sums,
        train_dataset=sums.dataset(),
        processing_class=AutoTokenizer.from_pretrained(options.model, padding_side="left"),
    )
    for callback in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(Progress())
    if not reuse:  # the trainer with reuse logs all of this itself
        trainer.add_callback(PlainRolloutMeter(model))
        trainer.add_callback(RunLog())
    trainer.train()
    return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(".demo"), help="where models, logs and the chart go")
    parser.add_argument("--model", help="another model than SmolLM2-135M-Instruct")
    parser.add_argument("--prompts", type=int, default=12, help="different prompts")
    parser.add_argument("--rows", type=int, default=8, help="responses an optimizer step, four to a prompt")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--cap", type=int, default=32, help="most tokens of a response")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    steps = options.prompts * 4 * options.epochs // options.rows
    minutes = max(1, round(8 * options.prompts * options.epochs / 48))  # 8 with the defaults
    print(f"Two runs of {steps} GRPO steps each: about {minutes} to {2 * minutes} minutes on two CPU cores.")
    options.model = options.model or str(build(options.output / "SmolLM2-135M-Instruct"))
    start = time.perf_counter()
    print("\n1. Plain TRL", flush=True)
    plain = report.load(train("plain", False, options))
    print("\n2. The same with use_spec_rollout=True", flush=True)
    reuse = report.load(train("reuse", True, options))
    chart = options.output / "demo.png"
    report.draw(reuse, plain, chart)
    print(f"\nBoth runs took {(time.perf_counter() - start) / 60:.1f} minutes.\n")
    print(report.table(reuse, plain))
    print(f"\nChart: {chart}")


if __name__ == "__main__":
    main()
