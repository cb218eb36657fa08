"""TRL runs of the tiny model in processes of their own, which can be killed."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import trl_runs
from transformers import TrainerCallback

from trl_integration import RunLog, SpecGRPOTrainer
from trl_integration.callback import RUN_LOG

COMPLETIONS = "completions.jsonl"


@dataclass(frozen=True)
class Moment:
    """When a process is killed: `delay` seconds after it began to do something at an optimizer step.

    It does not go beyond the end of the step after that, however late the kill comes.
    """

    action: str  # "reward": between generating and storing; "store"; "save"; "end": of the step
    step: int
    delay: float


class _WatchedTrainer(SpecGRPOTrainer):
    """Says what it is about to do, and at which step."""

    watcher: Connection

    def say(self, action: str) -> None:
        self.watcher.send((action, self.state.global_step + (action in ("reward", "store"))))

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.say("save")
        super()._save_checkpoint(*args, **kwargs)


class _Watch(TrainerCallback):
    def __init__(self, trainer: _WatchedTrainer, until: int | None, kill: Moment | None):
        self.trainer, self.until, self.kill = trainer, until, kill

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.say("end")
        if self.kill is not None and state.global_step > self.kill.step:
            time.sleep(600)
        control.should_training_stop = state.global_step == self.until


def _train(
    watcher: Connection,
    model: str,
    output: Path,
    resume: str | None,
    until: int | None,
    kill: Moment | None,
    changes: dict[str, Any],
) -> None:
    torch.set_num_threads(1)

    def reward(completions: list, trainer_state: Any, **kwargs: Any) -> list[float]:
        trainer.say("reward")
        with (output / COMPLETIONS).open("a") as file:
            file.write(json.dumps({"step": trainer_state.global_step + 1, "completions": completions}) + "\n")
        return trl_runs.reward_digits(completions)

    # TRL's sampler deals shuffled prompts in another order after a resume: unshuffled, its resume is exact.
    args = trl_runs.settings(
        output, num_train_epochs=4, shuffle_dataset=False, save_strategy="steps", save_steps=4, **changes
    )
    trainer = trl_runs.build(model, args, trainer=_WatchedTrainer, reward_funcs=reward)
    trainer.watcher = watcher
    trainer.add_callback(_Watch(trainer, until, kill))
    if trainer.spec_rollout is None:
        trainer.add_callback(RunLog())
    else:
        put_many = trainer.spec_rollout.cache.put_many

        def put_and_say(trajectories: list) -> None:
            trainer.say("store")
            put_many(trajectories)

        trainer.spec_rollout.cache.put_many = put_and_say
    trainer.train(resume_from_checkpoint=resume)


def last_checkpoint(output: Path) -> tuple[int, str | None]:
    """Step and path of the last whole checkpoint: what TRL writes last is its `trainer_state.json`."""
    whole = [file for file in output.glob("checkpoint-*/trainer_state.json") if _is_json(file)]
    steps = {int(file.parent.name.removeprefix("checkpoint-")): str(file.parent) for file in whole}
    return max(steps.items(), default=(0, None))


def _is_json(file: Path) -> bool:
    try:
        json.loads(file.read_text())
    except ValueError:
        return False
    return True


def run(
    model: str, output: Path, kill: Moment | None = None, until: int | None = None, **changes: Any
) -> tuple[int, dict[int, dict[str, Any]]]:
    """Train in a process from the last checkpoint on, until the process is killed or ends.

    Returns the step it started from, and what it logged and sampled, by step.
    """
    start, resume = last_checkpoint(output)
    output.mkdir(exist_ok=True)
    for name in (RUN_LOG, COMPLETIONS):
        (output / name).unlink(missing_ok=True)
    context = multiprocessing.get_context("forkserver")
    watcher, watched = context.Pipe(duplex=False)
    process = context.Process(target=_train, args=(watched, model, output, resume, until, kill, changes))
    process.start()
    watched.close()
    for action, step in _said(watcher):
        if kill is not None and (action, step) == (kill.action, kill.step):
            time.sleep(kill.delay)
            process.kill()
            break
    else:
        assert kill is None, f"it never came to {kill}"
    process.join(120)
    assert process.exitcode == (0 if kill is None else -9)
    return start, _records(output)


def _said(watcher: Connection) -> Iterator[tuple[str, int]]:
    try:
        while True:
            yield watcher.recv()
    except EOFError:
        return


def _records(output: Path) -> dict[int, dict[str, Any]]:
    """What was logged and sampled at each step, without what depends on time or on free pages."""
    records: dict[int, dict[str, Any]] = {}
    for name in (COMPLETIONS, RUN_LOG):
        file = output / name
        for line in file.read_text().splitlines() if file.exists() else ():
            content = json.loads(line)
            if "completions" in content or "reward" in content:
                timeless = {k: v for k, v in content.items() if "time" not in k and k != "spec/cache_mib"}
                records.setdefault(content["step"], {}).update(timeless)
    return records
