"""The cache: what is put comes back, whatever happens to the process, the disk or the file."""

from __future__ import annotations

import logging
import os
import pickle
import random
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import time
import tracemalloc
import zipfile
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import zstandard
from conftest import make_trajectory, same
from disk import full_disk
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from specrl_plugins import CacheError, Fingerprint, FingerprintMismatch, Trajectory, TrajectoryCache, prompt_key
from specrl_plugins.cache import FILE_NAME, CacheWriteError
from specrl_plugins.codec import MAX_TOKENS, CorruptRow, _checksum, decode, encode
from specrl_plugins.trajectory import FINISH_REASONS

SETTINGS = Fingerprint(model="tiny", tokenizer="abc", vocab_size=1000, scorer="trainer", sampling={"temperature": 1.0})


def key(prompt, slot=0):
    return prompt_key(prompt), slot


def get(cache, prompt=(1, 2, 3), slot=0):
    return cache.get_many([key(prompt, slot)])[0]


def rows_of(count, step=1, length=40):
    return [make_trajectory((i,), seed=i, step=step, length=length) for i in range(count)]


@pytest.fixture
def cache(tmp_path):
    with TrajectoryCache(tmp_path / "cache", SETTINGS) as cache:
        yield cache


def raw(cache: TrajectoryCache) -> sqlite3.Connection:
    """The file, as anybody can open it."""
    cache.close()
    return sqlite3.connect(cache.path, isolation_level=None)


def damaged(cache: TrajectoryCache) -> list[Path]:
    return sorted(cache.directory.glob("damaged-*.sqlite"))


# -- what is put comes back


@st.composite
def trajectories(draw):
    length = draw(st.integers(1, 40))
    return Trajectory(
        prompt=draw(st.binary(min_size=16, max_size=16)),
        slot=draw(st.integers(0, 2**40)),
        tokens=draw(arrays(np.int32, length, elements=st.integers(0, 2**31 - 1))),
        logprobs=draw(arrays(np.float32, length, elements=st.floats(-(2.0**100), 0, width=32))),
        ages=draw(arrays(np.uint16, length, elements=st.integers(0, 2**16 - 1))),
        finish_reason=draw(st.sampled_from(FINISH_REASONS)),
        cap=draw(st.integers(length, 2**40)),
        step=draw(st.integers(0, 2**40)),
        reward=draw(st.none() | st.floats(allow_nan=False)),
    )


@given(trajectories())
def test_encoding_is_undone_by_decoding(trajectory):
    back = decode(encode(trajectory))
    assert same(back, trajectory)
    assert (back.tokens.dtype, back.logprobs.dtype, back.ages.dtype) == (np.int32, np.float32, np.uint16)


@given(st.lists(trajectories(), max_size=5, unique_by=lambda t: (t.prompt, t.slot)))
@settings(max_examples=40, deadline=None)
def test_what_is_put_comes_back(tmp_path_factory, batch):
    with TrajectoryCache(tmp_path_factory.mktemp("cache"), SETTINGS) as cache:
        cache.put_many(batch)
        found = cache.get_many([(t.prompt, t.slot) for t in batch])
        assert len(cache) == len(batch) and cache.corrupt == 0
    assert all(same(a, b) for a, b in zip(found, batch, strict=True))


def test_misses_are_none_in_their_place(cache):
    cache.put_many([make_trajectory((1,)), make_trajectory((1,), slot=2)])
    found = cache.get_many([key((1,), 1), key((1,), 0), key((2,), 0), key((1,), 2), key((1,), 0)])
    assert [t is not None for t in found] == [False, True, False, True, True]
    assert cache.get_many([]) == []


def test_trajectories_outlive_the_process_that_put_them(cache):
    cache.put_many(rows_of(5))
    script = f"from specrl_plugins import TrajectoryCache as C; print(len(list(C({str(cache.directory)!r}))))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "5\n"
    cache.close()
    assert same(get(cache, (3,)), rows_of(5)[3])


def test_newest_step_wins_whatever_the_order(cache):
    for step in (3, 1, 5, 4, 5):
        cache.put_many([make_trajectory(step=step, length=step)])
    assert get(cache).step == 5 and len(get(cache).tokens) == 5 and len(cache) == 1
    cache.put_many([make_trajectory(step=5, length=7)])
    assert len(get(cache).tokens) == 7


