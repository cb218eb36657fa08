"""TRL training runs on the transformers path, through `trainer.train()`."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("trl")

import numpy as np
import torch
import trl
import truncation
from conftest import build_tiny_model
from datasets import Dataset
from disk import full_disk
from tokenizers import pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    TrainerCallback,
)
from trl_runs import (
    METRICS,
    PROMPTS,
    SHIFT,
    CheckedGRPOTrainer,
    CheckedRLOOTrainer,
    RecordedReward,
    StopAt,
    build,
    counting_rows,
    history,
    reward_digits,
    settings,
    shifted,
    stored_beyond_policy,
    timeless,
)

from specrl_plugins import CacheError, FingerprintMismatch, RolloutCounts, TrajectoryCache, report
from specrl_plugins.pruning import PruningSettings
from trl_integration import SpecGRPOConfig, SpecGRPOTrainer, SpecRLOOConfig, SpecRLOOTrainer
from trl_integration.callback import RUN_LOG, RunLog, summary
from trl_integration.checks import UnsupportedSetting, check_config, epochs, warm_share

pytestmark = pytest.mark.trl


def test_reuse_begins_with_the_second_epoch_and_everything_is_logged(tiny_model, tmp_path, capsys):
    trainer = build(tiny_model, settings(tmp_path, num_train_epochs=4), trainer=CheckedGRPOTrainer)
    trainer.train()
    fraction = history(trainer, "spec/reused_token_fraction")
    assert fraction[:3] == [0, 0, 0]
    assert len(fraction) == 12 and min(fraction[3:]) > 0
    logged = {name.removeprefix("spec/") for entry in trainer.state.log_history for name in entry}
    assert logged >= METRICS
    assert trainer.checked_rows == 12 * 8
    total = trainer.spec_rollout.total
    assert total.generated_tokens + total.reused_tokens == total.completion_tokens
    assert sum(history(trainer, "spec/generated_tokens")) == total.generated_tokens
    said = capsys.readouterr().out
    assert "log-lenience 0.5" in said and "75% of the rollouts" in said and str(tmp_path / "spec_cache") in said
    assert f"\n{summary(total, trainer.spec_rollout.guard.plain_cost)}\n" in said
    lines = [json.loads(line) for line in (tmp_path / RUN_LOG).read_text().splitlines()]
    assert [line["spec/reused_token_fraction"] for line in lines[:12]] == fraction


def test_what_the_summary_of_a_run_says():
    total = RolloutCounts(
        completion_tokens=1000, generated_tokens=600, reused_tokens=400, lookup_s=0.5, verify_s=3.0, generate_s=6.0,
        store_s=1.0, spared_s=2.0,
    )  # fmt: skip
    lines = [
        "Speculative rollouts: 600 tokens generated, 400 reused (40%).",
        "  generating 6.0 s, verifying 3.0 s (of which 2.0 s spared the trainer), looking up and storing 1.5 s",
        # Without reuse a token took 15 ms, so all of them 15 s; they took 6 + 3 + 1.5 - 2 s.
        "  estimated time saved: 6.5 s of 15.0 s, at the 15.00 ms that a token cost without reuse",
    ]
    assert summary(total, 0.015).splitlines() == lines
    assert summary(total, None).splitlines() == lines[:2]


@pytest.mark.parametrize(
    "changes",
    [
        dict(gradient_accumulation_steps=2, per_device_train_batch_size=4),
        dict(num_iterations=2, logging_steps=2),
        dict(num_iterations=2),
        dict(steps_per_generation=2, per_device_train_batch_size=4),
        dict(steps_per_generation=2, num_iterations=2, per_device_train_batch_size=4, logging_steps=4),
        # Six prompts of four completions: an epoch ends within an accumulation.
        dict(steps_per_generation=2, gradient_accumulation_steps=4, per_device_train_batch_size=4),
        dict(steps_per_generation=1, gradient_accumulation_steps=2),
    ],
    ids=["accumulation", "iterations, every other step", "iterations", "generations", "both", "cut", "cut, shorter"],
)
def test_a_plain_run_tells_its_tokens(tiny_model, tmp_path, changes):
    lengths = []

    def reward(completions, completion_ids, **kwargs):
        lengths.append(sum(map(len, completion_ids)))
        return reward_digits(completions)

    args = settings(tmp_path, trl.GRPOConfig, **changes)
    build(tiny_model, args, trainer=trl.GRPOTrainer, reward_funcs=reward, callbacks=[RunLog()]).train()
    assert sum(step["tokens"] or 0 for step in report.load(tmp_path)) == pytest.approx(sum(lengths))


def test_a_plain_run_that_is_resumed_tells_its_tokens(tiny_model, tmp_path):
    """From a checkpoint in the middle of what a rollout serves: TRL begins with a new one."""
    lengths = []

    def reward(completions, completion_ids, **kwargs):
        lengths.append(sum(map(len, completion_ids)))
        return reward_digits(completions)

    args = settings(tmp_path, trl.GRPOConfig, num_iterations=2, save_strategy="steps", save_steps=3)
    for resume in (False, True):
        callbacks = [RunLog()] if resume else [RunLog(), StopAt(3)]
        trainer = build(tiny_model, args, trainer=trl.GRPOTrainer, reward_funcs=reward, callbacks=callbacks)
        trainer.train(resume_from_checkpoint=resume)
    assert sum(step["tokens"] or 0 for step in report.load(tmp_path)) == pytest.approx(sum(lengths))


@pytest.mark.parametrize(
    ("plain", "ours", "config", "our_config"),
    [
        (trl.GRPOTrainer, SpecGRPOTrainer, trl.GRPOConfig, SpecGRPOConfig),
        (trl.RLOOTrainer, SpecRLOOTrainer, trl.RLOOConfig, SpecRLOOConfig),
    ],
)
def test_flag_off_is_trl_and_flag_on_samples_the_same_first_epoch(
    tiny_model, tmp_path, plain, ours, config, our_config
):
    runs = {}
    for name, trainer_class, args in (
        ("plain", plain, settings(tmp_path / "plain", config)),
        ("off", ours, settings(tmp_path / "off", our_config, use_spec_rollout=False)),
        ("on", ours, settings(tmp_path / "on", our_config, spec_trim_padding=False)),
    ):
        reward = RecordedReward()
        trainer = build(tiny_model, args, trainer=trainer_class, reward_funcs=reward)
        trainer.train()
        runs[name] = (reward.completions, timeless(trainer))
    assert runs["off"] == runs["plain"]
    assert runs["on"][0][:3] == runs["plain"][0][:3]
    assert runs["on"][0][3:] != runs["plain"][0][3:]
    without_ours = [{k: v for k, v in entry.items() if not k.startswith("spec/")} for entry in runs["on"][1][:3]]
    assert without_ours == runs["plain"][1][:3]
    assert not (tmp_path / "off" / "spec_cache").exists()


@pytest.mark.parametrize(
    "changes",
    [
        dict(temperature=0.7),
        dict(gradient_accumulation_steps=2),
        dict(steps_per_generation=2, gradient_accumulation_steps=1, per_device_train_batch_size=4),
        dict(num_iterations=2, loss_type="dr_grpo", beta=0.05),
        dict(steps_per_generation=2, mask_truncated_completions=True, per_device_train_batch_size=4),
        dict(loss_type="bnpo", spec_rule="random"),
        dict(spec_rule="full", spec_carry_limit=1),
        dict(shuffle_dataset=False, gradient_checkpointing=True, spec_refresh_rate=0.5),
    ],
    ids=lambda changes: "-".join(changes),
)
def test_every_schedule_and_setting_hands_over_and_stores_right_log_probs(tiny_model, tmp_path, changes):
    trainer = build(tiny_model, settings(tmp_path, **changes), trainer=CheckedGRPOTrainer)
    trainer.train()
    assert trainer.checked_rows >= 24
    assert trainer.spec_rollout.total.reused_tokens > 0


# With the last schedule TRL makes a pass of its own for the old log-probs.
@pytest.mark.parametrize(
    "changes",
    [
        *truncation.SETTINGS,
        dict(steps_per_generation=2, per_device_train_batch_size=4) | truncation.SETTINGS[-1],
    ],
    ids=truncation.name,
)
def test_every_sampling_setting_reuses_and_hands_over_and_stores_right_log_probs(tiny_model, tmp_path, changes):
    trainer = build(tiny_model, settings(tmp_path, learning_rate=3e-4, **changes), trainer=CheckedGRPOTrainer)
    trainer.train()
    fraction = history(trainer, "spec/reused_token_fraction")
    first_epoch = len(fraction) // 3
    assert fraction[:first_epoch] == [0] * first_epoch and min(fraction[first_epoch:]) > 0
    assert trainer.checked_rows >= 9 * 4
    total = trainer.spec_rollout.total
    assert total.reused_tokens < total.drafted_tokens
    assert total.dropped_nonfinite == total.unstored_rows == 0


@pytest.mark.parametrize("sampling", truncation.SETTINGS, ids=truncation.name)
def test_a_policy_that_does_not_change_reuses_everything(tiny_model, tmp_path, sampling):
    args = settings(tmp_path, learning_rate=0.0, num_train_epochs=2, spec_log_lenience=1e-3, **sampling)
    trainer = build(tiny_model, args, trainer=CheckedGRPOTrainer)
    trainer.train()
    assert history(trainer, "spec/full_reuse_rate") == [0, 0, 0, 1, 1, 1]
    assert abs(history(trainer, "spec/log_ratio_mean")[-1]) < 1e-5


def test_flag_on_samples_the_same_first_epoch_with_every_cut_of_the_support(tiny_model, tmp_path):
    completions = []
    for config, trainer_class in ((trl.GRPOConfig, trl.GRPOTrainer), (SpecGRPOConfig, SpecGRPOTrainer)):
        reward = RecordedReward()
        args = settings(tmp_path / config.__name__, config, num_train_epochs=1, **truncation.SETTINGS[-1])
        build(tiny_model, args, trainer=trainer_class, reward_funcs=reward).train()
        completions.append(reward.completions)
    assert completions[0] == completions[1]


@pytest.mark.parametrize("verify", [0, 1, 2])
def test_a_token_that_the_cut_now_leaves_out_ends_the_prefix(tiny_model, tmp_path, verify):
    """With a high learning rate the support moves, so drafts hold tokens that cannot be sampled any more."""
    rule = ("speculative", "random", "full")[verify]
    args = settings(tmp_path, learning_rate=3e-2, top_k=3, spec_rule=rule, spec_log_lenience=20.0, num_train_epochs=2)
    trainer = build(tiny_model, args, trainer=CheckedGRPOTrainer)
    trainer.train()
    total = trainer.spec_rollout.total
    assert 0 < total.reused_tokens < total.drafted_tokens
    assert total.dropped_nonfinite == 0 and trainer.checked_rows == 6 * 8


@pytest.mark.parametrize("changes", [dict(), dict(beta=0.1, temperature=1.3)], ids=["plain", "kl-temperature"])
def test_rloo_reuses_and_stores_what_its_own_pass_computed(tiny_model, tmp_path, changes):
    args = settings(tmp_path, SpecRLOOConfig, **changes)
    trainer = build(tiny_model, args, trainer=counting_rows(CheckedRLOOTrainer, trl.RLOOTrainer))
    trainer.train()
    assert trainer.checked_rows == 9 * 8
    total = trainer.spec_rollout.total
    assert total.reused_tokens > 0 and total.full_reuse_rows > 0
    # The loss is told the log-probs of before the update: those of its own micro-batches, which have all rows. What
    # the cache is told is computed where verification has not.
    once = total.rows - total.full_reuse_rows + total.rows
    assert total.spared_s > 0 and trainer.computed_rows == total.verified_rows + once


def test_rloo_without_trimming_has_trls_own_pass(tiny_model, tmp_path):
    args = settings(tmp_path, SpecRLOOConfig, spec_trim_padding=False)
    trainer = build(tiny_model, args, trainer=counting_rows(CheckedRLOOTrainer, trl.RLOOTrainer))
    trainer.train()
    total = trainer.spec_rollout.total
    assert total.spared_s == 0 and trainer.computed_rows == total.verified_rows + total.rows


@pytest.mark.parametrize("rule", ["full", "speculative"])
@pytest.mark.parametrize(
    ("ours", "plain", "config", "changes"),
    [
        (SpecRLOOTrainer, trl.RLOOTrainer, SpecRLOOConfig, dict()),
        (SpecGRPOTrainer, trl.GRPOTrainer, SpecGRPOConfig, dict(steps_per_generation=4, gradient_accumulation_steps=2)),
        (SpecGRPOTrainer, trl.GRPOTrainer, SpecGRPOConfig, dict(num_iterations=2)),
    ],
    ids=["rloo", "unaligned", "iterations"],
)
def test_ratios_begin_at_exactly_one_in_half_precision(tiny_model, tmp_path, ours, plain, config, changes, rule):
    """In bf16 a forward of another width rounds otherwise. At a learning rate of 0 all ratios are those of the first
    update."""
    differences = []

    class Watched(plain):
        __module__ = ours.__module__  # of another's loss it would not be known that it changes nothing

        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            self.computed = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            return self.computed

        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            mask, new = inputs["completion_mask"], self.computed[0].detach()
            old = inputs["old_logps"] if "old_logps" in inputs else inputs["old_per_token_logps"]
            differences.append((old - (new * mask).sum(1) if old.dim() == 1 else (old - new) * mask).abs().max().item())
            return loss

    common = dict(per_device_train_batch_size=2, gradient_accumulation_steps=4, max_completion_length=64)
    changes = common | dict(learning_rate=0.0, bf16=True, spec_rule=rule, num_train_epochs=2) | changes
    trainer = build(tiny_model, settings(tmp_path, config, **changes), trainer=type("W", (ours, Watched), {}))
    trainer.train()
    assert trainer.spec_rollout.total.reused_tokens > 0
    assert differences and not any(differences)


# With the last one TRL makes no pass for the old log-probs: what was noted while sampling is stored.
@pytest.mark.parametrize(
    ("ours", "plain", "config", "changes", "stored", "ratio"),
    [
        (SpecRLOOTrainer, trl.RLOOTrainer, SpecRLOOConfig, dict(), SHIFT, 0),
        (SpecGRPOTrainer, trl.GRPOTrainer, SpecGRPOConfig, dict(steps_per_generation=2), SHIFT, 0),
        (SpecGRPOTrainer, trl.GRPOTrainer, SpecGRPOConfig, dict(spec_refresh_rate=1.0), 0, None),
    ],
    ids=["rloo", "unaligned", "no-pass"],
)
def test_what_is_compared_comes_from_the_forward_that_computed_what_is_stored(
    tiny_model, tmp_path, ours, plain, config, changes, stored, ratio
):
    args = settings(tmp_path, config, learning_rate=0.0, spec_rule="random", **changes)
    trainer = build(tiny_model, args, trainer=shifted(ours, plain))
    trainer.train()
    np.testing.assert_allclose(stored_beyond_policy(trainer), stored, atol=1e-4)
    ratios = history(trainer, "spec/log_ratio_mean")
    assert bool(ratios) == (ratio is not None) and ratios == pytest.approx([ratio] * len(ratios), abs=1e-4)


def test_rloo_with_a_cut_support_stores_what_was_sampled(tiny_model, tmp_path):
    args = settings(tmp_path, SpecRLOOConfig, **truncation.SETTINGS[-1])
    trainer = build(tiny_model, args, trainer=counting_rows(CheckedRLOOTrainer, trl.RLOOTrainer))
    trainer.train()
    assert trainer.checked_rows == 9 * 8
    total = trainer.spec_rollout.total
    assert total.reused_tokens > 0 and total.spared_s == 0
    assert trainer.computed_rows == 2 * total.rows  # verification has a forward of its own


@pytest.mark.parametrize(
    "model", [dict(pad_is_eos=True), dict(more_eos=3), dict(extra_vocab=8)], ids=["pad-is-eos", "many-eos", "padded"]
)
def test_every_kind_of_end_token_and_vocabulary(tmp_path, model):
    directory = build_tiny_model(tmp_path / "model", **model)
    trainer = build(directory, settings(tmp_path / "out", num_train_epochs=4), trainer=CheckedGRPOTrainer)
    trainer.train()
    total = trainer.spec_rollout.total
    assert total.reused_tokens > 0
    assert bool(total.dropped_vocabulary) == ("extra_vocab" in model)


@pytest.mark.parametrize("changes", [dict(), dict(steps_per_generation=2)], ids=["aligned", "unaligned"])
def test_a_base_of_four_bits_with_an_adapter(tiny_model, tmp_path, changes):
    pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, quantization_config=four_bits, device_map="cpu")
    trainer = build(
        model,
        settings(tmp_path, learning_rate=0.05, beta=0.05, **changes),
        trainer=CheckedGRPOTrainer,
        tokenizer=tiny_model,
        peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    )
    trainer.train()
    assert trainer.checked_rows == trainer.spec_rollout.total.rows
    fraction = history(trainer, "spec/reused_token_fraction")
    assert sum(fraction) > 0 and min(fraction[len(fraction) // 3 :]) < 1  # the policy moves


def test_the_guard_pauses_reuse_that_costs_more_than_it_saves(tiny_model, tmp_path, caplog):
    class SlowToVerify(CheckedGRPOTrainer):
        def spec_score(self, prompts, continuations):
            time.sleep(1.5)  # a whole step takes a fifth of that
            return super().spec_score(prompts, continuations)

    with caplog.at_level(logging.WARNING):
        trainer = build(tiny_model, settings(tmp_path, num_train_epochs=5, spec_guard=True), trainer=SlowToVerify)
        trainer.train()
    # The first epoch has nothing to verify, and two batches that can be measured; three with drafts follow, a third
    # without, four that pause, and it is tried again.
    assert history(trainer, "spec/paused_rate") == [0] * 6 + [1] * 5 + [0] * 3 + [1]
    reused = [fraction > 0 for fraction in history(trainer, "spec/reused_token_fraction")]
    assert reused == [False] * 3 + [True] * 3 + [False] * 5 + [True] * 3 + [False]
    said = [record.getMessage() for record in caplog.records if "does not pay" in record.getMessage()]
    assert ["pauses for 4 batches" in message for message in said] == [True, False]
    assert "pauses for 8 batches" in said[1] and "no prompt has come back" not in caplog.text
    # Rows that were made in a pause are right and stored as ever.
    assert trainer.checked_rows == trainer.spec_rollout.total.rows == 15 * 8
    assert trainer.spec_rollout.cache.stats().newest_step == 15


def test_evaluations_and_checkpoints_are_no_part_of_a_step(tiny_model, tmp_path):
    """Of what the guard compares, every second one would have an evaluation in it."""

    class Slow(CheckedGRPOTrainer):
        def evaluate(self, *args, **kwargs):
            time.sleep(3)
            return super().evaluate(*args, **kwargs)

        def _save_checkpoint(self, *args, **kwargs):
            time.sleep(3)
            return super()._save_checkpoint(*args, **kwargs)

    seconds = []
    args = settings(
        tmp_path, num_train_epochs=2, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=3
    )
    trainer = build(tiny_model, args, trainer=Slow, eval_dataset=Dataset.from_dict({"prompt": PROMPTS}))
    observe = trainer.spec_rollout.guard.observe
    trainer.spec_rollout.guard.observe = lambda counts: (seconds.append(counts.step_s), observe(counts))
    start = time.perf_counter()
    trainer.train()
    time.sleep(3)
    trainer.train()  # on the same trainer, whose caches go on
    stood_still = 3 * (2 * (3 + 2) + 1)  # three evaluations and two checkpoints in each
    assert len(seconds) == 12 and seconds[0] == 0 and min(seconds[1:]) > 0
    assert sum(seconds) < time.perf_counter() - start - stood_still


def test_conversational_prompts(tiny_model, tmp_path):
    prompts = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    trainer = build(tiny_model, settings(tmp_path), trainer=CheckedGRPOTrainer, prompts=prompts)
    trainer.train()
    assert trainer.spec_rollout.total.reused_tokens > 0


def test_a_prompt_that_is_twice_in_the_data_set_keeps_all_its_samples(tiny_model, tmp_path):
    args = settings(tmp_path, per_device_train_batch_size=16)
    trainer = build(tiny_model, args, trainer=CheckedGRPOTrainer, prompts=[PROMPTS[0]] * 4)
    trainer.train()
    assert sorted(t.slot for t in trainer.spec_rollout.cache) == list(range(16))


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"])
def test_every_loss(tiny_model, tmp_path, loss_type):
    args = settings(tmp_path, loss_type=loss_type, num_train_epochs=2)
    trainer = build(tiny_model, args, trainer=CheckedGRPOTrainer)
    trainer.train()
    assert trainer.spec_rollout.total.reused_tokens > 0


def test_a_prompt_that_is_twice_in_a_step_is_sampled_twice(tiny_model, tmp_path):
    reward = RecordedReward()
    args = settings(
        tmp_path,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        steps_per_generation=1,
        num_train_epochs=1,
    )
    trainer = build(tiny_model, args, trainer=CheckedGRPOTrainer, prompts=[PROMPTS[0]] * 4, reward_funcs=reward)
    trainer.train()
    first, second, *_ = reward.completions
    assert first != second


@pytest.mark.parametrize("cap", [6, 20])
def test_a_changed_cap_cuts_or_continues_what_was_cached(tiny_model, tmp_path, cap):
    common = dict(save_strategy="steps", save_steps=3, learning_rate=0.0, num_train_epochs=2)
    build(tiny_model, settings(tmp_path, **common), callbacks=[StopAt(3)]).train()
    args = settings(tmp_path, max_completion_length=cap, **common)
    resumed = build(tiny_model, args, trainer=CheckedGRPOTrainer)
    resumed.train(resume_from_checkpoint=True)
    total = resumed.spec_rollout.total
    assert resumed.checked_rows == 24
    # The policy is unchanged, so every draft is reused to its end or to the cap of today.
    assert total.drafted_tokens == total.reused_tokens > 0
    assert total.generated_tokens == 0 if cap < 12 else total.generated_tokens > 0


def test_evaluation_neither_reads_nor_writes_the_cache(tiny_model, tmp_path):
    args = settings(tmp_path, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8, num_generations_eval=4)
    trainer = build(tiny_model, args, eval_dataset=Dataset.from_dict({"prompt": [*PROMPTS[:2], "9+9=?", "8-1=?"]}))
    cache, calls = trainer.spec_rollout.cache, []
    get_many, put_many = cache.get_many, cache.put_many
    cache.get_many = lambda keys: calls.append(trainer.model.training) or get_many(keys)
    cache.put_many = lambda rows: calls.append(trainer.model.training) or put_many(rows)
    trainer.train()
    assert history(trainer, "eval_reward")
    assert len(calls) == 18 and all(calls)
    assert len(cache) == len(PROMPTS) * 4
    assert not [name for entry in trainer.state.log_history for name in entry if name.startswith("eval_spec")]


@pytest.mark.parametrize(
    "steps",
    [dict(logging_steps=2, eval_steps=3), dict(logging_steps=100, eval_steps=9), dict(logging_steps=3, eval_steps=3)],
    ids=["after-the-last-log", "without-a-log", "with-the-last-log"],
)
def test_what_came_before_a_last_evaluation_is_logged_too(tiny_model, tmp_path, steps):
    args = settings(tmp_path, eval_strategy="steps", per_device_eval_batch_size=8, num_generations_eval=4, **steps)
    trainer = build(tiny_model, args, eval_dataset=Dataset.from_dict({"prompt": PROMPTS[:2]}))
    trainer.train()
    total, run = trainer.spec_rollout.total, report.load(tmp_path)
    assert sum(history(trainer, "spec/generated_tokens")) == total.generated_tokens
    assert sum(step["generated"] for step in run) == total.generated_tokens
    assert sum(step["reused"] for step in run) == total.reused_tokens > 0
    assert sum(step["steps"] for step in run) == 9 and all(step["reward"] and step["step_s"] for step in run)
    (logged,) = [len(entry) for entry in trainer.state.log_history if "train_runtime" in entry]
    assert (logged > 20) == (steps["logging_steps"] != 3)  # TRL's own metrics with it, where any were left


def test_an_interrupted_step_leaves_nothing_behind(tiny_model, tmp_path):
    calls = []

    def reward(completions, **kwargs):
        calls.append(trainer.model.training)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return reward_digits(completions)

    args = settings(tmp_path, per_device_eval_batch_size=8, num_generations_eval=4)
    dataset = Dataset.from_dict({"prompt": ["9+9=?", "8-1=?"]})
    trainer = build(tiny_model, args, trainer=CheckedGRPOTrainer, reward_funcs=reward, eval_dataset=dataset)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    rows = len(trainer.spec_rollout.cache)
    trainer.evaluate()
    assert len(trainer.spec_rollout.cache) == rows
    trainer.train()
    assert trainer.state.global_step == 9


@pytest.mark.parametrize("enabled", [False, True], ids=["plain", "reuse"])
def test_resuming_equals_not_having_stopped(tiny_model, tmp_path, enabled):
    def run(output_dir, resume=None, **changes):
        # TRL's sampler deals shuffled prompts in another order after a resume: unshuffled, its resume is exact.
        args = settings(
            output_dir, save_strategy="steps", save_steps=4, shuffle_dataset=False, use_spec_rollout=enabled
        )
        trainer = build(tiny_model, args, **changes)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run(tmp_path / "whole")
    run(tmp_path / "parts", callbacks=[StopAt(4)])
    resumed = run(tmp_path / "parts", resume=str(tmp_path / "parts" / "checkpoint-4"))
    assert history(resumed, "reward") == history(whole, "reward")
    if enabled:
        name = "spec/reused_token_fraction"
        assert history(resumed, name) == history(whole, name)
        assert history(resumed, name)[-1] > 0


def test_resuming_after_a_crash_forgets_what_is_newer_than_the_checkpoint(tiny_model, tmp_path, caplog):
    args = settings(tmp_path, save_strategy="steps", save_steps=4)
    build(tiny_model, args, callbacks=[StopAt(6)]).train()  # as if killed after step 6, with checkpoint 4 the last
    with TrajectoryCache(tmp_path / "spec_cache") as cache:
        assert cache.stats().newest_step == 6
    resumed = build(tiny_model, args, trainer=CheckedGRPOTrainer)
    seen = []
    resumed.add_callback(_OnBegin(lambda: seen.append(resumed.spec_rollout.cache.stats().newest_step)))
    with caplog.at_level(logging.WARNING):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert seen == [4]
    assert "newer than step 4" in caplog.text
    assert resumed.state.global_step == 9


class _OnStep(TrainerCallback):
    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.action()


class _OnBegin(TrainerCallback):
    def __init__(self, action):
        self.action = action

    def on_train_begin(self, args, state, control, **kwargs):
        self.action()


def test_a_new_run_in_the_directory_of_an_old_one_starts_afresh(tiny_model, tmp_path):
    first = build(tiny_model, settings(tmp_path))
    first.train()
    second = build(tiny_model, settings(tmp_path))
    second.train()
    for name in ("reward", "spec/reused_token_fraction"):
        assert history(second, name) == history(first, name)


def test_switching_the_flag_on_and_off_in_the_middle_of_a_run(tiny_model, tmp_path):
    common = dict(save_strategy="steps", save_steps=3)
    build(tiny_model, settings(tmp_path, use_spec_rollout=False, **common), callbacks=[StopAt(3)]).train()
    on = build(tiny_model, settings(tmp_path, **common), callbacks=[StopAt(6)], trainer=CheckedGRPOTrainer)
    on.train(resume_from_checkpoint=True)
    assert on.spec_rollout.total.reused_tokens == 0  # its first epoch
    off = build(tiny_model, settings(tmp_path, use_spec_rollout=False, **common))
    off.train(resume_from_checkpoint=True)
    assert off.state.global_step == 9


def test_another_sampling_setting_refuses_the_old_cache(tiny_model, tmp_path):
    build(tiny_model, settings(tmp_path)).train()
    with pytest.raises(FingerprintMismatch, match=r"sampling\.temperature: 1\.0 in the cache, 0\.5 now"):
        build(tiny_model, settings(tmp_path, temperature=0.5))


def test_another_model_tokenizer_or_end_token_refuses_the_old_cache(tiny_model, tmp_path):
    def rebuild(model=tiny_model, **parts):
        return build(model, settings(tmp_path / "out"), tokenizer=tiny_model, **parts)

    first = rebuild()
    first.train()
    rebuild(processing_class=first.processing_class)  # it has padded since
    rebuild()
    copy = shutil.copytree(tiny_model, tmp_path / "copy")
    with pytest.raises(FingerprintMismatch, match=f"\n  model: {tiny_model!r} in the cache, {str(copy)!r} now\n"):
        rebuild(str(copy))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Digits(individual_digits=False)
    with pytest.raises(FingerprintMismatch, match=r"\n  tokenizer: '\w+' in the cache, '\w+' now\n"):
        rebuild(processing_class=tokenizer)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.generation_config.eos_token_id = [2, 5]
    with pytest.raises(FingerprintMismatch, match=r"\n  sampling.eos_token_ids: \[2\] in the cache, \[2, 5\] now\n"):
        rebuild(model)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(spec_verifier="engine"), "spec_verifier"),
        (dict(spec_verifier="engine", use_vllm=True, vllm_mode="colocate", temperature=0.5), "temperature"),
        (dict(spec_verifier="engine", use_vllm=True, vllm_mode="colocate", top_p=0.5), "top_p"),
        (dict(spec_verifier="engine", use_vllm=True, vllm_mode="colocate", top_k=5), "top_k"),
        (dict(spec_verifier="engine", use_vllm=True, vllm_mode="colocate", min_p=0.1), "min_p"),
        (dict(use_vllm=True, vllm_mode="colocate", temperature=0.005), "temperature"),
        (dict(spec_verifier="engine", use_vllm=True, vllm_mode="server", temperature=0.5), "temperature"),
        (dict(temperature=0.0), "temperature"),
        (dict(temperature=float("nan")), "temperature"),
        (dict(temperature=float("inf")), "temperature"),
        (dict(top_k=None), "top_k"),
        (dict(top_k=-1), "top_k"),
        (dict(top_k=2.5), "top_k"),
        (dict(top_p=None), "top_p"),
        (dict(top_p=0.0), "top_p"),
        (dict(top_p=1.5), "top_p"),
        (dict(min_p=-0.1), "min_p"),
        (dict(min_p=float("nan")), "min_p"),
        (dict(repetition_penalty=1.1), "repetition_penalty"),
        (dict(generation_kwargs={"no_repeat_ngram_size": 2}), "generation_kwargs"),
        (dict(use_vllm=True, vllm_mode="colocate", vllm_structured_outputs_regex="[0-9]+"), "structured_outputs"),
        (dict(spec_reused_logprobs="behaviour"), "spec_reused_logprobs"),
        (
            dict(
                spec_reused_logprobs="behaviour",
                use_vllm=True,
                vllm_mode="colocate",
                vllm_importance_sampling_correction=False,
            ),
            "vllm_importance_sampling_correction",
        ),
        (dict(max_completion_length=None), "max_completion_length"),
    ],
)
def test_settings_that_cannot_be_done_right_are_refused_before_anything_is_built(tmp_path, changes, named):
    with pytest.raises(UnsupportedSetting, match=named):
        build_nothing(settings(tmp_path, **changes))
    with pytest.raises(Exception) as error:  # without the flag they are TRL's business: it looks for the model
        build_nothing(settings(tmp_path, use_spec_rollout=False, **changes))
    assert not isinstance(error.value, UnsupportedSetting)


def build_nothing(args):
    SpecGRPOTrainer(model="/no/such/model", args=args, reward_funcs=reward_digits, train_dataset=[])


@pytest.mark.parametrize(
    "own",
    [dict(no_repeat_ngram_size=1), dict(suppress_tokens=[7]), dict(min_new_tokens=6), dict(typical_p=0.2),
     dict(min_p=0.5), dict(exponential_decay_length_penalty=(3, 1.5))],
    ids=lambda own: next(iter(own)),
)  # fmt: skip
def test_what_the_models_own_generation_config_shapes_is_refused(tiny_model, tmp_path, own):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.generation_config.update(**own)
    with pytest.raises(UnsupportedSetting, match=next(iter(own))):
        build(model, settings(tmp_path), tokenizer=tiny_model)


def test_harmless_settings_of_the_models_generation_config_are_not_refused(tiny_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.generation_config.update(temperature=0.3, top_p=0.5, top_k=3, do_sample=True, max_length=20)
    trainer = build(model, settings(tmp_path), trainer=CheckedGRPOTrainer, tokenizer=tiny_model)
    trainer.train()
    assert trainer.spec_rollout.total.reused_tokens > 0


def test_prompts_of_unequal_length_are_scored_where_they_were_sampled(tiny_model, tmp_path):
    args = settings(tmp_path, learning_rate=0.0, spec_log_lenience=1e-3, num_train_epochs=2)
    prompts = ["1+1=?", "what is 2+2?", "so?", "how much is it: 3+1?"]
    trainer = build(tiny_model, args, trainer=CheckedGRPOTrainer, prompts=prompts)
    trainer.train()
    assert history(trainer, "spec/draft_accept_rate") == [1, 1]


def test_a_model_that_numbers_positions_from_the_padding_is_refused(tiny_model, tmp_path):
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    with pytest.raises(UnsupportedSetting, match=r"a model \(gpt2\) that sees padding"):
        build(GPT2LMHeadModel(config), settings(tmp_path), tokenizer=tiny_model)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig"])
def test_virtual_tokens_before_the_padding_are_refused(tiny_model, tmp_path, kind):
    peft = pytest.importorskip("peft")
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(UnsupportedSetting, match=r"PEFT's (prompt_tuning|prefix_tuning|p_tuning): TRL's padding"):
        build(tiny_model, settings(tmp_path), peft_config=config)


@pytest.mark.parametrize("trim", [True, False])
def test_who_asks_for_other_log_probs_between_gets_them_and_spoils_nothing(tiny_model, tmp_path, trim):
    """A reward function may ask the trainer about a text of its own, in as many rows, before and after TRL's pass."""
    text = torch.tensor([[5, 6, 7, 8, 9, 10]]).expand(8, -1)
    answers = []

    class Asking(SpecGRPOTrainer):
        def _calculate_rewards(self, *args):
            rewards = super()._calculate_rewards(*args)
            with torch.no_grad():
                asked = (self.model, text, torch.ones_like(text), 4)
                told = self._get_per_token_logps_and_entropies(*asked, compute_entropy=len(answers) % 2 == 1)
                known = trl.GRPOTrainer._get_per_token_logps_and_entropies(self, *asked, compute_entropy=True)
            answers.append((told[0] - known[0]).abs().max().item())
            assert len(answers) % 2 == 1 or (told[1] - known[1]).abs().max() < 1e-5
            return rewards

    # With two iterations TRL makes a pass for the old log-probs, and the cache keeps what it gives.
    changes = dict(learning_rate=0.0, num_iterations=2, spec_log_lenience=50.0, spec_trim_padding=trim)
    trainer = build(tiny_model, settings(tmp_path, **changes), trainer=Asking)
    trainer.train()
    trainer.model.eval()
    assert history(trainer, "spec/full_reuse_rate")[-1] == 1
    assert len(answers) == 9 and max(answers) < 1e-5
    assert np.abs(stored_beyond_policy(trainer)).max() < 1e-4


