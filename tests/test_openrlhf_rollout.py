"""OpenRLHF: real executors, samples generator, rollout actors with CPU engines, and the cache actor, under Ray."""

from __future__ import annotations

import sqlite3
import sys
import threading
import time
from contextlib import closing
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
    LENIENT,
    PROMPTS,
    flags,
    parse,
    warm_engines,
    write_files,
)
from transformers import AutoModelForCausalLM
from vllm import SamplingParams

from openrlhf_integration.cache_actor import running_cache
from openrlhf_integration.rollout_actor import COUNTS_KEY
from openrlhf_integration.samples_generator import SpecSamplesGenerator
from openrlhf_integration.start import start_cache_of
from specrl_plugins import TrajectoryCache, prompt_key
from specrl_plugins.cache import FILE_NAME

pytestmark = [pytest.mark.openrlhf, pytest.mark.ray, pytest.mark.vllm, pytest.mark.usefixtures("ray_running")]

N = 4
SETTINGS = dict(data__max_len=64, rollout__max_new_tokens=12, algo__advantage__is_correction_level="token")


@pytest.fixture(scope="module")
def engines(ray_running, tiny_model, tmp_path_factory):
    """Two engines, which outlive the caches of the tests."""
    args = parse(flags(tiny_model, tmp_path_factory.mktemp("engines"), "--use_spec_rollout", vllm__num_engines=2))
    with warm_engines(args) as engines:
        yield engines


