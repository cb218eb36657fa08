"""Online pruning in OpenRLHF: real executors, rollout actors with CPU engines, the cache actor, and training runs."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise

import pytest

pytest.importorskip("openrlhf")
pytest.importorskip("vllm")
pytest.importorskip("ray")

import numpy as np
import ray
import torch
from openrlhf.trainer.ppo_trainer import prepare_datasets
from openrlhf.utils import get_strategy, get_tokenizer
from openrlhf_runs import (
    PROMPTS,
    flags,
    history,
    parse,
    train,
    warm_engines,
    write_files,
)
from test_openrlhf_rollout import check, epoch, response_of

from openrlhf_integration.cache_actor import Lesson, running_cache
from openrlhf_integration.rollout_actor import COUNTS_KEY
from openrlhf_integration.samples_generator import SpecSamplesGenerator
from openrlhf_integration.start import start_cache_of
from specrl_plugins import RolloutCounts, TrajectoryCache, prompt_key

pytestmark = [pytest.mark.openrlhf, pytest.mark.ray, pytest.mark.vllm, pytest.mark.usefixtures("ray_running")]

N, LENGTH = 4, 4
REUSE = ["--use_spec_rollout", "--spec.refresh_rate", "0", "--spec.guard", "false"]
PRUNE = ["--spec.prune", "--spec.prune_detection_length", str(LENGTH), "--spec.prune_warmup_steps", "1"]
SETTINGS = dict(data__max_len=64, rollout__max_new_tokens=12, algo__advantage__is_correction_level="token")

# 1 where the character at the detection length is an odd one: the hidden state there tells it.
REWARD = f"""
import torch

def reward_func(queries, prompts, labels, **kwargs):
    texts = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    rewards = torch.tensor([float(ord(text[:{LENGTH}][-1]) % 2) for text in texts])
    return {{"rewards": rewards, "scores": rewards, "extra_logs": {{"digits": rewards}}}}
"""

# Samples of a prompt differ in what they do, by turns.
AGENT = """
import asyncio
import itertools
import torch
from openrlhf.utils.agent import MultiTurnAgentExecutor, AgentInstanceBase

numbers = itertools.count()

class Turns(AgentInstanceBase):
    def __init__(self):
        self.turns = 0

    async def reset(self, states, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        self.turns += 1
        return {
            "rewards": torch.tensor(1.0),
            "scores": torch.tensor(1.0),
            "environment_feedback": " go on: " if self.turns < 2 else "",
            "done": self.turns == 2,
            "sampling_params": states["sampling_params"],
        }

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Turns)

    async def execute(self, prompt, label, sampling_params, **kwargs):
        number = next(numbers)
        if prompt == "raises late":  # those that survive
            await super().execute(prompt, label, sampling_params, **kwargs)
        if prompt == "raises late" or prompt.startswith("raises") and number % 4 == 3:
            raise ValueError("an executor fails")
        if prompt == "cached":
            ids = kwargs["hf_tokenizer"](prompt, add_special_tokens=False)["input_ids"]
            output = await kwargs["llm_engine"].generate(ids, sampling_params)
            logs = {"tokens": len(output.outputs[0].token_ids), "cached": output.num_cached_tokens}
            return dict(reward=1.0, extra_logs=logs)
        if prompt == "raises or holds on":
            try:
                return await super().execute(prompt, label, sampling_params, **kwargs)
            except BaseException:
                await asyncio.sleep(3600)
        if prompt.endswith("swallows"):
            try:
                return await super().execute(prompt, label, sampling_params, **kwargs)
            except BaseException:
                return await super().execute(prompt, label, sampling_params, **kwargs)
        if prompt == "asks for nothing" and number % 2:
            ids = kwargs["hf_tokenizer"](prompt, add_special_tokens=False)["input_ids"]
            return dict(
                prompt=prompt, label=label, reward=0.0, scores=0.0, observation_tokens=ids, action_ranges=[],
                rollout_log_probs=[0.0] * len(ids), truncated=False, extra_logs={},
            )
        if prompt == "changes" and number % 2:
            sampling_params = sampling_params.clone()
            sampling_params.top_k = 5
        return await super().execute(prompt, label, sampling_params, **kwargs)
