"""The cache under fire: processes that are killed, that work at once, files that are damaged, disks that are full.

`SPECRL_FIRE_SECONDS` sets how long the processes of one cache work at once, 15 s if it is not set.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from cache_runs import SETTINGS, another_run, damaged, get, in_children, key, rows_of
from conftest import make_trajectory, same
from disk import full_disk

from specrl_plugins import CacheError, FingerprintMismatch, Trajectory, TrajectoryCache
from specrl_plugins.cache import CLAIM_NAME, FILE_NAME, PAGE_BYTES, CacheWriteError

SECONDS = float(os.environ.get("SPECRL_FIRE_SECONDS", 15))
KILLS = 200
MUTANTS = 10_000


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory, where there is one: what a slow disk does is not asked here."""
    shared = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as directory:
        yield Path(directory)


# -- kills


def batch_of(writer: int, batch: int) -> list[Trajectory]:
    """Every fifth batch is large, so that some kills meet the log being copied into the file."""
    length = 4000 if batch % 5 == 4 else 300
    return [make_trajectory((writer, batch, i), seed=i, step=batch, length=length) for i in range(8)]


@contextmanager
def writing(directory: Path, writer: int) -> Iterator[tuple[int, int]]:
    """A process that puts batches until it is killed or told to end; its id, and a pipe of the batches put so far."""
    acks, say = os.pipe()
    ended, end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(end)
            os.set_blocking(ended, False)
            with TrajectoryCache(directory, SETTINGS) as cache:
                for batch in range(100_000):
                    cache.put_many(batch_of(writer, batch))
                    os.write(say, struct.pack("<q", batch))
                    try:
                        if not os.read(ended, 1):  # the other end is closed
                            break
                    except BlockingIOError:
                        pass
            os._exit(0)
        finally:
            os._exit(1)
    os.close(say)
    os.close(ended)
    try:
        yield child, acks
    finally:
        os.close(end)


def last_of(acks: int) -> int:
    """Number of the last batch that was acknowledged; -1 if none."""
    with open(acks, "rb") as file:
        content = file.read()
    return struct.unpack("<q", content[-8:])[0] if content else -1


def check_batches(cache: TrajectoryCache, writer: int, last: int) -> None:
    """Batches up to `last` are there, a later one is there whole or not at all."""
    for batch in range(last + 2):
        expected = batch_of(writer, batch)
        found = cache.get_many([(t.prompt, t.slot) for t in expected])
        there = {t is not None for t in found}
        assert there == {True} if batch <= last else len(there) == 1, (writer, batch, last)
        assert all(t is None or same(t, e) for t, e in zip(found, expected, strict=True))


@pytest.mark.slow
def test_killed_writers_lose_nothing_that_was_acknowledged(memory):
    """200 processes are killed, half of them after their first batch (seed 0), while another one goes on writing."""
    rng = random.Random(0)
    acknowledged = 0
    for survivor in range(0, KILLS, 20):
        directory = memory / str(survivor)
        with writing(directory, survivor) as (other, other_acks):
            lasts = {}
            for victim in range(survivor + 1, survivor + 21):
                with writing(directory, victim) as (child, acks):
                    if victim % 2:  # once it has put a batch
                        select.select([acks], [], [], 60)
                    time.sleep(rng.uniform(0, 0.03))
                    os.kill(child, signal.SIGKILL)
                    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
                    lasts[victim] = last_of(acks)
                    acknowledged += lasts[victim] + 1
        lasts[survivor] = last_of(other_acks)
        assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == 0
        with TrajectoryCache(directory, SETTINGS) as cache:
            for writer, last in lasts.items():
                check_batches(cache, writer, last)
            assert cache.verify()[1] == cache.corrupt == 0 and not damaged(cache)
        shutil.rmtree(directory)
    assert acknowledged >= KILLS // 2


