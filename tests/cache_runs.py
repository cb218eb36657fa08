"""Caches, and processes that use them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conftest import make_trajectory

from specrl_plugins import Fingerprint, TrajectoryCache, prompt_key

SETTINGS = Fingerprint(model="tiny", tokenizer="abc", vocab_size=1000, scorer="trainer", sampling={"temperature": 1.0})


def key(prompt, slot=0):
    return prompt_key(prompt), slot


def get(cache, prompt=(1, 2, 3), slot=0):
    return cache.get_many([key(prompt, slot)])[0]


def rows_of(count, step=1, length=40):
    return [make_trajectory((i,), seed=i, step=step, length=length) for i in range(count)]


def damaged(cache: TrajectoryCache) -> list[Path]:
    return sorted(cache.directory.glob("damaged-*.sqlite"))


@contextmanager
def another_run(directory: Path, fingerprint: str = "None", then: str = "pass") -> Iterator[int]:
    """A process that has claimed a cache, and done something `then` to `cache`, until the block ends; its id."""
    script = f"""
from cache_runs import SETTINGS, rows_of
from specrl_plugins import TrajectoryCache
cache = TrajectoryCache({str(directory)!r}, {fingerprint})
cache.claim()
{then}
print("claimed", flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "claimed\n"
        try:
            yield other.pid
        finally:
            other.stdin.close()


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
