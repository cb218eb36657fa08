"""Majority vote against a vote that the quality head weighs, on sums that SmolLM2-135M-Instruct gets right at times.

    python -m examples.voting --output .voting

The head that pruning trains scores how promising a response is. At test time its score can weigh the votes of several
answers to one question. Here it learns from the answers to one half of the questions, and votes on the other half.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demo.smollm2 import build
from examples.demo.task import Sums
from specrl_plugins.pruning import QualityHead, weighted_vote


@dataclass(frozen=True)
class Answers:
    """Several answers to each of some questions.

    Args:
        numbers (`list[list[str | None]]` of shape `(questions, samples)`): the answers; `None` without a number.
        right (`NDArray[np.float64]` of shape `(questions, samples)`): 1 for a right one, 0 for a wrong one.
        hidden (`NDArray[np.float32]` of shape `(questions, samples, hidden)`): the last layer's hidden state from
            which the last token of each was sampled.
    """

    numbers: list[list[str | None]]
    right: NDArray[np.float64]
    hidden: NDArray[np.float32]


def answer(model: Any, tokenizer: Any, sums: Sums, rows: slice, options: argparse.Namespace) -> Answers:
    """Sample answers to some of the sums."""
    numbers, right, hidden = [], [], []
    states: list[torch.Tensor] = []  # the last layer's, of shape (rows, hidden) for each token that is sampled
    data = sums.dataset().select(range(rows.start, rows.stop))
    for start in range(0, len(data), options.batch):
        part = data.select(range(start, min(start + options.batch, len(data))))
        prompts = tokenizer.apply_chat_template(
            list(part["prompt"]), add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        hook = model.model.register_forward_hook(lambda _, args, output: states.append(output.last_hidden_state[:, -1]))
        with torch.no_grad():
            ids = model.generate(
                **prompts, do_sample=True, top_k=0, num_return_sequences=options.samples, max_new_tokens=options.cap
            )
        hook.remove()
        width = prompts["input_ids"].size(1)
        ends = (ids[:, width:] != tokenizer.pad_token_id).sum(1) - 1
        hidden.append(torch.stack(states)[ends, torch.arange(len(ids))].float().cpu().numpy())
        states.clear()
        texts = tokenizer.batch_decode(ids[:, width:], skip_special_tokens=True)
        problems = [problem for problem in part["problem"] for _ in range(options.samples)]
        numbers += [sums.last_number(text) for text in texts]
        right += [sums.score(number, problem) for number, problem in zip(numbers[-len(texts) :], problems, strict=True)]
    shape = (len(data), options.samples)
    return Answers(
        [numbers[start : start + options.samples] for start in range(0, len(numbers), options.samples)],
        np.reshape(right, shape),
        np.concatenate(hidden).reshape(*shape, -1),
    )


def voted(answers: Answers, scores: NDArray[np.float64], sums: Sums, rows: slice) -> float:
    """Share of questions that a vote with these scores, of shape `(questions, samples)`, gets right."""
    winners = [weighted_vote(row, weights) for row, weights in zip(answers.numbers, scores, strict=True)]
    return float(np.mean([sums.score(winner, rows.start + i) for i, winner in enumerate(winners)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(".voting"), help="where the model goes")
    parser.add_argument("--model", help="another model than SmolLM2-135M-Instruct")
    parser.add_argument("--questions", type=int, default=64, help="half to learn from, half to vote on")
    parser.add_argument("--samples", type=int, default=8, help="answers to each question")
    parser.add_argument("--terms", type=int, default=2, help="numbers that are added in a question")
    parser.add_argument("--cap", type=int, default=32, help="most tokens of an answer")
    parser.add_argument("--batch", type=int, default=16, help="questions sampled at once")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    path = options.model or str(build(options.output / "SmolLM2-135M-Instruct"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device)
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    sums = Sums(options.questions, options.terms)
    learned, asked = slice(0, len(sums.problems) // 2), slice(len(sums.problems) // 2, len(sums.problems))
    print(f"Sampling {options.samples} answers to each of {len(sums.problems)} questions ...", flush=True)
    past, new = (answer(model, tokenizer, sums, rows, options) for rows in (learned, asked))

    head = QualityHead(past.hidden.shape[2], seed=options.seed)
    for hidden, right in zip(past.hidden, past.right, strict=True):  # as in training: a little more with every group
        head.learn(hidden, right, np.ones(options.samples))
    scores = head.scores(new.hidden.reshape(-1, new.hidden.shape[2])).reshape(new.right.shape)
    equal = np.ones_like(scores)
    print(f"{'one answer':>28}  {new.right.mean():.1%}")
    print(f"{'majority vote':>28}  {voted(new, equal, sums, asked):.1%}")
    print(f"{'vote weighed by the head':>28}  {voted(new, scores, sums, asked):.1%}")
    print(f"{'any right answer':>28}  {new.right.max(1).mean():.1%}")


if __name__ == "__main__":
    main()
