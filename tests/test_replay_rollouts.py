"""The replay of the rollout stage, with a real engine and a real trainer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("trl")

pytestmark = [pytest.mark.trl, pytest.mark.vllm, pytest.mark.slow]

ROOT = Path(__file__).parents[1]


def test_it_measures_both_profiles_in_every_way(tmp_path):
    command = [sys.executable, "benchmarks/replay_rollouts.py", "--output", str(tmp_path), "--shape", "tiny"]
    command += ["--repeats", "1", "--rows", "--reuse", "--mean"]  # no sweep
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    settings = json.loads((tmp_path / "summary.json").read_text())["settings"]
    assert [setting["repeats"] for setting in settings.values()] == [1, 1]
    for setting in settings.values():
        assert all(seconds["total_s"] > 0 for seconds in setting["seconds"].values())
        assert setting["seconds"]["engine"]["verify_s"] > 0 and setting["seconds"]["trainer"]["verify_s"] > 0
        assert setting["seconds"]["cold"]["verify_s"] < 0.01  # nothing to verify
