"""The cache: what is put comes back, whatever happens to the process, the disk or the file."""

from __future__ import annotations

import logging
import os
import pickle
import re
import shutil
import sqlite3
import struct
import subprocess
import sys
import time
import tracemalloc
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zstandard
from cache_runs import SETTINGS, damaged, get, in_children, key, rows_of
from conftest import make_trajectory, same
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from specrl_plugins import CacheError, Fingerprint, FingerprintMismatch, Trajectory, TrajectoryCache, prompt_key
from specrl_plugins.cache import FILE_NAME, CacheWriteError
from specrl_plugins.codec import FORMAT, MAX_TOKENS, CorruptRow, _checksum, decode, encode
from specrl_plugins.trajectory import FINISH_REASONS


def raw(cache: TrajectoryCache) -> sqlite3.Connection:
    """The file, as anybody can open it."""
    cache.close()
    return sqlite3.connect(cache.path, isolation_level=None)


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


def as_stored(trajectory):
    """Log-probs are kept in steps of 2^-16 nats, rounded down."""
    steps = np.ceil(trajectory.logprobs.astype(np.float64) * -(2**16)).clip(0, 2**32 - 2**8)
    return replace(trajectory, logprobs=(steps * -(2.0**-16)).astype(np.float32))


@given(trajectories())
def test_encoding_is_undone_by_decoding(trajectory):
    back = decode(encode(trajectory))
    assert same(back, as_stored(trajectory)) and same(decode(encode(back)), back)
    assert (back.tokens.dtype, back.logprobs.dtype, back.ages.dtype) == (np.int32, np.float32, np.uint16)


@given(st.lists(trajectories(), max_size=5, unique_by=lambda t: (t.prompt, t.slot)))
@settings(max_examples=40, deadline=None)
def test_what_is_put_comes_back(tmp_path_factory, batch):
    with TrajectoryCache(tmp_path_factory.mktemp("cache"), SETTINGS) as cache:
        cache.put_many(batch)
        found = cache.get_many([(t.prompt, t.slot) for t in batch])
        assert len(cache) == len(batch) and cache.corrupt == 0
    assert all(same(a, as_stored(b)) for a, b in zip(found, batch, strict=True))


@given(arrays(np.float32, st.integers(1, 40), elements=st.floats(-(2.0**15), 2.0**-10, width=32)))
def test_stored_logprobs_are_lower_by_less_than_a_step_and_never_above_zero(logprobs):
    back = decode(encode(make_trajectory(length=len(logprobs), logprobs=logprobs))).logprobs
    lowered = np.minimum(logprobs, 0).astype(np.float64) - back
    assert (back <= 0).all() and (lowered >= 0).all() and (lowered <= 2.0**-16).all()


@pytest.mark.parametrize(
    ("logprob", "stored"),
    [(0.0, 0.0), (1e-3, 0.0), (-1e-30, -(2.0**-16)), (-65535.0, -65535.0), (-65536.0, -65535.996), (-3e38, -65535.996)],
)
def test_logprobs_at_the_ends_of_what_can_be_stored(logprob, stored):
    back = decode(encode(make_trajectory(length=1, logprobs=np.full(1, logprob, np.float32))))
    assert back.logprobs[0] == np.float32(stored)


@pytest.mark.parametrize("token", [0, 255, 256, 65535, 65536, 2**24 - 1, 2**24, 2**31 - 1])
def test_tokens_of_any_width_come_back(token):
    trajectory = make_trajectory(length=3, tokens=np.array([0, token, 0], np.int32))
    assert same(decode(encode(trajectory)), trajectory)


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


def test_look_up_that_is_interrupted_misses_and_the_next_one_does_not(cache):
    """SQLite asks every 20 instructions whether to stop; the answer is yes in the middle of the batch."""
    cache.put_many(rows_of(60))
    cache._connect().set_progress_handler(iter([0] * 60 + [1] * 10**6).__next__, 20)
    found = cache.get_many([key((i,)) for i in range(60)])
    assert found[0] is not None and found[-1] is None
    cache._connect().set_progress_handler(None, 0)
    assert None not in cache.get_many([key((i,)) for i in range(60)])
    cache.put_many(rows_of(60, step=2))
    assert {t.step for t in cache} == {2} and cache.verify() == (60, 0)


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