def test_batch_is_stored_whole_or_not_at_all(cache):
    """SQLite asks every 20 instructions whether to stop; the answer is yes in the middle of the batch."""
    cache.put_many(rows_of(3))
    cache._connect().set_progress_handler(iter([0] * 60 + [1] * 10**6).__next__, 20)
    with pytest.raises(CacheWriteError, match="interrupted"):
        cache.put_many(rows_of(60, step=2))
    cache._connect().set_progress_handler(None, 0)
    assert [t.step for t in cache] == [1, 1, 1] and cache.verify() == (3, 0)
    cache.put_many(rows_of(60, step=2))
    assert {t.step for t in cache} == {2} and len(cache) == 60


def test_keyboard_interrupt_undoes_its_batch(tmp_path):
    class Interrupted(TrajectoryCache):
        def _put(self, db, row):
            super()._put(db, row)
            if row.prompt == prompt_key((5,)):
                raise KeyboardInterrupt

    with Interrupted(tmp_path, SETTINGS) as cache:
        cache.put_many(rows_of(3))
        with pytest.raises(KeyboardInterrupt):
            cache.put_many(rows_of(10, step=2))
        assert [t.step for t in cache] == [1, 1, 1] and cache.verify() == (3, 0)
        cache.put_many(rows_of(4, step=2))
        assert [t.step for t in cache] == [2] * 4


def test_numpy_scalars_are_numbers(cache):
    cache.put_many([make_trajectory(slot=np.int64(0), step=np.int64(1), cap=np.int32(16), reward=np.float32(0.5))])
    assert same(get(cache), make_trajectory())
    cache.put_many([make_trajectory(step=2)])
    assert get(cache).step == 2


def test_rewind_forgets_what_is_newer(cache):
    cache.put_many([make_trajectory((step,), step=step) for step in range(1, 11)])
    assert cache.rewind(6) == 4
    assert sorted(t.step for t in cache) == [1, 2, 3, 4, 5, 6]
    assert cache.rewind(6) == 0 and cache.rewind(0) == 6 and len(cache) == 0
    assert cache.verify() == (0, 0)


def test_stats_count_what_is_stored(cache):
    assert cache.stats() == type(cache.stats())(0, 0, 0, cache.mib, None, None, 0)
    cache.put_many([make_trajectory((p,), slot, step=3 + slot, length=10) for p in range(3) for slot in range(2)])
    stats = cache.stats()
    assert (stats.rows, stats.prompts, stats.tokens, stats.oldest_step, stats.newest_step) == (6, 3, 60, 3, 4)
    assert len(cache) == 6 and cache.verify() == (6, 0)


def test_iteration_begins_with_the_latest_used(cache):
    cache.put_many(rows_of(4))
    get(cache, (1,))
    assert [t.prompt for t in cache] == [prompt_key((i,)) for i in (1, 3, 2, 0)]


# -- size


def test_least_recently_used_are_forgotten_and_a_get_renews(tmp_path):
    with TrajectoryCache(tmp_path, SETTINGS, max_mib=0.5) as cache:
        cache.put_many(rows_of(20, length=500))
        for i in range(20, 400, 10):
            assert get(cache, (7,)) is not None
            cache.put_many([make_trajectory((j,), seed=j, length=500) for j in range(i, i + 10)])
            assert cache.mib <= 0.5
        kept = {t.prompt for t in cache}
    assert 40 < len(kept) < 300
    assert prompt_key((7,)) in kept and prompt_key((399,)) in kept and prompt_key((8,)) not in kept


def test_files_stay_near_the_size_limit(tmp_path):
    with TrajectoryCache(tmp_path, SETTINGS, max_mib=0.5) as cache:
        for i in range(0, 1000, 20):
            cache.put_many([make_trajectory((j,), seed=j, length=500) for j in range(i, i + 20)])
        assert cache.mib <= 0.5 and cache.verify()[1] == 0
    assert cache.path.stat().st_size < 1.5 * 2**19


def test_prune_shrinks_the_file(cache):
    cache.put_many(rows_of(200, length=500))
    before = cache.mib * 2**20
    get(cache, (0,))
    assert cache.prune(0.2) > 0
    assert cache.path.stat().st_size <= 0.2 * 2**20 < before
    assert cache.verify()[1] == 0 and get(cache, (0,)) is not None and get(cache, (1,)) is None


def test_limit_below_one_row_keeps_nothing(tmp_path):
    with TrajectoryCache(tmp_path, SETTINGS, max_mib=0) as cache:
        cache.put_many(rows_of(3))
        assert len(cache) == 0


