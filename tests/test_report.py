"""`specrl report`: the log of a run as a table and a chart."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specrl_plugins import RolloutCounts, report

STEPS_PER_EPOCH = 10


def reuse_entry(step, every=1, reused=0, drafted=0, **changes):
    """What a run with reuse logs: 100 completion tokens and 2 s of rollout a step."""
    counts = RolloutCounts(
        rows=4 * every,
        completion_tokens=100 * every,
        generated_tokens=(100 - reused) * every,
        reused_tokens=reused * every,
        drafted_tokens=drafted * every,
        lookup_s=0.1 * every,
        verify_s=0.2 * every,
        generate_s=1.6 * every,
        store_s=0.1 * every,
    )
    return entry(step) | counts.metrics() | changes


def plain_entry(step, every=1, **changes):
    """What a plain run logs that counts its tokens: 100 of them, and 4 s of rollout a step."""
    return entry(step) | {"rollout/completion_tokens": 100 * every, "rollout/seconds": 4.0 * every} | changes


def entry(step):
    return {"step": step, "epoch": step / STEPS_PER_EPOCH, "reward": step / 100, "step_time": 5.0}


def write(run_dir: Path, entries, tail: str = "") -> Path:
    run_dir.mkdir(exist_ok=True)
    (run_dir / report.RUN_LOG).write_text("".join(json.dumps(entry) + "\n" for entry in entries) + tail)
    return run_dir


def reuse_run(every=1, steps=30):
    """Nothing to reuse in the first epoch, 60 of 100 tokens afterwards."""
    return [
        reuse_entry(step, every, **({} if step <= STEPS_PER_EPOCH else {"reused": 60, "drafted": 80}))
        for step in range(every, steps + 1, every)
    ]


def cells(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


# -- load


@pytest.mark.parametrize("every", [1, 5])
def test_amounts_are_sums_whatever_the_logging_interval(tmp_path, every):
    run = report.load(write(tmp_path, reuse_run(every)))
    assert [record["step"] for record in run] == list(range(every, 31, every))
    assert {record["steps"] for record in run} == {every}
    assert run[-1] == {
        "step": 30,
        "steps": every,
        "epoch": 3,
        "reward": 0.3,
        "tokens": 100 * every,
        "generated": 40 * every,
        "reused": 60 * every,
        "accept_rate": 0.75,
        "rollout_s": pytest.approx(2.0 * every),
        "verify_s": pytest.approx(0.2 * every),
        "spared_s": 0.0,
        "step_s": 5.0 * every,  # TRL logs the mean
    }


def test_epochs_count_from_one_and_end_with_their_last_step(tmp_path):
    epochs = [1e-9, 0.1, 0.999, 1.0, 1.0000000001, 1.1, 2.0, 2.9999999999]
    entries = [entry(step) | {"epoch": epoch} for step, epoch in enumerate(epochs, 1)]
    assert [record["epoch"] for record in report.load(write(tmp_path, entries))] == [1, 1, 1, 1, 1, 2, 2, 3]


def test_resumed_run_counts_what_it_logged_last(tmp_path):
    killed = [plain_entry(step, reward=0.0) for step in range(1, 18)]
    resumed = [plain_entry(step, reward=1.0) for step in range(11, 21)]
    run = report.load(write(tmp_path, killed + resumed))
    assert [record["step"] for record in run] == list(range(1, 21))
    assert [record["reward"] for record in run] == [0.0] * 10 + [1.0] * 10
    assert {record["steps"] for record in run} == {1}


def test_run_begun_anew_forgets_the_longer_one_before(tmp_path):
    run = report.load(write(tmp_path, [plain_entry(s) for s in (1, 2, 3, 4)] + [plain_entry(s) for s in (1, 2)]))
    assert [record["step"] for record in run] == [1, 2]


def test_truncated_last_line_is_ignored(tmp_path, caplog):
    run = report.load(write(tmp_path, reuse_run(), tail='{"step": 31, "epo'))
    assert run[-1]["step"] == 30
    assert not caplog.records


ODD = [
    '{"step": 3, "rew',
    "17",
    '["reward"]',
    '{"reward": 1}',
    "\0\0",
    "[" * 100_000,
    *(
        json.dumps(plain_entry(1) | {name: value})
        for name, values in {
            "step": [None, "1", 1.5, True, -1, 0, 10**400, [1]],
            "epoch": [None, "1", float("nan"), float("inf"), 10**400, {}],
            "reward": ["high", [0.1], 10**400],
            "step_time": ["5 s"],
            "rollout/completion_tokens": ["many"],
            "spec/draft_accept_rate": [{}],
            "spec/time/verify_s": ["1"],
        }.items()
        for value in values
    ),
]


@pytest.mark.parametrize("damaged", ODD, ids=range(len(ODD)))
def test_damaged_line_before_others_is_left_out_and_named(tmp_path, caplog, damaged):
    write(tmp_path, [plain_entry(1)], tail=damaged + "\n" + json.dumps(plain_entry(2)) + "\n")
    assert [record["step"] for record in report.load(tmp_path)] == [1, 2]
    assert "line 2 of" in caplog.text


def test_damaged_last_line_that_was_not_cut_off_is_named(tmp_path, caplog):
    write(tmp_path, [plain_entry(1)], tail=json.dumps(plain_entry(2, reward="high")) + "\n")
    assert [record["step"] for record in report.load(tmp_path)] == [1]
    assert "line 2 of" in caplog.text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), None])
@pytest.mark.parametrize(
    "name",
    [
        *("reward", "step_time", "spec/generated_tokens", "spec/reused_tokens", "spec/draft_accept_rate"),
        *(f"spec/time/{stage}_s" for stage in ("lookup", "verify", "generate", "store", "spared")),
    ],
)
def test_a_number_that_is_none_poisons_no_mean_and_no_sum(tmp_path, caplog, name, value):
    odd = report.load(write(tmp_path / "odd", [*reuse_run(), reuse_entry(31, reused=60, drafted=80, **{name: value})]))
    absent = reuse_entry(31, reused=60, drafted=80)
    del absent[name]
    assert odd == report.load(write(tmp_path / "absent", [*reuse_run(), absent]))
    assert not caplog.records
    for text in report.table(odd), report.table(odd, odd), report.costs(odd):
        assert "nan" not in text and "inf" not in text and text.strip()


def test_a_line_that_tells_no_seconds_of_its_rollout_leaves_the_cell_empty(tmp_path):
    told = {"spec/generated_tokens": 5, "spec/reused_tokens": 1}
    run = report.load(write(tmp_path, [{"step": 1, "epoch": 1, "reward": 0.1} | told]))
    assert cells(report.table(run))[1] == ["1", "0.100", "6", "5", "16.7%"]
    assert report.costs(run) == ""


def test_epochs_that_are_out_of_order_are_each_counted_whole(tmp_path):
    entries = [plain_entry(step) | {"epoch": epoch} for step, epoch in [(1, 1), (2, 2), (3, 1), (4, 2)]]
    assert [row[:3] for row in cells(report.table(report.load(write(tmp_path, entries))))[1:3]] == [
        ["1", "0.020", "200"],
        ["2", "0.030", "200"],
    ]


def test_evaluations_may_say_anything(tmp_path, caplog):
    others = [{"step": 0, "epoch": None, "eval_reward": 0.1}, {"eval_reward": float("nan")}]
    assert report.load(write(tmp_path, others + reuse_run()))[0]["step"] == 1
    assert not caplog.records


def test_evaluations_and_the_summary_of_the_run_are_no_steps(tmp_path):
    others = [{"step": 30, "epoch": 3.0, "eval_reward": 0.1}, {"step": 30, "epoch": 3.0, "train_runtime": 9.0}]
    assert report.load(write(tmp_path, reuse_run() + others)) == report.load(write(tmp_path, reuse_run()))


def test_steps_without_a_rollout_count_their_seconds_only(tmp_path):
    """TRL with `num_iterations=2` makes a rollout every other step."""
    entries = [reuse_entry(1), {"step": 2, "epoch": 0.2, "step_time": 3.0}]
    (summary,) = cells(report.table(report.load(write(tmp_path, entries))))[1:2]
    assert summary == ["1", "0.010", "100", "100", "0.0%", "2.0", "8.0"]


def test_reward_that_no_function_gave_is_no_zero(tmp_path):
    entries = [plain_entry(1, reward=None), plain_entry(2, reward=0.5)]
    assert cells(report.table(report.load(write(tmp_path, entries))))[-1][1] == "0.500"


@pytest.mark.parametrize("content", [None, "", "{", '{"step": 1, "epoch": 1, "train_loss": 0}\n'])
def test_nothing_to_report(tmp_path, content):
    if content is not None:
        (tmp_path / report.RUN_LOG).write_text(content)
    with pytest.raises(report.ReportError, match=r"specrl\.jsonl"):
        report.load(tmp_path)


# -- table


@pytest.mark.parametrize("every", [1, 5])
def test_table_of_one_run(tmp_path, every):
    text = report.table(report.load(write(tmp_path, reuse_run(every))))
    assert [row[0] for row in cells(text)] == ["epoch", "1", "2", "3", "all"]
    assert [row[2:] for row in cells(text)[1:]] == [
        ["1,000", "1,000", "0.0%", "20.0", "50.0"],
        ["1,000", "400", "60.0%", "20.0", "50.0"],
        ["1,000", "400", "60.0%", "20.0", "50.0"],
        ["3,000", "1,800", "40.0%", "60.0", "150.0"],
    ]


def test_reused_share_is_that_of_the_sums_not_a_mean_of_shares(tmp_path):
    long = RolloutCounts(rows=1, completion_tokens=900, generated_tokens=0, reused_tokens=900, drafted_tokens=900)
    entries = [reuse_entry(1), entry(2) | long.metrics()]
    assert cells(report.table(report.load(write(tmp_path, entries))))[-1][4] == "90.0%"


def test_reward_of_an_epoch_weighs_entries_by_their_steps(tmp_path):
    entries = [plain_entry(1, reward=1.0), plain_entry(5, every=4, reward=0.0)]  # as `logging_first_step` does
    assert cells(report.table(report.load(write(tmp_path, entries))))[-1][1] == "0.200"


def test_table_of_two_runs(tmp_path):
    reuse = report.load(write(tmp_path / "reuse", reuse_run(5)))
    plain = report.load(write(tmp_path / "plain", [plain_entry(step) for step in range(1, 31)]))
    rows = cells(report.table(reuse, plain))
    assert rows[0] == ["reward", "tokens", "generated", "reused", "rollout", "s", "step", "s"]
    assert rows[1] == ["epoch", *["plain", "reuse"] * 3, "reuse", *["plain", "reuse"] * 2]
    assert rows[3][3:] == ["1,000", "1,000", "1,000", "400", "60.0%", "40.0", "20.0", "50.0", "50.0"]
    assert rows[5][3:] == ["3,000", "3,000", "3,000", "1,800", "40.0%", "120.0", "60.0", "150.0", "150.0"]
    assert rows[6:] == [["plain", "/", "reuse", "1.00x", "1.67x", "2.00x", "1.00x"]]


def test_baseline_that_does_not_count_its_tokens_leaves_cells_empty(tmp_path):
    reuse = report.load(write(tmp_path / "reuse", reuse_run()))
    plain = report.load(write(tmp_path / "plain", [entry(step) | {"num_tokens": 1e6} for step in range(1, 31)]))
    rows = cells(report.table(reuse, plain))
    assert rows[5] == ["all", "0.155", "0.155", "3,000", "1,800", "40.0%", "60.0", "150.0", "150.0"]
    assert rows[6] == ["plain", "/", "reuse", "1.00x"]


def test_runs_of_different_length_are_compared_where_both_went(tmp_path):
    reuse = report.load(write(tmp_path / "reuse", reuse_run()))
    plain = report.load(write(tmp_path / "plain", [plain_entry(step) for step in range(1, 16)]))
    for text in report.table(reuse, plain), report.table(plain, reuse):
        assert "only steps up to 15 are compared." in text
    rows = cells(report.table(reuse, plain))
    assert [row[0] for row in rows[2:]] == ["1", "2", "all", "plain", "The"]
    assert rows[4][3:] == ["1,500", "1,500", "1,500", "1,200", "20.0%", "60.0", "30.0", "75.0", "75.0"]


def test_runs_without_a_common_step_cannot_be_compared(tmp_path):
    odd = report.load(write(tmp_path / "odd", [plain_entry(3, every=3)]))
    even = report.load(write(tmp_path / "even", [plain_entry(2, every=2)]))
    with pytest.raises(report.ReportError, match="in common"):
        report.table(odd, even)


# -- what verifying took and reuse saved


@pytest.mark.parametrize("every", [1, 5])
def test_costs_are_those_of_the_summary_at_the_end_of_training(tmp_path, every):
    """A first step of 9 s in place of 2; then 20 ms a token without reuse, and 10 ms, 2 of them spared, with it."""
    entries = reuse_run(every)
    entries[0]["spec/time/generate_s"] += 7
    for later in entries[STEPS_PER_EPOCH // every :]:
        later |= {"spec/time/generate_s": 0.6 * every, "spec/time/spared_s": 0.2 * every}
    verifying, saved = report.costs(report.load(write(tmp_path, entries))).splitlines()
    assert verifying == (
        "Verifying took 6.0 s of the 47.0 s of rollouts, and spared the trainer 4.0 s of its pass for log-probs."
    )
    assert saved == "Estimated time saved: 17.0 s of 60.0 s, at the 20.00 ms that a token took without reuse."


def test_costs_without_a_plain_step_to_compare_with(tmp_path):
    """A run that was resumed in its second epoch."""
    entries = [reuse_entry(step, reused=60, drafted=80) for step in (11, 12)]
    (line,) = report.costs(report.load(write(tmp_path, entries))).splitlines()
    assert line.startswith("Verifying took 0.4 s of the 4.0 s")


@pytest.mark.parametrize("entries", [reuse_run(steps=5), [plain_entry(step) for step in range(1, 5)], [entry(1)]])
def test_costs_of_a_run_that_verified_nothing(tmp_path, entries):
    assert report.costs(report.load(write(tmp_path, entries))) == ""


# -- chart


def variants():
    plain = [plain_entry(step) for step in range(1, 31)]
    uncounted = [entry(step) for step in range(1, 31)]
    return {
        "reuse": (reuse_run(), None),
        "reuse, logged every 5 steps": (reuse_run(5), None),
        "reuse beside plain": (reuse_run(), plain),
        "reuse beside plain without counts": (reuse_run(), uncounted),
        "plain": (plain, None),
        "plain without counts": (uncounted, None),
        "one step": (reuse_run(steps=1), plain[:1]),
    }


@pytest.mark.parametrize("variant", variants())
def test_chart_is_drawn(tmp_path, variant):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    run, baseline = variants()[variant]
    run = report.load(write(tmp_path / "run", run))
    baseline = None if baseline is None else report.load(write(tmp_path / "baseline", baseline))
    report.draw(run, baseline, tmp_path / "chart.png")
    image = imread(tmp_path / "chart.png")
    assert image.shape[:2] == (600, 1800)
    panels = [image[:, left : left + 480, :3] for left in (60, 660, 1260)]
    assert all((panel < 0.5).any() for panel in panels)
    coloured = [bool((panel.max(2) - panel.min(2) > 0.3).any()) for panel in panels]
    assert coloured == ([False] * 3 if variant.startswith("plain") else [True, True, variant != "one step"])


def test_chart_without_matplotlib_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run = report.load(write(tmp_path, reuse_run()))
    with pytest.raises(report.ReportError, match=r"specrl-plugins\[report\]"):
        report.draw(run, None, tmp_path / "chart.png")


def test_matplotlib_is_imported_for_the_chart_only():
    code = "import sys, specrl_plugins.cli; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
