"""TRL training runs with a colocated vLLM engine, through `trainer.train()`."""

from __future__ import annotations

import gc
import logging

import pytest

pytest.importorskip("trl")
pytest.importorskip("vllm")

import numpy as np
import torch
import trl
import trl_tools
import truncation
import vllm_cpu
from conftest import build_tiny_model
from trl_runs import (
    METRICS,
    SHIFT,
    AsMade,
    CheckedGRPOTrainer,
    CheckedRLOOTrainer,
    RecordedReward,
    StopAt,
    build,
    counting_rows,
    history,
    settings,
    shifted,
    stored_beyond_policy,
    timeless,
)
from trl_update import ComparedGRPOTrainer

from specrl_plugins import FingerprintMismatch
from trl_integration import SpecGRPOConfig, SpecGRPOTrainer, SpecRLOOConfig

pytestmark = [pytest.mark.trl, pytest.mark.vllm]


@pytest.fixture(autouse=True, scope="module")
def repaired_vllm():
    vllm_cpu.repair()


ENGINE = dict(use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.2, vllm_max_model_length=64)


def run(model, output_dir, config=SpecGRPOConfig, trainer=CheckedGRPOTrainer, parts=None, resume=None, **changes):
    trainer = build(model, settings(output_dir, config, **(ENGINE | changes)), trainer=trainer, **(parts or {}))
    calls = watch(trainer.vllm_generation.llm)
    trainer.train(resume_from_checkpoint=resume)
    del trainer.vllm_generation.llm._original
    gc.collect()
    return trainer, calls


def watch(llm):
    """The calls that reach the real engine, in order: whatever is called on it, by whomever."""
    calls = []
    for name in ("generate", "wake_up", "sleep", "reset_prefix_cache"):
        original = getattr(llm._original, name)

        def watched(*args, name=name, original=original, **kwargs):
            calls.append(name)
            return original(*args, **kwargs)

        setattr(llm._original, name, watched)
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
    trainer, calls = run(tiny_model, tmp_path, trainer=counting_rows(CheckedGRPOTrainer, trl.GRPOTrainer), **changes)
    fraction = history(trainer, "spec/reused_token_fraction")
    first_epoch = len(fraction) // 3
    assert fraction[:first_epoch] == [0] * first_epoch
    assert min(fraction[first_epoch:]) > 0
    assert trainer.checked_rows == sum(history(trainer, "spec/draft_hit_rate")) * 8 + first_epoch * 8
    # What the trainer verified is not computed again, be it TRL that asks for it or what is stored; but for what the
    # loss is told, which is computed in the micro-batches of the update.
    total, by_engine = trainer.spec_rollout.total, changes.get("spec_verifier") == "engine"
    again = total.rows if "num_iterations" in changes else 0
    assert trainer.computed_rows == total.rows + again + (
        0 if by_engine else total.verified_rows - total.full_reuse_rows
    )
    # Stale weights in the engine would show here.
    assert all(value < 1e-4 for value in history(trainer, "sampling/sampling_logp_difference/max"))
    assert calls.count("generate") == (2 * len(fraction) - first_epoch if by_engine else len(fraction))


@pytest.mark.parametrize("trim", [True, False])
def test_no_pass_computes_the_padding_of_the_longest_row(tiny_model, tmp_path, trim):
    masks = []

    class Watched(trl.GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, *args, **kwargs):
            masks.append((torch.is_grad_enabled(), attention_mask))
            return super()._get_per_token_logps_and_entropies(model, input_ids, attention_mask, *args, **kwargs)

    changes = dict(per_device_train_batch_size=2, gradient_accumulation_steps=4, max_completion_length=32, beta=0.1)
    trainer = type("WatchedTrainer", (CheckedGRPOTrainer, Watched), {})
    trainer, _ = run(tiny_model, tmp_path, trainer=trainer, num_train_epochs=1, spec_trim_padding=trim, **changes)
    assert trainer.checked_rows == 3 * 8
    passes, updates = ([mask for in_update, mask in masks if in_update is kind] for kind in (False, True))
    assert len(updates) == 3 * 4
    tokens = [sum(mask.numel() for mask in kind) for kind in (passes, updates)]
    padded = sum(8 * max(mask.size(1) for mask in updates[4 * step : 4 * step + 4]) for step in range(3))
    if trim:
        assert all(mask.all() for mask in passes + updates)  # padding stands behind, where it needs none
        assert tokens[0] < 2 * padded and tokens[1] < padded  # the former of the policy and of the reference
    else:
        assert tokens == [2 * padded, padded]


