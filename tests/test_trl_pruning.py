"""Online pruning through `trainer.train()`."""

from __future__ import annotations

import gc
import json

import pytest

pytest.importorskip("trl")

import trl_tools
from trl_pruning import SETTINGS, CheckedPruning, check_counts, pruning_settings, reward_told_at_detection
from trl_runs import StopAt, build, history, settings

from trl_integration import SpecGRPOConfig, SpecGRPOTrainer, SpecRLOOConfig, SpecRLOOTrainer
from trl_integration.checks import UnsupportedSetting

pytestmark = [pytest.mark.trl, pytest.mark.slow]

UNALIGNED = dict(beta=0.05, gradient_accumulation_steps=2, per_device_train_batch_size=12, steps_per_generation=4)


def run(model, output_dir, resume=None, trainer=CheckedPruning, callbacks=(), peft_config=None, **changes):
    args = pruning_settings(output_dir, **changes)
    parts = dict(reward_funcs=reward_told_at_detection, callbacks=list(callbacks), peft_config=peft_config)
    trainer = build(model, args, trainer=trainer, **parts)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(use_spec_rollout=False),
        dict(temperature=0.8),
        UNALIGNED,
    ],
    ids=["with reuse", "alone", "tempered", "with a pass for old log-probs"],
)
def test_survivors_are_trained_on_and_all_that_is_judged_and_stored_is_right(tiny_model, tmp_path, changes, capsys):
    trainer = run(tiny_model, tmp_path, **changes)
    check_counts(trainer)
    total, printed = trainer.spec_rollout.total, capsys.readouterr().out
    assert bool(total.reused_tokens) == trainer.args.use_spec_rollout
    assert "Online pruning: 16 completions of a prompt start and 8 of them survive" in printed
    assert f"{total.pruned_rows} of {total.judged_rows} completions given up" in printed
    assert max(history(trainer, "prune/pruned_fraction")) > 0.2
    assert history(trainer, "prune/head_auc_in_groups")[-1] > 0.55
    logged = [json.loads(line) for line in (tmp_path / "specrl.jsonl").read_text().splitlines()]
    assert any("prune/survivor_positive_rate" in line for line in logged)


def test_lora(tiny_model, tmp_path):
    from peft import LoraConfig

    trainer = run(
        tiny_model,
        tmp_path,
        learning_rate=1e-2,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    )
    check_counts(trainer)


def test_with_tools(tmp_path):
    """First turns are judged; tools are called for survivors alone."""
    model = trl_tools.build_model(tmp_path / "model")
    args = pruning_settings(tmp_path / "run", max_completion_length=24, **UNALIGNED)
    parts = trl_tools.parts(model) | dict(reward_funcs=reward_told_at_detection)
    trainer = build(model, args, trainer=CheckedPruning, **parts)
    trainer.train()
    check_counts(trainer)
    assert min(history(trainer, "tools/call_frequency")) > 0 and not any(history(trainer, "tools/failure_frequency"))


def test_rloo(tiny_model, tmp_path):
    args = settings(tmp_path, SpecRLOOConfig, **SETTINGS)
    trainer = build(tiny_model, args, trainer=SpecRLOOTrainer, reward_funcs=reward_told_at_detection)
    trainer.train()
    assert trainer.spec_rollout.total.pruned_rows > 0


def test_without_the_flag_nothing_changes(tiny_model, tmp_path):
    logs = []
    others = dict(spec_prune_oversample=3.0, spec_prune_warmup_steps=1)
    for name, changes in (("plain", {}), ("other settings", others)):
        trainer = build(tiny_model, settings(tmp_path / name, num_train_epochs=2, **changes))
        trainer.train()
        assert trainer.spec_rollout.pruning is None and not trainer.spec_rollout.total.judged_rows
        logs.append([history(trainer, metric) for metric in ("reward", "loss", "spec/reused_tokens")])
        assert not [key for entry in trainer.state.log_history for key in entry if key.startswith("prune/")]
    assert logs[0] == logs[1]


@pytest.mark.parametrize("reuse", [True, False])
def test_resuming_equals_not_having_stopped(tiny_model, tmp_path, reuse):
    """What the head has learned, its optimiser and its track record go with the checkpoint."""
    changes = dict(use_spec_rollout=reuse, save_strategy="steps", save_steps=6, shuffle_dataset=False)
    whole = run(tiny_model, tmp_path / "whole", trainer=SpecGRPOTrainer, **changes)
    stopped = run(tiny_model, tmp_path / "stopped", trainer=SpecGRPOTrainer, callbacks=[StopAt(6)], **changes)
    assert stopped.spec_rollout.total.pruned_rows > 0
    checkpoint = tmp_path / "stopped" / "checkpoint-6"
    assert (checkpoint / "spec_pruner.pt").is_file()
    resumed = run(tiny_model, tmp_path / "stopped", resume=str(checkpoint), trainer=SpecGRPOTrainer, **changes)
    for name in ("reward", "prune/pruned_fraction", "prune/head_auc", "prune/calibration_error", "loss"):
        assert history(resumed, name)[-2:] == history(whole, name)[-2:], name


def test_a_checkpoint_without_a_pruner_begins_with_a_warm_up(tiny_model, tmp_path, caplog):
    changes = dict(save_strategy="steps", save_steps=2)
    run(tiny_model, tmp_path, trainer=SpecGRPOTrainer, max_steps=2, spec_prune=False, **changes)
    trainer = run(tiny_model, tmp_path, resume=True, trainer=SpecGRPOTrainer, max_steps=4, **changes)
    assert "warm-up" in caplog.text and trainer.state.global_step == 4
    assert not trainer.spec_rollout.total.pruned_rows and trainer.spec_rollout.total.judged_rows


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(spec_prune_detection_length=12), "spec_prune_detection_length=12"),
        (dict(spec_verifier="engine", use_vllm=True), "spec_prune=True"),
        (dict(repetition_penalty=1.1, use_spec_rollout=False), "spec_prune=False"),
        (dict(spec_prune_oversample=1.05), "spec_prune_oversample=1.05"),
        (dict(repetition_penalty=1.1), "set `use_spec_rollout=False` and `spec_prune=False`"),
    ],
)
def test_what_cannot_be_done_right_is_refused(tiny_model, tmp_path, changes, named):
    with pytest.raises(UnsupportedSetting, match=named):
        build(tiny_model, pruning_settings(tmp_path, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        dict(spec_prune_detection_length=0),
        dict(spec_prune_detection_length=4.0),
        dict(spec_prune_warmup_steps=float("nan")),
        dict(spec_prune_oversample=0.5),
        dict(spec_prune_target_share=1.5),
        dict(spec_prune_warmup_steps=-1),
        dict(spec_prune_success_reward=float("nan")),
        dict(spec_prune="yes"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(tmp_path, changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        settings(tmp_path, SpecGRPOConfig, **changes)


@pytest.mark.vllm
@pytest.mark.parametrize("reuse", [True, False])
def test_with_a_colocated_engine(tiny_model, tmp_path, reuse):
    pytest.importorskip("vllm")
    import vllm_cpu

    vllm_cpu.repair()
    engine = dict(use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.2, vllm_max_model_length=64)
    trainer = run(tiny_model, tmp_path, use_spec_rollout=reuse, **engine)
    check_counts(trainer)
    del trainer.vllm_generation.llm._original
    gc.collect()
