"""Sums that are to be answered in a sentence: a `reasoning-gym` task that a small model learns in minutes."""

from __future__ import annotations

import re
from typing import Any

import reasoning_gym
from datasets import Dataset

EXAMPLE = [
    {"role": "system", "content": "Explain."},
    {"role": "user", "content": "2 + 6?"},
    {"role": "assistant", "content": "Starting at 2 and adding 6 gives 8, so 2 + 6 = 8."},
]


class Sums:
    """Prompts and reward.

    Args:
        prompts (`int`): how many different sums.
        terms (`int`, *optional*, defaults to `2`): how many numbers of one digit are added.
    """

    __name__ = "correct"  # under which TRL logs the reward

    def __init__(self, prompts: int, terms: int = 2):
        problems = reasoning_gym.create_dataset(
            "basic_arithmetic",
            seed=1,
            size=8 * prompts,
            min_terms=terms,
            max_terms=terms,
            min_digits=1,
            max_digits=1,
            operators=("+",),
            allow_parentheses=False,
            allow_negation=False,
        )
        self.score_answer = problems.score_answer
        # The task repeats itself: keep the first problem of each expression.
        different = {problem["metadata"]["expression"]: problem for problem in reversed(list(problems))}
        self.problems = list(reversed(different.values()))[:prompts]

    def dataset(self) -> Dataset:
        """One row a sum: a conversation with one solved example, and the number of the problem."""
        return Dataset.from_list(
            [
                {
                    "prompt": [*EXAMPLE, {"role": "user", "content": f"{problem['metadata']['expression']}?"}],
                    "problem": i,
                }
                for i, problem in enumerate(self.problems)
            ]
        )

    def __call__(self, completions: list[Any], problem: list[int], **kwargs: Any) -> list[float]:
        """The task's own score of the last number in each answer."""
        numbers = [self.last_number(completion[0]["content"]) for completion in completions]
        return [self.score(number, i) for number, i in zip(numbers, problem, strict=True)]

    @staticmethod
    def last_number(text: str) -> str | None:
        """What an answer says; `None` where it has no number."""
        found = re.findall(r"-?\d+", text)
        return found[-1] if found else None

    def score(self, number: str | None, problem: int) -> float:
        """The task's own score of a number as the answer to a problem."""
        return float(self.score_answer(number, self.problems[problem]))