@pytest.fixture(scope="module")
def policy(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


@pytest.fixture
def run(engines, tiny_model, tmp_path):
    """Starts a run: its cache, and a samples generator over a shuffled data set."""
    started = []

    def start(*line, rule="random", **changes):
        spec = [
            "--use_spec_rollout",
            "--spec.rule",
            rule,
            "--spec.refresh_rate",
            "0",
            "--spec.guard",
            "false",
            *LENIENT,
        ]
        args = parse(flags(tiny_model, tmp_path, *spec, *line, **SETTINGS | changes))
        started.append(start_cache_of(args))
        ray.get(started[-1].rewind.remote(0))
        ray.get([engine.meet.remote(args.train.agent_func_path, args.reward.remote_url) for engine in engines])
        strategy = get_strategy(args)
        tokenizer = get_tokenizer(tiny_model, None, "left", strategy)
        dataloader, eval_dataloader, _ = prepare_datasets(strategy, tokenizer)
        generator = SpecSamplesGenerator(strategy, dataloader, eval_dataloader, tokenizer, engines)
        return generator, dict(max_len=64, max_new_tokens=12, temperature=1.0, top_p=1.0)

    yield start
    for cache in started:
        ray.kill(cache)


def epoch(generator, kwargs):
    """All samples of one pass over the data, and the metrics of each batch; then one optimizer step passes."""
    samples, metrics, exhausted = [], [], False
    while not exhausted:
        batch, _, _, exhausted = generator.generate_samples(**kwargs)
        samples += batch
        metrics += [batch.metrics] if batch else []
    ray.get(running_cache().policy_is.remote(generator._epochs))
    return samples, metrics


def response_of(sample):
    """Prompt ids, response ids and their log-probs."""
    ids, actions = sample.sequences[0], sample.action_mask[0].bool()
    first = int(actions.nonzero()[0]) + 1
    last = int(actions.nonzero()[-1]) + 2
    return ids[:first].tolist(), ids[first:last].tolist(), sample.rollout_log_probs[0][actions].numpy()


def plain_logprobs(policy, prompt, tokens):
    with torch.no_grad():
        logits = policy(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()


def check(sample, policy, tokenizer):
    prompt, tokens, logprobs = response_of(sample)
    assert tokenizer.decode(prompt) == sample.prompts[0]
    assert 1 <= len(tokens) <= 12 and tokenizer.eos_token_id not in tokens[:-1]
    ended = tokens[-1] == tokenizer.eos_token_id
    assert ended or len(tokens) == 12
    assert bool(sample.truncated) == (not ended)
    np.testing.assert_allclose(logprobs, plain_logprobs(policy, prompt, tokens), atol=1e-4)
    assert sample.rewards is not None and sample.info["digits"] is not None
    return prompt, tokens


@pytest.mark.parametrize("rule", ["random", "speculative"])
def test_the_second_epoch_reuses(run, policy, rule):
    generator, kwargs = run(rule=rule)
    first, metrics = epoch(generator, kwargs)
    assert [(m["spec/reused_tokens"], m["spec/new_reward_fraction"]) for m in metrics] == [(0, 1), (0, 1)]
    second, metrics = epoch(generator, kwargs)
    assert all(m["spec/reused_token_fraction"] > 0 and m["spec/draft_hit_rate"] == 1 for m in metrics)
    assert all(m["spec/cache_rows"] == len(PROMPTS) * N for m in metrics)
    for samples in (first, second):
        assert len(samples) == len(PROMPTS) * N
        made = [check(sample, policy, generator.tokenizer) for sample in samples]
    # What is stored is what the trainer got, each sample of a prompt in a slot of its own.
    with TrajectoryCache(generator.args.spec.cache_directory(generator.args.ckpt.output_dir)) as cache:
        stored = {(t.prompt, t.slot): t for t in cache}
    for prompt in {tuple(prompt) for prompt, _ in made}:
        got = sorted(tokens for other, tokens in made if tuple(other) == prompt)
        assert got == sorted(stored[prompt_key(prompt), slot].tokens.tolist() for slot in range(N))
    assert all(t.step == 2 and t.reward is not None for t in stored.values())
    if rule == "speculative":  # the policy has not moved: all is kept
        assert metrics[0]["spec/full_reuse_rate"] == 1
        assert [m["spec/new_reward_fraction"] for m in metrics] == pytest.approx([0, 0])
        assert metrics[0]["spec/log_ratio_mean"] == pytest.approx(0, abs=1e-5)
    # Seconds to import, and memory of the head node: it comes with the pruner, which this run has not.
    assert not ray.get(running_cache().__ray_call__.remote(lambda actor: "torch" in sys.modules))


def test_an_agent_reuses_its_first_turn(run, policy, tmp_path):
    generator, kwargs = run(train__agent_func_path=write_files(tmp_path)["agent.py"], rollout__max_new_tokens=None)
    kwargs["max_new_tokens"] = None
    epoch(generator, kwargs)
    samples, metrics = epoch(generator, kwargs)
    assert all(m["spec/reused_tokens"] > 0 and m["spec/draft_hit_rate"] == 1 for m in metrics)
    turns = 0
    for sample in samples:
        ids, actions = sample.sequences[0], sample.action_mask[0].bool()
        positions = (actions.nonzero()[:, 0] + 1).tolist()
        turns += sum(b != a + 1 for a, b in pairwise(positions)) + 1
        with torch.no_grad():
            logprobs = policy(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        np.testing.assert_allclose(sample.rollout_log_probs[0][actions], logprobs[actions], atol=1e-4)
    assert turns > len(samples)  # some went on after their first
    # Responses may fill the context of 64 tokens; only first turns are stored.
    assert metrics[-1]["spec/cache_rows"] == len(PROMPTS) * N


def test_responses_that_fill_the_context_are_reused_too(run, policy):
    # Little room is left after such prompts, so that many responses reach the end of the context before they stop.
    prompts = ["+".join([str(n)] * 28) for n in range(6)]
    generator, kwargs = run(rule="full", rollout__max_new_tokens=None, prompts=prompts)
    kwargs["max_new_tokens"] = None
    first, _ = epoch(generator, kwargs)
    assert {int(s.total_length) for s in first if s.truncated} == {64}
    _, metrics = epoch(generator, kwargs)
    # vLLM cannot score a sequence that leaves no room: the last token, be it the end token, is sampled again.
    assert sum(m["spec/dropped_drafts"] for m in metrics) == 0
    assert sum(m["spec/generated_tokens"] for m in metrics) == sum(int(s.total_length) == 64 for s in first)


def test_damaged_rows_are_misses_and_counted_once(run, tmp_path):
    generator, kwargs = run(rule="full")
    epoch(generator, kwargs)
    (path,) = tmp_path.rglob(FILE_NAME)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE payloads SET cap = cap + 1 WHERE id IN (SELECT id FROM payloads LIMIT 5)")
    _, metrics = epoch(generator, kwargs)
    assert sum(m["spec/corrupt_rows"] for m in metrics) == 5
    _, metrics = epoch(generator, kwargs)
    assert sum(m["spec/corrupt_rows"] for m in metrics) == 0


def test_a_prompt_twice_in_a_batch_has_slots_of_its_own(run, policy):
    generator, kwargs = run(prompts=["1+1", "1+1", "2+2"])
    first, _ = epoch(generator, kwargs)
    _, metrics = epoch(generator, kwargs)
    assert metrics[0]["spec/cache_rows"] == 3 * N == len(first)
    assert metrics[0]["spec/draft_hit_rate"] == 1


def test_evaluation_bypasses_the_cache(run, tmp_path):
    files = write_files(tmp_path / "eval", PROMPTS)
    generator, kwargs = run(eval__dataset=files["prompts.jsonl"])
    epoch(generator, kwargs)
    before = ray.get(running_cache().size.remote())
    generator.ledger.lap()
    start = time.perf_counter()
    samples = generator.generate_eval_samples(**kwargs | dict(temperature=0.6, n_samples_per_prompt=2))
    took = time.perf_counter() - start
    assert generator.ledger.lap() < 0.1 * took  # and it is no part of a training step
    assert len(samples) == 2 * len(PROMPTS)
    assert ray.get(running_cache().size.remote()) == before
    assert generator.ledger.total.rows == N * len(PROMPTS)
    _, metrics = epoch(generator, kwargs)  # and training goes on to read it
    assert all(m["spec/draft_hit_rate"] == 1 for m in metrics)


def test_what_dynamic_filtering_drops_is_stored_before(run):
    generator, kwargs = run(
        "--algo.dynamic_filtering_enable", "--algo.dynamic_filtering_range", "2", "3", rollout__batch_size=6
    )
    samples, pass_rate, consumed, exhausted = generator.generate_samples(**kwargs)
    assert (len(samples), pass_rate, consumed, exhausted) == (0, 0, 6, True)
    assert ray.get(running_cache().size.remote())[0] == 6 * N
    assert generator.ledger.total.rows == 6 * N


def test_while_reuse_pauses_responses_are_stored_all_the_same(run):
    generator, kwargs = run()
    epoch(generator, kwargs)
    generator.ledger.guard._paused_for = 1
    batch, *_ = generator.generate_samples(**kwargs)
    assert batch.metrics["spec/paused_rate"] == 1 and batch.metrics["spec/reused_tokens"] == 0
    batch, *_ = generator.generate_samples(**kwargs)
    assert batch.metrics["spec/paused_rate"] == 0 and batch.metrics["spec/reused_tokens"] > 0


def test_a_reused_output_has_the_form_of_an_ordinary_one(run, engines):
    run()
    params = SamplingParams(temperature=1.0, max_tokens=12, min_tokens=1, skip_special_tokens=False, logprobs=1)
    ours, ordinary = ray.get(engines[0].one_of_each.remote([5, 6, 7], params))
    assert type(ours) is type(ordinary) and vars(ours).keys() == vars(ordinary).keys()
    mine, theirs = ours.outputs[0], ordinary.outputs[0]
    for name in ("text", "token_ids", "logprobs", "finish_reason", "cumulative_logprob", "index"):
        assert type(getattr(mine, name)) is type(getattr(theirs, name)), name
    assert ours.prompt_token_ids == ordinary.prompt_token_ids == [5, 6, 7]
    assert ours.finished and ours.prompt_logprobs is None
    assert [list(position) for position in mine.logprobs] == [[token] for token in mine.token_ids]
    params.logprobs = None
    ours, ordinary = ray.get(engines[0].one_of_each.remote([5, 6, 7], params))
    assert ours.outputs[0].logprobs is ordinary.outputs[0].logprobs is None


def test_concurrent_requests_do_not_mix(run, engines, policy, tmp_path):
    """Many prompts at once through one engine, twice: each response belongs to its own prompt and slot."""
    generator, _ = run()
    cache = running_cache()
    prompts = [f"{a}*{b}=" for a in range(8) for b in range(8)]
    params = SamplingParams(temperature=1.0, max_tokens=12, min_tokens=1, skip_special_tokens=False, logprobs=1)
    for visit in range(2):
        ray.get(cache.begin.remote(True))
        groups = ray.get(
            [
                engines[0].generate_responses.remote(prompt, prompt, params, 64, generator.tokenizer, num_samples=N)
                for prompt in prompts
            ]
        )
        ray.get(cache.policy_is.remote(visit + 1))
    counts = [answer[COUNTS_KEY] for group in groups for answer in group]
    assert all(count.rows == count.draft_rows == count.verified_rows == 1 for count in counts)
    assert sum(count.reused_tokens for count in counts) and sum(count.generated_tokens for count in counts)
    with TrajectoryCache(generator.args.spec.cache_directory(generator.args.ckpt.output_dir)) as stored:
        for prompt, group in zip(prompts, groups, strict=True):
            ids = generator.tokenizer(prompt, add_special_tokens=False)["input_ids"]
            kept = stored.get_many([(prompt_key(ids), slot) for slot in range(N)])
            for answer, trajectory in zip(group, kept, strict=True):
                tokens = answer["observation_tokens"][len(ids) :]
                assert answer["observation_tokens"][: len(ids)] == ids
                assert trajectory.tokens.tolist() == tokens
                expected = plain_logprobs(policy, ids, tokens)
                np.testing.assert_allclose(answer["rollout_log_probs"][len(ids) :], expected, atol=1e-4)


def test_the_tokenizer_does_not_travel_with_the_prompts(run):
    generator, kwargs = run()
    generator.tokenizer.lock = threading.Lock()  # cannot be pickled
    samples, _ = epoch(generator, kwargs)
    assert len(samples) == len(PROMPTS) * N


def test_a_damaged_cache_is_no_reason_to_stop(run):
    generator, kwargs = run()
    epoch(generator, kwargs)
    directory = generator.args.spec.cache_directory(generator.args.ckpt.output_dir)
    for file in directory.glob("trajectories.sqlite*"):
        file.write_bytes(b"nonsense")
    samples, metrics = epoch(generator, kwargs)
    assert len(samples) == len(PROMPTS) * N
    samples, metrics = epoch(generator, kwargs)
    assert metrics[-1]["spec/draft_hit_rate"] > 0


def test_an_engine_that_dies_mid_batch(run, engines):
    """Comes last: it takes an engine along."""
    generator, kwargs = run(rollout__batch_size=6)
    epoch(generator, kwargs)
    directory = generator.args.spec.cache_directory(generator.args.ckpt.output_dir)
    ray.get(engines[1].stall.remote())  # so that the batch is under way for sure

    def kill():
        time.sleep(2)
        ray.kill(engines[1])

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(ray.exceptions.RayActorError):
        generator.generate_samples(**kwargs)
    killer.join()
    with TrajectoryCache(directory) as cache:
        assert cache.verify() == (len(PROMPTS) * N, 0)
    assert ray.get(running_cache().size.remote())[0] == len(PROMPTS) * N