def test_a_cache_that_would_be_uploaded_is_refused(tmp_path):
    with pytest.raises(UnsupportedSetting, match="push_to_hub"):
        check_config(settings(tmp_path, push_to_hub=True))
    check_config(settings(tmp_path / "out", push_to_hub=True, spec_cache_dir=str(tmp_path / "cache")))


def conversations(*columns):
    prompts = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    return Dataset.from_dict({"prompt": prompts} | {column: [None] * len(prompts) for column in columns})


def test_a_model_that_takes_images_is_refused(tiny_model, tmp_path):
    pytest.importorskip("PIL")
    from transformers import (
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    size = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    tower = CLIPVisionConfig(image_size=8, patch_size=4, **size)
    text = AutoConfig.from_pretrained(tiny_model)
    model = LlavaForConditionalGeneration(LlavaConfig(vision_config=tower, text_config=text, image_token_index=0))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    images = CLIPImageProcessorPil(size=dict(shortest_edge=8), crop_size=dict(height=8, width=8))
    processor = LlavaProcessor(image_processor=images, tokenizer=tokenizer, patch_size=4, image_token="<unk>")
    with pytest.raises(UnsupportedSetting, match="takes images: pass a tokenizer"):
        build(model, settings(tmp_path), tokenizer=tiny_model, processing_class=processor)


@pytest.mark.parametrize("column", ["image", "images"])
def test_data_sets_with_images_are_refused(tiny_model, tmp_path, column):
    with pytest.raises(UnsupportedSetting, match=f"column `{column}`"):
        build(tiny_model, settings(tmp_path), train_dataset=conversations(column))


def test_images_in_prompts_are_refused(tiny_model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = "{{ messages[0]['content'][-1]['text'] }}"
    content = [dict(type="image", image="a.png", text=None), dict(type="text", image=None, text="1+1=?")]
    dataset = Dataset.from_dict({"prompt": [[dict(role="user", content=content)]] * 2})
    trainer = build(tiny_model, settings(tmp_path), processing_class=tokenizer, train_dataset=dataset)
    with pytest.raises(UnsupportedSetting, match="images in prompts"):
        trainer.train()


def test_what_a_tokenizer_returns_beside_ids_is_refused_where_trl_uses_it(tiny_model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    with pytest.raises(UnsupportedSetting, match=r"token_type_ids: .* Remove them from its `model_input_names`"):
        build(tiny_model, settings(tmp_path), processing_class=tokenizer, train_dataset=conversations())
    streamed = conversations().to_iterable_dataset()  # which is not looked into before it is trained on
    args = settings(tmp_path, max_steps=3)
    trainer = build(tiny_model, args, processing_class=tokenizer, train_dataset=streamed)
    with pytest.raises(UnsupportedSetting, match=r"token_type_ids: .* Remove them from its `model_input_names`"):
        trainer.train()
    trainer = build(tiny_model, settings(tmp_path), processing_class=tokenizer)  # not of plain text
    trainer.train()
    assert trainer.spec_rollout.total.reused_tokens > 0


def test_rollout_functions_are_refused(tiny_model, tmp_path):
    with pytest.raises(UnsupportedSetting, match="rollout_func"):
        build(tiny_model, settings(tmp_path), rollout_func=lambda prompts, trainer: {})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(spec_refresh_rate=1.5), "refresh_rate"),
        (dict(spec_carry_limit=-1), "carry_limit"),
        (dict(spec_rule="best"), "speculative, random, full, not 'best'"),
        (dict(spec_guard="no"), "spec_guard"),
        (dict(use_spec_rollout="no"), "use_spec_rollout"),
        (dict(spec_verifier="oracle"), "spec_verifier"),
        (dict(spec_cache_max_mib=0), "spec_cache_max_mib"),
        (dict(spec_cache_max_mib=float("nan")), "spec_cache_max_mib"),
        (dict(spec_cache_max_mib=None), "spec_cache_max_mib"),
        (dict(spec_carry_limit=2.5), "carry_limit"),
        (dict(spec_log_lenience=float("nan")), "log_lenience"),
        (dict(spec_log_lenience="abc"), "log_lenience"),
        (dict(spec_log_lenience=-1.0), "spec_log_lenience is 0 or more"),
        (dict(spec_refresh_rate="0.1"), "spec_refresh_rate is a share of rows, between 0 and 1, not '0.1'"),
        (dict(spec_carry_limit=-1), "spec_carry_limit is a whole number of visits, or 0 for no limit, not -1"),
        (dict(spec_carry_limit=None), "spec_carry_limit is a whole number of visits, or 0 for no limit, not None"),
        (dict(spec_cache_dir=5), "spec_cache_dir is the path of a folder, not 5"),
        (dict(spec_cache_dir=""), "spec_cache_dir is the path of a folder, not ''"),
        (dict(spec_cache_max_mib="4"), "spec_cache_max_mib is a size in MiB, above 0, not '4'"),
        (dict(spec_prune_success_reward="x"), "spec_prune_success_reward is a reward, a finite number, not 'x'"),
    ],
)
def test_settings_out_of_range_are_refused(tmp_path, changes, named):
    with pytest.raises(ValueError, match=named):
        settings(tmp_path, **changes)