@pytest.mark.slow
@pytest.mark.parametrize("before", ["new", "stored", "damaged", "file gone"])
def test_killed_while_opening_and_pruning(memory, before):
    """25 processes each: what was in the directory stays there, and the next one can use it."""
    rng = random.Random(before)
    wanted = rows_of(30, length=300)
    for attempt in range(25):
        directory = memory / str(attempt)
        if before != "new":
            leave_behind(directory, wanted)
        else:
            directory.mkdir()
        path = directory / FILE_NAME
        if before == "damaged":
            path.write_bytes(b"no database" * 1000)
        if before == "file gone":
            path.unlink()
        precious = path.with_name(FILE_NAME + "-wal") if before == "file gone" else path
        inode = precious.stat().st_ino if before != "new" else None
        child = os.fork()
        if child == 0:
            try:
                with TrajectoryCache(directory, SETTINGS) as cache:
                    cache.put_many(rows_of(30, step=2, length=300))
                    cache.prune(100)
                    cache.rewind(1)
                    time.sleep(1)
            finally:
                os._exit(1)
        time.sleep(rng.uniform(0, 0.012))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if inode is not None:
            assert inode in inodes(directory)
        with TrajectoryCache(directory, SETTINGS) as cache:
            found = cache.get_many([(t.prompt, t.slot) for t in wanted])
            versions = zip(wanted, rows_of(30, step=2, length=300), strict=True)
            assert all(t is None or same(t, a) or same(t, b) for t, (a, b) in zip(found, versions, strict=True))
            assert before != "stored" or len({t and t.step for t in found}) == 1
            cache.put_many(rows_of(30, step=3))
            assert cache.verify()[1] == 0 and get(cache, (29,)).step == 3
        shutil.rmtree(directory)


def inodes(directory: Path) -> set[int]:
    return {file.stat().st_ino for file in directory.iterdir()}


def leave_behind(directory: Path, *batches: list[Trajectory]) -> None:
    """A cache as a killed process leaves it: its last batches are in the log beside the file."""
    child = os.fork()
    if child == 0:
        cache = TrajectoryCache(directory, SETTINGS)
        for batch in batches:
            cache.put_many(batch)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


# -- several processes at once


@pytest.mark.slow
def test_eight_processes_read_and_write_at_once(memory):
    """For `SECONDS`: no error, no wrong trajectory, none older than one that was read before. Seeds 0 to 7."""

    def work(seed):
        rng, puts, hits, seen = random.Random(seed), 0, 0, {}
        with TrajectoryCache(memory, SETTINGS, max_mib=2) as cache:
            until = time.monotonic() + SECONDS
            while time.monotonic() < until:
                ids = [rng.randrange(60) for _ in range(8)]
                if rng.random() < 0.5:
                    cache.put_many([make_trajectory((i,), seed=i, step=rng.randrange(1, 1000)) for i in ids])
                    puts += 1
                for i, found in zip(ids, cache.get_many([key((i,)) for i in ids]), strict=True):
                    if found is not None:
                        assert same(found, make_trajectory((i,), seed=i, step=found.step)), "wrong trajectory"
                        assert found.step >= seen.get(i, 0), "older trajectory"
                        seen[i] = found.step
                        hits += 1
            assert cache.verify()[1] == cache.corrupt == 0
        assert min(puts, hits) > 20, (puts, hits)

    assert in_children(8, work) == [0] * 8
    assert not list(memory.glob("damaged-*"))


@pytest.mark.slow
def test_eviction_while_other_processes_read(memory):
    """Two processes write far more than the size cap holds, three read all the time. Seeds 0 to 4."""

    def work(seed):
        rng, hits = random.Random(seed), 0
        with TrajectoryCache(memory, SETTINGS, max_mib=0.3) as cache:
            until = time.monotonic() + 4
            while time.monotonic() < until:
                ids = [rng.randrange(400) for _ in range(8)]
                if seed < 2:
                    cache.put_many([make_trajectory((i,), seed=i, length=500) for i in ids])
                    assert cache.mib <= 0.3
                for i, found in zip(ids, cache.get_many([key((i,)) for i in ids]), strict=True):
                    assert found is None or same(found, make_trajectory((i,), seed=i, length=500)), "wrong trajectory"
                    hits += found is not None
                for trajectory in cache:
                    assert len(trajectory.tokens) == 500
                assert cache.verify()[1] == cache.corrupt == 0
        assert hits > 20, hits

    assert in_children(5, work) == [0] * 5
    assert not list(memory.glob("damaged-*"))


def test_second_run_on_a_directory_is_refused_and_the_first_unharmed(cache):
    """Two runs are pointed at one directory by mistake, in one process or in two."""
    script = f"""
from specrl_plugins import TrajectoryCache
cache = TrajectoryCache({str(cache.directory)!r})
cache.claim()
cache.rewind(0)
"""

    def second_run():
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)

    cache.claim()
    cache.claim()  # of this process already
    TrajectoryCache(cache.directory, SETTINGS).claim()
    cache.put_many(rows_of(5))
    refused = second_run()
    assert refused.returncode == 1 and f"in use by another run (process {os.getpid()})" in refused.stderr
    check_full(cache, rows_of(5))
    cache.put_many(rows_of(8, step=2))
    check_full(cache, rows_of(8, step=2))
    cache.release()
    cache.release()
    assert second_run().returncode == 0
    assert len(cache) == 0


