"""The tasks of the training benchmark: their rewards, and the expected reward that is computed instead of sampled."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("reasoning_gym")
torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import tasks  # noqa: E402
from solutions import Solutions, expected_reward  # noqa: E402
from tiny_model import tiny_model  # noqa: E402
from warm_up import warm_up  # noqa: E402


@pytest.mark.parametrize("name", ["totals", "sorting", "counting"])
def test_worked_solutions_earn_everything_and_a_wrong_line_ends_it(name):
    task = getattr(tasks, name)(16)
    for index, solution in enumerate(task.solutions):
        lines = solution.split("\n")
        assert task.score(solution, index) == 1.0
        assert task.score("\n".join([*lines[:5], lines[5] + "0", *lines[6:]]), index) == 5 / len(lines)
        assert task.score("\n".join(lines[:3]), index) == 3 / len(lines)
        assert task.score(solution + "\n", index) == (len(lines) - 1) / len(lines)  # it does not end where it should
        assert task.score("", index) == 0.0
        whole = task.all_or_nothing().score
        assert whole(solution, index) == 1.0
        assert not any(whole(other, index) for other in ("\n".join(lines[:-1]), solution + "\n", ""))


def test_expected_reward_is_the_mean_of_sampled_rewards(tmp_path):
    """Mean reward of 512 samples against the expectation, within four standard errors."""
    task = tasks.counting(2, terms=4, digits=1)
    model, tokenizer = tiny_model()
    warm_up(model, tokenizer, task, task, tmp_path, reward=0.3, most_steps=200, learning_rate=5e-3, every=2)
    rewarded = [task, task.all_or_nothing()]
    expected = [expected_reward(model, Solutions.of(kind, tokenizer)) for kind in rewarded]
    assert all(0.05 < reward < 0.9 for reward in expected)  # so that there is something to be wrong about
    torch.manual_seed(1)
    rewards = []
    for index, prompt in enumerate(task.prompts):
        ids = torch.tensor([tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)] * 256)
        sampled = model.generate(ids, do_sample=True, top_k=0, max_new_tokens=24, attention_mask=torch.ones_like(ids))
        texts = tokenizer.batch_decode(sampled[:, ids.size(1) :], skip_special_tokens=True)
        rewards += [[kind.score(text, index) for kind in rewarded] for text in texts]
    errors = np.std(rewards, axis=0) / np.sqrt(len(rewards))
    assert (np.abs(np.mean(rewards, axis=0) - expected) < 4 * errors).all()