def test_a_trainer_without_a_config_of_ours_says_that_it_is_trls(tiny_model, tmp_path, caplog):
    config = settings(tmp_path, trl.GRPOConfig, max_steps=1)
    trainer = build(tiny_model, config)
    assert trainer.spec_rollout is None
    assert "Pass SpecGRPOConfig(..., use_spec_rollout=True) as `args`" in caplog.text


def test_a_config_of_the_other_trainer_is_refused(tiny_model, tmp_path):
    with pytest.raises(TypeError, match="SpecRLOOTrainer takes a SpecRLOOConfig as `args`, not a SpecGRPOConfig"):
        build(tiny_model, settings(tmp_path), trainer=SpecRLOOTrainer)


def test_a_cache_that_cannot_be_made_names_its_setting(tiny_model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="`spec_cache_dir`, by default in `output_dir`: the cache directory"):
        build(tiny_model, settings(tmp_path / "out", spec_cache_dir=str(tmp_path / "file" / "cache")))


def test_a_full_disk_does_not_end_training(tiny_model, tmp_path, caplog, capsys):  # capsys: output needs no file
    trainer = build(tiny_model, settings(tmp_path))
    with ExitStack() as disk:
        trainer.add_callback(_OnStep(3, lambda: disk.enter_context(full_disk())))
        with caplog.at_level(logging.WARNING):
            trainer.train()
    assert trainer.state.global_step == 9
    assert "Training goes on" in caplog.text and "was not logged" in caplog.text
    assert trainer.spec_rollout.total.unstored_rows > 0


