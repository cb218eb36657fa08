"""Ranks that are forked from one process which has imported what they need: `torchrun` spares them no import."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import socket
import time
from pathlib import Path

import trl_ranks


def fork(
    model: str, output: Path, runs: dict[str, dict], ranks: int = 2, timeout_s: float = 300, **environment: str
) -> tuple[list[int], str]:
    """Train in `ranks` processes, as [`trl_ranks`] does; returns their exit codes and what they printed.

    Where one fails, the others have some seconds to find out.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    output.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    processes, logs = [], []
    for rank in range(ranks):
        variables = environment | dict(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
        logs.append(output / f"rank-{rank}.log")
        processes.append(context.Process(target=_rank, args=(variables, logs[-1], model, output, runs)))
        processes[-1].start()
    try:
        _wait(processes, timeout_s)
    finally:  # what hangs would go on, with the locks that it holds
        for process in processes:
            process.kill()
            process.join()
    return [process.exitcode for process in processes], "".join(log.read_text() for log in logs)


def _wait(processes: list, timeout_s: float) -> None:
    """Until all have ended, or one has failed and the others had their time."""
    end = time.monotonic() + timeout_s
    while running := [process for process in processes if process.is_alive()]:
        left = end - time.monotonic()
        if left <= 0:
            if any(process.exitcode for process in processes):
                return
            raise TimeoutError(f"{len(running)} ranks are still running after {timeout_s:.0f} s")
        multiprocessing.connection.wait([process.sentinel for process in running], left)
        if any(process.exitcode for process in processes):
            end = min(end, time.monotonic() + 10)


def _rank(variables: dict[str, str], log: Path, model: str, output: Path, runs: dict[str, dict]) -> None:
    with log.open("wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.environ.update(variables)
    trl_ranks.main(model, str(output), json.dumps(runs))
