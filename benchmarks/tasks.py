"""Tasks with long answers that a small model can learn: problems to be worked out line by line.

Most are of `reasoning-gym`.

The worked solution of a problem is derived from it, so that a model can be warmed up on others of the kind. The reward
is the share of lines before the first wrong one: it rises with each step that is learned, where a whole answer is right
only once nearly all of them are. The latter, as most verifiable rewards are, is `Task.all_or_nothing`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import reasoning_gym
from datasets import Dataset

Conversation = list[dict[str, str]]


@dataclass(frozen=True)
class Task:
    """Problems with a reward.

    Attributes:
        prompts (`problems` conversations): what is asked.
        solutions (`problems` strings, *optional*): worked solutions, where the task has any.
        score (callable): reward, between 0 and 1, of an answer to the problem of this index.
        in_part (`bool`): whether an answer that is right in part earns its share.
    """

    prompts: list[Conversation]
    solutions: list[str] | None
    score: Callable[[str, int], float]
    in_part: bool = True

    __name__ = "correct"  # under which TRL logs the reward

    def all_or_nothing(self) -> Task:
        """The same problems, with a reward of 1 for an answer that is right to its end, and of 0 for any other."""
        return replace(self, score=lambda answer, index: float(self.score(answer, index) == 1.0), in_part=False)

    def dataset(self) -> Dataset:
        """One row a problem: its prompt and its index."""
        return Dataset.from_list([{"prompt": prompt, "problem": i} for i, prompt in enumerate(self.prompts)])

    def __call__(self, completions: Sequence[Conversation], problem: Sequence[int], **kwargs: Any) -> list[float]:
        return [
            self.score(completion[0]["content"], index) for completion, index in zip(completions, problem, strict=True)
        ]


def leading_share(answer: str, solution: str) -> float:
    """Share of the lines of a solution that an answer gets right before its first wrong one.

    The last line is right only where the answer ends with it.
    """
    wanted, lines = solution.split("\n"), answer.split("\n")
    right = sum(takewhile(bool, (a == b for a, b in zip(lines, wanted, strict=False))))
    if right == len(wanted) < len(lines):
        right -= 1
    return right / len(wanted)


def totals(problems: int, terms: int = 24, digits: int = 2, seed: int = 0) -> Task:
    """Sums of many terms (`chain_sum`), worked out as running totals.

    `12-43+75` is answered with `12-43=-31`, and on the next line `-31+75=44`.

    Args:
        problems (`int`): how many.
        terms, digits (`int`): of each sum, and of each term at most.
        seed (`int`): of the problems.
    """
    data = _chain_sums(problems, terms, digits, seed)
    prompts, solutions = [], []
    for problem in data:
        expression = problem["metadata"]["expression"].replace(" ", "")
        first, *steps = re.findall(r"[+-]?\d+", expression)
        total, lines = int(first), []
        for step in steps:
            lines.append(f"{total}{step}={total + int(step)}")
            total += int(step)
        assert data.score_answer(str(total), problem) == 1.0
        prompts.append(_ask(expression))
        solutions.append("\n".join(lines))
    return _worked(prompts, solutions)


def sorting(problems: int, terms: int = 50, digits: int = 2, seed: int = 0) -> Task:
    """Lists of whole numbers (`number_sorting`) in ascending or descending order, one on each line.

    Args:
        problems (`int`): how many.
        terms, digits (`int`): numbers of each list, and digits of each number at most.
        seed (`int`): of the problems.
    """
    largest = 10**digits - 1
    data = reasoning_gym.create_dataset(
        "number_sorting", seed=seed, size=problems, min_numbers=terms, max_numbers=terms, min_decimals=0,
        max_decimals=0, min_value=-largest, max_value=largest,
    )  # fmt: skip
    prompts, solutions = [], []
    for problem in data:
        facts = problem["metadata"]
        assert data.score_answer(str(facts["sorted_numbers"]), problem) == 1.0
        given, ordered = ([str(int(float(n))) for n in facts[key]] for key in ("original_numbers", "sorted_numbers"))
        prompts.append(_ask(f"{facts['direction']}: {' '.join(given)}"))
        solutions.append("\n".join(ordered))
    return _worked(prompts, solutions)


def counting(problems: int, terms: int = 50, digits: int = 3, seed: int = 0) -> Task:
    """A range to be counted out, up or down, one number on each line: `17 by -4`. Not of `reasoning-gym`.

    Args:
        problems (`int`): how many, all different.
        terms, digits (`int`): numbers to be listed, and digits of the first of them at most. The step has one digit
            less, and at least one.
        seed (`int`): of the problems.
    """
    dealer, first, step = random.Random(seed), 10**digits, 10 ** max(1, digits - 1)
    pairs = dealer.sample([(a, b) for a in range(first) for b in range(1 - step, step) if b], problems)
    return _worked(
        [_ask(f"{start} by {by}") for start, by in pairs],
        ["\n".join(str(start + i * by) for i in range(1, terms + 1)) for start, by in pairs],
    )


def sums(problems: int, terms: int = 6, digits: int = 1, seed: int = 0) -> Task:
    """Sums of one-digit numbers after a solved example, all or nothing: the last number of the answer counts.

    Args:
        problems (`int`): how many.
        terms, digits (`int`): of each sum, and of each term at most.
        seed (`int`): of the problems.
    """
    data = _chain_sums(problems, terms, digits, seed)
    example = [
        {"role": "system", "content": "Solve step by step."},
        {"role": "user", "content": "9 - 3 + 5 - 2"},
        {"role": "assistant", "content": "9 - 3 = 6\n6 + 5 = 11\n11 - 2 = 9"},
    ]
    problems_ = list(data)

    def last_number(answer: str, index: int) -> float:
        found = re.findall(r"-?\d+", answer)
        return float(data.score_answer(found[-1] if found else None, problems_[index]))

    prompts = [[*example, *_ask(problem["metadata"]["expression"])] for problem in problems_]
    return Task(prompts, None, last_number, in_part=False)


TASKS = {"totals": totals, "sorting": sorting, "counting": counting, "sums": sums}


def _chain_sums(problems: int, terms: int, digits: int, seed: int) -> Any:
    return reasoning_gym.create_dataset(
        "chain_sum", seed=seed, size=problems, min_terms=terms, max_terms=terms, min_digits=1, max_digits=digits
    )


def _ask(question: str) -> Conversation:
    return [{"role": "user", "content": question}]


def _worked(prompts: list[Conversation], solutions: list[str]) -> Task:
    return Task(prompts, solutions, lambda answer, index: leading_share(answer, solutions[index]))