@pytest.mark.parametrize("trouble", ["deleted", "chdir"])
def test_reuse_survives_a_deleted_directory_and_a_change_of_directory(tiny_model, tmp_path, monkeypatch, trouble):
    monkeypatch.chdir(tmp_path)
    args = settings("run", num_train_epochs=4)
    trainer = build(tiny_model, args, trainer=CheckedGRPOTrainer)
    (tmp_path / "elsewhere").mkdir()

    def act():
        if trouble == "chdir":
            os.chdir(tmp_path / "elsewhere")
        else:
            shutil.rmtree(tmp_path / "run" / "spec_cache")

    trainer.add_callback(_OnStep(5, act))
    trainer.train()
    assert history(trainer, "spec/reused_token_fraction")[-1] > 0
    assert trainer.spec_rollout.total.unstored_rows == 0


def test_a_second_run_on_a_cache_in_use_is_refused(tiny_model, tmp_path):
    script = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from trl_runs import build, settings
build({tiny_model!r}, settings({str(tmp_path)!r})).train()
"""
    trainer = build(tiny_model, settings(tmp_path))
    outcomes = []

    def second_run():
        outcomes.append(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120))

    trainer.add_callback(_OnStep(5, second_run))
    trainer.train()
    assert outcomes[0].returncode != 0
    assert f"in use by another run (process {os.getpid()})" in outcomes[0].stderr
    assert min(history(trainer, "spec/reused_token_fraction")[3:]) > 0
    second_run()  # the first one has ended
    assert outcomes[1].returncode == 0


def test_a_generate_that_somebody_else_patched_is_kept(tiny_model, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    calls, generate = [], model.generate
    model.generate = lambda *args, **kwargs: calls.append(1) or generate(*args, **kwargs)
    trainer = build(model, settings(tmp_path, num_train_epochs=1), tokenizer=tiny_model)
    trainer.train()
    assert len(calls) == 3


def test_training_twice_sums_up_each_run(tiny_model, tmp_path, capsys):
    trainer = build(tiny_model, settings(tmp_path, num_train_epochs=1))
    trainer.train()
    trainer.train()
    assert trainer.spec_rollout.total.rows == 24


def test_switching_on_in_mid_run_gives_no_false_warning(tiny_model, tmp_path, caplog):
    common = dict(save_strategy="steps", save_steps=5)
    build(tiny_model, settings(tmp_path, use_spec_rollout=False, **common), callbacks=[StopAt(5)]).train()
    with caplog.at_level(logging.WARNING):
        build(tiny_model, settings(tmp_path, **common)).train(resume_from_checkpoint=True)
    assert "no prompt has come back" not in caplog.text


def test_prompts_that_change_every_epoch_are_warned_about(tiny_model, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trainer = build(tiny_model, settings(tmp_path))
        tokenize = trainer._tokenize_prompts
        counter = iter(range(100))

        def other_prompts(prompts):
            number = next(counter)
            return tokenize([f"{number}:{prompt}" for prompt in prompts])

        trainer._tokenize_prompts = other_prompts
        trainer.train()
    assert "no prompt has come back" in caplog.text


class Unscored(trl.RLOOTrainer):
    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        logprobs, *others = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return logprobs if torch.is_grad_enabled() else logprobs * torch.nan, *others


class UnscoredRLOOTrainer(SpecRLOOTrainer, Unscored):
    """The pass for the old log-probs finds none; TRL's loss is spared that."""

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        logprobs, *others = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        return logprobs.nan_to_num(), *others


