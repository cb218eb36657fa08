"""Worked solutions as token ids: to warm a model up on, and to know its expected reward without sampling."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tasks import Task
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True)
class Solutions:
    """Prompts followed by their worked solutions and an end token.

    Attributes:
        ids (`problems` tensors of shape `(tokens,)`): prompt and solution.
        lines (`problems` tensors of shape `(tokens,)`): line of the solution that a token belongs to; -1 in the prompt.
        in_part (`bool`): whether an answer that is right in part earns its share.
    """

    ids: list[torch.Tensor]
    lines: list[torch.Tensor]
    in_part: bool

    @staticmethod
    def of(task: Task, tokenizer: Any) -> Solutions:
        """Those of a task that has them."""
        ids, lines = [], []
        for prompt, solution in zip(task.prompts, task.solutions or [], strict=True):
            before = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
            after = [*tokenizer(solution, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            ends = torch.tensor(["\n" in tokenizer.decode([token]) for token in after])
            ids.append(torch.tensor(before + after))
            # The line break is part of the line that it ends, and the end token of the last one.
            lines.append(torch.cat([torch.full((len(before),), -1), ends.cumsum(0) - ends.long()]))
        return Solutions(ids, lines, task.in_part)

    def batches(self, order: list[int], size: int, device: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Padded `ids` and `lines` of shape `(size, tokens)`, in this order."""
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            yield (
                pad_sequence([self.ids[row] for row in rows], batch_first=True).to(device),
                pad_sequence([self.lines[row] for row in rows], batch_first=True, padding_value=-1).to(device),
            )


def losses(model: Any, ids: torch.Tensor, lines: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of shape `(batch, tokens - 1)`, nats; 0 outside the solutions."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.device.type == "cuda"):
        logits = model(ids).logits[:, :-1]  # padded on the right: nothing before the padding sees it
    wanted = ids[:, 1:].where(lines[:, 1:] >= 0, -100)
    # As one row a token: with the vocabulary in the middle a GPU would copy the logits, which are gigabytes, once more.
    return cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(), reduction="none").view_as(wanted)


@torch.no_grad()
def expected_reward(model: Any, solutions: Solutions, size: int = 16) -> float:
    """Mean reward that the policy would get at temperature 1, from one forward.

    The reward of an answer is the share of lines before the first wrong one. Given that the lines before are right,
    line i is right with the probability p_i of its tokens, so the expectation is the mean over i of p_1 p_2 ... p_i. Of
    all or nothing it is the product over all lines. (Another split of the same text into tokens is left out, and so is
    the cap.)
    """
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    order = sorted(range(len(solutions.ids)), key=lambda row: len(solutions.ids[row]))
    total = 0.0
    for ids, lines in solutions.batches(order, size, device):
        logprobs = -losses(model, ids, lines)
        count = int(lines.max()) + 1
        lines = lines[:, 1:]
        per_line = torch.zeros(len(ids), count + 1, device=device).scatter_add_(1, lines + 1, logprobs)[:, 1:]
        exists = torch.arange(count, device=device) <= lines.max(1, keepdim=True).values
        right = per_line.cumsum(1).exp()  # up to each line; past the last one, up to the last one
        total += float(((right * exists).sum(1) / exists.sum(1) if solutions.in_part else right[:, -1]).sum())
    model.train(training)
    return total / len(solutions.ids)
