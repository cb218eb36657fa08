"""TRL training runs with a colocated vLLM engine, through `trainer.train()`."""

from __future__ import annotations

import gc

import pytest

pytest.importorskip("trl")
pytest.importorskip("vllm")

import trl_tools
import vllm_cpu
from conftest import build_tiny_model
from trl_runs import CheckedGRPOTrainer, CheckedRLOOTrainer, build, history, settings

from trl_integration import SpecGRPOConfig, SpecRLOOConfig

pytestmark = [pytest.mark.trl, pytest.mark.vllm]


@pytest.fixture(autouse=True, scope="module")
def repaired_vllm():
    vllm_cpu.repair()


def run(model, output_dir, config=SpecGRPOConfig, trainer=CheckedGRPOTrainer, parts=None, **changes):
    engine = dict(use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.2, vllm_max_model_length=64)
    trainer = build(model, settings(output_dir, config, **(engine | changes)), trainer=trainer, **(parts or {}))
    calls = watch(trainer.vllm_generation.llm)
    trainer.train()
    del trainer.vllm_generation.llm._llm
    gc.collect()
    return trainer, calls


def watch(llm):
    """The calls that reach the real engine, in order: whatever is called on it, by whomever."""
    calls = []
    for name in ("generate", "wake_up", "sleep", "reset_prefix_cache"):
        original = getattr(llm._llm, name)

        def watched(*args, name=name, original=original, **kwargs):
            calls.append(name)
            return original(*args, **kwargs)

        setattr(llm._llm, name, watched)
    return calls


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(spec_verifier="engine"),
        dict(vllm_importance_sampling_correction=False),
        dict(temperature=0.7),
        dict(steps_per_generation=2, num_iterations=2, per_device_train_batch_size=4),
    ],
    ids=lambda changes: "-".join(changes) or "default",
)
def test_reuse_begins_with_the_second_epoch_and_log_probs_are_right(tiny_model, tmp_path, changes):
    trainer, calls = run(tiny_model, tmp_path, **changes)
    fraction = history(trainer, "spec/reused_token_fraction")
    first_epoch = len(fraction) // 3
    assert fraction[:first_epoch] == [0] * first_epoch
    assert min(fraction[first_epoch:]) > 0
    assert trainer.checked_rows == sum(history(trainer, "spec/draft_hit_rate")) * 8 + first_epoch * 8
    # Stale weights in the engine would show here.
    assert all(value < 1e-4 for value in history(trainer, "sampling/sampling_logp_difference/max"))
    assert calls.count("generate") == len(fraction) * (1 if changes.get("spec_verifier") != "engine" else 2) - (
        first_epoch if changes.get("spec_verifier") == "engine" else 0
    )


@pytest.mark.parametrize("verifier", ["trainer", "engine"])
def test_with_sleep_mode_the_engine_works_only_between_waking_and_sleeping(tiny_model, tmp_path, verifier):
    trainer, calls = run(tiny_model, tmp_path, vllm_enable_sleep_mode=True, spec_verifier=verifier)
    assert trainer.spec_rollout.total.reused_tokens > 0
    awake = False
    for call in calls:
        if call in ("wake_up", "sleep"):
            awake = call == "wake_up"
        else:
            assert awake, f"{call} on a sleeping engine"
    # One wake-up of the weights and one of the KV cache a rollout: verifying and continuing share them.
    assert calls.count("sleep") == 9 and calls.count("wake_up") == 18


def test_rloo(tiny_model, tmp_path):
    trainer, _ = run(tiny_model, tmp_path, SpecRLOOConfig, CheckedRLOOTrainer)
    assert trainer.spec_rollout.total.reused_tokens > 0
    assert trainer.checked_rows == 9 * 8


def test_all_reused_needs_no_engine_call(tiny_model, tmp_path):
    trainer, calls = run(tiny_model, tmp_path, spec_rule="full", learning_rate=0.0)
    assert history(trainer, "spec/full_reuse_rate") == [0, 0, 0] + [1] * 6
    assert calls.count("generate") == 3
    # What verification computed was the pass for the old log-probs.
    assert trainer.spec_rollout.total.spared_s == pytest.approx(trainer.spec_rollout.total.verify_s, rel=0.05)


@pytest.mark.parametrize(
    "model", [dict(pad_is_eos=True), dict(more_eos=3), dict(extra_vocab=8)], ids=["pad-is-eos", "many-eos", "padded"]
)
def test_every_kind_of_end_token_and_vocabulary(tmp_path, model):
    directory = build_tiny_model(tmp_path / "model", **model)
    trainer, _ = run(directory, tmp_path / "out", num_train_epochs=4)
    assert trainer.spec_rollout.total.reused_tokens > 0
    assert bool(trainer.spec_rollout.total.dropped_vocabulary) == ("extra_vocab" in model)


@pytest.mark.parametrize("verifier", ["trainer", "engine"])
def test_a_context_too_short_for_the_cap_ends_responses_without_failing(tiny_model, tmp_path, verifier):
    # Prompts have 5 tokens: 12 more do not fit.
    trainer, _ = run(tiny_model, tmp_path, vllm_max_model_length=14, spec_verifier=verifier)
    total = trainer.spec_rollout.total
    assert total.reused_tokens > 0
    # vLLM cannot score a draft that fills its context: those are left aside, and counted.
    assert bool(total.dropped_length) == (verifier == "engine")


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(spec_verifier="engine"),
        dict(vllm_enable_sleep_mode=True, vllm_importance_sampling_correction=False),
    ],
    ids=lambda changes: "-".join(changes) or "default",
)
def test_with_tools_the_first_turn_is_reused_and_the_engine_does_the_others(tmp_path, changes):
    model = trl_tools.build_model(tmp_path / "model")
    trainer, calls = run(model, tmp_path, parts=trl_tools.parts(model), **trl_tools.SETTINGS | changes)
    total = trainer.spec_rollout.total
    assert total.rows == trainer.checked_rows == 12 * 8
    assert min(history(trainer, "spec/reused_token_fraction")[3:]) > 0
    assert total.full_reuse_rows > trainer.went_on_rows > 0
    if changes.get("spec_verifier") != "engine":
        # One call for the first turns of a rollout, where any are unfinished, and one for each later turn.
        assert calls.count("generate") > 12
    if trainer.args.vllm_importance_sampling_correction:
        assert all(value < 1e-4 for value in history(trainer, "sampling/sampling_logp_difference/max"))