def test_rewind_to_the_last_checkpoint_gives_back_what_it_knew(cache):
    cache.rewind(0)
    cache.put_many(rows_of(3, step=1))
    cache.put_many(rows_of(1, step=2))  # no checkpoint knows what it replaces
    cache.checkpoint(2)
    for step in (3, 4):
        cache.put_many(rows_of(2, step=step))
    assert [get(cache, (i,)).step for i in range(3)] == [4, 4, 1]
    stats = cache.stats()
    assert len(cache) == len(list(cache)) == stats.rows == 3 and stats.tokens == 120 and cache.verify() == (5, 0)
    assert cache.rewind(2) == 2
    assert [get(cache, (i,)).step for i in range(3)] == [2, 1, 1] and cache.verify() == (3, 0)
    cache.put_many(rows_of(2, step=3))
    cache.checkpoint(3)
    assert cache.verify() == (3, 0)
    cache.put_many(rows_of(3, step=4))
    assert cache.rewind(0) == 6 and cache.verify() == (0, 0)


def test_what_only_a_checkpoint_knows_makes_room_first(tmp_path):
    with TrajectoryCache(tmp_path, SETTINGS, max_mib=0.3) as cache:
        cache.put_many(rows_of(100, length=500))
        cache.checkpoint(1)
        cache.put_many(rows_of(100, step=2, length=500))
        assert {t.step for t in cache} == {2} and len(cache) == 100 and cache.mib <= 0.3
        assert cache.rewind(1) == 100 and len(cache) < 100


@pytest.mark.parametrize("file", ["gone", "empty"])
def test_log_whose_file_is_gone_is_moved_aside(tmp_path, file):
    with TrajectoryCache(tmp_path / "cache", SETTINGS) as cache:
        cache.put_many(rows_of(5))
        log = cache.path.with_name(FILE_NAME + "-wal").read_bytes()
    other = tmp_path / "other"
    other.mkdir()
    (other / (FILE_NAME + "-wal")).write_bytes(log)
    if file == "empty":
        (other / FILE_NAME).write_bytes(b"")
    with TrajectoryCache(other, SETTINGS) as cache:
        assert len(cache) == 0
        cache.put_many(rows_of(2))
        assert [file.read_bytes() for file in other.glob("damaged-*.sqlite-wal")] == [log]


def test_header_that_calls_itself_read_only_is_damage(cache):
    cache.put_many(rows_of(5))
    cache.close()
    content = bytearray(cache.path.read_bytes())
    content[18] = 7  # the version that can write it
    cache.path.write_bytes(content)
    cache.rewind(0)
    cache.put_many(rows_of(5, step=2))
    assert cache.verify() == (5, 0) and len(damaged(cache)) == 1


def test_rows_that_are_not_found_by_their_ids_do_not_stop_eviction(tmp_path, caplog):
    with TrajectoryCache(tmp_path, SETTINGS) as cache:
        cache.put_many(rows_of(40, length=100))
        db = raw(cache)
        root = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'entries'").fetchone()[0]
        size = db.execute("PRAGMA page_size").fetchone()[0]
        db.close()
        content = bytearray(cache.path.read_bytes())
        page = memoryview(content)[(root - 1) * size : root * size]
        (cell,) = struct.unpack(">H", page[12:14])
        # Two leaves, of lower and of higher ids: the one is where the other should be.
        assert page[0] == 5 and page[3:5] == b"\0\1"
        page[8:12], page[cell : cell + 4] = bytes(page[cell : cell + 4]), bytes(page[8:12])
        cache.path.write_bytes(content)
        cache.prune(0.01)
        assert "not where their ids lead" in caplog.text and len(damaged(cache)) == 1
        assert cache.verify() == (len(cache), 0)


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


def test_rows_that_replace_shorter_and_longer_ones_take_no_more_room(tmp_path):
    """Bytes a token, of pages that SQLite fills to different degrees: 5% more than those of a new file, at most."""
    rng = np.random.default_rng(0)
    slots = [(prompt, slot) for prompt in range(100) for slot in range(8)]

    def put(cache, step, keys):
        lengths = rng.integers(200, 1001, len(keys)).tolist()
        cache.put_many(
            [make_trajectory((p,), slot, length, step) for (p, slot), length in zip(keys, lengths, strict=True)]
        )
        stats = cache.stats()
        return stats.mib * 2**20 / stats.tokens

    with TrajectoryCache(tmp_path, SETTINGS) as cache:
        new = put(cache, 1, slots)
        for step in range(2, 32):
            used = put(cache, step, [slots[row] for row in rng.choice(len(slots), 160, replace=False)])
        assert used <= 1.05 * new
        assert cache.verify() == (len(slots), 0)


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


