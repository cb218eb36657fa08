"""What `docs/results.md` and `benchmarks/results/summary.json` state is what the result files say."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import replay_rollouts  # noqa: E402
import run_summary  # noqa: E402
import summarise  # noqa: E402

HEADER = {
    "command": "python benchmarks/replay_rollouts.py --output OUT",
    "commit": "abc",
    "hardware": "a GPU, 4 CPU cores",
    "versions": {"torch": "1"},
    "shape": "qwen3-1.7b",
}
# Seconds of one repeat, chosen so that each ratio is plain to see.
MEASURED = {
    "plain": {"generate_s": 9.0, "extract_s": 1.0, "total_s": 10.0},
    "cold": {"total_s": 8.0},
    "engine": {"verify_s": 1.2, "generate_s": 2.5, "total_s": 4.0},
    "trainer": {"verify_s": 1.0, "generate_s": 3.5, "total_s": 5.0},
    "limit": {"prefill_s": 1.0, "total_s": 3.0},
    "limit_logprobs": {"prefill_s": 1.0, "total_s": 3.5},
}
TOKENS = {"rows": 512, "response_tokens": 460_800, "reused_share": 0.67}


def measurement(kind, repeat=0, setting=summarise.REPLAYED, faster=1.0):
    measured = {name: seconds / faster for name, seconds in MEASURED[kind].items()}
    return {"setting": setting, "repeat": repeat, "kind": kind, "tokens": TOKENS, "measured": measured}


@pytest.fixture
def replayed(tmp_path):
    """A folder of results that holds a replay and nothing else."""
    record = replay_rollouts.Record(tmp_path / summarise.REPLAYS["spec-rl"], HEADER)
    for kind in MEASURED:
        record.add(measurement(kind))
    return tmp_path


def test_the_summary_is_what_the_result_files_say():
    assert json.loads((summarise.RESULTS / "summary.json").read_text()) == json.loads(json.dumps(summarise.summarise()))


def test_the_page_states_the_figures_of_the_summary():
    page = (summarise.DOCS / "results.md").read_text()
    assert page == summarise.filled(page, summarise.tables())


def test_each_figure_says_where_it_is_from():
    for name, entry in summarise.summarise().items():
        assert entry["from"] and entry["origins"], name
        for origin in entry["origins"]:
            assert (ROOT / origin["source"]).is_file(), name
            assert all(origin[field] for field in ("command", "commit", "hardware", "versions")), name


def test_a_replay_is_preferred_and_its_ratios_are_the_ones_meant(replayed):
    found = summarise.summarise(replayed)
    assert {name: entry["value"] for name, entry in found.items()} == pytest.approx(
        {
            "rollout_speedup": 2.0,
            "rollout_speedup_engine": 2.5,
            "limit_share": 0.6,
            "limit_share_engine": 0.75,
            "limit_share_with_logprobs": 0.7,
            "limit_share_with_logprobs_engine": 0.875,
            "verify_over_prefill": 1.0,
            "verify_over_prefill_engine": 1.2,
            "cold_over_plain": 0.8,
        }
    )
    (origin,) = found["rollout_speedup"]["origins"]
    assert origin["command"] == [HEADER["command"]] and origin["hardware"] == HEADER["hardware"]


def test_a_figure_that_changes_changes_the_page(replayed):
    page = summarise.filled((summarise.DOCS / "results.md").read_text(), summarise.tables(replayed))
    assert "| `rollout_speedup` | 2 |" in page
    assert "`step_speedup`" in next(line for line in page.splitlines() if line.startswith("Not measured yet:"))
    with pytest.raises(ValueError, match="table: replay"):
        summarise.filled(page.replace("table: replay", "table: nothing"), summarise.tables(replayed))


def test_the_charts_are_drawn(replayed, tmp_path):
    pytest.importorskip("matplotlib")
    for directory in ("train-h200", "pruning-h200"):
        trained(replayed / directory, {"plain": (6.0, 0.05, {}), "reuse": (4.0, 0.05, {})})
    summarise.draw(replayed, tmp_path)
    drawn = ("results.png", "replay.png", "training.png", "pruning.png")
    assert all((tmp_path / name).stat().st_size > 10_000 for name in drawn)


def trained(output, runs, steps=10, seed=0):
    """A folder of finished training runs, by name: seconds of a step, reward gained by a step, more to log."""
    for name, (step_s, gain, more) in runs.items():
        run = output / name / f"seed-{seed}"
        run.mkdir(parents=True)
        lines = [
            {
                **{"step": step, "epoch": step / 2, "reward": 0.1, "policy/expected_reward": gain * step},
                **{"stage/step_s": step_s, "stage/rollout_s": step_s / 2, "rollout/completion_tokens": 1000},
                **{"stage/old_logprobs_s": step_s / 8, "stage/update_s": step_s / 4},
                **more,
            }
            for step in range(1, steps + 1)
        ]
        (run / "specrl.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (run / "finished.json").write_text('{"runs_on_one_device": 1}')
    run_summary.write_summary(output, "python benchmarks/train_side_by_side.py --output OUT", "abc")


def test_training_runs_are_summed_up(tmp_path):
    reused = {"spec/generated_tokens": 400, "spec/reused_token_fraction": 0.6}
    judged = {"prune/head_auc": 0.75}
    compared = {"plain": (6.0, 0.05, {}), "reuse": (4.0, 0.05, reused)}
    trained(tmp_path / "train-h200", compared)
    guarded = {"guard": (3.0, 0.05, {"spec/generated_tokens": 600, "spec/reused_token_fraction": 0.4})}
    for directory in (*summarise.LARGE_BATCH, *summarise.DEFAULTS):
        trained(tmp_path / directory, compared | guarded)
    trained(tmp_path / "low-rate-h200", {"plain": compared["plain"], "guard": (5.0, 0.05, {})})
    assert summarise.pruning(tmp_path) is None
    pruned = {"plain+wide": (12.0, 0.05, {}), "plain+prune": (8.0, 0.05, judged), "prune": (5.0, 0.05, judged)}
    trained(tmp_path / "pruning-h200", compared | pruned)
    found = summarise.summarise(tmp_path)
    expected = {
        **{"rollout_speedup_training": 2.0, "step_speedup": 2.0, "time_to_reward": 2.0, "time_to_reward_80": 2.0},
        **{"rollout_speedup_training_512": 2.0, "step_speedup_512": 2.0, "time_to_reward_512": 2.0},
        **{"time_to_reward_80_512": 2.0, "final_reward": 1.0, "final_reward_512": 1.0},
        **{"plain_spread": 0.0, "plain_spread_512": 0.0},
        **{"step_speedup_pausing": 1.2, "time_to_reward_pausing": 1.2, "final_reward_pausing": 1.0},
        **{"step_speedup_high_rate": 1.5, "time_to_reward_80_high_rate": 1.5, "final_reward_high_rate": 1.0},
        **{"prune_step_speedup": 1.5, "reuse_step_speedup": 1.5, "both_step_speedup": 2.4, "head_auc": 0.75},
        "reuse_time_to_reward": 1.5,
    }
    assert {name: entry["value"] for name, entry in found.items()} == pytest.approx(expected)
    # One row for a run of each folder: tokens that were drafted, the rollout's seconds, those of the step.
    row = next(line for line in summarise.tables(tmp_path)["step-stages"].splitlines() if "`guard`" in line)
    assert row.split(" | ")[2] == "0" and row.split(" | ")[9] == "1.5" and row.endswith("| 3 |")
    pruning = summarise.pruning(tmp_path)
    assert pruning["both_step_speedup"] == 2.4 and pruning["seconds"]["plain+prune"]["step_s"] == 8.0
    assert pruning["tokens"]["reuse"] == {"tokens": 1000, "generated": 400}
    assert pruning["rewards"]["plain"]["seed-0"]["policy"][-1] == 0.5 and pruning["commit"] == "abc"
    # The quickest run is through after 40 s: plain has made 6 of its 10 steps, each worth 0.05.
    for table in ("training", "pruning"):
        row = next(line for line in summarise.tables(tmp_path)[table].splitlines() if line.startswith("| `plain` "))
        assert "| 0.275 | 0.425 | 48 |" in row


def test_seeds_of_several_folders_count_alike(tmp_path):
    """Two seeds that are twice as fast as plain, and one in another folder that is as fast."""
    folders = summarise.LARGE_BATCH
    fast = {"plain": (6.0, 0.05, {}), "guard": (3.0, 0.05, {})}
    trained(tmp_path / folders[0], fast, seed=1)
    trained(tmp_path / folders[0], fast, seed=2)
    assert "step_speedup" not in summarise.summarise(tmp_path)
    trained(tmp_path / folders[1], {"plain": (6.0, 0.05, {}), "guard": (6.0, 0.04, {})})
    found = summarise.summarise(tmp_path)
    assert found["step_speedup"]["value"] == 1.5
    assert found["final_reward"]["value"] == pytest.approx(14 / 15, abs=1e-3)
    assert "time_to_reward" not in found  # a seed did not get there
    assert [origin["source"] for origin in found["step_speedup"]["origins"]] == [
        f"benchmarks/results/{folder}/summary.json" for folder in folders
    ]
    goals = summarise.tables(tmp_path)["goals"]
    assert "1,024 responses 1.5 (reached)" in goals and "1,024 responses 0.9333 (missed)" in goals
    trained(tmp_path / folders[1], {"plain": (6.0, 0.05, {})}, seed=3)  # plain alone: seeds are no longer pairs
    assert "step_speedup" not in summarise.summarise(tmp_path)


def test_a_goal_is_reached_or_missed():
    summary = {name: {"value": value, "goal": summarise.FIGURES[name][1]} for name, value in {
        "final_reward": 0.97, "plain_spread": 0.04, "final_reward_512": 0.97, "plain_spread_512": 0.02,
        "cold_over_plain": 0.9, "bytes_per_token": 5.01, "step_speedup": 1.5,
        "prune_step_speedup": 2.0, "reuse_step_speedup": 1.5, "both_step_speedup": 2.9,
    }.items()}  # fmt: skip
    reached = {name for name, entry in summary.items() if entry["goal"] and summarise._reached(summary, name)}
    assert reached == {"final_reward", "cold_over_plain", "step_speedup", "prune_step_speedup"}


def test_a_whole_step_is_the_rollout_of_one_run_and_the_rest_of_another(tmp_path):
    rollouts = {summarise.REPLAYED: {"seconds": {"plain": {"total_s": 30.0}, "trainer": {"total_s": 10.0}}}}
    rest = {"trl": {"step": 90.0, "reference": 20.0}, "trimmed": {"step": 30.0, "reference": 5.0}}
    parts = {
        summarise.REPLAYS["spec-rl"]: {"settings": rollouts},
        summarise.UPDATE: {"medians": {"paper": rest}},
    }
    for folder, part in parts.items():
        assert summarise.WholeStep().read(tmp_path) is None
        (tmp_path / folder).mkdir()
        about = {"hardware": "a GPU", "versions": {}, "command": folder, "commit": "x"}
        (tmp_path / folder / "summary.json").write_text(json.dumps(part | about))
    found = summarise.WholeStep().read(tmp_path)
    assert found["value"] == 3.0 and [origin["command"] for origin in found["origins"]] == [[f] for f in parts]
    assert summarise.WholeStep(without=("reference",)).read(tmp_path)["value"] == pytest.approx(100 / 35)


def test_what_steps_taught_is_weighed_by_its_error(tmp_path):
    for folder, taught, error in (("exact", 1.0, 0.1), ("rough", 0.5, 0.2)):
        (tmp_path / folder).mkdir()
        settings = {"guard": {"with_drafts": {"taught": taught, "taught_error": error}}}
        summary = {"settings": settings, "hardware": "a GPU", **{key: "x" for key in ("command", "commit")}}
        (tmp_path / folder / "summary.json").write_text(json.dumps(summary | {"versions": {}}))
    found = summarise.Weighed(("exact", "rough"), ("guard", "with_drafts", "taught")).read(tmp_path)
    assert found["value"] == pytest.approx(0.9) and found["error"] == pytest.approx(0.2 / 5**0.5)
    assert found["chi_squared"] == pytest.approx(0.1**2 / 0.1**2 + 0.4**2 / 0.2**2)
    assert summarise.Weighed(("exact", "none"), ("guard", "with_drafts", "taught")).read(tmp_path) is None


def test_the_cores_seconds_and_bytes_are_in_their_columns(tmp_path):
    parts = ("look up", "accept", "assemble", "store", "all")
    seconds = {part: {"cpu_s": {"median": 0.1 * (i + 1)}} for i, part in enumerate(parts)}
    run = {"processes": 8, "seconds_a_million_tokens": seconds}
    cache = {"held": 10_000, "runs": [run], "bytes_a_token_when_new": 6, "bytes_a_token_after_rollouts": 7}
    (tmp_path / "core").mkdir()
    measured = {"command": "python benchmarks/core.py", "caches": [cache]}
    summary = {"faster_machine": [measured | {"commit": "a" * 12}], "now": [measured | {"commit": "b" * 12}]}
    (tmp_path / "core" / "summary.json").write_text(json.dumps(summary))
    table = summarise._core(tmp_path).splitlines()
    assert table[2] == (
        "| commit | held | processes | look up, s | accept, s | assemble, s | store, s | all, s "
        "| bytes a token, new | in use |"
    )
    assert table[-2:] == [
        f"| `{commit}` | 10,000 | 8 | 0.1 | 0.2 | 0.3 | 0.4 | 0.5 | 6 | 7 |" for commit in ("a" * 7, "b" * 7)
    ]


def test_what_a_step_teaches_is_measured_in_steps_of_plain(tmp_path):
    half = {"spec/generated_tokens": 500, "spec/new_reward_fraction": 0.7}
    trained(tmp_path, {"plain": (6.0, 0.05, {}), "reuse": (4.0, 0.04, half), "faster": (4.0, 0.06, {})}, steps=20)
    settings = json.loads((tmp_path / "summary.json").read_text())["settings"]
    taught = settings["reuse"]["taught"]
    assert list(taught) == ["5", "10", "15", "20"]
    for after in taught.values():  # at the end three steps are but two
        assert after["steps"] == pytest.approx(0.8, abs=0.03) and after["tokens"] == pytest.approx(1.6, abs=0.06)
        assert after["new"] == 0.7
    assert settings["faster"]["taught"]["20"]["steps"] is None and "new" not in settings["faster"]["taught"]["20"]
    assert settings["plain"]["taught"]["10"] == {"steps": 1.0, "tokens": 1.0}


def test_what_was_learned_is_set_against_plain_of_the_same_seeds(tmp_path):
    """A seed that only plain has learns twice as fast, and another one was cut off with reuse."""
    slow = {"plain": (6.0, 0.04, {}), "reuse": (4.0, 0.02, {})}
    trained(tmp_path, slow, steps=20)
    trained(tmp_path, {"plain": (6.0, 0.08, {})}, steps=20, seed=1)
    trained(tmp_path, {"plain": (6.0, 0.08, {}), "reuse": (4.0, 0.08, {})}, steps=20, seed=2)
    (tmp_path / "reuse" / "seed-2" / "finished.json").unlink()
    run_summary.write_summary(tmp_path, "again", "abc")
    reuse = json.loads((tmp_path / "summary.json").read_text())["settings"]["reuse"]
    assert reuse["against_plain"]["final"] == pytest.approx(0.5)
    assert [after["steps"] for after in reuse["taught"].values()] == pytest.approx([0.5] * 4, abs=0.03)


def test_a_rollout_that_is_trained_on_twice_is_generated_once(tmp_path):
    """With `num_iterations=2` TRL logs neither reward nor tokens at every other step."""
    trained(tmp_path, {"plain": (6.0, 0.05, {}), "plain+twice": (5.0, 0.05, {})})
    path = tmp_path / "plain+twice" / "seed-0" / "specrl.jsonl"
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    for step in steps[1::2]:
        del step["reward"], step["rollout/completion_tokens"]
    path.write_text("".join(json.dumps(step) + "\n" for step in steps))
    run_summary.write_summary(tmp_path, "again", "abc")
    settings = json.loads((tmp_path / "summary.json").read_text())["settings"]
    assert settings["plain+twice"]["uses"] == 2.0 and settings["plain"]["uses"] == 1.0
    assert settings["plain+twice"]["curves"]["seed-0"]["generated"][-1] == 5_000
    assert settings["plain+twice"]["against_plain"]["generated_to_0.9"] == pytest.approx(2.0, rel=0.15)


def test_steps_with_drafts_are_compared_with_those_of_the_guards_pauses(tmp_path):
    trained(tmp_path, {"plain": (6.0, 0.05, {}), "guard": (4.0, 0.05, {}), "reuse": (4.0, 0.05, {})})
    path = tmp_path / "guard" / "seed-0" / "specrl.jsonl"
    steps, reward = [json.loads(line) for line in path.read_text().splitlines()], 0.0
    for step in steps:
        drafts = step["step"] % 3 == 0
        reward += 0.06 if drafts else 0.04
        step |= {"policy/expected_reward": reward, "stage/step_s": 3.0 if drafts else 4.0}
        step |= {"spec/reused_token_fraction": 0.5 * drafts, "spec/new_reward_fraction": 0.25 if drafts else 1.0}
    path.write_text("".join(json.dumps(step) + "\n" for step in steps))
    run_summary.write_summary(tmp_path, "again", "abc")
    settings = json.loads((tmp_path / "summary.json").read_text())["settings"]
    exact = {"step_s_error": 0.0, "taught_error": pytest.approx(0.0, abs=1e-9)}
    assert settings["guard"]["with_drafts"] == {"steps": 3, "step_s": 3.0, "taught": 1.2, "new": 0.25} | exact
    assert settings["guard"]["without"] == {"steps": 6, "step_s": 4.0, "taught": 0.8, "new": 1.0} | exact
    assert not settings["reuse"].keys() & {"with_drafts", "without"}


def test_a_seed_that_was_cut_off_says_nothing_about_when_a_reward_is_reached(tmp_path):
    trained(tmp_path, {"plain": (6.0, 0.05, {}), "reuse": (4.0, 0.05, {})})
    for name in ("plain", "reuse"):
        shutil.copytree(tmp_path / name / "seed-0", tmp_path / name / "seed-1")
    cut_off = tmp_path / "reuse" / "seed-1"
    (cut_off / "finished.json").unlink()
    (cut_off / "specrl.jsonl").write_text("".join((cut_off / "specrl.jsonl").read_text().splitlines(True)[:3]))
    run_summary.write_summary(tmp_path, "again", "abc")
    reuse = json.loads((tmp_path / "summary.json").read_text())["settings"]["reuse"]
    assert reuse["learned"]["0.9"]["steps"][1] is None and reuse["against_plain"]["seconds_to_0.9"] == 1.5


def test_a_replay_that_was_cut_off_goes_on_with_what_is_missing(tmp_path):
    first = replay_rollouts.Record(tmp_path, HEADER)
    for kind in MEASURED:
        first.add(measurement(kind))
    first.add(measurement("plain", repeat=1))
    with first.path.open("a") as file:
        file.write('{"process": 0, "setting": ')  # killed while writing
    second = replay_rollouts.Record(tmp_path, HEADER)
    assert (
        second.complete(summarise.REPLAYED, replay_rollouts.KINDS) == 1
    )  # half a repeat is made again: processes are not mixed
    for kind in reversed(list(MEASURED)):
        second.add(measurement(kind, repeat=1, faster=2.0))
    assert second.complete(summarise.REPLAYED, replay_rollouts.KINDS) == 2
    setting = json.loads(second.summary_path.read_text())["settings"][summarise.REPLAYED]
    assert setting["seconds"]["plain"]["total_s"] == 10.0  # the median of 10, 10 and 5
    assert setting["seconds"]["cold"]["total_s"] == 6.0  # of 8 and 4
    assert setting["ratios"]["rollout_speedup_trainer"] == 2.0  # each of its own process
    with pytest.raises(ValueError, match="choose another --output"):
        replay_rollouts.Record(tmp_path, HEADER | {"hardware": "another GPU"})


@pytest.mark.parametrize("reuse", [0.33, 0.67, 0.9])
def test_lengths_follow_the_figures_that_they_are_drawn_by(reuse):
    lengths = replay_rollouts.published(replay_rollouts.Setting(reuse=reuse), scale=1)
    assert (
        lengths.prompts.reshape(-1, replay_rollouts.SAMPLES) == lengths.prompts[:: replay_rollouts.SAMPLES, None]
    ).all()
    assert (lengths.prefixes <= lengths.drafts).all() and (lengths.responses <= lengths.cap).all()
    whole = lengths.prefixes == lengths.drafts
    assert (lengths.remaining[whole] == 0).all() and (lengths.remaining[~whole] > 0).all()
    # A fixed seed. 512 lengths with a standard deviation of about 600 tokens: their mean has one of 27.
    assert lengths.responses.mean() == pytest.approx(900, abs=81)
    assert lengths.prefixes.sum() / lengths.drafts.sum() == pytest.approx(reuse, abs=0.05)


@pytest.mark.parametrize(
    ("run", "prompt", "response", "cap", "reused", "whole"),
    [
        ("trl-h200/reuse", 82, 36.5, 128, 0.91, 0.89),
        # 205 by the log. Exponential lengths of that mean, cut at 512, have one of 204 * (1 - exp(-512 / 204)) = 187.
        ("large-batch-lenience-h200/reuse/seed-1", 88, 187, 512, 0.392, 0.221),
    ],
)
def test_lengths_follow_the_log_of_a_run(run, prompt, response, cap, reused, whole):
    profile = str(summarise.RESULTS / run)
    totals = replay_rollouts.logged(replay_rollouts.Setting(profile=profile, rows=1024), scale=1).totals()
    assert totals["prompt_tokens"] / 1024 == pytest.approx(prompt, abs=1)
    assert totals["longest_response"] == totals["cap"] == cap
    assert totals["response_tokens"] / 1024 == pytest.approx(response, abs=3 * response / 32)  # 3 standard errors
    assert totals["reused_share"] == pytest.approx(reused, abs=0.03)
    assert totals["rows_reused_whole"] / 1024 == pytest.approx(whole, abs=0.04)  # 3 standard errors of the latter
