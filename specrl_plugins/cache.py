"""The trajectory cache: past responses on disk, one SQLite file a run.

Several processes of one node may read and write at once (SQLite's write-ahead log; not over a network file system).
What was written is there after a crash of the process. A file that is damaged is moved aside, never deleted; a row
that is damaged is a miss.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

from specrl_plugins.codec import CorruptRow, Row, decode, encode
from specrl_plugins.fingerprint import Fingerprint, FingerprintMismatch
from specrl_plugins.trajectory import Trajectory

logger = logging.getLogger(__name__)

T = TypeVar("T")

FILE_NAME = "trajectories.sqlite"
DAMAGED_FILES = "damaged-*.sqlite"
LOCK_NAME = "opening.lock"
CLAIM_NAME = "run.lock"
# A row of a few hundred tokens takes several pages, the last of them in part: small pages leave less room empty.
PAGE_BYTES = 1024
_BUSY_SECONDS = 60
_MIB = 1 << 20
_LOG_BYTES = 64 * _MIB
# Size above which the log is copied into the file.
_COPIED_BYTES = 4 * _MIB
# Pages that a process keeps in memory, at most.
_CACHED_KIB = 32 << 10
# Share of the rows that one pass of eviction forgets.
_EVICTED_SHARE = 0.05

# The queries and the tables are known to fit, so a query that is wrong or breaks a constraint means a broken file.
_DAMAGE = (
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_FORMAT,
    sqlite3.SQLITE_NOTADB,
)

# Two tables, so that what is looked up, counted and aged does not drag the arrays along. `replaced` is the step of the
# trajectory that took the place of this one, which is only kept for whoever resumes from the last checkpoint.
_SCHEMA = {
    "meta": "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "entries": (
        "CREATE TABLE entries (id INTEGER PRIMARY KEY, prompt BLOB NOT NULL, slot INTEGER NOT NULL, "
        "step INTEGER NOT NULL, replaced INTEGER, used INTEGER NOT NULL, length INTEGER NOT NULL, "
        "UNIQUE (prompt, slot, step))"
    ),
    "payloads": (
        "CREATE TABLE payloads (id INTEGER PRIMARY KEY, format INTEGER NOT NULL, finish INTEGER NOT NULL, "
        "cap INTEGER NOT NULL, reward REAL, arrays BLOB NOT NULL, checksum INTEGER NOT NULL)"
    ),
}
_ROW = (
    "SELECT format, prompt, slot, step, finish, cap, reward, length, arrays, checksum, entries.id "
    "FROM entries LEFT JOIN payloads ON payloads.id = entries.id"
)


class CacheError(RuntimeError):
    """The cache cannot be opened as it is; the message says what to do."""


class CacheWriteError(OSError):
    """Trajectories could not be written (disk full, say). What was there before is untouched."""


@dataclass(frozen=True)
class CacheStats:
    """What a cache holds, and what this process saw of it.

    `rows`, `prompts` and `tokens` count what is stored, `mib` is its size on disk in MiB (free pages not counted),
    `oldest_step` and `newest_step` are optimizer steps (`None` in an empty cache), `corrupt` counts the rows that did
    not check out since this process opened the cache.
    """

    rows: int
    prompts: int
    tokens: int
    mib: float
    oldest_step: int | None
    newest_step: int | None
    corrupt: int


class TrajectoryCache:
    """Newest trajectory of each (prompt, slot), on disk; and the one before it, where the last checkpoint knew that.

    Args:
        directory (`str` or `Path`):
            Folder of the cache; made if missing.
        fingerprint (`Fingerprint`, *optional*):
            What the trajectories depend on. A new cache keeps it; one that has another refuses to open. `None` opens
            an existing cache as it is, to look into it.
        max_mib (`float`, *optional*):
            Size in MiB above which the least recently used rows are forgotten. `None` sets no limit.

    Raises:
        FingerprintMismatch: the cache was made under other settings.
        CacheError: the folder cannot be written, or there is no cache to look into.
    """

    def __init__(
        self, directory: str | os.PathLike, fingerprint: Fingerprint | None = None, max_mib: float | None = None
    ):
        self.directory = Path(directory).absolute()  # the process may change its working directory
        self.path = self.directory / FILE_NAME
        self.fingerprint = fingerprint
        self._as_it_is = fingerprint is None  # nothing is made, and nothing is put in the place of what is damaged
        self.max_mib = max_mib
        self.corrupt = 0
        self._warned_full = False
        self._checkpoint = -1  # optimizer step of the last checkpoint of this run
        self._connection: sqlite3.Connection | None = None
        self._opened: tuple[int, int, int] | None = None
        self._claim: tuple[int, int, int] | None = None
        _caches.add(self)
        if fingerprint is None and not self.path.is_file():
            raise CacheError(f"there is no trajectory cache in {self.directory}")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CacheError(f"the cache directory {self.directory} cannot be made: {error}") from error
        self._connect()

    def claim(self) -> None:
        """Keep the cache for the runs of this process until [`release`]: step numbers of two would mix.

        Raises:
            CacheError: a run of another process has it, or the directory cannot be written.
        """
        path = self.directory / CLAIM_NAME
        try:
            self.directory.mkdir(parents=True, exist_ok=True)  # somebody may have deleted it
            claim = _identity(path)
            # POSIX locks are a process's: closing a second file, be it by another path, would give up the first.
            if claim is None or claim not in _claims:
                claim, lock = self._lock(path)
                _claims[claim] = lock, weakref.WeakSet()
        except OSError as error:
            raise CacheError(f"the trajectory cache {self.directory} cannot be claimed: {error}") from error
        if self._claim != claim:
            self._end_claim()
        self._claim = claim
        _claims[claim][1].add(self)

    def _lock(self, path: Path) -> tuple[tuple[int, int, int], IO[str]]:
        """Lock a file that this process has not locked; returns which it is, and the file, to be kept open."""
        lock = open(path, "a+")  # noqa: SIM115
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            with lock:
                lock.seek(0)
                owner = lock.read() or "unknown"
            if not isinstance(error, BlockingIOError | PermissionError):  # which say that it is locked
                raise
            raise CacheError(
                f"the trajectory cache {self.directory} is in use by another run (process {owner}): their steps would "
                "mix. Choose another cache directory, or end that run."
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        file = os.fstat(lock.fileno())
        return (os.getpid(), file.st_dev, file.st_ino), lock

    def release(self) -> None:
        """End a claim, if there is one, and close the file. Another claim of this process to the same cache stays."""
        self._end_claim()
        self.close()

    def _end_claim(self) -> None:
        claim, self._claim = self._claim, None
        if claim is None or claim[0] != os.getpid():
            return
        lock, claimants = _claims[claim]
        claimants.discard(self)
        if not claimants:
            del _claims[claim]
            lock.close()

    def get_many(self, keys: Sequence[tuple[bytes, int]]) -> list[Trajectory | None]:
        """Trajectories of a batch of (prompt key, slot); `None` for a miss. Marks what it finds as used."""
        try:
            db = self._connect()
        except CacheError as error:  # opened before, but not again (disk full, say): training goes on without drafts
            logger.warning("No past trajectories for this batch: %s", error)
            return [None] * len(keys)
        found: list[Trajectory | None] = []
        ids: list[int] = []
        query = f"{_ROW} WHERE prompt = ? AND slot = ? ORDER BY step DESC LIMIT 1"
        db.execute("BEGIN")  # one lock for all rows
        try:
            for prompt, slot in keys:
                trajectory = None
                try:
                    hit = db.execute(query, (prompt, slot)).fetchone()
                    if hit is not None:
                        trajectory = self._decode(hit)
                        ids.append(hit[-1])
                except sqlite3.DatabaseError as error:
                    self._saw_corrupt(f"row of prompt {prompt.hex()}, slot {slot}: {error}")
                # A hostile file can answer with another row than the one asked for.
                if trajectory is not None and (trajectory.prompt, trajectory.slot) != (prompt, slot):
                    self._saw_corrupt(f"row of prompt {prompt.hex()}, slot {slot} holds another one")
                    trajectory = None
                found.append(trajectory)
        finally:
            db.rollback()  # nothing was written; an error may have ended it already
        self._touch(db, ids)
        return found

    def put_many(self, trajectories: Sequence[Trajectory]) -> None:
        """Store a batch in one transaction: all of it or, where that fails, nothing.

        A trajectory replaces that of its prompt and slot, unless that one is of a later step.

        Raises:
            CacheWriteError: the disk is full or failing.
        """
        rows = [encode(trajectory) for trajectory in trajectories]

        def put(db: sqlite3.Connection) -> None:
            for row in rows:
                self._put(db, row)
            if self.max_mib is not None:
                forgotten = self._evict(db, self.max_mib)
                if forgotten and not self._warned_full:
                    self._warned_full = True
                    logger.warning(
                        "The trajectory cache %s has reached its size of %g MiB with %d trajectories, and forgets the "
                        "least recently used from now on. Where an epoch holds more than that, each is forgotten "
                        "before its prompt comes back: give the cache more room.",
                        self.directory,
                        self.max_mib,
                        db.execute("SELECT COUNT(*) FROM entries").fetchone()[0],
                    )

        self._write(put)

    def checkpoint(self, step: int, forget: bool = True) -> None:
        """The run can be resumed from optimizer step `step` now: [`rewind`] to it gives back what is newest now.

        Each process that writes has to know.

        Args:
            step (`int`): of the checkpoint.
            forget (`bool`, *optional*, defaults to `True`): whether to forget what only earlier checkpoints need. One
                process of a node is enough for that.

        Raises:
            CacheWriteError: the disk is full or failing; what is not needed any more is still there.
        """
        self._checkpoint = step
        if forget:
            self._write(lambda db: self._delete(db, "replaced <= ?", (step,)))

    def rewind(self, step: int) -> int:
        """Forget everything newer than optimizer step `step`; returns how many rows that were.

        To the last [`checkpoint`], what the newer rows had replaced is the newest again. Further back, or where the
        size cap left no room for it, it is gone.

        Raises:
            CacheWriteError: the disk is full or failing; what was to be forgotten is still there.
        """

        def back(db: sqlite3.Connection) -> int:
            forgotten = self._delete(db, "step > ?", (step,))
            db.execute("UPDATE entries SET replaced = NULL WHERE replaced > ?", (step,))
            return forgotten

        return self._write(back)

    def prune(self, max_mib: float) -> int:
        """Forget the least recently used rows until the cache is at most `max_mib` MiB, and shrink the file.

        Returns how many rows were forgotten.

        Raises:
            CacheWriteError: the disk is full: forgetting takes some room too, before it makes any.
        """
        forgotten = self._write(lambda db: self._evict(db, max_mib))
        db = self._connect()
        try:
            db.execute("VACUUM")
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.DatabaseError as error:
            raise CacheWriteError(f"{self.path} was not shrunk: {error}") from error
        return forgotten

    def verify(self) -> tuple[int, int]:
        """Check every row; returns how many there are and how many did not check out."""
        before = self.corrupt
        rows = sum(1 for _ in self._rows(""))
        return rows, self.corrupt - before

    def __iter__(self) -> Iterator[Trajectory]:
        """All trajectories that check out, in the order they were used, latest first."""
        latest = self._rows("WHERE replaced IS NULL ORDER BY used DESC")
        return (trajectory for trajectory in latest if trajectory is not None)

    def __len__(self) -> int:
        with self._reading() as db:
            return db.execute("SELECT COUNT(*) FROM entries WHERE replaced IS NULL").fetchone()[0]

    @property
    def mib(self) -> float:
        """Size on disk in MiB, free pages not counted."""
        with self._reading() as db:
            return self._used_mib(db)

    def stats(self) -> CacheStats:
        """Counts of what is stored. Reads the whole index, no array."""
        with self._reading() as db:
            rows, prompts, tokens, oldest, newest = db.execute(
                "SELECT COUNT(*), COUNT(DISTINCT prompt), COALESCE(SUM(length), 0), MIN(step), MAX(step) FROM entries "
                "WHERE replaced IS NULL"
            ).fetchone()
            return CacheStats(rows, prompts, tokens, self._used_mib(db), oldest, newest, self.corrupt)

    def __enter__(self) -> TrajectoryCache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. The next call opens it again."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    # -- rows

    def _put(self, db: sqlite3.Connection, row: Row) -> None:
        newest = db.execute(
            "SELECT id, step > ?, step <= ? AND ? < ? FROM entries "
            "WHERE prompt = ? AND slot = ? ORDER BY step DESC LIMIT 1",
            (row.step, self._checkpoint, self._checkpoint, row.step, row.prompt, row.slot),
        ).fetchone()
        id, is_newer, is_in_checkpoint = newest or (None, False, False)
        if is_newer:
            return
        if is_in_checkpoint:
            db.execute("UPDATE entries SET replaced = ? WHERE id = ?", (row.step, id))
        elif id is not None:
            db.execute("DELETE FROM payloads WHERE id = ?", (id,))
            db.execute("DELETE FROM entries WHERE id = ?", (id,))
        # A new row goes to the end, where pages fill up. In the place of the old one, which is longer or shorter, it
        # would split a page into two that are half empty.
        id = db.execute(
            "INSERT INTO entries (prompt, slot, step, used, length) VALUES (?, ?, ?, ?, ?)",
            (row.prompt, row.slot, row.step, time.time_ns(), row.length),
        ).lastrowid
        db.execute(
            "INSERT INTO payloads VALUES (?, ?, ?, ?, ?, ?, ?)",
            (id, row.format, row.finish, row.cap, row.reward, row.arrays, row.checksum),
        )

    def _decode(self, columns: tuple) -> Trajectory | None:
        try:
            return decode(Row(*columns[:-1]))
        except CorruptRow as error:
            self._saw_corrupt(f"row {columns[-1]}: {error}")
            return None

    def _rows(self, condition: str) -> Iterator[Trajectory | None]:
        """The rows of those entries that `condition` selects, in its order; `None` for one that does not check out.

        All as of one moment, whatever is written meanwhile: so an entry that its key does not lead to is a damaged one.
        """
        # As they are looked up: a damaged index can answer to one query and not to another.
        query = f"{_ROW} WHERE prompt = ? AND slot = ? AND step <= ? ORDER BY step DESC LIMIT 1"
        with self._reading(), self._alone():
            db = self._open()
        try:
            with self._reading():
                db.execute("BEGIN")
                # Of the table: the index may be what is damaged.
                entries = db.execute(f"SELECT prompt, slot, step, id FROM entries NOT INDEXED {condition}").fetchall()
            for *key, id in entries:
                try:
                    columns = db.execute(query, key).fetchone()
                except sqlite3.DatabaseError as error:
                    self._saw_corrupt(f"row {id}: {error}")
                    yield None
                    continue
                if columns is None or columns[-1] != id:
                    self._saw_corrupt(f"row {id}: its key does not lead to it")
                    yield None
                else:
                    yield self._decode(columns)
        finally:
            db.close()

    def _touch(self, db: sqlite3.Connection, ids: list[int]) -> None:
        # Recency only decides what is forgotten first: not worth failing a look-up on a full or read-only disk.
        try:
            with self._transaction(db):
                db.executemany("UPDATE entries SET used = ? WHERE id = ?", [(time.time_ns(), id) for id in ids])
        except sqlite3.DatabaseError as error:
            logger.debug("recency of %d rows not noted: %s", len(ids), error)

    def _evict(self, db: sqlite3.Connection, max_mib: float) -> int:
        forgotten = 0
        while self._used_mib(db) > max_mib:
            rows = db.execute("SELECT COUNT(*) FROM entries").fetchone()[0]
            if rows == 0:
                break
            oldest = "id IN (SELECT id FROM entries ORDER BY replaced IS NULL, used LIMIT ?)"
            deleted = self._delete(db, oldest, (max(1, int(rows * _EVICTED_SHARE)),))
            if not deleted:
                raise sqlite3.DatabaseError("its rows are not where their ids lead")
            forgotten += deleted
        return forgotten

    @staticmethod
    def _delete(db: sqlite3.Connection, condition: str, values: tuple) -> int:
        db.execute(f"DELETE FROM payloads WHERE id IN (SELECT id FROM entries WHERE {condition})", values)
        return db.execute(f"DELETE FROM entries WHERE {condition}", values).rowcount

    @staticmethod
    def _used_mib(db: sqlite3.Connection) -> float:
        pages, free, size = (
            db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size / _MIB

    # -- the file

    def _connect(self) -> sqlite3.Connection:
        """This process's connection to the file that the path names now: another process may have replaced it."""
        if self._connection is not None and self._opened == _identity(self.path):
            return self._connection
        self.close()
        # Where the directory was deleted, so was the file that is locked: another run may have been granted a new one.
        if self._claim is not None and self._claim[0] == os.getpid():
            self.claim()
        try:
            # Two processes that set up one new file, or move one damaged file aside, would undo each other's work.
            with self._alone():
                try:
                    self._connection = self._open()
                except sqlite3.DatabaseError as error:
                    if not _is_damage(error, self.path):
                        raise
                    if self._as_it_is:
                        raise CacheError(f"{self.path} is damaged, or no trajectory cache: {error}") from error
                    self._set_aside(error)
                    self._connection = self._open()
                self._opened = _identity(self.path)
        except (sqlite3.DatabaseError, OSError) as error:
            raise CacheError(
                f"the trajectory cache {self.path} cannot be opened for writing ({error}). Check that the "
                "directory is writable and not on a network file system, or choose another cache directory."
            ) from error
        return self._connection

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One process at a time, on this node."""
        if not self._as_it_is:
            self.directory.mkdir(parents=True, exist_ok=True)  # somebody may have deleted it
        with open(self.directory / LOCK_NAME, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        try:
            yield self._connect()
        except sqlite3.DatabaseError as error:
            raise CacheError(f"{self.path} is damaged and cannot be read: {error}") from error

    def _write(self, change: Callable[[sqlite3.Connection], T]) -> T:
        """Commit what `change` does, all of it or nothing. A file that turns out to be damaged is replaced first."""
        try:
            try:
                return self._commit(change)
            except sqlite3.DatabaseError as error:
                if self._as_it_is or not _is_damage(error, self.path):
                    raise
                with self._alone():
                    if self._opened == _identity(self.path):  # no other process has replaced it meanwhile
                        self._set_aside(error)
            return self._commit(change)
        except (sqlite3.DatabaseError, CacheError, OSError) as error:
            raise CacheWriteError(f"nothing was written to {self.path}: {error}") from error

    def _commit(self, change: Callable[[sqlite3.Connection], T]) -> T:
        db = self._connect()
        with self._transaction(db):
            return change(db)

    def _open(self) -> sqlite3.Connection:
        log = self.path.with_name(FILE_NAME + "-wal")
        if _size(log) and not _size(self.path):  # SQLite would delete it
            raise sqlite3.DatabaseError("it is empty or gone, its write-ahead log is not")
        db = sqlite3.connect(self.path, timeout=_BUSY_SECONDS, isolation_level=None)
        try:
            db.text_factory = partial(str, encoding="utf-8", errors="replace")  # what is damaged is read, and refused
            # The file may come from anywhere: nothing in its schema may call functions, and pages are checked.
            db.execute("PRAGMA trusted_schema = OFF")
            db.execute("PRAGMA cell_size_check = ON")
            db.execute(f"PRAGMA page_size = {PAGE_BYTES}")  # of a new file
            db.execute("PRAGMA journal_mode = WAL")
            # A commit survives the death of the process; a power cut may lose the last ones, never the file.
            db.execute("PRAGMA synchronous = NORMAL")
            # The log keeps the size of its largest transaction otherwise.
            db.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
            # A page of a batch that is larger than SQLite's cache is written and read several times over.
            db.execute(f"PRAGMA cache_size = -{_CACHED_KIB}")
            db.execute(f"PRAGMA wal_autocheckpoint = {_COPIED_BYTES // PAGE_BYTES}")
            with self._transaction(db):
                # Pairs, since a trigger may have the name of a table.
                present = db.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
                if not present and self.fingerprint is not None:
                    for statement in _SCHEMA.values():
                        db.execute(statement)
                    db.execute("INSERT INTO meta VALUES ('fingerprint', ?)", (self.fingerprint.to_json(),))
                elif Counter(present) != Counter(_SCHEMA.items()):
                    raise sqlite3.DatabaseError("its tables are not those of a trajectory cache of this version")
                self._check_fingerprint(db)
        except UnicodeDecodeError as error:  # SQLite complains of the damage and quotes it
            db.close()
            raise sqlite3.DatabaseError(f"its tables cannot be read: {error}") from error
        except BaseException:
            db.close()
            raise
        return db

    def _check_fingerprint(self, db: sqlite3.Connection) -> None:
        stored = db.execute("SELECT value FROM meta WHERE name = 'fingerprint'").fetchone()
        if stored is None:
            raise sqlite3.DatabaseError("it has no fingerprint")
        try:
            fingerprint = Fingerprint.from_json(stored[0])
        except (ValueError, TypeError, RecursionError) as error:
            raise sqlite3.DatabaseError(f"its fingerprint cannot be read: {error}") from error
        if self.fingerprint is None:
            self.fingerprint = fingerprint
        elif differences := fingerprint.differences(self.fingerprint):
            raise FingerprintMismatch(
                f"the trajectories in {self.directory} were made under other settings, and reusing them would be "
                "wrong:\n  " + "\n  ".join(differences) + "\nChoose another cache directory, or delete this one."
            )

    def _set_aside(self, error: Exception) -> None:
        """Move a damaged file out of the way, with its write-ahead log: it may still be worth something to someone."""
        self.close()
        self.corrupt += 1
        stamp = time.time_ns()
        for suffix in ("", "-wal", "-shm", "-journal"):
            damaged = self.path.with_name(FILE_NAME + suffix)
            if damaged.exists():
                damaged.rename(self.path.with_name(DAMAGED_FILES.replace("*", str(stamp)) + suffix))
        logger.warning(
            "%s is damaged (%s): it was moved to damaged-%d.sqlite beside it, and an empty cache takes its place.",
            self.path,
            error,
            stamp,
        )

    def _saw_corrupt(self, what: str) -> None:
        self.corrupt += 1
        if self.corrupt == 1:
            logger.warning("%s holds a row that does not check out and is not used (%s).", self.path, what)

    @staticmethod
    @contextmanager
    def _transaction(db: sqlite3.Connection) -> Iterator[None]:
        db.execute("BEGIN IMMEDIATE")
        try:
            yield
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise


def _is_damage(error: sqlite3.DatabaseError, path: Path) -> bool:
    """Whether the file itself is broken, as against locked, read-only or out of space."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:  # raised by this module, or by the sqlite3 module itself for text that is not UTF-8
        return type(error) in (sqlite3.DatabaseError, sqlite3.OperationalError)
    if code == sqlite3.SQLITE_READONLY:  # a broken header can say so too
        return os.access(path, os.W_OK)
    return code & 0xFF in _DAMAGE


def _identity(path: Path) -> tuple[int, int, int] | None:
    """Which file a path names, and for which process; `None` where there is none."""
    try:
        file = os.stat(path)
    except OSError:
        return None
    return os.getpid(), file.st_dev, file.st_ino


def _size(file: Path) -> int:
    """Bytes of a file, 0 where there is none."""
    return file.stat().st_size if file.exists() else 0


# A connection may not be carried across a fork, not even unused: the child would believe to hold locks that only its
# parent holds. See "How To Corrupt An SQLite Database File", 2.6.
_caches: weakref.WeakSet[TrajectoryCache] = weakref.WeakSet()
# Open files whose locks a process holds, by process and file (a forked child has a copy of this, but no lock), and the
# caches that claim by them.
_claims: dict[tuple[int, int, int], tuple[IO[str], weakref.WeakSet[TrajectoryCache]]] = {}


def _close_all() -> None:
    for cache in list(_caches):
        cache.close()


os.register_at_fork(before=_close_all)