def test_a_batch_is_looked_up_as_it_was_at_one_moment(cache):
    """Another writer replaces the whole batch while its first row is being read."""
    cache.put_many(rows_of(5))

    class Interrupted(TrajectoryCache):
        def _decode(self, columns):
            cache.put_many(rows_of(5, step=2))
            return super()._decode(columns)

    with Interrupted(cache.directory, SETTINGS) as reader:
        for step in (1, 2):
            found = reader.get_many([key((i,)) for i in range(5)])
            assert [trajectory.step for trajectory in found] == [step] * 5


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
    "one table less": lambda path: our_schema_but(path, "DROP TABLE payloads"),
    "first format": lambda path: our_schema_but(
        path,
        "CREATE INDEX entries_step ON entries (step)",
        "ALTER TABLE payloads RENAME COLUMN arrays TO tokens",
        "ALTER TABLE payloads ADD COLUMN logprobs BLOB",
        "ALTER TABLE payloads ADD COLUMN ages BLOB",
    ),
    "name that is not text": lambda path: our_schema_but(
        path, "UPDATE sqlite_master SET name = CAST(name AS BLOB) WHERE name = 'entries'"
    ),
    "second format": lambda path: our_schema_but(
        path,
        "CREATE INDEX entries_used ON entries (replaced IS NULL, used)",
        "UPDATE sqlite_master SET sql = replace(sql, 'checksum INTEGER', 'checksum BLOB')",
    ),
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


def test_swapped_payloads_are_misses(cache):
    cache.put_many(rows_of(4))
    db = raw(cache)
    db.execute("UPDATE payloads SET id = CASE id WHEN 1 THEN -2 WHEN 2 THEN -1 ELSE id END")
    db.execute("UPDATE payloads SET id = -id WHERE id < 0")
    db.close()
    assert [get(cache, (i,)) is None for i in range(4)] == [True, True, False, False]
    assert cache.corrupt == 2 and cache.verify() == (4, 2) and len(list(cache)) == 2


@pytest.mark.parametrize("which", [0, 1], ids=["one", "the other"])
def test_rows_behind_a_damaged_key_are_counted_as_damaged(cache, which):
    """A key is in the table and in its index, where one out of order hides rows, its own and perhaps others."""
    rows = rows_of(200)
    for trial in range(20):
        cache.put_many(rows)
        raw(cache).close()
        content = cache.path.read_bytes()
        first, second = (found.start() for found in re.finditer(re.escape(rows[trial * 10].prompt), content))
        place = (first, second)[which]
        cache.path.write_bytes(content[:place] + bytes([content[place] ^ 0x80]) + content[place + 1 :])
        missed = sum(found is None for found in cache.get_many([(row.prompt, row.slot) for row in rows]))
        total, wrong = cache.verify()
        assert total == 200 and wrong >= max(missed, 1) and len(list(cache)) == 200 - wrong
        cache.close()
        cache.path.unlink()


def test_whoever_reads_all_rows_sees_them_as_of_one_moment(cache):
    cache.put_many(rows_of(50))
    reading = iter(cache)
    found = [next(reading)]
    with TrajectoryCache(cache.directory, SETTINGS) as other:
        other.put_many(rows_of(40, step=2))
        other.rewind(1)  # forgets what it had put
        assert len(other) == 10
    found += reading
    assert [trajectory.step for trajectory in found] == [1] * 50 and not cache.corrupt


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
    db.execute("UPDATE payloads SET format = ? WHERE id = 1", (FORMAT - 1,))
    db.close()
    assert get(cache, (0,)) is None and get(cache, (1,)) is not None
    for other in (FORMAT - 1, FORMAT + 1):
        with pytest.raises(CorruptRow, match=f"format {other}, expected {FORMAT}"):
            decode(encode(make_trajectory())._replace(format=other))
    cache.put_many(rows_of(2, step=2))
    assert get(cache, (0,)).step == 2


def test_threads_encode_and_decode_at_once():
    """Compression contexts are kept, and no two threads may use one."""

    def work(seed):
        made = [make_trajectory(seed=seed, slot=slot, length=2000) for slot in range(100)]
        return all(same(decode(encode(trajectory)), trajectory) for trajectory in made)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))


VALUES = ["text", "", b"", b"bytes", 1.5, -1, 0, 2**62, -(2**63), 1e300, "9" * 500]


@pytest.mark.parametrize("column", ["slot", "step", "replaced", "used", "length", "prompt"])
def test_wrong_value_in_an_entry_is_a_miss_or_harmless(cache, column):
    for value in VALUES:
        cache.put_many(rows_of(2, step=2**62))
        db = raw(cache)
        db.execute(f"UPDATE entries SET {column} = ? WHERE id = 1", (value,))
        db.close()
        found, unchanged = (
            get(cache, (0,)),
            (column, value) in {("slot", 0), ("step", 2**62)} or column in ("replaced", "used"),
        )
        assert same(found, rows_of(2, step=2**62)[0]) if unchanged else found is None
        assert same(get(cache, (1,)), rows_of(2, step=2**62)[1])
        cache.verify(), cache.stats(), len(cache), list(cache)
        cache.prune(0)