"""


@pytest.fixture(scope="module")
def engines(ray_running, tiny_model, tmp_path_factory):
    """An engine, which outlives the caches of the tests."""
    args = parse(flags(tiny_model, tmp_path_factory.mktemp("engines"), *REUSE, *PRUNE))
    with warm_engines(args) as engines:
        yield engines


@pytest.fixture
def run(engines, tiny_model, tmp_path):
    """Starts a run: its cache, whose pruner may prune from the start unless it is new, and a samples generator."""
    started = []

    def start(*line, new=False, agent=False, prune=True, **changes):
        if agent:
            changes["train__agent_func_path"] = tmp_path / "agent.py"
        line = flags(tiny_model, tmp_path, *PRUNE * prune, *line, **SETTINGS | changes)
        (tmp_path / "reward.py").write_text(REWARD)
        (tmp_path / "agent.py").write_text(AGENT)
        args = parse(line)
        started.append(start_cache_of(args))
        ray.get(started[-1].rewind.remote(0))
        if prune and not new:
            make_ready(started[-1])
        ray.get([engine.meet.remote(args.train.agent_func_path, args.reward.remote_url) for engine in engines])
        strategy = get_strategy(args)
        tokenizer = get_tokenizer(tiny_model, None, "left", strategy)
        dataloader, eval_dataloader, _ = prepare_datasets(strategy, tokenizer)
        generator = SpecSamplesGenerator(strategy, dataloader, eval_dataloader, tokenizer, engines)
        return generator, dict(max_len=64, max_new_tokens=12, temperature=args.rollout.temperature, top_p=1.0)

    yield start
    for cache in started:
        ray.kill(cache)


def make_ready(cache):
    """Show the pruner scores that told successes from failures."""
    rng = np.random.default_rng(0)
    scores = rng.random(200)
    hidden = rng.normal(size=(200, 64)).astype(np.float32)
    rewards = (scores > 0.5).astype(float)
    yes, no = np.ones(200, bool), np.zeros(200, bool)
    ray.get(cache.teach.remote(Lesson(bytes(16), hidden, scores, np.ones(200), yes, no, rewards)))
    assert ray.get(cache.policy_is.remote(0))["prune/ready"] == 1


def waiting_lessons(cache=None):
    return ray.get((cache or running_cache()).__ray_call__.remote(lambda actor: actor._lessons))


def stored(generator):
    with TrajectoryCache(generator.args.spec.cache_directory(generator.args.ckpt.output_dir)) as cache:
        return {(t.prompt, t.slot): t for t in cache}


def groups_of(*args, **kwargs):
    """Answers of the rollout actor to prompts that it is sent all at once."""
    return ray.get(sent(*args, **kwargs), timeout=120)


def sent(generator, engine, prompts, samples=N, **changes):
    from vllm import SamplingParams

    asked = dict(temperature=1.0, max_tokens=12, min_tokens=1, skip_special_tokens=False, logprobs=1) | changes
    ray.get(running_cache().begin.remote(True))
    return [
        engine.generate_responses.remote(
            prompt, prompt, SamplingParams(**asked), 64, generator.tokenizer, num_samples=samples
        )
        for prompt in prompts
    ]


def totals(groups):
    return sum((answer[COUNTS_KEY] for group in groups for answer in group), RolloutCounts())


def test_pruned_responses_are_drafts_that_the_next_visit_continues(run, policy):
    generator, kwargs = run(*REUSE)
    samples, metrics = epoch(generator, kwargs)
    made = [check(sample, policy, generator.tokenizer) for sample in samples]
    assert Counter(tuple(prompt) for prompt, _ in made) == {tuple(prompt): N for prompt, _ in made}
    assert len(samples) == N * len(PROMPTS)
    total, drafts = generator.ledger.total, stored(generator)
    assert total.rows == total.judged_rows == len(drafts) == 2 * len(samples)
    assert total.pruned_rows == sum(t.finish_reason == "pruned" for t in drafts.values()) > 0
    assert all(len(t.tokens) == LENGTH and t.reward is None for t in drafts.values() if t.finish_reason == "pruned")
    assert sum(t.reward is not None for t in drafts.values()) == len(samples)
    # No token vanishes from the counts, and none of a pruned response is trained on.
    assert total.generated_tokens == sum(len(t.tokens) for t in drafts.values())
    trained = Counter((prompt_key(prompt), tuple(tokens)) for prompt, tokens in made)
    assert trained == Counter((t.prompt, tuple(t.tokens)) for t in drafts.values() if t.reward is not None)
    assert total.went_on_tokens == sum(len(t.tokens) - LENGTH for t in drafts.values() if len(t.tokens) > LENGTH)
    assert all(0 < m["prune/pruned_fraction"] <= 0.5 and m["prune/time/judge_s"] > 0 for m in metrics)

    epoch(generator, kwargs)
    again = stored(generator)
    assert generator.ledger.total.draft_rows == len(drafts) == len(again)
    went_on = [key for key, t in drafts.items() if t.finish_reason == "pruned" and len(again[key].tokens) > LENGTH]
    assert went_on
    assert any(again[key].tokens[:LENGTH].tolist() == drafts[key].tokens.tolist() for key in went_on)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_pruning_alone_keeps_nothing(run, policy, temperature):
    generator, kwargs = run(rollout__temperature=temperature)
    for _ in range(2):
        samples, metrics = epoch(generator, kwargs)
        assert len(samples) == N * len(PROMPTS)
    if temperature == 1.0:
        for sample in samples:
            check(sample, policy, generator.tokenizer)
    total = generator.ledger.total
    assert total.judged_rows == 4 * len(samples) and total.pruned_rows > 0 and not total.draft_rows
    assert metrics[-1]["spec/cache_rows"] == 0
    assert not generator.args.spec.cache_directory(generator.args.ckpt.output_dir).exists()


@pytest.mark.parametrize("reuse", [True, False])
def test_hidden_states_are_those_of_the_policy(run, policy, reuse):
    """Tolerance: 1e-3 of a state's largest entry (fp32; the engine attends in other orders)."""
    generator, kwargs = run(*REUSE if reuse else [], "--spec.rule", "full", rollout__batch_size=6)
    for visit in range(1 + reuse):
        samples, *_ = generator.generate_samples(**kwargs)
        lessons = waiting_lessons()
        assert generator.generate_samples(**kwargs)[-1]  # the epoch is over
        ray.get(running_cache().policy_is.remote(visit + 1))
        judged = np.concatenate([lesson.hidden for lesson in lessons])
        rewards = np.concatenate([lesson.rewards for lesson in lessons])
        assert len(judged) == len(samples) and Counter(len(lesson.rewards) for lesson in lessons) == {N: len(PROMPTS)}
        left = list(range(len(judged)))
        for sample in samples:
            prompt, tokens, _ = response_of(sample)
            head = torch.tensor([prompt + tokens[:LENGTH]])
            with torch.no_grad():
                state = policy(head, output_hidden_states=True).hidden_states[-1][0, -1].numpy()
            row = min(left, key=lambda row: np.abs(judged[row] - state).max())
            np.testing.assert_allclose(judged[row], state, atol=1e-3 * np.abs(state).max())
            assert rewards[row] == float(sample.rewards[0])
            left.remove(row)
    if reuse:  # some drafts were whole: nothing was generated before they were judged
        assert generator.ledger.total.full_reuse_rows > 0