def test_everything_is_logged_and_a_run_is_resumed(tiny_model, tmp_path, caplog):
    saved = dict(save_strategy="steps", save_steps=4, vllm_enable_sleep_mode=True)
    # As if it had been killed after step 7, with checkpoint 4 the last.
    trainer, _ = run(tiny_model, tmp_path, parts=dict(callbacks=[StopAt(7)]), **saved)
    logged = {name.removeprefix("spec/") for entry in trainer.state.log_history for name in entry}
    assert logged >= METRICS | {"time/spared_s", "masked_row_rate"}
    with caplog.at_level(logging.WARNING):
        resumed, _ = run(tiny_model, tmp_path, resume=str(tmp_path / "checkpoint-4"), **saved)
    assert "newer than step 4" in caplog.text
    hits, reused = (history(resumed, f"spec/{name}")[4:] for name in ("draft_hit_rate", "reused_token_fraction"))
    assert hits == [1] * 5 and min(reused) > 0  # what the forgotten ones had replaced is back
    assert resumed.checked_rows == 5 * 8


def test_flag_off_is_trl_and_flag_on_samples_the_same_first_epoch(tiny_model, tmp_path):
    runs = {}
    for name, trainer_class, config, changes in (
        ("plain", trl.GRPOTrainer, trl.GRPOConfig, dict()),
        ("again", trl.GRPOTrainer, trl.GRPOConfig, dict()),
        ("off", SpecGRPOTrainer, SpecGRPOConfig, dict(use_spec_rollout=False)),
        ("on", SpecGRPOTrainer, SpecGRPOConfig, dict()),
    ):
        reward = RecordedReward()
        args = settings(tmp_path / name, config, **ENGINE, **changes)
        trainer = build(tiny_model, args, trainer=trainer_class, reward_funcs=reward)
        trainer.train()
        runs[name] = (reward.completions, timeless(trainer))
    if runs["again"] != runs["plain"]:
        pytest.skip("TRL itself does not repeat with the engine of this machine")
    assert runs["off"] == runs["plain"]
    assert runs["on"][0][:3] == runs["plain"][0][:3]
    assert runs["on"][0][3:] != runs["plain"][0][3:]


@pytest.mark.parametrize("sampling", truncation.SETTINGS[1:], ids=truncation.name)
def test_every_cut_of_the_support_reuses_and_hands_over_and_stores_right_log_probs(tiny_model, tmp_path, sampling):
    trainer, _ = run(tiny_model, tmp_path, learning_rate=3e-4, **sampling)
    fraction = history(trainer, "spec/reused_token_fraction")
    assert fraction[:3] == [0, 0, 0] and min(fraction[3:]) > 0
    assert trainer.checked_rows == 9 * 8
    total = trainer.spec_rollout.total
    assert total.dropped_nonfinite == total.unstored_rows == 0


@pytest.mark.parametrize("correction", [True, False])
def test_with_a_cut_support_a_policy_that_does_not_change_reuses_everything(tiny_model, tmp_path, correction):
    trainer, calls = run(
        tiny_model,
        tmp_path,
        learning_rate=0.0,
        spec_log_lenience=1e-3,
        vllm_importance_sampling_correction=correction,
        **truncation.SETTINGS[-1],
    )
    assert history(trainer, "spec/full_reuse_rate") == [0, 0, 0] + [1] * 6
    assert calls.count("generate") == 3


