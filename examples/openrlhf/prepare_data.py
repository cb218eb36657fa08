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
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    problems = reasoning_gym.create_dataset(options.task, size=options.prompts, seed=options.seed, **options.settings)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w") as file:
        for problem in problems:
            row = {
                "input": [{"role": "user", "content": f"{problem['question']}\n{INSTRUCTION}"}],
                "label": json.dumps({"task": options.task, "problem": problem}),
            }
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