def test_while_the_pruner_is_not_ready_no_more_start(run):
    generator, kwargs = run(*REUSE, "--spec.prune_warmup_steps", "3", new=True)
    samples, metrics = epoch(generator, kwargs)
    total = generator.ledger.total
    assert total.rows == total.judged_rows == len(samples) == N * len(PROMPTS) and not total.pruned_rows
    assert [m["prune/pruned_fraction"] for m in metrics] == [0, 0]


def test_evaluation_is_left_alone(run, tmp_path):
    files = write_files(tmp_path / "eval", PROMPTS)
    generator, kwargs = run(*REUSE, eval__dataset=files["prompts.jsonl"])
    samples = generator.generate_eval_samples(**kwargs | dict(temperature=0.6, n_samples_per_prompt=2))
    assert len(samples) == 2 * len(PROMPTS)
    assert not waiting_lessons() and not generator.ledger.total.rows
    assert ray.get(running_cache().size.remote())[0] == 0


def test_a_prompt_twice_in_a_batch_makes_two_groups(run, engines):
    generator, _ = run(*REUSE)
    groups = groups_of(generator, engines[0], ["1+1", "1+1", "2+2"])
    assert [len(group) for group in groups] == [N, N, N]
    assert sorted(len(lesson.rewards) for lesson in waiting_lessons()) == [N, N, N]
    assert totals(groups).rows == len(stored(generator)) == 6 * N


def test_responses_that_fill_the_context_are_judged_too(run):
    """There is room for as many tokens as are judged, of which the engine cannot take the last one into a context."""
    prompts = ["+".join([str(n)] * 30) + "=" for n in range(3)]
    generator, kwargs = run(*REUSE, rollout__max_new_tokens=None, prompts=prompts)
    for _ in range(2):
        samples, _ = epoch(generator, kwargs | dict(max_new_tokens=None))
        assert len(samples) == N * len(prompts)
        assert 64 in {int(sample.total_length) for sample in samples}
    total = generator.ledger.total
    assert total.judged_rows == 4 * len(samples) and not total.pruned_rows  # none was stopped before its end


