"""Every benchmark runs from its command line, at a size that takes seconds: a published command must go on working."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"


def run(script, *arguments, timeout=300):
    """Standard output of a benchmark, which must succeed."""
    paths = os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])
    command = [sys.executable, str(BENCHMARKS / script), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=ROOT, env=environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def report_of(output):
    """The JSON object that a benchmark prints, among what others print."""
    start = [found.start() for found in re.finditer(r"^\{", output, re.MULTILINE)][-1]
    return json.JSONDecoder().raw_decode(output, start)[0]


def test_no_benchmark_is_left_out():
    scripts = {path.name for path in BENCHMARKS.glob("*.py") if 'if __name__ == "__main__"' in path.read_text()}
    scripts.remove("summarise.py")  # test_results.py is about that one
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_benchmark*.py"))
    assert [script for script in scripts if f'run("{script}"' not in tests] == []


def test_core():
    small = ["--held", 160, "--tokens", 20_000, "--processes", 1, 2, "--repeats", 1]
    (cache,) = json.loads(run("core.py", *small))["caches"]
    assert [measured["processes"] for measured in cache["runs"]] == [1, 2]
    for measured in cache["runs"]:
        seconds = measured["seconds_a_million_tokens"]
        assert all(stage["cpu_s"]["median"] > 0 for stage in seconds.values())
        assert 0 < measured["reused_token_fraction"] < 1
    assert 2 < cache["bytes_a_token_when_new"] < 10


def test_eviction():
    """The more room the more is found where prompts come in another order, and nothing where they come in the same."""
    another, same = (
        [int(share) for share in re.findall(r"(\d+)% found", line)] for line in run("eviction.py").splitlines()
    )
    assert len(set(another)) == 4 and another == sorted(another, reverse=True) and same == [0] * 4


@pytest.mark.trl
@pytest.mark.slow
def test_train_side_by_side(tmp_path):
    pytest.importorskip("trl")
    pytest.importorskip("reasoning_gym")
    small = ["--model", "tiny", "--prompts", 8, "--num_train_epochs", 2, "--warm_up_steps", 5]
    small += ["--max_completion_length", 48]
    run("train_side_by_side.py", *small, "--output", tmp_path, "--runs", "plain", "guard", "lenience-inf+carry-0")
    settings = json.loads((tmp_path / "summary.json").read_text())["settings"]
    assert {name: setting["finished"] for name, setting in settings.items()} == {
        name: ["seed-0"] for name in ("plain", "guard", "lenience-inf+carry-0")
    }
    assert settings["lenience-inf+carry-0"]["step"]["reused_share"] > 0.5


@pytest.mark.trl
@pytest.mark.slow
def test_old_logprobs():
    pytest.importorskip("trl")
    report = report_of(run("old_logprobs.py", "--shape", "tiny", "--scale", 64, "--repeats", 1))
    assert report["ratio"] > 0


@pytest.mark.trl
@pytest.mark.slow
def test_update(tmp_path):
    pytest.importorskip("trl")
    sides = ("trl", "trimmed", "masked", "packed")
    report = report_of(run("update.py", "--output", tmp_path / "out.json", "--shape", "tiny", "--sides", *sides))
    assert json.loads((tmp_path / "out.json").read_text()) == report
    for profile in ("paper", "smollm2"):
        steps = {step["side"]: step for step in report["measured"] if step["profile"] == profile}
        assert steps.keys() == set(sides) and len({step["real_tokens"] for step in steps.values()}) == 1
        computed = [steps[side]["update_tokens"] for side in sides]
        assert computed[0] > computed[2] >= computed[1] > computed[3] == steps["packed"]["real_tokens"]
        for step in steps.values():
            seconds = step["seconds"]
            assert min(seconds.values()) > 0
            assert seconds["step"] > seconds["old_logprobs"] + seconds["reference"] + seconds["update"]


@pytest.mark.trl
@pytest.mark.vllm
@pytest.mark.slow
def test_exactness(tmp_path):
    for part in ("trl", "vllm"):
        pytest.importorskip(part)
    small = ["--output", tmp_path / "out.json", "--samples", 12_000, "--groups", 1000]
    report = report_of(run("exactness.py", *small))
    point = report["bias"][-1]
    far = {kind: point[kind]["log_ratio"]["mean"] / point[kind]["log_ratio"]["error"] for kind in ("trained", "others")}
    assert far["trained"] > 3 and far["others"] < -10  # standard errors
    for exact in (point["exact"]["log_ratio"] for point in report["bias"]):
        assert abs(exact["mean"]) <= 4 * exact["error"]
    engine = report["engine"]
    assert engine["engine_accepted_tokens"] > 500
    assert engine["places"]["p_value"] > 1e-4 and engine["first_token"]["p_value"] > 1e-4
    assert engine["places_of_the_drafts"]["p_value"] < 1e-6


@pytest.mark.trl
@pytest.mark.vllm
@pytest.mark.slow
def test_rollouts(tmp_path):
    """Of a policy one visit later; the same command again has nothing left to measure."""
    for part in ("trl", "vllm", "reasoning_gym"):
        pytest.importorskip(part)
    small = ["--model", "tiny", "--output", tmp_path, "--widen", 2, "--rows", 16, "--caps", 40, "--gates", 8, 16]
    small += ["--task", "counting", "--terms", 6, "--warm_up_steps", 30, "--warm_up_problems", 400]
    small += ["--repeats", 1, "--warm_up_learning_rate", 4e-3, "--learning_rate", 1e-3]
    report = report_of(run("rollouts.py", *small))
    (setting,) = report["settings"].values()
    drafting = {"asleep", "exact-8", "exact-16", "rest-8", "rest-16"}
    assert setting["medians"].keys() == {"plain", "cold", "trainer", "engine", "limit"} | drafting
    assert setting["speedup"].keys() == setting["medians"].keys() - {"plain"}
    medians = setting["medians"]
    assert medians["trainer"]["reused_tokens"] > 0 == medians["exact-16"]["reused_tokens"]
    assert medians["exact-16"]["engine_accepted_tokens"] > 0 == medians["asleep"]["engine_drafted_tokens"]
    measured = (tmp_path / "measurements.jsonl").read_text()
    run("rollouts.py", *small)
    assert (tmp_path / "measurements.jsonl").read_text() == measured


@pytest.mark.trl
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("profiles", [["spec-rl", "run"], ["run"]])
def test_replay_rollouts(tmp_path, profiles):
    pytest.importorskip("vllm")
    pytest.importorskip("trl")
    log = BENCHMARKS / "results" / "large-batch-lenience-h200" / "reuse" / "seed-1"
    small = ["--shape", "tiny", "--repeats", 1, "--rows", "--reuse", "--mean"]  # no sweep
    run("replay_rollouts.py", "--output", tmp_path, *small, "--profiles", *profiles, "--run", log)
    settings = json.loads((tmp_path / "summary.json").read_text())["settings"]
    assert list(settings)[-1] == "run-reuse-1024" and len(settings) == len(profiles)
    for setting in settings.values():
        assert setting["repeats"] == 1
        assert all(seconds["total_s"] > 0 for seconds in setting["seconds"].values())
        assert setting["seconds"]["engine"]["verify_s"] > 0 and setting["seconds"]["trainer"]["verify_s"] > 0
        assert setting["seconds"]["cold"]["verify_s"] < 0.01  # nothing to verify


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_overhead():
    pytest.importorskip("vllm")
    found = re.findall(r"found (\d+)% in the order of scoring, (\d+)% in reverse", run("vllm_overhead.py"))
    assert len(found) == 4 and all(int(share) > 0 for _, share in found)


@pytest.mark.vllm
@pytest.mark.slow
def test_hidden_states():
    pytest.importorskip("vllm")
    report = report_of(run("hidden_states.py", "--prompts", 1, "--samples", 2, "--tokens", 40, "--repeats", 1))
    assert report["difference"] < 1e-3 * report["scale"]


@pytest.mark.trl
@pytest.mark.vllm
@pytest.mark.slow
def test_server_generation(tiny_model):
    pytest.importorskip("vllm")
    pytest.importorskip("trl")
    small = ["--prompts", 2, "--samples", 2, "--tokens", 8, "--repeats", 1]
    report = report_of(run("server_generation.py", "--model", tiny_model, *small))
    assert report["mixed_median_s"] > 0


@pytest.mark.openrlhf
@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.slow
def test_openrlhf_actor(tiny_model):
    for package in ("openrlhf", "vllm", "ray"):
        pytest.importorskip(package)
    small = ["--prompts", 2, "--samples", 2, "--tokens", 8, "--steps", 3]
    report = report_of(run("openrlhf_actor.py", "--model", tiny_model, *small))
    assert report["reuse_median_s"] > 0


@pytest.mark.ray
@pytest.mark.slow
def test_openrlhf_cache_actor():
    for package in ("openrlhf", "ray"):
        pytest.importorskip(package)
    small = ["--engines", 1, "--prompts", 4, "--samples", 2, "--tokens", 16, "--epochs", 2]
    assert report_of(run("openrlhf_cache_actor.py", *small))


@pytest.mark.openrlhf
@pytest.mark.slow
def test_openrlhf_side_by_side(tmp_path, tiny_model):
    """It needs a GPU: here each run is stopped at once, and its flags are given to OpenRLHF's own parser."""
    for package in ("openrlhf", "vllm", "ray"):
        pytest.importorskip(package)
    from openrlhf_runs import parse

    names = ("plain", "reuse", "reuse_corrected", "plain_separate", "reuse_async", "ppo", "dapo")
    small = ["--run_s", 1, "--gpus", 2]
    run("openrlhf_side_by_side.py", "--model", tiny_model, "--output", tmp_path, *small, "--runs", *names)
    runs = json.loads((tmp_path / "summary.json").read_text())["runs"]
    assert [*runs] == [*names]
    for name, stopped in runs.items():
        assert stopped["exit_code"] == 124
        parsed = vars(parse(shlex.split(stopped["flags"])))
        assert ("spec" in parsed) == (not name.startswith("plain"))
