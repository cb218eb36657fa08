"""Prompts of a `reasoning-gym` task as a file that OpenRLHF reads; `reward_func.py` beside it scores the answers.

python examples/openrlhf/prepare_data.py --output data/sums.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import reasoning_gym

INSTRUCTION = "Think step by step, then give the final answer between <answer> and </answer>."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the file, .jsonl")
    parser.add_argument("--task", default="chain_sum", help="name of a reasoning-gym task")
    parser.add_argument("--settings", type=json.loads, default={}, help="settings of the task, as JSON")
    parser.add_argument(
        "--example", nargs=2, metavar=("QUESTION", "ANSWER"), help="a solved example before each question"
    )
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # Some tasks repeat themselves: keep the first problem of each question.
    problems = reasoning_gym.create_dataset(
        options.task, size=8 * options.prompts, seed=options.seed, **options.settings
    )
    different = {problem["question"]: problem for problem in reversed(list(problems))}
    problems = list(reversed(different.values()))[: options.prompts]
    if len(problems) < options.prompts:
        print(f"{options.task} has only {len(problems)} different problems with these settings.")
    example = []
    if options.example:
        question, answer = options.example
        example = [{"role": "user", "content": f"{question}\n{INSTRUCTION}"}, {"role": "assistant", "content": answer}]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w") as file:
        for problem in problems:
            row = {
                "input": [*example, {"role": "user", "content": f"{problem['question']}\n{INSTRUCTION}"}],
                "label": json.dumps({"task": options.task, "problem": problem}),
            }
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