@pytest.mark.parametrize("column", ["slot", "step", "replaced", "used", "length", "prompt"])
def test_text_that_is_no_unicode_in_an_entry_is_a_miss_or_harmless(cache, column):
    """As a flipped bit makes of a number or of bytes. Python refuses to read it."""
    cache.put_many(rows_of(2))
    db = raw(cache)
    db.execute(f"UPDATE entries SET {column} = CAST(x'ff' AS TEXT) WHERE prompt = ?", (prompt_key((0,)),))
    db.close()
    unread = column in ("replaced", "used")
    assert (get(cache, (0,)) is None) == (not unread)
    assert cache.verify() == (2, 0 if unread else 1)
    assert [same(found, rows_of(2)[1]) for found in cache][-1:] == [True]
    cache.put_many(rows_of(2, step=2))
    latest, other = rows_of(2, step=2)
    assert same(get(cache, (1,)), other)
    if column == "step":  # it seems newer than all others
        assert get(cache, (0,)) is None
    else:
        assert same(get(cache, (0,)), latest)
    assert not damaged(cache)


@pytest.mark.parametrize("column", ["format", "finish", "cap", "reward", "arrays", "checksum"])
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


@pytest.mark.parametrize("name", ["prompt", "slot", "step", "finish", "cap", "reward", "length", "arrays"])
def test_checksum_covers_every_column(name):
    row = encode(make_trajectory(length=8))
    other = encode(make_trajectory((5,), slot=1, step=2, length=9, seed=1, reward=0.25, finish_reason="length", cap=99))
    with pytest.raises(CorruptRow, match="checksum"):
        decode(row._replace(**{name: getattr(other, name)}))


def test_checksum_tells_where_the_prompt_ends():
    """Bytes moved from one blob to the next keep their concatenation, not the checksum."""
    row = encode(make_trajectory())
    with pytest.raises(CorruptRow, match="checksum"):
        decode(row._replace(prompt=row.prompt[:-1], arrays=row.prompt[-1:] + row.arrays))


def hostile(**changes):
    """A row whose checksum fits whatever was changed."""
    row = encode(make_trajectory(length=8))._replace(**changes)
    return row._replace(checksum=_checksum(row[:-1]))


def claims(size: int, body: bytes = b"") -> bytes:
    """A zstd frame whose header claims `size` bytes."""
    return b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", size) + body


BOMB = zstandard.compress(bytes(64 << 20))
HOSTILE = {
    "bomb": dict(arrays=BOMB),
    "claim of a terabyte": dict(arrays=claims(1 << 40)),
    "claim of a terabyte that fits the length": dict(length=1 << 38, arrays=claims(12 << 38), cap=1 << 40),
    "length above the bound": dict(length=MAX_TOKENS + 1, arrays=claims(12 * (MAX_TOKENS + 1)), cap=1 << 40),
    "negative length": dict(length=-8),
    "no length": dict(length=0, arrays=claims(0)),
    "unknown size": dict(arrays=zstandard.ZstdCompressor(write_content_size=False).compress(bytes(96))),
    "right claim without content": dict(arrays=claims(96)),
    "right claim, more content": dict(arrays=claims(96) + BOMB[14:]),
    "one byte a number too many": dict(arrays=zstandard.compress(bytes(120))),
    "part of a plane": dict(arrays=zstandard.compress(bytes(47))),
    "no planes": dict(arrays=zstandard.compress(b"")),
    "empty": dict(arrays=b""),
    "not a frame": dict(arrays=b"\0" * 40),
    "negative token": dict(arrays=zstandard.compress(b"\xff" * 96)),
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
    values = (1, FORMAT, row.finish, row.cap, row.reward, row.arrays, row.checksum)
    db.execute("INSERT INTO payloads VALUES (?, ?, ?, ?, ?, ?, ?)", values)
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


def test_directory_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="cannot be made"):
        TrajectoryCache(tmp_path / "file" / "cache", SETTINGS)


def test_directory_in_place_of_the_file_is_a_clear_error(tmp_path):
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(CacheError, match="cannot be opened for writing"):
        TrajectoryCache(tmp_path, SETTINGS)


def test_reaching_the_size_cap_is_said_aloud_once(tmp_path, fingerprint, caplog):
    with TrajectoryCache(tmp_path, fingerprint, max_mib=0.3) as cache, caplog.at_level(logging.WARNING):
        for step in range(40):
            cache.put_many([make_trajectory(prompt=(step, i), length=200) for i in range(20)])
    assert caplog.text.count("has reached its size of 0.3 MiB") == 1
