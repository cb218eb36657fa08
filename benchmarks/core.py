"""What the speculative core costs beside the model: seconds a million tokens, and bytes a cached token.

The engine is the only stand-in: it returns log-probs and tokens that were made beforehand, so that no time is its own.
All else is what a trainer runs: `SpeculativeRollout.run` and `store` on a `TrajectoryCache` that already holds
trajectories. Several processes share one cache and one clock, as the ranks of a node do. No framework is imported.

The tokens are drawn one by one from a Zipf distribution whose ranks are dealt to ids at random: text repeats itself and
compresses better. Log-probs are a mixture of nearly certain, likely and open tokens, down to -15 nats.

Prints one JSON object. A stage's figure is the median over repeats of all its processes; `cpu_s` are seconds of process
CPU time, `wall_s` of the clock, both for a million tokens of the responses of one process.

    python benchmarks/core.py --held 10000 100000 --processes 1 8
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import platform
import shlex
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import zstandard
from numpy.typing import NDArray

from specrl_plugins import Fingerprint, ReusePolicy, SpeculativeRollout, Trajectory, TrajectoryCache, prompt_key
from specrl_plugins.engine import Continuation
from specrl_plugins.guard import VerificationGuard

SHORTEST, LONGEST = 200, 1000  # tokens of a response
SAMPLES = 8  # responses a prompt
PROMPT_TOKENS = 100
SEED = 0
# The stages of a rollout, by the methods that are timed. "all" is `run` and `store`, with what lies between stages.
STAGES = {"look up": "_look_up", "accept": "_accept", "assemble": "_generate", "store": "store"}


class Language:
    """Tokens, log-probs and ages of made-up responses."""

    def __init__(self, vocab_size: int, seed: int, tokens: int = 1 << 21):
        self.rng = np.random.default_rng(seed)
        weights = 1 / (np.arange(vocab_size) + 2.7)
        ranks = np.searchsorted(np.cumsum(weights / weights.sum()), self.rng.random(tokens))
        ids = np.random.default_rng(SEED).permutation(vocab_size).astype(np.int32)
        self.tokens = ids[np.minimum(ranks, vocab_size - 1)]
        kind = self.rng.choice(3, tokens, p=[0.5, 0.3, 0.2])
        log_of_minus = np.array([-7.0, -2.5, 0.0])[kind] + np.array([2.0, 1.2, 0.8])[kind] * self.rng.normal(
            size=tokens
        )
        self.logprobs = -np.minimum(np.exp(log_of_minus), 15).astype(np.float32)

    def words(self, length: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Tokens and log-probs, each of shape `(length,)`."""
        start = self.rng.integers(0, len(self.tokens) - length)
        return self.tokens[start : start + length], self.logprobs[start : start + length]

    def length(self) -> int:
        return int(self.rng.integers(SHORTEST, LONGEST + 1))

    def trajectory(self, prompt: int, slot: int, step: int) -> Trajectory:
        """A response as it is after a few visits: its first tokens are the oldest."""
        length = self.length()
        tokens, logprobs = self.words(length)
        cuts = np.sort(self.rng.integers(0, length + 1, self.rng.integers(0, 4)))
        ages = np.searchsorted(-cuts, -np.arange(length), side="left").astype(np.uint16)
        return Trajectory(
            prompt=prompt_key(prompt_ids(prompt)),
            slot=slot,
            tokens=tokens,
            logprobs=logprobs,
            ages=ages,
            finish_reason="stop",
            cap=LONGEST,
            step=step,
            reward=float(self.rng.integers(0, 2)),
        )


def prompt_ids(prompt: int) -> list[int]:
    return list(range(prompt, prompt + PROMPT_TOKENS))