@pytest.mark.parametrize("trouble", ["log-probs", "disk"])
def test_prompts_are_not_blamed_where_nothing_was_stored(tiny_model, tmp_path, caplog, capsys, trouble):
    with ExitStack() as disk, caplog.at_level(logging.WARNING):
        kind = SpecRLOOTrainer if trouble == "disk" else UnscoredRLOOTrainer
        trainer = build(tiny_model, settings(tmp_path, SpecRLOOConfig), trainer=kind)
        if trouble == "disk":
            trainer.add_callback(_OnBegin(lambda: disk.enter_context(full_disk())))
        trainer.train()
    assert trainer.spec_rollout.total.unstored_rows == trainer.spec_rollout.total.rows == 9 * 8
    assert "40 of 40 completions were not cached" in caplog.text
    assert "no prompt has come back" not in caplog.text


def test_dropout_is_warned_about(tmp_path, caplog):
    tokenizer = build_tiny_model(tmp_path / "model")
    for disable in (False, True):
        caplog.clear()
        model = GPTNeoXForCausalLM(
            GPTNeoXConfig(
                vocab_size=48,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=1,
                num_attention_heads=2,
                hidden_dropout=0.1,
            )
        )
        with caplog.at_level(logging.WARNING):
            build(model, settings(tmp_path / str(disable), disable_dropout=disable), tokenizer=tokenizer)
        assert ("disable_dropout" in caplog.text) == (not disable)


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        (dict(num_train_epochs=1), True),
        (dict(num_train_epochs=2), False),
        (dict(max_steps=3), True),
        (dict(max_steps=4), False),
        (dict(max_steps=6, num_iterations=2), True),
        (dict(num_train_epochs=9, max_steps=3), True),
    ],
)
def test_a_single_epoch_is_warned_about(tiny_model, tmp_path, caplog, changes, warned):
    with caplog.at_level(logging.WARNING):
        build(tiny_model, settings(tmp_path, **changes))
    assert ("cannot help here" in caplog.text) == warned


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(num_train_epochs=5), 5),
        (dict(max_steps=6), 2),
        (dict(max_steps=6, gradient_accumulation_steps=3), 6),
        (dict(max_steps=6, num_iterations=2), 1),
        (dict(max_steps=3, num_generations=2, per_device_train_batch_size=12), 3),
    ],
)
def test_how_often_prompts_are_seen_is_what_training_says(tiny_model, tmp_path, changes, expected):
    trainer = build(tiny_model, settings(tmp_path, learning_rate=0.0, **changes))
    assert epochs(trainer) == expected
    trainer.train()
    assert trainer.spec_rollout.total.rows == expected * len(PROMPTS) * trainer.num_generations