@pytest.mark.parametrize(
    "changes",
    [dict(), dict(vllm_importance_sampling_correction=False), dict(spec_verifier="engine")],
    ids=lambda changes: "-".join(changes) or "default",
)
def test_what_is_stored_and_compared_is_the_verifiers(tiny_model, tmp_path, changes):
    """The trainer's forward is off by a known amount, the engine's is not: either is consistent in itself."""
    kind, verifier = shifted(SpecGRPOTrainer, trl.GRPOTrainer), changes.get("spec_verifier", "trainer")
    trainer, _ = run(tiny_model, tmp_path, trainer=kind, learning_rate=0.0, spec_rule="random", **changes)
    expected = SHIFT if verifier == "trainer" else 0.0
    np.testing.assert_allclose(stored_beyond_policy(trainer), expected, atol=1e-4)
    assert history(trainer, "spec/log_ratio_mean") == pytest.approx([0.0] * 6, abs=1e-4)
    other = {"trainer": "engine", "engine": "trainer"}[verifier]
    refused = "scorer: 'trainer' in the cache, 'vllm' now" if other == "engine" else "scorer: 'vllm' in the cache"
    with pytest.raises(FingerprintMismatch, match=refused):
        run(tiny_model, tmp_path, spec_verifier=other)


def test_with_a_cut_support_the_cache_of_the_other_sampling_library_is_refused(tiny_model, tmp_path):
    cuts = truncation.SETTINGS[-1]
    build(tiny_model, settings(tmp_path, **cuts), trainer=SpecGRPOTrainer).train()
    with pytest.raises(FingerprintMismatch, match=r"sampling\.sampler: 'transformers' in the cache, 'vllm' now"):
        run(tiny_model, tmp_path, **cuts)


@pytest.mark.parametrize("changes", [dict(), dict(spec_verifier="engine", beta=0.05)], ids=["trainer", "engine-kl"])
def test_lora_whose_adapters_are_merged_for_the_engine(tiny_model, tmp_path, changes):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    trainer, _ = run(tiny_model, tmp_path, parts=dict(peft_config=lora), learning_rate=1e-2, **changes)
    total = trainer.spec_rollout.total
    assert 0 < total.reused_tokens < total.drafted_tokens  # the policy moves
    assert trainer.checked_rows == 9 * 8