class Prepared:
    """An engine that has its answers ready."""

    max_context = max_scored = None

    def __init__(self, language: Language, drafts: Sequence[Trajectory]):
        # The policy moved a little everywhere, and far at one token in seven hundred.
        rng = language.rng
        self.scores = []
        for draft in drafts:
            moved = rng.normal(0, 0.05, len(draft.tokens)) - 3 * (rng.random(len(draft.tokens)) < 1 / 700)
            self.scores.append(np.minimum(draft.logprobs + moved, 0).astype(np.float32))
        self.continuations = [Continuation(*language.words(LONGEST), "stop") for _ in drafts]
        # Responses that are not taken over whole end a little earlier or later than their drafts.
        ends = rng.uniform(0.8, 1.2, len(drafts)) * [len(draft.tokens) for draft in drafts]
        self.ends = np.clip(ends.astype(int), SHORTEST, LONGEST) + PROMPT_TOKENS

    def score(self, prompts, continuations):
        return self.scores

    def generate(self, contexts, budgets):
        made = []
        for context, budget, end, ready in zip(contexts, budgets, self.ends, self.continuations, strict=False):
            count = min(budget, max(end - len(context), 1))
            made.append(Continuation(ready.tokens[:count], ready.logprobs[:count], "stop"))
        return made


class Clock:
    """CPU and wall seconds by stage."""

    def __init__(self):
        self.seconds: dict[str, NDArray] = defaultdict(lambda: np.zeros(2))

    def timed(self, stage: str, function: Callable) -> Callable:
        def call(*args, **options):
            start = time.process_time(), time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.seconds[stage] += np.subtract((time.process_time(), time.perf_counter()), start)

        return call


def settings(vocab_size: int) -> Fingerprint:
    return Fingerprint("benchmark", "none", vocab_size, "prepared")


