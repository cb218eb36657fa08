"""Reward function for `--reward.remote_url`: the task's own score of what stands between the answer tags."""

from __future__ import annotations

import json
import re
from typing import Any

import reasoning_gym
import torch


def reward_func(queries: list[str], prompts: list[str], labels: list[str], **kwargs: Any) -> dict[str, Any]:
    """Called by OpenRLHF.

    Args:
        queries (`list[str]` of length `batch`): prompt and response.
        prompts (`list[str]` of length `batch`): prompts.
        labels (`list[str]` of length `batch`): what `prepare_data.py` wrote.
    """
    rewards = []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        row = json.loads(label)
        answers = re.findall(r"<answer>(.*?)</answer>", query[len(prompt) :], re.DOTALL)
        score_answer: Any = reasoning_gym.get_score_answer_fn(row["task"])
        rewards.append(score_answer(answers[-1].strip() if answers else None, row["problem"]))
    correct = torch.tensor(rewards, dtype=torch.float32)
    return {"rewards": correct, "scores": correct, "extra_logs": {"correct": (correct == 1).float()}}