# -- settings


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        ({"model": "other"}, ["model: 'tiny' in the cache, 'other' now"]),
        ({"vocab_size": 7}, ["vocab_size: 1000 in the cache, 7 now"]),
        ({"sampling": {"temperature": 0.7}}, ["sampling.temperature: 1.0 in the cache, 0.7 now"]),
        (
            {"sampling": {"top_k": 5}},
            ["sampling.temperature: 1.0 in the cache, 'not set' now", "sampling.top_k: 'not set'"],
        ),
        ({"scorer": "vllm", "tokenizer": "x"}, ["scorer: 'trainer' in the cache, 'vllm' now", "tokenizer: 'abc'"]),
    ],
)
def test_other_settings_are_refused_by_name(cache, change, lines):
    cache.put_many(rows_of(2))
    with pytest.raises(FingerprintMismatch) as refusal:
        TrajectoryCache(cache.directory, Fingerprint(**(vars(SETTINGS) | change)))
    for line in [*lines, str(cache.directory), "Choose another cache directory, or delete this one."]:
        assert line in str(refusal.value)
    assert len(cache) == 2 and not damaged(cache)


def test_equal_settings_open_whatever_json_makes_of_them(tmp_path):
    sampling = {"ends": (1, 2), "nested": {"a": (1,)}}
    first = Fingerprint("m", "t", 5, "s", sampling)
    TrajectoryCache(tmp_path, first).close()
    TrajectoryCache(tmp_path, Fingerprint("m", "t", 5, "s", {"nested": {"a": [1]}, "ends": [1, 2]})).close()


def test_existing_cache_opens_without_settings_to_look_into(cache, tmp_path):
    cache.put_many(rows_of(2))
    with TrajectoryCache(cache.directory) as other:
        assert other.fingerprint == SETTINGS and len(other) == 2
    with pytest.raises(CacheError, match="there is no trajectory cache"):
        TrajectoryCache(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


# -- several processes


def hammer(directory, seed, seconds, results):
    """Read and write for a while; report how much, or what went wrong."""
    try:
        rng, counts, seen = random.Random(seed), [0, 0], {}
        cache = TrajectoryCache(directory, SETTINGS, max_mib=2)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            ids = [rng.randrange(60) for _ in range(8)]
            if rng.random() < 0.5:
                cache.put_many([make_trajectory((i,), seed=i, step=rng.randrange(1, 1000)) for i in ids])
                counts[0] += 1
            for i, found in zip(ids, cache.get_many([key((i,)) for i in ids]), strict=True):
                if found is not None:
                    assert same(found, make_trajectory((i,), seed=i, step=found.step)), "wrong trajectory"
                    assert found.step >= seen.get(i, 0), "older trajectory"
                    seen[i] = found.step
                    counts[1] += 1
        assert cache.verify()[1] == cache.corrupt == 0
        cache.close()
        results.put(counts)
    except BaseException as error:
        results.put(repr(error))


@pytest.mark.slow
def test_two_processes_share_a_cache(tmp_path):
    context = get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=hammer, args=(tmp_path, seed, 3, results)) for seed in range(2)]
    for process in processes:
        process.start()
    reports = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert all(isinstance(report, list) and min(report) > 20 for report in reports), reports


def in_children(count, body):
    """Run `body(i)` in forked children that start at one moment; their exit codes."""
    start, go = os.pipe()
    children = []
    for i in range(count):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.close(go)
                os.read(start, 1)
                body(i)
                code = 0
            except BaseException as error:
                os.write(2, f"child {i}: {error!r}\n".encode())
            finally:
                os._exit(code)
        children.append(child)
    os.close(start)
    os.close(go)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


@pytest.mark.parametrize("before", [b"", b"no database" * 1000], ids=["new", "damaged"])
def test_processes_that_start_together_share_one_file(tmp_path, before):
    for attempt in range(6):
        directory = tmp_path / str(attempt)
        directory.mkdir()
        if before:
            (directory / FILE_NAME).write_bytes(before)

        def body(i, directory=directory):
            cache = TrajectoryCache(directory, SETTINGS)
            cache.put_many([make_trajectory((i,), seed=i)])
            time.sleep(0.05)

        assert in_children(6, body) == [0] * 6
        with TrajectoryCache(directory, SETTINGS) as cache:
            assert len(cache) == 6 and len(damaged(cache)) == bool(before)