def fill(directory: Path, held: int, vocab_size: int) -> None:
    """A cache that holds `held` trajectories."""
    language = Language(vocab_size, SEED)
    rows = ((row // SAMPLES, row % SAMPLES) for row in range(held))
    with TrajectoryCache(directory, settings(vocab_size)) as cache:
        for start in range(0, held, 4096):
            count = min(4096, held - start)
            cache.put_many([language.trajectory(*next(rows), step=1) for _ in range(count)])


def work(directory, rank, processes, held, vocab_size, tokens, repeats, first_step, together, answers) -> None:
    """One rank: rolls out batches of its own prompts, and reports seconds a million tokens of each."""
    language = Language(vocab_size, SEED + 1 + rank)
    prompts = np.arange(rank, held // SAMPLES, processes)
    rows = min(tokens * 2 // (SHORTEST + LONGEST), len(prompts) * SAMPLES)
    with TrajectoryCache(directory, settings(vocab_size)) as cache:
        guard = VerificationGuard(may_pause=False)  # there is no step to compare: every batch has drafts
        rollout = SpeculativeRollout(cache, ReusePolicy(seed=SEED), vocab_size, guard=guard)
        results = []
        for repeat in range(repeats + 1):  # the first one warms up
            chosen = language.rng.choice(prompts, rows // SAMPLES, replace=False).tolist()
            batch = [prompt_ids(prompt) for prompt in chosen for _ in range(SAMPLES)]
            keys = [(prompt_key(prompt_ids(prompt)), slot) for prompt in chosen for slot in range(SAMPLES)]
            with TrajectoryCache(directory, settings(vocab_size)) as other:
                drafts = [draft for draft in other.get_many(keys) if draft is not None]
            assert len(drafts) == len(batch)
            engine = Prepared(language, drafts)
            rewards = language.rng.integers(0, 2, len(batch)).astype(float).tolist()
            clock = Clock()
            for stage, method in STAGES.items():
                setattr(rollout, method, clock.timed(stage, getattr(type(rollout), method).__get__(rollout)))
            together.wait()

            def step(batch=batch, engine=engine, rewards=rewards, number=first_step + repeat):
                done = rollout.run(engine, batch, LONGEST, number)
                rollout.store(done, rewards=rewards)
                return done.counts

            counts = clock.timed("all", step)()
            assert counts.unstored_rows == 0 and counts.draft_rows == len(batch)
            millions = counts.completion_tokens / 1e6
            if repeat:
                results.append({stage: (seconds / millions).tolist() for stage, seconds in clock.seconds.items()})
        reused = rollout.total.reused_tokens / rollout.total.completion_tokens
    answers.put((results, reused, rows))


def report(*args) -> None:
    """[`work`]; one that fails ends the wait of the others."""
    *_, together, answers = args
    try:
        work(*args)
    except BaseException:
        together.abort()
        answers.put(None)
        raise


def measure(
    directory: Path, held: int, processes: int, vocab_size: int, tokens: int, repeats: int, first_step: int
) -> dict[str, object]:
    """Medians, least and most of each stage, with `processes` at once on one cache."""
    context = multiprocessing.get_context("spawn")
    together, answers = context.Barrier(processes), context.Queue()
    ranks = [
        context.Process(
            target=report,
            args=(directory, rank, processes, held, vocab_size, tokens, repeats, first_step, together, answers),
        )
        for rank in range(processes)
    ]
    for rank in ranks:
        rank.start()
    reports = [answers.get() for _ in ranks]
    for rank in ranks:
        rank.join()
    if None in reports:
        raise SystemExit("a process failed; what it said is above")
    results = [result for report, _, _ in reports for result in report]
    stages = {}
    for stage in (*STAGES, "all"):
        seconds = np.array([result[stage] for result in results])
        stages[stage] = {
            name: {
                "median": round(float(np.median(column)), 4),
                "least": round(float(column.min()), 4),
                "most": round(float(column.max()), 4),
            }
            for name, column in zip(("cpu_s", "wall_s"), seconds.T, strict=True)
        }
    return {
        "processes": processes,
        "rows_a_batch": reports[0][2],
        "reused_token_fraction": round(float(np.mean([reused for _, reused, _ in reports])), 3),
        "seconds_a_million_tokens": stages,
    }


def size(directory: Path) -> float:
    """Bytes a cached token, of the pages in use."""
    with TrajectoryCache(directory) as cache:
        stats = cache.stats()
    return round(stats.mib * 2**20 / stats.tokens, 3)


def machine() -> dict[str, object]:
    cpu = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0] if names else cpu
    return {"cpu": cpu, "cores": os.cpu_count(), "load_average": os.getloadavg()}


def versions(*packages: str) -> dict[str, str]:
    """Of those packages that are installed."""
    found = {}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def commit() -> str:
    """The checked-out commit, marked where files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        asked = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except FileNotFoundError:  # no git here
        return "unknown"
    return asked.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--held",
        type=int,
        nargs="+",
        default=[10_000, 100_000],
        help="trajectories in the cache; 1000000 take 4 GB of disk and some ten minutes",
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 8], help="processes at once on the cache")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="about so many tokens a batch and process")
    parser.add_argument("--repeats", type=int, default=5, help="batches that are timed, after one that is not")
    parser.add_argument("--vocab-size", type=int, default=150_000)
    parser.add_argument("--directory", type=Path, help="where the caches are made, and deleted; default: the system's")
    parser.add_argument("--output", type=Path, help="file for the result, beside printing it")
    args = parser.parse_args()
    result: dict[str, object] = {
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit(),
        "machine": machine(),
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "sqlite": sqlite3.sqlite_version,
            "zstandard": zstandard.__version__,
            "zstd": ".".join(map(str, zstandard.ZSTD_VERSION)),
        },
        "vocab_size": args.vocab_size,
        "caches": (caches := []),
    }
    for held in args.held:
        with tempfile.TemporaryDirectory(dir=args.directory) as directory:
            start = time.perf_counter()
            fill(Path(directory), held, args.vocab_size)
            cache: dict[str, object] = {"held": held, "filled_in_s": round(time.perf_counter() - start, 1)}
            cache["bytes_a_token_when_new"] = size(Path(directory))
            cache["runs"] = [
                measure(
                    Path(directory),
                    held,
                    processes,
                    args.vocab_size,
                    args.tokens,
                    args.repeats,
                    first_step=2 + number * (args.repeats + 1),
                )
                for number, processes in enumerate(args.processes)
            ]
            cache["bytes_a_token_after_rollouts"] = size(Path(directory))
            caches.append(cache)
            print(f"{held} trajectories done", file=sys.stderr)
    result["machine"] |= {"load_average_at_the_end": os.getloadavg()}  # type: ignore[operator]
    text = json.dumps(result, indent=1)
    print(text)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
