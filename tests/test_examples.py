"""The example scripts, run as a user runs them."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specrl_plugins import report

pytest.importorskip("trl")
pytest.importorskip("reasoning_gym")

import trl

from trl_integration import SpecGRPOConfig, SpecGRPOTrainer

pytestmark = [pytest.mark.trl, pytest.mark.slow]

ROOT = Path(__file__).parents[1]
LAUNCH = "accelerate.commands.launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no --cpu"


def test_the_demo_trains_twice_and_compares(tiny_model, tmp_path):
    command = [sys.executable, "-m", "examples.demo", "--output", str(tmp_path), "--model", tiny_model]
    command += ["--prompts", "4", "--epochs", "3", "--cap", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"plain / reuse .*\dx", done.stdout)
    assert (tmp_path / "demo.png").stat().st_size > 10_000
    plain, reuse = (report.load(tmp_path / name) for name in ("plain", "reuse"))
    assert [record["reward"] for record in plain[:2]] == [record["reward"] for record in reuse[:2]]  # the first epoch
    assert sum(record["generated"] for record in reuse) < sum(record["generated"] for record in plain)
    assert all(record["rollout_s"] > 0 for record in plain + reuse)


def grpo_flags(model, output_dir, **changes):
    flags = dict(
        model_name_or_path=model, output_dir=output_dir, task="chain_sum", prompts=4, num_train_epochs=3,
        num_generations=4, per_device_train_batch_size=8, max_completion_length=8, learning_rate=1e-3,
        use_spec_rollout="true", use_cpu="true", bf16="false", report_to="none", save_strategy="no",
    )  # fmt: skip
    return [str(part) for name, value in (flags | changes).items() for part in (f"--{name}", value)]


@pytest.mark.parametrize("launcher", [[], ["-m", *LAUNCH.split()]], ids=["python", "accelerate"])
def test_the_grpo_example_trains_and_reuses(tiny_model, tmp_path, launcher):
    command = [sys.executable, *launcher, str(ROOT / "examples/trl/train_grpo.py"), *grpo_flags(tiny_model, tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(re.search(r"(\d+) reused", done.stdout)[1]) > 0
    assert (tmp_path / "model.safetensors").exists()


def trained_by_the_grpo_example(model, output_dir, **changes):
    """What the example's `main` has trained for two steps, with these flags more."""
    trainers = []

    class Kept(SpecGRPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            trainers.append(self)

    script = runpy.run_path(str(ROOT / "examples/trl/train_grpo.py"))
    main = script["main"]
    main.__globals__["SpecGRPOTrainer"] = Kept
    parser = trl.TrlParser((script["TaskArguments"], SpecGRPOConfig, trl.ModelConfig))
    main(*parser.parse_args_and_config(grpo_flags(model, output_dir, max_steps=2, **changes)))
    (trainer,) = trainers
    return trainer


def lora(trainer):
    return trainer.model.peft_config["default"]


@pytest.mark.parametrize(
    ("flags", "shows"),
    [
        (dict(), lambda trainer: trainer.model.dtype == torch.float32 and not hasattr(trainer.model, "peft_config")),
        (dict(dtype="bfloat16"), lambda trainer: trainer.model.dtype == torch.bfloat16),
        (dict(attn_implementation="eager"), lambda trainer: trainer.model.config._attn_implementation == "eager"),
        (
            dict(use_peft="true", lora_r=3, lora_alpha=5, lora_dropout=0.0, lora_target_modules=".*q_proj"),
            lambda trainer: (
                (lora(trainer).r, lora(trainer).lora_alpha, lora(trainer).lora_dropout) == (3, 5, 0.0)
                and lora(trainer).target_modules == ".*q_proj"
            ),
        ),
        (
            dict(use_peft="true", load_in_4bit="true", model_init_kwargs='{"device_map": "cpu"}'),
            lambda trainer: trainer.model.get_base_model().is_loaded_in_4bit,
        ),
    ],
    ids=lambda value: "-".join(value) or "default" if isinstance(value, dict) else "",
)
def test_the_flags_of_trls_model_config_have_their_effect(tiny_model, tmp_path, flags, shows):
    pytest.importorskip("peft")
    if "load_in_4bit" in flags:
        pytest.importorskip("bitsandbytes")
    assert shows(trained_by_the_grpo_example(tiny_model, tmp_path, **flags))


def test_the_grpo_example_resumes(tiny_model, tmp_path):
    trained_by_the_grpo_example(tiny_model, tmp_path, save_strategy="steps", save_steps=1)
    resumed = trained_by_the_grpo_example(tiny_model, tmp_path, resume_from_checkpoint=tmp_path / "checkpoint-1")
    assert [entry["step"] for entry in resumed.state.log_history if "train_runtime" in entry] == [2]
    assert resumed.spec_rollout.total.rows == 8  # one step


def test_the_votes_are_counted(tiny_model, tmp_path):
    command = [sys.executable, "-m", "examples.voting", "--output", str(tmp_path), "--model", tiny_model]
    done = subprocess.run([*command, "--questions", "8", "--cap", "4"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(re.findall(r"^ +[a-z ]+  \d+\.\d%$", done.stdout, re.M)) == 4