def test_forked_child_reads_and_writes(cache):
    cache.put_many(rows_of(4))

    def body(i):
        assert same(get(cache, (i,)), rows_of(4)[i])
        cache.put_many([make_trajectory((100 + i,), seed=100 + i)])

    assert in_children(3, body) == [0, 0, 0]
    cache.put_many([make_trajectory((200,))])
    assert len(cache) == 8 and cache.verify() == (8, 0)


def test_child_inherits_no_connection(cache):
    """SQLite allows a child nothing with an inherited connection, not even to close it."""
    cache.put_many(rows_of(1))

    def body(i):
        assert cache._connection is None

    assert in_children(1, body) == [0] and len(cache) == 1


def test_child_keeps_what_it_writes_after_its_parent_closed(cache):
    """A child that inherits an open connection believes to hold its parent's locks. A parent that closes then takes
    itself for the last one, and deletes the log that the child goes on writing to."""
    cache.put_many([make_trajectory((0,))])
    (ready, say_ready), (closed, say_closed) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            cache.put_many([make_trajectory((1,))])
            os.write(say_ready, b"1")
            os.read(closed, 1)
            cache.put_many([make_trajectory((2,))])
        finally:
            os._exit(0)
    os.read(ready, 1)
    cache.close()
    os.write(say_closed, b"1")
    os.waitpid(child, 0)
    assert len(cache) == 3 and cache.verify() == (3, 0)


def test_every_process_turns_to_the_file_that_replaced_a_damaged_one(cache):
    cache.put_many(rows_of(3))
    with TrajectoryCache(cache.directory, SETTINGS) as other:
        assert len(other) == 3
        cache._set_aside(sqlite3.DatabaseError("as if"))
        cache.put_many(rows_of(2))
        assert len(other) == 2
        other.put_many(rows_of(5))
        assert len(cache) == 5 and len(damaged(cache)) == 1