@pytest.mark.parametrize(
    "changes",
    [
        dict(vllm_importance_sampling_mode="sequence_mask", loss_type="bnpo"),
        dict(vllm_importance_sampling_mode="sequence_truncate"),
        dict(vllm_importance_sampling_mode="token_mask", loss_type="vespo"),
        dict(vllm_importance_sampling_mode="token_truncate", num_iterations=2, beta=0.05),
        dict(off_policy_mask_threshold=1e-3, spec_skip_zero_advantage=True),
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_corrected_samples_have_trls_gradient(tiny_model, tmp_path, changes):
    """With ratios that are not 1: reused tokens count as sampled by the policy that wrote them."""
    rows = dict(per_device_train_batch_size=2, gradient_accumulation_steps=4, max_completion_length=24)
    told = dict(spec_reused_logprobs="behaviour", num_train_epochs=2, learning_rate=5e-3)
    trainer, _ = run(tiny_model, tmp_path, trainer=ComparedGRPOTrainer, **rows | told | changes)
    assert trainer.differences and max(trainer.differences) < 1e-9


class CorrectedTrainer(SpecGRPOTrainer, AsMade):
    """Notes, of each rollout, what TRL's importance-sampling correction was told and what it made of that."""

    def _generate_single_turn(self, *args, **kwargs):
        answer = super()._generate_single_turn(*args, **kwargs)
        self.drafts = [
            (r.prefix, r.draft.logprobs[: r.prefix] if r.prefix else []) for r in self._pending.rollout.responses
        ]
        return answer

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self.corrections = [*getattr(self, "corrections", []), (self.drafts, self.as_made)]
        return output

    def _trim(self, batches, narrow):
        trimmed = super()._trim(batches, narrow)
        # The loss goes by its own log-probs, so that the ratio of its clipping is exactly 1.
        assert all(a.keys() - b.keys() == {"old_per_token_logps"} for a, b in zip(batches, trimmed, strict=True))
        return trimmed


LENIENCE = 0.5
SMALLEST = 0.7  # above exp(-0.5), so that some reused tokens are below


@pytest.mark.parametrize("told", ["verified", "behaviour"])
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_what_importance_sampling_correction_is_told_of_reused_tokens(tiny_model, tmp_path, mode, told):
    limits = dict(vllm_importance_sampling_clip_min=SMALLEST, vllm_importance_sampling_clip_max=1.3)
    settings = dict(vllm_importance_sampling_mode=mode, spec_reused_logprobs=told, num_train_epochs=2)
    trainer, _ = run(tiny_model, tmp_path, trainer=CorrectedTrainer, learning_rate=5e-3, **limits, **settings)
    rates, told_apart = [], 0
    for drafts, output in trainer.corrections:
        mask = output["completion_mask"].bool()
        old, sampling = output["old_per_token_logps"], output["sampling_per_token_logps"]
        for row, (prefix, draft) in enumerate(drafts):
            verified = old[row, :prefix].numpy()
            written = np.minimum(draft, LENIENCE + verified)
            np.testing.assert_allclose(sampling[row, :prefix], verified if told == "verified" else written, atol=1e-4)
            told_apart += bool(prefix) and np.abs(written - verified).max() > 1e-2
            # The engine's own tokens are sampled by the policy of today.
            np.testing.assert_allclose(
                sampling[row, prefix:][mask[row, prefix:]], old[row, prefix:][mask[row, prefix:]], atol=1e-4
            )
        differences = torch.where(mask, old - sampling, 0.0)
        ratio = (differences.sum(1, keepdim=True) if "sequence" in mode else differences).exp()
        inside = (ratio >= SMALLEST) & (ratio <= 1.3)
        expected = ratio.clamp(SMALLEST, 1.3) if "truncate" in mode else ratio * inside
        torch.testing.assert_close(output["importance_sampling_ratio"], expected, atol=1e-4, rtol=1e-4)
        if told == "behaviour":  # the rule that kept them bounds the ratio of each reused token
            assert (differences > -LENIENCE - 1e-4).all()
        else:
            assert (expected - 1).abs().max() < 1e-3
        rates.append(0.0 if "truncate" in mode else (~inside | ~mask).all(1).float().mean().item())
    assert told_apart > 0
    assert history(trainer, "spec/masked_row_rate") == pytest.approx(rates)
    if mode == "sequence_mask":
        assert (sum(rates) > 0) == (told == "behaviour")


def test_a_correction_that_masks_most_rows_is_warned_about(tiny_model, tmp_path, caplog):
    trainer, _ = run(tiny_model, tmp_path, num_train_epochs=1, vllm_importance_sampling_clip_max=1e-6)
    assert history(trainer, "spec/masked_row_rate") == [1, 1, 1]
    warnings = [record.getMessage() for record in caplog.records if "out of the loss" in record.getMessage()]
    assert len(warnings) == 1 and "100%" in warnings[0] and "token_truncate" in warnings[0]


def test_rows_that_were_left_out_for_their_length_are_not_masked_by_the_correction(tiny_model, tmp_path):
    trainer, _ = run(tiny_model, tmp_path, num_train_epochs=1, mask_truncated_completions=True)
    assert max(history(trainer, "completions/clipped_ratio")) > 0
    rates = history(trainer, "spec/masked_row_rate")  # none for a step whose rows were all too long
    assert rates and set(rates) == {0}


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
    trainer, _ = run(tiny_model, tmp_path, vllm_max_model_length=14, spec_verifier=verifier, num_train_epochs=6)
    total = trainer.spec_rollout.total
    assert total.reused_tokens > 0
    assert total.dropped_length == 0


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


def test_what_tools_answered_does_not_hide_that_a_row_is_masked(tmp_path):
    model = trl_tools.build_model(tmp_path / "model")
    clipped = dict(vllm_importance_sampling_mode="token_mask", vllm_importance_sampling_clip_max=1e-6)
    changes = trl_tools.SETTINGS | clipped | dict(num_train_epochs=1)
    trainer, _ = run(model, tmp_path, parts=trl_tools.parts(model), **changes)
    assert max(history(trainer, "tools/call_frequency")) > 0
    assert history(trainer, "spec/masked_row_rate") == [1, 1, 1]
