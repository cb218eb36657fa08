"""Supervised fine-tuning on worked solutions, up to a given expected reward: where reinforcement learning begins."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from solutions import Solutions, expected_reward, losses
from tasks import Task


def warm_up(
    model: Any,
    tokenizer: Any,
    train: Task,
    held_out: Task,
    directory: Path,
    reward: float,
    most_steps: int,
    learning_rate: float,
    rows: int = 64,
    every: int = 10,
) -> None:
    """Train a model until its expected reward on other problems reaches `reward`, and save it.

    Args:
        model, tokenizer: of transformers.
        train, held_out (`Task`): with worked solutions.
        directory (`Path`): where the model and a `warm_up.json` go.
        reward (`float`): at which to stop.
        most_steps (`int`): at which to stop anyway.
        learning_rate (`float`): of AdamW, after 50 steps of linear increase.
        rows (`int`, *optional*): solutions a step.
        every (`int`, *optional*): steps between two looks at the reward.
    """
    torch.manual_seed(0)
    dealer, start = random.Random(0), time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    solutions, judged = Solutions.of(train, tokenizer), Solutions.of(held_out, tokenizer)
    curve, step = [(0, expected_reward(model, judged))], 0
    while step < most_steps and curve[-1][1] < reward:
        order = dealer.sample(range(len(solutions.ids)), len(solutions.ids))
        for ids, lines in solutions.batches(order, rows, device):
            loss = losses(model, ids, lines).sum() / (lines >= 0).sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            if step % every == 0 or step == most_steps:
                curve.append((step, expected_reward(model, judged)))
                print(f"warm-up step {step}: loss {loss.item():.3f}, expected reward {curve[-1][1]:.3f}", flush=True)
                if step == most_steps or curve[-1][1] >= reward:
                    break
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    record = {"steps": step, "seconds": time.perf_counter() - start, "expected_reward": curve}
    (directory / "warm_up.json").write_text(json.dumps(record) + "\n")  # last: the model is whole