@pytest.mark.slow
def test_killed_process_loses_nothing_that_was_acknowledged(tmp_path):
    """A process is killed 20 times, at random moments of writing batches of 8, seed 0."""
    rng = random.Random(0)
    cache = TrajectoryCache(tmp_path, SETTINGS)
    acknowledged = 0
    for attempt in range(20):
        first = 1000 * attempt
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                for batch in range(first, first + 1000):
                    cache.put_many([make_trajectory((batch, i), seed=i, step=batch, length=300) for i in range(8)])
                    os.write(write, struct.pack("<q", batch))
            finally:
                os._exit(1)
        os.close(write)
        os.read(read, 8)
        time.sleep(rng.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        with open(read, "rb") as acks:
            rest = acks.read()
        last = struct.unpack("<q", rest[-8:])[0] if rest else first
        acknowledged += last - first
        for batch in range(first, last + 3):
            found = cache.get_many([key((batch, i)) for i in range(8)])
            there = [t is not None for t in found]
            assert all(there) if batch <= last else all(there) or not any(there)
            for i, t in enumerate(found):
                assert t is None or same(t, make_trajectory((batch, i), seed=i, step=batch, length=300))
    assert acknowledged > 20 and cache.corrupt == 0 and cache.verify()[1] == 0 and not damaged(cache)
    cache.close()


# -- files that are not what they should be


class Payload:
    """Unpickling it writes a file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def a_zip(path):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("tokens.npy", b"\0" * 5000)


def another_schema(path, *statements):
    db = sqlite3.connect(path)
    for statement in statements:
        db.execute(statement)
    db.commit()
    db.close()


def our_schema_but(path, *statements):
    """A cache with rows in it, then changed by hand."""
    directory = path.with_name("original")
    with TrajectoryCache(directory, SETTINGS) as cache:
        cache.put_many(rows_of(5))
    db = sqlite3.connect(directory / FILE_NAME)
    db.execute("PRAGMA writable_schema = ON")
    for statement in statements:
        db.execute(statement)
    db.commit()
    db.close()
    shutil.move(directory / FILE_NAME, path)


FOREIGN = {
    "garbage": lambda path: path.write_bytes(np.random.default_rng(0).bytes(50000)),
    "text": lambda path: path.write_text("trajectories\n" * 1000),
    "short": lambda path: path.write_bytes(b"SQLite format 3\0"),
    "zip": a_zip,
    "pickle": lambda path: path.write_bytes(pickle.dumps(Payload(path.with_name("marker")))),
    "other schema": lambda path: another_schema(path, "CREATE TABLE rows (a, b)", "INSERT INTO rows VALUES (1, 2)"),
    "view": lambda path: another_schema(
        path,
        "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
        "CREATE VIEW entries AS SELECT randomblob(16) AS prompt, 0 AS slot, 1 AS id, 1 AS step, 1 AS length",
        "CREATE VIEW payloads AS WITH RECURSIVE c(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM c) SELECT id FROM c",
    ),
    "trigger": lambda path: our_schema_but(
        path, "CREATE TRIGGER more AFTER INSERT ON entries BEGIN DELETE FROM payloads; END"
    ),
    # Listed before the table whose name it has.
    "trigger named like a table": lambda path: our_schema_but(
        path,
        "CREATE TRIGGER entries AFTER INSERT ON payloads BEGIN DELETE FROM meta; END",
        "UPDATE sqlite_master SET rowid = rowid + 100 WHERE tbl_name = 'entries'",
    ),
    "one table more": lambda path: our_schema_but(path, "CREATE TABLE more (a)"),
    "one index less": lambda path: our_schema_but(path, "DROP INDEX entries_step"),
    "no fingerprint": lambda path: our_schema_but(path, "DELETE FROM meta"),
    "fingerprint of another type": lambda path: our_schema_but(path, "UPDATE meta SET value = '[1, 2]'"),
    "fingerprint that is no JSON": lambda path: our_schema_but(path, "UPDATE meta SET value = x'ff00fe'"),
    "fingerprint that is a number": lambda path: our_schema_but(path, "UPDATE meta SET value = 5"),
    "fingerprint without end": lambda path: our_schema_but(
        path, "UPDATE meta SET value = replace(hex(zeroblob(100000)), '00', '[')"
    ),
    "fingerprint with sampling of another type": lambda path: our_schema_but(
        path, "UPDATE meta SET value = json_set(value, '$.sampling', 5)"
    ),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_file_is_moved_aside_and_training_goes_on(tmp_path, kind):
    directory = tmp_path / "cache"
    directory.mkdir()
    path = directory / FILE_NAME
    FOREIGN[kind](path)
    size = path.stat().st_size
    with pytest.raises(CacheError, match="damaged, or no trajectory cache"):
        TrajectoryCache(directory)
    assert path.stat().st_size == size
    with TrajectoryCache(directory, SETTINGS) as cache:
        assert cache.get_many([key((i,)) for i in range(5)]) == [None] * 5
        cache.put_many(rows_of(3, step=9))
        assert all(same(get(cache, (i,)), t) for i, t in enumerate(rows_of(3, step=9)))
        assert len(cache) == 3 and cache.verify() == (3, 0)
        assert [file.stat().st_size for file in damaged(cache)] == [size]
    assert not list(tmp_path.rglob("marker"))


@pytest.mark.parametrize("size", [0, 1, 99, 4096, 5000, 20000, -4096, -1])
def test_truncated_file_never_stops_training(cache, size):
    cache.put_many(rows_of(40, length=200))
    cache.close()
    with open(cache.path, "r+b") as file:
        file.truncate(size if size >= 0 else cache.path.stat().st_size + size)
    for i, found in enumerate(cache.get_many([key((i,)) for i in range(40)])):
        assert found is None or same(found, rows_of(40, length=200)[i])
    for step in (2, 3):
        cache.put_many(rows_of(40, step=step))
    assert all(
        same(a, b) for a, b in zip(cache.get_many([key((i,)) for i in range(40)]), rows_of(40, step=3), strict=True)
    )


@pytest.mark.parametrize("suffix", ["-wal", "-shm"])
def test_garbage_beside_the_file_is_harmless(cache, suffix):
    cache.put_many(rows_of(5))
    cache.close()
    cache.path.with_name(FILE_NAME + suffix).write_bytes(np.random.default_rng(0).bytes(40000))
    assert all(same(get(cache, (i,)), t) for i, t in enumerate(rows_of(5)))
    cache.put_many(rows_of(5, step=2))
    assert cache.verify() == (5, 0)


@pytest.mark.slow
def test_flipped_bits_give_a_miss_or_the_right_trajectory(tmp_path):
    """300 copies of a file, each with one to three bits flipped: a third of them in its first page. Seed 0."""
    rows = [make_trajectory((i,), seed=i, length=30 if i % 3 else 900) for i in range(30)]
    with TrajectoryCache(tmp_path / "original", SETTINGS) as cache:
        cache.put_many(rows)
    content = cache.path.read_bytes()
    rng = random.Random(0)
    misses = replaced = 0
    for attempt in range(300):
        flipped = bytearray(content)
        for _ in range(rng.randint(1, 3)):
            flipped[rng.randrange(4096 if attempt % 3 == 0 else len(content))] ^= 1 << rng.randrange(8)
        directory = tmp_path / "copy"
        directory.mkdir()
        (directory / FILE_NAME).write_bytes(flipped)
        try:
            cache = TrajectoryCache(directory, SETTINGS)
        except FingerprintMismatch:
            assert SETTINGS.to_json().encode() not in flipped
        else:
            for row, found in zip(rows, cache.get_many([(t.prompt, t.slot) for t in rows]), strict=True):
                assert found is None or same(found, row)
                misses += found is None
            try:
                cache.stats(), len(cache), cache.verify()
            except CacheError as error:
                assert "damaged" in str(error)
            newer = rows_of(30, step=2)
            cache.put_many(newer)
            cache.put_many(newer)
            for row, found in zip(newer, cache.get_many([(t.prompt, t.slot) for t in newer]), strict=True):
                assert found is None or same(found, row)
            replaced += len(damaged(cache))
            cache.close()
        shutil.rmtree(directory)
    assert misses > 100 and replaced > 10


def test_swapped_payloads_are_misses(cache):
    cache.put_many(rows_of(4))
    db = raw(cache)
    db.execute("UPDATE payloads SET id = CASE id WHEN 1 THEN -2 WHEN 2 THEN -1 ELSE id END")
    db.execute("UPDATE payloads SET id = -id WHERE id < 0")
    db.close()
    assert [get(cache, (i,)) is None for i in range(4)] == [True, True, False, False]
    assert cache.corrupt == 2 and cache.verify() == (4, 2) and len(list(cache)) == 2


def test_missing_payload_is_a_miss(cache):
    cache.put_many(rows_of(4))
    db = raw(cache)
    db.execute("DELETE FROM payloads WHERE id = 2")
    db.close()
    assert get(cache, (1,)) is None and cache.verify() == (4, 1)
    cache.put_many(rows_of(4, step=2))
    assert get(cache, (1,)).step == 2


def test_other_format_version_is_a_miss(cache):
    cache.put_many(rows_of(2))
    db = raw(cache)
    db.execute("UPDATE payloads SET format = 2 WHERE id = 1")
    db.close()
    assert get(cache, (0,)) is None and get(cache, (1,)) is not None
    with pytest.raises(CorruptRow, match="format 2, expected 1"):
        decode(encode(make_trajectory())._replace(format=2))


VALUES = ["text", "", b"", b"bytes", 1.5, -1, 0, 2**62, -(2**63), 1e300, "9" * 500]


@pytest.mark.parametrize("column", ["slot", "step", "used", "length", "prompt"])
def test_wrong_value_in_an_entry_is_a_miss_or_harmless(cache, column):
    for value in VALUES:
        cache.put_many(rows_of(2, step=2**62))
        db = raw(cache)
        db.execute(f"UPDATE entries SET {column} = ? WHERE id = 1", (value,))
        db.close()
        found, unchanged = get(cache, (0,)), (column, value) in {("slot", 0), ("step", 2**62)} or column == "used"
        assert same(found, rows_of(2, step=2**62)[0]) if unchanged else found is None
        assert same(get(cache, (1,)), rows_of(2, step=2**62)[1])
        cache.verify(), cache.stats(), len(cache), list(cache)
        cache.rewind(0)


@pytest.mark.parametrize("column", ["format", "finish", "cap", "reward", "tokens", "logprobs", "ages", "checksum"])
def test_wrong_value_in_a_payload_is_a_miss(cache, column):
    for value in VALUES:
        cache.put_many(rows_of(2))
        db = raw(cache)
        db.execute(f"UPDATE payloads SET {column} = ? WHERE id = 1", (value,))
        db.close()
        found = get(cache, (0,))
        assert found is None or same(found, rows_of(2)[0])
        assert (found is None) == (column != "finish" or value != 0)
        assert same(get(cache, (1,)), rows_of(2)[1])
        cache.rewind(0)


@pytest.mark.parametrize(
    "name", ["prompt", "slot", "step", "finish", "cap", "reward", "length", "tokens", "logprobs", "ages"]
)
def test_checksum_covers_every_column(name):
    row = encode(make_trajectory(length=8))
    other = encode(make_trajectory((5,), slot=1, step=2, length=9, seed=1, reward=0.25, finish_reason="length", cap=99))
    with pytest.raises(CorruptRow, match="checksum"):
        decode(row._replace(**{name: getattr(other, name)}))


@pytest.mark.parametrize("name", ["tokens", "logprobs", "ages"])
def test_checksum_tells_arrays_apart_where_one_ends(name):
    """Bytes moved from one array to the next keep their concatenation, not the checksum."""
    row = encode(make_trajectory())
    following = {"tokens": "logprobs", "logprobs": "ages", "ages": "prompt"}[name]
    a, b = getattr(row, name), getattr(row, following)
    with pytest.raises(CorruptRow, match="checksum"):
        decode(row._replace(**{name: a[:-1], following: a[-1:] + b}))


def hostile(**changes):
    """A row whose checksum fits whatever was changed."""
    row = encode(make_trajectory(length=8))._replace(**changes)
    return row._replace(checksum=_checksum(row[:-1]))


def claims(size: int, body: bytes = b"") -> bytes:
    """A zstd frame whose header claims `size` bytes."""
    return b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", size) + body


BOMB = zstandard.compress(bytes(64 << 20))
HOSTILE = {
    "bomb": dict(tokens=BOMB),
    "claim of a terabyte": dict(tokens=claims(1 << 40)),
    "claim of a terabyte that fits the length": dict(length=1 << 38, tokens=claims(1 << 40), cap=1 << 40),
    "length above the bound": dict(length=MAX_TOKENS + 1, tokens=claims(4 * (MAX_TOKENS + 1)), cap=1 << 40),
    "negative length": dict(length=-8),
    "no length": dict(length=0, tokens=claims(0), logprobs=claims(0), ages=claims(0)),
    "unknown size": dict(tokens=zstandard.ZstdCompressor(write_content_size=False).compress(bytes(32))),
    "right claim without content": dict(tokens=claims(32)),
    "right claim, more content": dict(tokens=claims(32) + BOMB[14:]),
    "empty": dict(tokens=b""),
    "not a frame": dict(logprobs=b"\0" * 40),
    "negative token": dict(tokens=zstandard.compress(b"\xff" * 32)),
    "NaN log-prob": dict(logprobs=zstandard.compress(b"\xff" * 32)),
    "positive log-prob": dict(logprobs=zstandard.compress(b"\x3f" * 32)),
    "unknown finish": dict(finish=3),
    "negative finish": dict(finish=-1),
    "cap below the length": dict(cap=7),
    "negative step": dict(step=-1),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_row_is_refused_without_allocating(cache, kind):
    row = hostile(**HOSTILE[kind])
    tracemalloc.start()
    try:
        with pytest.raises(CorruptRow):
            decode(row)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    cache.put_many([make_trajectory(length=8)])
    db = raw(cache)
    db.execute("UPDATE entries SET step = ?, length = ?", (row.step, row.length))
    db.execute("DELETE FROM payloads")
    values = (1, 1, row.finish, row.cap, row.reward, row.tokens, row.logprobs, row.ages, row.checksum)
    db.execute("INSERT INTO payloads VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
    db.close()
    assert get(cache) is None and cache.corrupt == 1


def test_row_that_answers_to_another_key_is_a_miss(cache):
    """A hostile index can lead from one key to the row of another, which is whole."""
    cache.put_many(rows_of(2))
    db = raw(cache)
    db.execute("PRAGMA writable_schema = ON")
    content = bytearray(cache.path.read_bytes())
    page = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'sqlite_autoindex_entries_1'").fetchone()[0]
    size = db.execute("PRAGMA page_size").fetchone()[0]
    db.close()
    leaf = content[(page - 1) * size : page * size]
    a, b = prompt_key((0,)), prompt_key((1,))
    assert leaf.count(a) == leaf.count(b) == 1
    swapped = leaf.replace(a, b"x" * 16).replace(b, a).replace(b"x" * 16, b)
    # Cells are sorted by prompt: exchange their pointers too.
    swapped[8:10], swapped[10:12] = swapped[10:12], swapped[8:10]
    content[(page - 1) * size : page * size] = swapped
    cache.path.write_bytes(content)
    assert get(cache, (0,)) is None and get(cache, (1,)) is None
    assert cache.corrupt == 2


# -- full and read-only disks


def check_full(cache, before):
    """What was stored is there, what was not is not."""
    found = cache.get_many([(t.prompt, t.slot) for t in before])
    assert all(same(a, b) for a, b in zip(found, before, strict=True))
    assert len(cache) == len(before) and cache.verify() == (len(before), 0) and not damaged(cache)


def test_no_file_can_grow(cache):
    before = rows_of(20)
    cache.put_many(before)
    with full_disk():
        for _ in range(2):
            with pytest.raises(CacheWriteError, match="nothing was written"):
                cache.put_many(rows_of(200, step=2, length=500))
            check_full(cache, before)
    cache.put_many(rows_of(200, step=2, length=500))
    assert cache.verify() == (200, 0)


def test_file_at_its_largest(cache):
    before = rows_of(20)
    cache.put_many(before)
    db = cache._connect()
    db.execute("PRAGMA max_page_count = 20")
    with pytest.raises(CacheWriteError, match="full"):
        cache.put_many(rows_of(200, step=2, length=500))
    check_full(cache, before)
    db.execute("PRAGMA max_page_count = 100000")
    cache.put_many(rows_of(200, step=2, length=500))
    assert cache.verify() == (200, 0)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 1 MiB; the tests that need one are skipped where nothing can be mounted."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(directory)]
    if os.getuid() != 0 or not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


def test_disk_without_room(small_disk):
    with TrajectoryCache(small_disk, SETTINGS) as cache:
        stored, prompt = [], 0
        with pytest.raises(CacheWriteError):
            while True:
                batch = [make_trajectory((prompt + i,), seed=prompt + i, length=500) for i in range(10)]
                cache.put_many(batch)
                stored += batch
                prompt += 10
        assert len(stored) > 20
        check_full(cache, stored)
        for attempt in (lambda: cache.rewind(0), lambda: cache.prune(0.1)):
            with pytest.raises(CacheWriteError):
                attempt()
        check_full(cache, stored)
        subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
        cache.put_many(batch)
        check_full(cache, stored + batch)


def test_disk_without_room_from_the_start(small_disk):
    """It cannot be opened, which is said; a cache that was open goes on without drafts."""
    with TrajectoryCache(small_disk, SETTINGS) as cache:
        cache.put_many(rows_of(5))
        cache.close()
        filler = small_disk / "filler"
        with pytest.raises(OSError), open(filler, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        assert cache.get_many([key((i,)) for i in range(5)]) == [None] * 5
        with pytest.raises(CacheWriteError):
            cache.put_many(rows_of(5, step=2))
        with pytest.raises(CacheError, match="cannot be opened for writing"):
            TrajectoryCache(small_disk, SETTINGS)
        filler.unlink()
        check_full(cache, rows_of(5))


def test_read_only_disk_is_a_clear_error(small_disk):
    with TrajectoryCache(small_disk, SETTINGS) as cache:
        cache.put_many(rows_of(2))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(CacheError, match=r"cannot be opened for writing .* Check that the directory is writable"):
        TrajectoryCache(small_disk, SETTINGS)
    assert not damaged(cache)


def test_directory_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="cannot be made"):
        TrajectoryCache(tmp_path / "file" / "cache", SETTINGS)


@pytest.mark.skipif(os.getuid() == 0, reason="permissions do not bind root")
def test_directory_without_permission_is_a_clear_error(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(CacheError, match="cannot be opened for writing"):
        TrajectoryCache(tmp_path, SETTINGS)
    tmp_path.chmod(0o700)


def test_directory_in_place_of_the_file_is_a_clear_error(tmp_path):
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(CacheError, match="cannot be opened for writing"):
        TrajectoryCache(tmp_path, SETTINGS)


def test_claim_keeps_other_processes_out_and_lasts_until_release(tmp_path, fingerprint):
    script = f"""
from specrl_plugins import TrajectoryCache
TrajectoryCache({str(tmp_path)!r}).claim()
"""

    def other_process():
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)

    with TrajectoryCache(tmp_path, fingerprint) as cache:
        cache.claim()
        cache.claim()  # of this process already
        TrajectoryCache(tmp_path, fingerprint).claim()
        refused = other_process()
        assert refused.returncode == 1 and f"in use by another run (process {os.getpid()})" in refused.stderr
        cache.release()
        cache.release()
        assert other_process().returncode == 0


def test_reaching_the_size_cap_is_said_aloud_once(tmp_path, fingerprint, caplog):
    with TrajectoryCache(tmp_path, fingerprint, max_mib=0.3) as cache, caplog.at_level(logging.WARNING):
        for step in range(40):
            cache.put_many([make_trajectory(prompt=(step, i), length=200) for i in range(20)])
    assert caplog.text.count("has reached its size of 0.3 MiB") == 1