@pytest.mark.parametrize("prompt", ["go", "changes", "asks for nothing", "swallows"])
def test_whatever_an_executor_does_as_many_as_asked_for_survive(run, engines, prompt):
    generator, _ = run(*REUSE, agent=True)
    for _ in range(2):
        (group,) = groups_of(generator, engines[0], [prompt], max_tokens=None)
        assert len(group) == N
        (lesson,) = waiting_lessons()
        assert len(lesson.rewards) == N and not np.isnan(lesson.rewards).any()
        ray.get(running_cache().policy_is.remote(generator._epochs + 1))
    trained = [answer for answer in group if answer["action_ranges"]]
    assert all(end > start for answer in trained for start, end in answer["action_ranges"])


def test_survivors_go_on_from_keys_and_values_that_are_still_there(run, engines):
    """Blocks have 32 tokens, and the prompt 6: whole blocks of it are none."""
    generator, _ = run("--spec.prune_detection_length", "40", rollout__max_new_tokens=56, agent=True)
    (group,) = groups_of(generator, engines[0], ["cached"], samples=16, max_tokens=56)
    long = [answer["extra_logs"] for answer in group if answer["extra_logs"]["tokens"] > 40]
    assert long and all(logs["cached"] == 32 for logs in long)


@pytest.mark.parametrize("prune", [True, False])
@pytest.mark.parametrize("prompt", ["raises", "raises late", "raises or swallows"])
def test_an_executor_that_fails_ends_its_group_and_no_other(run, engines, prompt, prune):
    """Nothing of the group is left in the engine, which could not reset its prefix cache with it."""
    generator, _ = run(*REUSE, agent=True, prune=prune)
    for others in [[], ["go"]]:
        failing, *going = sent(generator, engines[0], [prompt, *others], max_tokens=None)
        with pytest.raises(ray.exceptions.RayTaskError, match="an executor fails"):
            ray.get(failing, timeout=120)
        assert [len(group) for group in ray.get(going, timeout=120)] == [N] * len(others)
        assert ray.get(engines[0].get_num_unfinished_requests.remote()) == 0
    ray.get(engines[0].reset_prefix_cache.remote())
    assert len(stored(generator)) == (2 * N if prune else N)  # those that went on, whether or not they survived


def test_an_executor_that_does_not_end_does_not_keep_an_error(run, engines):
    generator, _ = run(*REUSE, agent=True)
    with pytest.raises(ray.exceptions.RayTaskError, match="an executor fails"):
        groups_of(generator, engines[0], ["raises or holds on"], max_tokens=None)
    assert ray.get(engines[0].get_num_unfinished_requests.remote()) == 0


def test_a_group_that_is_cancelled_leaves_nothing_in_the_engine(run, engines):
    generator, _ = run(*REUSE, agent=True)

    def unfinished():
        return ray.get(engines[0].get_num_unfinished_requests.remote())

    (going,) = sent(generator, engines[0], ["go"], max_tokens=None)
    wait_until(unfinished)
    ray.cancel(going)
    with pytest.raises((ray.exceptions.TaskCancelledError, ray.exceptions.RayTaskError)):
        ray.get(going, timeout=120)
    wait_until(lambda: not unfinished())


def wait_until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_judgement_that_fails_fails_its_group(run, engines):
    """And leaves no sample waiting."""
    generator, _ = run(*REUSE)
    ray.get(running_cache().__ray_call__.remote(lambda actor: setattr(actor._pruner, "judge", None)))
    with pytest.raises(ray.exceptions.RayTaskError, match="not callable"):
        groups_of(generator, engines[0], ["1+1"])
    ray.get(running_cache().__ray_call__.remote(lambda actor: delattr(actor._pruner, "judge")))
    assert len(groups_of(generator, engines[0], ["1+1"])[0]) == N