def is_refused(directory: Path) -> bool:
    """Whether another process may not claim a cache."""

    def claim(_):
        with pytest.raises(CacheError, match=r"in use by another run \(process \d+\)"):
            TrajectoryCache(directory, SETTINGS).claim()

    return in_children(1, claim) == [0]


@pytest.mark.parametrize("path", ["same", "symlink"])
def test_a_claim_lasts_until_the_last_that_claimed_in_this_process_releases(cache, tmp_path, path):
    """A directory may have several paths."""
    other = cache.directory
    if path == "symlink":
        other = tmp_path / "link"
        other.symlink_to(cache.directory, target_is_directory=True)
    second = TrajectoryCache(other, SETTINGS)
    cache.claim()
    second.claim()
    second.claim()
    second.release()
    second.release()
    assert is_refused(cache.directory) and is_refused(other)
    second.claim()
    cache.release()
    assert is_refused(cache.directory) and is_refused(other)
    second.release()
    assert not is_refused(cache.directory)


def test_a_forked_child_neither_has_nor_ends_the_claim_of_its_parent(cache):
    cache.claim()

    def body(_):
        cache.put_many(rows_of(3))  # it may use the cache, as other ranks of the run do
        with pytest.raises(CacheError, match=f"process {os.getppid()}"):
            cache.claim()
        cache.release()

    assert in_children(1, body) == [0]
    check_full(cache, rows_of(3))
    assert is_refused(cache.directory)


@pytest.mark.parametrize("deleted", ["before the claim", "after it"])
def test_a_directory_that_is_deleted_is_made_and_claimed_again(cache, deleted):
    if deleted == "after it":
        cache.claim()
        cache.put_many(rows_of(3))
    shutil.rmtree(cache.directory)
    if deleted == "before the claim":
        cache.claim()
    cache.put_many(rows_of(4))
    check_full(cache, rows_of(4))
    assert is_refused(cache.directory)
    cache.release()
    assert not is_refused(cache.directory)


def test_a_deleted_directory_that_another_run_has_made_is_its_own(cache):
    cache.claim()
    cache.put_many(rows_of(3))
    shutil.rmtree(cache.directory)
    with another_run(cache.directory, "SETTINGS", "cache.put_many(rows_of(2, step=7))") as pid:
        assert cache.get_many([key((0,)), key((1,))]) == [None, None]
        with pytest.raises(CacheWriteError, match=f"in use by another run .process {pid}"):
            cache.put_many(rows_of(4))
    check_full(cache, rows_of(2, step=7))


def test_a_directory_that_cannot_be_claimed_is_a_clear_error(cache):
    (cache.directory / CLAIM_NAME).mkdir()
    with pytest.raises(CacheError, match=f"{cache.directory} cannot be claimed: "):
        cache.claim()


# -- damaged files


def a_zip() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        file.writestr("tokens.npy", bytes(5000))
    return content.getvalue()


Files = dict[str, bytes]  # content by suffix: "" is the database, "-wal" its log, "-shm" the log's index


@dataclass
class Original:
    """A cache to damage: its files when they are closed, when their process was killed, and at an earlier time."""

    closed: Files
    killed: Files
    earlier: Files
    stranger: Files  # another cache with rows of its own under the same settings
    stored: dict[tuple[bytes, int], list[Trajectory]]


def read_files(directory: Path) -> Files:
    files = {suffix: directory / (FILE_NAME + suffix) for suffix in ("", "-wal", "-shm")}
    return {suffix: file.read_bytes() for suffix, file in files.items() if file.exists()}


def make_original(directory: Path) -> Original:
    def versions(step):
        return [make_trajectory((i,), seed=i, step=step, length=900 if i % 3 == 0 else 30) for i in range(6)]

    with TrajectoryCache(directory / "ours", SETTINGS) as cache:
        cache.put_many(versions(1))
    earlier = read_files(directory / "ours")
    with TrajectoryCache(directory / "ours", SETTINGS) as cache:
        cache.put_many(versions(2))
    closed = read_files(directory / "ours")
    leave_behind(directory / "ours", versions(3)[:3], versions(3)[3:])
    killed = read_files(directory / "ours")
    leave_behind(directory / "stranger", [make_trajectory((i,), seed=i, step=9, length=60) for i in range(6)])
    stranger = read_files(directory / "stranger")
    stored: dict = {}
    for step in (1, 2, 3):
        for trajectory in versions(step):
            stored.setdefault((trajectory.prompt, trajectory.slot), []).append(trajectory)
    for i in range(6):
        stored[key((i,))].append(make_trajectory((i,), seed=i, step=9, length=60))
    return Original(closed, killed, earlier, stranger, stored)


