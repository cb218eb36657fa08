"""The command `specrl`: every command, every error, every exit code."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from cache_runs import another_run
from conftest import make_trajectory, same
from test_report import plain_entry, reuse_run, write

import specrl_plugins
from specrl_plugins import TrajectoryCache, prompt_key
from specrl_plugins.cache import FILE_NAME, PAGE_BYTES
from specrl_plugins.cli import main

PROMPTS = [(1, 2, 3), (4, 5), (6,)]


@pytest.fixture
def directory(tmp_path, fingerprint) -> Path:
    """A cache of 3 prompts x 2 slots, of steps 1 to 3."""
    cache = TrajectoryCache(tmp_path / "cache", fingerprint)
    for step, prompt in enumerate(PROMPTS, 1):
        cache.put_many([make_trajectory(prompt, slot, length=10 * step, step=step) for slot in range(2)])
    cache.close()
    return cache.directory


def run(capsys, *arguments) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as exit:
        code = exit.code
    return code, *capsys.readouterr()


def contents(directory: Path) -> list[tuple]:
    """Time of last use, prompt and slot of each row."""
    with closing(sqlite3.connect(directory / FILE_NAME)) as db:
        return db.execute("SELECT used, prompt, slot FROM entries ORDER BY used").fetchall()


def damage_row(directory: Path, slot: int = 0) -> None:
    with closing(sqlite3.connect(directory / FILE_NAME)) as db, db:
        db.execute("UPDATE payloads SET cap = cap + 1 WHERE id IN (SELECT id FROM entries WHERE slot = ?)", (slot,))


# -- looking


def test_stats(capsys, directory):
    code, out, err = run(capsys, "cache", "stats", directory)
    lines = dict(line.split("  ", 1) for line in out.splitlines())
    values = {name: value.strip() for name, value in lines.items()}
    assert (code, err) == (0, "")
    mib = TrajectoryCache(directory).mib
    assert values == {
        "rows": "6",
        "prompts": "3",
        "tokens": "120",
        "MiB": f"{mib:.2f}",
        "bytes per token": f"{mib * 2**20 / 120:.1f}",
        "oldest step": "1",
        "newest step": "3",
        "damaged files": "0",
        "model": "tiny",
        "tokenizer": "abc",
        "vocab_size": "1000",
        "scorer": "trainer",
        "sampling.temperature": "1.0",
    }


def test_stats_and_show_of_an_empty_cache(capsys, tmp_path, fingerprint):
    TrajectoryCache(tmp_path, fingerprint).close()
    code, out, _ = run(capsys, "cache", "stats", tmp_path)
    assert code == 0
    assert [line.split()[-1] for line in out.splitlines()[:7] if "MiB" not in line] == ["0", "0", "0", "-", "-", "-"]
    code, out, _ = run(capsys, "cache", "show", tmp_path)
    assert code == 0
    assert len(out.splitlines()) == 1


def test_show_lists_the_latest_first(capsys, directory):
    code, out, err = run(capsys, "cache", "show", directory)
    assert (code, err) == (0, "")
    header, *rows = (line.split() for line in out.splitlines())
    assert header == ["prompt", "slot", "step", "length", "finish", "reward", "mean", "log-prob", "oldest", "age"]
    last = make_trajectory(PROMPTS[2], 1, length=30, step=3)
    assert rows[0] == [
        last.prompt.hex()[:12],
        "1",
        "3",
        "30",
        "stop",
        "0.500",
        f"{last.logprobs.mean():.3f}",
        str(last.ages.max()),
    ]
    assert [row[2] for row in rows] == ["3", "3", "2", "2", "1", "1"]


def test_show_limit(capsys, directory):
    for limit, lines in (0, 1), (4, 5), (100, 7):
        assert len(run(capsys, "cache", "show", directory, "--limit", limit)[1].splitlines()) == lines


def test_show_leaves_the_cell_of_an_unknown_reward_empty(capsys, tmp_path, fingerprint):
    TrajectoryCache(tmp_path, fingerprint).put_many([make_trajectory(reward=None)])
    assert len(run(capsys, "cache", "show", tmp_path)[1].splitlines()[1].split()) == 7


@pytest.mark.parametrize("digits", [32, 8])
def test_show_one_prompt_with_its_token_ids(capsys, directory, digits):
    key = prompt_key(PROMPTS[1]).hex()
    code, out, err = run(capsys, "cache", "show", directory, "--prompt", key[:digits].upper())
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"prompt {key}"
    tokens = [make_trajectory(PROMPTS[1], slot, length=20, step=2).tokens.tolist() for slot in (1, 0)]
    assert lines[4:] == [f"slot {slot}: {' '.join(map(str, tokens[1 - slot]))}" for slot in (1, 0)]
    limited = run(capsys, "cache", "show", directory, "--prompt", key[:digits], "--limit", 1)[1]
    assert limited.splitlines()[3:] == lines[4:5]


def test_show_prompt_must_be_one(capsys, tmp_path, fingerprint):
    keys = [bytes([0xAB, *[n] * 15]) for n in range(2)]
    with TrajectoryCache(tmp_path, fingerprint) as cache:
        cache.put_many([replace(make_trajectory(), prompt=key) for key in keys])
    code, out, err = run(capsys, "cache", "show", tmp_path, "--prompt", "ab")
    assert (code, out) == (2, "")
    assert err == f"specrl: 2 prompts in {tmp_path} have a key that begins with ab\n"
    code, out, err = run(capsys, "cache", "show", tmp_path, "--prompt", "ab02")
    assert (code, out) == (2, "")
    assert err == f"specrl: no prompts in {tmp_path} have a key that begins with ab02\n"
    assert run(capsys, "cache", "show", tmp_path, "--prompt", "ab01")[0] == 0


def test_verify(capsys, directory):
    assert run(capsys, "cache", "verify", directory) == (0, "6 rows, none of them damaged\n", "")
    damage_row(directory)
    code, out, _ = run(capsys, "cache", "verify", directory)
    assert (code, out) == (1, "6 rows, 3 of them damaged\n")
    # What is damaged is not shown.
    code, out, _ = run(capsys, "cache", "show", directory)
    assert code == 0
    assert [line.split()[1] for line in out.splitlines()[1:]] == ["1"] * 3


def test_looking_changes_nothing(capsys, directory):
    before = contents(directory)
    key = prompt_key(PROMPTS[0]).hex()
    for command in ["stats"], ["show"], ["show", "--prompt", key], ["verify"]:
        name, *options = command
        assert run(capsys, "cache", name, directory, *options)[0] == 0
    assert contents(directory) == before


# -- trimming


def test_prune_after_step_rewinds_and_shrinks(capsys, tmp_path, fingerprint):
    with_much = TrajectoryCache(tmp_path, fingerprint)
    kept = make_trajectory(step=5)
    with_much.put_many([kept, *(make_trajectory((9,), slot, length=2000, step=6) for slot in range(50))])
    with_much.close()
    size = (tmp_path / FILE_NAME).stat().st_size
    code, out, err = run(capsys, "cache", "prune", tmp_path, "--after-step", 5)
    assert (code, err) == (0, "")
    assert out.startswith("50 rows forgotten, 1 left (")
    assert (tmp_path / FILE_NAME).stat().st_size < size / 5
    (left,) = TrajectoryCache(tmp_path)
    assert same(left, kept)


def test_prune_max_mib_forgets_the_least_recently_used(capsys, tmp_path, fingerprint):
    cache = TrajectoryCache(tmp_path, fingerprint)
    cache.put_many([make_trajectory(slot=slot, length=2000) for slot in range(100)])
    cache.get_many([(prompt_key((1, 2, 3)), slot) for slot in range(10)])
    limit = cache.mib / 2
    cache.close()
    code, _, err = run(capsys, "cache", "prune", tmp_path, "--max-mib", limit)
    assert (code, err) == (0, "")
    assert (tmp_path / FILE_NAME).stat().st_size <= limit * 2**20
    slots = {trajectory.slot for trajectory in TrajectoryCache(tmp_path)}
    assert slots >= {*range(10), 99}
    assert 10 not in slots


def test_prune_that_has_nothing_to_forget(capsys, directory):
    before = contents(directory)
    for limit in ["--max-mib", 100], ["--max-mib", "inf"], ["--after-step", 3]:
        code, out, _ = run(capsys, "cache", "prune", directory, *limit)
        assert code == 0
        assert out.startswith("0 rows forgotten, 6 left (")
    assert contents(directory) == before


def test_prune_everything(capsys, directory):
    assert run(capsys, "cache", "prune", directory, "--max-mib", 0)[1].startswith("6 rows forgotten, 0 left (")
    assert run(capsys, "cache", "verify", directory) == (0, "0 rows, none of them damaged\n", "")


def test_prune_by_step_is_refused_while_a_run_has_the_cache(capsys, directory):
    """A run in another process. By size it may be pruned: a run does that to its own cache."""
    with another_run(directory) as pid:
        before = contents(directory)
        code, out, err = run(capsys, "cache", "prune", directory, "--after-step", 1)
        assert (code, out) == (2, "")
        assert f"in use by another run (process {pid})" in err and err.count("\n") == 1
        assert contents(directory) == before
        assert run(capsys, "cache", "prune", directory, "--max-mib", 100)[0] == 0
    assert run(capsys, "cache", "prune", directory, "--after-step", 1)[1].startswith("4 rows forgotten, 2 left (")


# -- errors

COMMANDS = [["stats"], ["show"], ["verify"], ["prune", "--max-mib", "0"], ["prune", "--after-step", "0"]]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("exists", [True, False])
def test_missing_cache_is_an_error_and_is_not_made(capsys, tmp_path, command, exists):
    directory = tmp_path / "nowhere"
    if exists:
        directory.mkdir()
    name, *options = command
    code, out, err = run(capsys, "cache", name, directory, *options)
    assert (code, out, err) == (2, "", f"specrl: there is no trajectory cache in {directory}\n")
    assert directory.exists() == exists
    assert not list(tmp_path.glob("*/*"))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_file_that_is_no_cache_is_an_error_and_stays(capsys, tmp_path, command):
    (tmp_path / FILE_NAME).write_bytes(b"something else entirely" * 1000)
    name, *options = command
    code, out, err = run(capsys, "cache", name, tmp_path, *options)
    assert (code, out) == (2, "")
    assert err.startswith("specrl: ")
    assert err.count("\n") == 1
    assert (tmp_path / FILE_NAME).read_bytes() == b"something else entirely" * 1000


def test_damaged_pages_never_end_in_a_traceback(capsys, directory, tmp_path):
    """Each page of the file in turn is overwritten."""
    page = PAGE_BYTES
    intact = (directory / FILE_NAME).read_bytes()
    seen = set()
    for start in range(0, len(intact), page):
        for command in COMMANDS:
            shutil.rmtree(tmp_path / "damaged", ignore_errors=True)
            (tmp_path / "damaged").mkdir()
            damaged = intact[:start] + b"\xa5" * page + intact[start + page :]
            (tmp_path / "damaged" / FILE_NAME).write_bytes(damaged)
            name, *options = command
            code, _, err = run(capsys, "cache", name, tmp_path / "damaged", *options)
            assert code in (0, 1, 2)
            if code == 2:
                assert err.splitlines()[-1].startswith("specrl: ")
                if name != "prune":
                    assert (tmp_path / "damaged" / FILE_NAME).read_bytes() == damaged
            # Only training puts an empty cache in the place of a damaged one.
            assert not list((tmp_path / "damaged").glob("damaged-*"))
            seen.add((name, code))
    assert {("stats", 2), ("show", 2), ("verify", 1), ("verify", 2), ("prune", 2)} <= seen


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "required"),
        (["cache"], "required"),
        (["cache", "stats"], "DIR"),
        (["cache", "burn", "DIR"], "burn"),
        (["cache", "show", "DIR", "--prompt", "xyz"], "not hexadecimal"),
        (["cache", "show", "DIR", "--prompt", ""], "not hexadecimal"),
        (["cache", "show", "DIR", "--limit", "-1"], "not a count"),
        (["cache", "prune", "DIR"], "one of the arguments --max-mib --after-step is required"),
        (["cache", "prune", "DIR", "--max-mib", "1", "--after-step", "1"], "not allowed with"),
        (["cache", "prune", "DIR", "--max-mib", "-1"], "not a size"),
        (["cache", "prune", "DIR", "--max-mib", "nan"], "not a size"),
        (["cache", "prune", "DIR", "--max-mib", "much"], "not a size"),
        (["cache", "prune", "DIR", "--after-step", "1.5"], "not a count"),
        (["cache", "prune", "DIR", "--after-step", "9" * 30], "not a count"),
        (["report"], "RUN_DIR"),
        (["report", "DIR", "--output", "chart.jpg"], "does not end in .png"),
    ],
)
def test_bad_arguments(capsys, directory, arguments, told):
    before = contents(directory)
    code, out, err = run(capsys, *(str(directory) if argument == "DIR" else argument for argument in arguments))
    assert (code, out) == (2, "")
    assert told in err.splitlines()[-1]
    assert contents(directory) == before


@pytest.mark.parametrize(
    "command",
    ["", "cache", "cache stats", "cache show", "cache verify", "cache prune", "report"],
)
def test_help(capsys, command):
    code, out, err = run(capsys, *command.split(), "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: specrl {command}".strip())


# -- report


def test_report(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    write(tmp_path / "reuse", reuse_run())
    write(tmp_path / "plain", [plain_entry(step) for step in range(1, 31)])
    code, out, err = run(capsys, "report", tmp_path / "reuse")
    assert (code, err) == (0, "")
    chart = tmp_path / "reuse" / "specrl_report.png"
    assert out.splitlines()[-1] == f"Chart: {chart}"
    assert chart.stat().st_size > 10_000
    other = tmp_path / "other.PNG"
    arguments = ["report", tmp_path / "reuse", "--baseline", tmp_path / "plain", "--output", other]
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == f"Chart: {other}"
    assert out.splitlines()[-4].split()[:3] == ["plain", "/", "reuse"]
    assert out.splitlines()[-3].startswith("Verifying took 6.0 s")
    assert out.splitlines()[-2].startswith("Estimated time saved: ")
    assert other.read_bytes()[:4] == b"\x89PNG"


def test_report_errors(capsys, tmp_path, monkeypatch):
    write(tmp_path / "reuse", reuse_run())
    missing = tmp_path / "missing"
    for arguments in [missing], [tmp_path / "reuse", "--baseline", missing]:
        code, out, err = run(capsys, "report", *arguments)
        assert (code, out) == (2, "")
        assert err.startswith(f"specrl: there is no specrl.jsonl in {missing}")
    code, _, err = run(capsys, "report", tmp_path / "reuse", "--output", missing / "chart.png")
    assert code == 2
    assert err.startswith("specrl: ")
    assert err.count("\n") == 1
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = run(capsys, "report", tmp_path / "reuse")
    assert code == 0  # nobody asked for a chart, and the table needs no matplotlib
    assert out.startswith("epoch")
    assert err == "specrl: no chart: drawing needs matplotlib: pip install 'specrl-plugins[report]'\n"
    code, out, err = run(capsys, "report", tmp_path / "reuse", "--output", tmp_path / "chart.png")
    assert code == 2
    assert err == "specrl: drawing needs matplotlib: pip install 'specrl-plugins[report]'\n"
    _, out, _ = run(capsys, "report", tmp_path / "reuse", "--baseline", tmp_path / "reuse")
    assert "no plain run" in out


def test_the_output_directory_of_a_run_is_a_likely_guess(tmp_path, capsys):
    (tmp_path / "spec_cache").mkdir()
    code, _, err = run(capsys, "cache", "stats", tmp_path)
    assert code == 2
    assert str(tmp_path / "spec_cache") in err


def test_version(capsys):
    code, out, _ = run(capsys, "--version")
    assert (code, out) == (0, f"specrl {specrl_plugins.__version__}\n")


# -- the script


@pytest.mark.parametrize("command", [["show", "--limit", "5000"], ["show"], ["stats"], ["verify"]], ids=" ".join)
@pytest.mark.parametrize("read", [0, 1])
def test_a_reader_that_has_enough_is_no_error(tmp_path, fingerprint, command, read):
    """As `head` does it. More than a pipe holds, and less, which is only written when the command ends."""
    with TrajectoryCache(tmp_path, fingerprint) as cache:
        cache.put_many([make_trajectory(slot=slot) for slot in range(3000)])
    name, *options = command
    arguments = [sys.executable, "-m", "specrl_plugins.cli", "cache", name, str(tmp_path), *options]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as specrl:
        assert specrl.stdout is not None and specrl.stderr is not None
        if read:
            assert specrl.stdout.readline()
        specrl.stdout.close()
        assert specrl.stderr.read() in ("", "At most 20 are shown: see --limit.\n")
    small = command[-1] != "5000"
    assert specrl.returncode == 141 or (read and small and specrl.returncode == 0)


def test_output_that_cannot_be_written_is_an_error(directory):
    with open("/dev/full", "w") as full:
        arguments = [sys.executable, "-m", "specrl_plugins.cli", "cache", "stats", str(directory)]
        specrl = subprocess.run(arguments, stdout=full, stderr=subprocess.PIPE, text=True)
    assert specrl.returncode and specrl.stderr.startswith("specrl: [Errno 28]")


def test_installed_script(directory, tmp_path):
    script = Path(sys.executable).parent / "specrl"
    if not script.exists():
        pytest.skip("the package is not installed")

    def specrl(*arguments):
        return subprocess.run([script, *map(str, arguments)], capture_output=True, text=True)

    assert specrl("cache", "verify", directory).stdout == "6 rows, none of them damaged\n"
    damage_row(directory)
    damaged = specrl("cache", "verify", directory)
    assert damaged.returncode == 1
    assert "does not check out" in damaged.stderr
    missing = specrl("cache", "stats", tmp_path / "nowhere")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr == f"specrl: there is no trajectory cache in {tmp_path / 'nowhere'}\n"