def test_the_pruner_learns_the_same_in_whatever_order_groups_come(run):
    rng = np.random.default_rng(1)
    lessons = [
        Lesson(
            bytes([group % 3]) * 16,
            rng.normal(size=(6, 64)).astype(np.float32),
            rng.random(6),
            np.full(6, 0.5),
            np.zeros(6, bool),
            np.zeros(6, bool),
            rng.integers(0, 2, 6).astype(float),
        )
        for group in range(9)
    ]
    learned = []
    for order in (lessons, lessons[::-1]):
        run()
        cache = running_cache()
        for lesson in order:
            ray.get(cache.teach.remote(lesson))
        ray.get(cache.policy_is.remote(1))
        judgement = ray.get(cache.judge.remote(bytes(16), lessons[0].hidden, np.zeros(6, bool), 3))
        learned.append((judgement.scores.tolist(), judgement.survives.tolist()))
        ray.kill(cache)
    assert learned[0] == learned[1]


# -- training runs


def line(model, directory, *more, **changes):
    arguments = flags(
        model,
        directory,
        *PRUNE,
        *more,
        **dict(
            rollout__batch_size=6,
            train__batch_size=48,
            rollout__n_samples_per_prompt=8,
            ckpt__best_metric_key="none",
            logger__tensorboard_dir=directory / "tensorboard",
            train__num_episodes=6,
            # A policy that hardly moves: one that learns leaves fewer and fewer failures to tell from successes, and
            # now and then too few for the pruner to be ready within these steps.
            actor__adam__lr=1e-4,
        )
        | changes,
    )
    (directory / "reward.py").write_text(REWARD)
    return arguments


@pytest.mark.slow
def test_asynchronous_training_prunes_without_reuse(engines, tiny_model, tmp_path):
    """Checkpoints are those of the best evaluation."""
    evaluation = dict(eval__dataset=write_files(tmp_path / "eval", PROMPTS[:2])["prompts.jsonl"], eval__steps=3)
    checkpoints = dict(ckpt__save_steps=-1, ckpt__best_metric_key=None)
    changes = evaluation | checkpoints | dict(train__num_episodes=8)
    train(line(tiny_model, tmp_path, "--train.async_enable", **changes), engines)
    steps = [step for step in history(tmp_path / "tensorboard") if "train/actor_grad_norm" in step]
    check_steps(steps, 8)
    assert not any(step["train/spec/cache_rows"] for step in steps)
    assert not (tmp_path / "out" / "spec_cache").exists()
    states, _ = torch.load(tmp_path / "ckpt" / "_actor" / "states.pt", weights_only=False)
    assert learned_at(tmp_path, step := states["global_step"]) >= step  # one batch may be ahead of the weights


@pytest.mark.slow
def test_a_run_that_reuses_prunes_and_resumes(engines, tiny_model, tmp_path):
    """The checkpoint is of step 4; the run that resumes goes on with what its pruner had learned there."""
    train(line(tiny_model, tmp_path, *REUSE, ckpt__save_steps=4), engines)
    steps = history(tmp_path / "tensorboard")
    check_steps(steps, 6)
    assert learned_at(tmp_path, 4) == 4
    tensorboard = tmp_path / "resumed"
    changes = dict(train__num_episodes=8, ckpt__save_steps=4, logger__tensorboard_dir=tensorboard)
    train(line(tiny_model, tmp_path, *REUSE, "--ckpt.load_enable", **changes), engines)
    resumed = history(tensorboard)
    assert len(resumed) == 4 and all(step["train/spec/reused_tokens"] > 0 for step in resumed)
    assert learned_at(tmp_path, 8) == 8
    for part in (steps, [*steps[:4], *resumed]):  # a step prunes if the step before left the pruner ready
        for before, step in pairwise(part):
            if before["train/prune/ready"] and not step["train/prune/pruned_fraction"]:
                # The policy may have learned to end before anything is left to give up.
                assert step["train/rollout/response_length_mean"] <= LENGTH
            assert before["train/prune/ready"] or not step["train/prune/pruned_fraction"]


def check_steps(steps, number):
    assert len(steps) == number
    for step in steps:
        assert step["train/rollout/num_samples"] == 48
        assert step["train/prune/time/judge_s"] > 0
        assert 0 <= step["train/prune/pruned_fraction"] <= 0.5
    assert steps[0]["train/prune/time/learn_s"] > 0
    # The reward is told by the state that is judged: with two standard errors of 0.05 an AUC of 0.7 is out of doubt.
    assert steps[0]["train/prune/pruned_fraction"] == 0
    assert any(step["train/prune/pruned_fraction"] > 0 for step in steps)


def learned_at(directory, step):
    """Steps that the pruner had learned from at the only checkpoint that there is of it, which is that of `step`."""
    (saved,) = (directory / "ckpt" / "spec_pruner").iterdir()
    assert saved.name == f"global_step{step}.pt"
    return torch.load(saved, weights_only=True)["steps"]