@pytest.mark.parametrize(
    ("epoch", "cached", "share"),
    [(0, False, 3 / 4), (0, True, 3 / 4), (0.5, True, 3 / 3.5), (2, True, 1), (2, False, 1 / 2), (3, False, 0)],
)
def test_the_share_of_rollouts_that_can_reuse(tiny_model, tmp_path, epoch, cached, share):
    trainer = build(tiny_model, settings(tmp_path, num_train_epochs=4))
    assert warm_share(trainer, epoch, cached) == pytest.approx(share)
    assert warm_share(trainer, 4, cached) is None  # nothing is left


def test_a_run_that_is_resumed_says_what_it_can_reuse(tiny_model, tmp_path, capsys):
    common = dict(save_strategy="steps", save_steps=3)
    build(tiny_model, settings(tmp_path, **common), callbacks=[StopAt(3)]).train()
    capsys.readouterr()
    build(tiny_model, settings(tmp_path, **common)).train(resume_from_checkpoint=True)
    assert "(24 trajectories); 100% of the rollouts" in capsys.readouterr().out


def test_all_settings_are_command_line_flags():
    flags = dict(
        output_dir="out", use_cpu="true", bf16="false", use_spec_rollout="true", spec_log_lenience="0.2",
        spec_rule="random", spec_carry_limit="3", spec_refresh_rate="0.25", spec_verifier="trainer",
        spec_cache_dir="somewhere", spec_cache_max_mib="10", spec_guard="false", spec_reused_logprobs="behaviour",
        spec_prune="true", spec_prune_detection_length="64", spec_prune_oversample="1.5", spec_prune_warmup_steps="5",
        spec_prune_target_share="0.4", spec_prune_success_reward="0.9",
    )  # fmt: skip
    line = [part for name, value in flags.items() for part in (f"--{name}", value)]
    (args,) = trl.TrlParser(SpecGRPOConfig).parse_args_and_config(line)
    assert args.use_spec_rollout and not args.spec_guard
    assert (args.spec_log_lenience, args.spec_rule, args.spec_carry_limit) == (0.2, "random", 3)
    assert args.spec_reused_logprobs == "behaviour" and args.spec_prune
    assert args.pruning_settings() == PruningSettings(64, 1.5, 0.4, 5, 0.9)
    assert (args.cache_directory(), args.spec_cache_max_mib) == (Path("somewhere"), 10)


def test_every_setting_has_help():
    fields = SpecGRPOConfig.__dataclass_fields__.values()
    ours = [field for field in fields if field.name.startswith(("spec_", "use_spec"))]
    assert len(ours) == 22
    assert all(field.metadata.get("help") for field in ours)
