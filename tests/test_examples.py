"""The example scripts, run as a user runs them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from specrl_plugins import report

pytest.importorskip("trl")
pytest.importorskip("reasoning_gym")

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


@pytest.mark.parametrize("launcher", [[], ["-m", *LAUNCH.split()]], ids=["python", "accelerate"])
def test_the_grpo_example_trains_and_reuses(tiny_model, tmp_path, launcher):
    flags = dict(
        model_name_or_path=tiny_model, output_dir=tmp_path, task="chain_sum", prompts=4, num_train_epochs=3,
        num_generations=4, per_device_train_batch_size=8, max_completion_length=8, learning_rate=1e-3,
        use_spec_rollout="true", use_cpu="true", bf16="false", report_to="none", save_strategy="no",
    )  # fmt: skip
    command = [sys.executable, *launcher, str(ROOT / "examples/trl/train_grpo.py")]
    command += [str(part) for name, value in flags.items() for part in (f"--{name}", value)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(re.search(r"(\d+) reused", done.stdout)[1]) > 0
    assert (tmp_path / "model.safetensors").exists()


def test_the_votes_are_counted(tiny_model, tmp_path):
    command = [sys.executable, "-m", "examples.voting", "--output", str(tmp_path), "--model", tiny_model]
    done = subprocess.run([*command, "--questions", "8", "--cap", "4"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(re.findall(r"^ +[a-z ]+  \d+\.\d%$", done.stdout, re.M)) == 4
