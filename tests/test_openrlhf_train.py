"""OpenRLHF training runs through our launcher, with what its trackers get."""

from __future__ import annotations

import json
import math

import pytest

pytest.importorskip("openrlhf")
pytest.importorskip("vllm")
pytest.importorskip("ray")

import ray
import repeater
from openrlhf_runs import (
    LENIENT,
    PROMPTS,
    flags,
    history,
    parse,
    train,
    warm_engines,
    write_files,
)

from specrl_plugins import TrajectoryCache

pytestmark = [
    pytest.mark.openrlhf,
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.usefixtures("ray_running"),
]

SPEC = ["--use_spec_rollout", "--spec.refresh_rate", "0", "--spec.guard", "false", *LENIENT]
N = 4


@pytest.fixture(scope="module")
def first_run(ray_running, tiny_model, tmp_path_factory):
    """Three epochs of two steps, with an evaluation and a checkpoint; returns its folder and what it logged."""
    directory = tmp_path_factory.mktemp("run")
    train(line(tiny_model, directory, *SPEC))
    return directory, history(directory / "tensorboard")


@pytest.fixture(scope="module")
def warm_engine(ray_running, tiny_model, tmp_path_factory):
    """An engine for many short runs, each with a cache of its own."""
    args = parse(flags(tiny_model, tmp_path_factory.mktemp("engine"), *SPEC))
    with warm_engines(args) as engines:
        yield engines


def line(model, directory, *more, **changes):
    content = dict(
        train__num_episodes=3,
        eval__dataset=write_files(directory / "eval", PROMPTS[:2])["prompts.jsonl"],
        eval__steps=5,
        eval__n_samples_per_prompt=2,
        ckpt__save_steps=4,
        ckpt__best_metric_key="none",
        logger__tensorboard_dir=directory / "tensorboard",
        logger__wandb__run_name="run",
    )
    return flags(model, directory, *more, **content | changes)


def spec(step, name):
    return step[f"train/spec/{name}"]


def test_reuse_begins_with_the_second_epoch(first_run):
    _, steps = first_run
    assert len(steps) == 6
    assert [spec(step, "reused_tokens") for step in steps[:2]] == [0, 0]
    assert all(spec(step, "reused_tokens") > 0 and spec(step, "draft_hit_rate") == 1 for step in steps[2:])
    for step in steps:
        assert spec(step, "generated_tokens") + spec(step, "reused_tokens") == pytest.approx(
            step["train/rollout/response_length_mean"] * step["train/rollout/num_samples"], rel=1e-5
        )
        stages = sum(spec(step, f"time/{name}_s") for name in ("lookup", "verify", "generate", "store"))
        assert 0 < stages <= step["train/timing/generation"]
    # The policy learns, so that its engines, whose weights are synchronised, accept less than all.
    assert any(0 < spec(step, "draft_accept_rate") < 1 for step in steps[2:])


def test_evaluation_left_no_trace(first_run):
    directory, steps = first_run
    assert any("eval/eval_default_pass1" in step for step in steps)
    with TrajectoryCache(directory / "out" / "spec_cache") as cache:
        assert len(cache) == len(PROMPTS) * N
        assert cache.verify()[1] == 0
        assert {trajectory.step for trajectory in cache} == {5, 6}


def test_what_openrlhf_logs_by_itself_is_logged_too(first_run, tiny_model, tmp_path):
    train(line(tiny_model, tmp_path, eval__steps=1, train__num_episodes=1))
    without = set().union(*history(tmp_path / "tensorboard"))
    with_flag = set().union(*first_run[1])
    assert without and not any("spec" in name for name in without)
    assert {name for name in with_flag if "spec/" not in name} == without


def test_resuming_rewinds_the_cache_to_the_checkpoint(first_run, warm_engine, tiny_model):
    """The checkpoint is of step 4; what steps 5 and 6 left in the cache was of policies that are gone.

    What they had replaced is back, so that every prompt finds a draft.
    """
    directory, _ = first_run
    train(
        line(
            tiny_model,
            directory,
            *SPEC,
            "--ckpt.load_enable",
            train__num_episodes=4,
            logger__tensorboard_dir=directory / "resumed",
        ),
        warm_engine,
    )
    steps = history(directory / "resumed")
    assert len(steps) == 4
    assert [spec(step, "draft_hit_rate") for step in steps] == [1, 1, 1, 1]


def test_asynchronous_training(warm_engine, tiny_model, tmp_path):
    train(
        line(
            tiny_model,
            tmp_path,
            *SPEC,
            "--train.async_enable",
            algo__advantage__is_correction_level="token",
            eval__steps=4,
        ),
        warm_engine,
    )
    steps = [step for step in history(tmp_path / "tensorboard") if "train/spec/generated_tokens" in step]
    assert len(steps) == 6
    assert [spec(step, "reused_tokens") for step in steps[:2]] == [0, 0]
    assert all(spec(step, "draft_hit_rate") == 1 for step in steps[2:])
    assert sum(spec(step, "reused_tokens") for step in steps[2:]) > 0
    # One step of lag is all that parts the sampling log-probs from those of the policy that is trained.
    assert steps[0]["train/rollout_logprob_difference"] < 1e-4


@pytest.mark.parametrize(
    ("estimator", "more"),
    [
        ("rloo", ()),
        ("reinforce", ()),
        ("reinforce_baseline", ()),
        ("dr_grpo", ()),
        ("flash_reinforce", ()),
        ("gae", ()),
        ("group_norm", ("--algo.dynamic_filtering_enable", "--algo.dynamic_filtering_range", "0", "1")),
    ],
    ids=lambda value: value if isinstance(value, str) else "filtered" if value else "",
)
def test_every_estimator_trains_on_reused_responses(warm_engine, tiny_model, tmp_path, estimator, more):
    """Two epochs of one step. All rewards of the last prompt are 0, so that dynamic filtering drops it."""
    prompts = [*PROMPTS[:2], "?"]
    arguments = flags(
        tiny_model,
        tmp_path,
        *SPEC,
        *more,
        prompts=prompts,
        algo__advantage__estimator=estimator,
        logger__tensorboard_dir=tmp_path / "tensorboard",
    )
    train(arguments, warm_engine)
    first, second = history(tmp_path / "tensorboard")
    assert spec(first, "reused_tokens") == 0
    assert spec(second, "reused_tokens") > 0 and spec(second, "draft_hit_rate") == 1
    kept = len(prompts) - bool(more)
    for step in (first, second):
        assert spec(step, "cache_rows") == len(prompts) * N
        assert step["train/rollout/num_samples"] == kept * N
        assert 0 < step["train/actor_grad_norm"] < math.inf
        assert ("train/critic_loss" in step) == (estimator == "gae")
        assert math.isfinite(step.get("train/critic_loss", 0))


def test_engines_that_draft(ray_running, tiny_model, tmp_path):
    drafting = ["--spec.vllm_speculative_config", json.dumps(repeater.SPECULATIVE_CONFIG)]
    arguments = line(
        tiny_model, tmp_path, *SPEC, *drafting, train__num_episodes=2, algo__advantage__is_correction_level="token"
    )
    with warm_engines(parse(arguments)) as engines:
        assert ray.get(engines[0].speculative_method.remote()) == "custom_class"
        train(arguments, engines)
    first, *others = history(tmp_path / "tensorboard")
    assert spec(first, "reused_tokens") == 0 and sum(spec(step, "reused_tokens") for step in others) > 0
    assert all(step["train/rollout_logprob_difference"] < 1e-4 for step in (first, *others))