def flip(content: bytes, rng: random.Random, start=0, end=None) -> bytes:
    flipped = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        flipped[rng.randrange(start, min(end or len(content), len(content)))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def pages(content: bytes, size=PAGE_BYTES) -> list[bytes]:
    return [content[i : i + size] for i in range(0, len(content), size)]


def swap(blocks: list[bytes], rng: random.Random) -> list[bytes]:
    i, j = rng.randrange(len(blocks)), rng.randrange(len(blocks))
    blocks[i], blocks[j] = blocks[j], blocks[i]
    return blocks


def put_in(blocks: list[bytes], rng: random.Random, block: bytes) -> list[bytes]:
    blocks[rng.randrange(len(blocks))] = block
    return blocks


def frames(log: bytes) -> list[bytes]:
    """The header of a log, then one block a frame."""
    return [log[:32], *(log[i : i + 24 + PAGE_BYTES] for i in range(32, len(log), 24 + PAGE_BYTES))]


def cut(content: bytes, rng: random.Random) -> bytes:
    """Shortened to any length, a quarter of the time to whole pages."""
    length = rng.randrange(len(content))
    return content[: length - length % PAGE_BYTES if rng.random() < 0.25 else length]


Mutation = Callable[[Original, random.Random], Files]

# Each gives the files of a directory, from an original and a generator of its own seed.
MUTATIONS: dict[str, Mutation] = {
    "bits anywhere": lambda o, rng: {"": flip(o.closed[""], rng)},
    "bits of the first page": lambda o, rng: {"": flip(o.closed[""], rng, 0, PAGE_BYTES)},
    "bits of the header": lambda o, rng: {"": flip(o.closed[""], rng, 0, 100)},
    "bits of the settings": lambda o, rng: {
        "": flip(o.closed[""], rng, n := o.closed[""].index(SETTINGS.to_json().encode()), n + len(SETTINGS.to_json()))},
    "bits of the header, with a log": lambda o, rng: o.killed | {"": flip(o.killed[""], rng, 0, 100)},
    "bits anywhere, with a log": lambda o, rng: o.killed | {"": flip(o.killed[""], rng)},
    "cut": lambda o, rng: {"": cut(o.closed[""], rng)},
    "cut, with a log": lambda o, rng: o.killed | {"": cut(o.killed[""], rng)},
    "pages swapped": lambda o, rng: {"": b"".join(swap(pages(o.closed[""]), rng))},
    "page twice": lambda o, rng: {"": b"".join(put_in(pages(o.closed[""]), rng, rng.choice(pages(o.closed[""]))))},
    "page empty": lambda o, rng: {"": b"".join(put_in(pages(o.closed[""]), rng, bytes(PAGE_BYTES)))},
    "page of an earlier time": lambda o, rng: {"": b"".join(
        put_in(pages(o.closed[""]), rng, rng.choice(pages(o.earlier[""]))))},
    "half of an earlier time": lambda o, rng: {
        "": o.closed[""][: (n := PAGE_BYTES * rng.randrange(1, len(o.closed[""]) // PAGE_BYTES))] + o.earlier[""][n:]},
    "wrong header": lambda o, rng: {"": rng.randbytes(rng.choice((16, 100))) + o.closed[""][100:]},
    "header of another cache": lambda o, rng: {
        "": o.stranger[""][: rng.choice((100, PAGE_BYTES))] + o.closed[""][PAGE_BYTES:]},
    "another kind of file": lambda o, rng: {"": rng.choice(
        (a_zip(), pickle.dumps([1] * 1000), b"SQLite format 3\0", b"tokens\n" * 500, rng.randbytes(9000), b"\0"))},
    "another kind of file, with a log": lambda o, rng: o.killed | {"": rng.choice(
        (a_zip(), pickle.dumps([1] * 1000), b"tokens\n" * 500, rng.randbytes(9000)))},
    "bits of the log": lambda o, rng: o.killed | {"-wal": flip(o.killed["-wal"], rng)},
    "bits of the log's header": lambda o, rng: o.killed | {"-wal": flip(o.killed["-wal"], rng, 0, 56)},
    "log cut": lambda o, rng: o.killed | {"-wal": cut(o.killed["-wal"], rng)},
    "log's frames swapped": lambda o, rng: o.killed | {"-wal": b"".join(swap(frames(o.killed["-wal"]), rng))},
    "log of another cache": lambda o, rng: o.killed | {"-wal": o.stranger["-wal"]},
    "log of garbage": lambda o, rng: o.killed | {"-wal": rng.choice((a_zip(), rng.randbytes(rng.randrange(1, 9000))))},
    "log without its file": lambda o, rng: {"": b"", "-wal": o.killed["-wal"]} if rng.random() < 0.5 else {
        "-wal": o.killed["-wal"]},
    "bits of the log's index": lambda o, rng: o.killed | {"-shm": flip(o.killed["-shm"], rng)},
    "log's index cut or garbage": lambda o, rng: o.killed | {"-shm": rng.choice(
        (cut(o.killed["-shm"], rng), rng.randbytes(32768)))},
    "journal of garbage": lambda o, rng: o.closed | {"-journal": rng.choice((a_zip(), rng.randbytes(5000)))},
}  # fmt: skip


def use(directory: Path, original: Original, newer: list[Trajectory], max_mib: float | None) -> str:
    """What a run does with a cache that it finds: opens it, rewinds, reads, writes, and reads again."""
    try:
        cache = TrajectoryCache(directory, SETTINGS, max_mib)
    except FingerprintMismatch:
        return "refused"
    with cache:
        check_found(cache, original, newer)
        for look in (cache.stats, lambda: check_all(cache, original)):
            try:
                look()
            except CacheError as error:
                assert "damaged" in str(error)
        cache.rewind(15)
        cache.put_many(newer)
        check_found(cache, original, newer)
        return "whole" if cache.corrupt == 0 else "damaged"


def check_all(cache: TrajectoryCache, original: Original) -> None:
    for trajectory in cache:
        versions = original.stored[trajectory.prompt, trajectory.slot]
        assert any(same(trajectory, version) for version in versions), "wrong trajectory"


def check_found(cache: TrajectoryCache, original: Original, newer: list[Trajectory]) -> None:
    found = cache.get_many(list(original.stored))
    for t, versions, new in zip(found, original.stored.values(), newer, strict=True):
        assert t is None or any(same(t, version) for version in [*versions, new]), "wrong trajectory"


@pytest.mark.slow
def test_ten_thousand_damaged_files(memory):
    """Each is opened, read and written: no crash, no hang, no wrong trajectory, and what was damaged is still there."""
    original, newer = make_original(memory), rows_of(6, step=20)

    def work(worker):
        outcomes, failures = {"refused": 0, "whole": 0, "damaged": 0}, []
        directory = memory / f"mutant-{worker}"
        signal.signal(signal.SIGALRM, hangs)
        for number in range(worker, MUTANTS, 2):
            name = list(MUTATIONS)[number // 2 % len(MUTATIONS)]
            rng = random.Random(number)
            directory.mkdir()
            for suffix, content in MUTATIONS[name](original, rng).items():
                (directory / (FILE_NAME + suffix)).write_bytes(content)
            database, log = directory / FILE_NAME, directory / (FILE_NAME + "-wal")
            # An empty file holds nothing; without its file, the log is what there is to lose.
            precious = database if database.exists() and database.stat().st_size else log
            inode = precious.stat().st_ino if precious.exists() else None
            signal.alarm(60)
            try:
                outcomes[use(directory, original, newer, rng.choice((None, 0.05)))] += 1
                assert inode is None or inode in inodes(directory), "gone"
            except Exception as error:
                failures.append(f"{number}, {name}: {error!r}")
            signal.alarm(0)
            shutil.rmtree(directory)
        (memory / f"failures-{worker}").write_text("\n".join(failures))
        assert min(outcomes.values()) > 5, outcomes

    assert in_children(2, work) == [0, 0]
    assert "".join((memory / f"failures-{worker}").read_text() for worker in range(2)) == ""


def hangs(*signal):
    raise TimeoutError("it hangs")


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
    db.execute("PRAGMA max_page_count = 60")
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


def test_read_only_directory_is_a_clear_error_and_stays_as_it_was(memory):
    """Permissions do not bind root, so the process gives root up."""
    directory = memory / "cache"
    with TrajectoryCache(directory, SETTINGS) as cache:
        cache.put_many(rows_of(3))
    before = read_files(directory)
    memory.chmod(0o755)
    directory.chmod(0o555)
    cache.path.chmod(0o444)

    def open_it(_):
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        with pytest.raises(CacheError, match=r"cannot be opened for writing .* Check that the directory is writable"):
            TrajectoryCache(directory, SETTINGS)

    assert in_children(1, open_it) == [0]
    directory.chmod(0o755)
    assert read_files(directory) == before and not damaged(cache)
