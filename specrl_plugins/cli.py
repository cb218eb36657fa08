"""The command `specrl`: look into a trajectory cache, trim it, and report on a run."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sqlite3
import sys
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from specrl_plugins import __version__, report
from specrl_plugins.cache import DAMAGED_FILES, FILE_NAME, CacheError, TrajectoryCache

# Hexadecimal digits of a prompt key that `show` prints: enough to tell prompts apart.
_KEY_DIGITS = 12


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv (`Sequence[str]`, *optional*): arguments, those of the process by default.

    Returns:
        Exit code: 0, or 1 where `cache verify` found damaged rows, or 2 where the command could not be carried out
        (then one line on stderr says why), or 141 where whoever reads the output has closed it, as by `head` (which
        is what a shell says of a command that SIGPIPE ends). Bad arguments raise `SystemExit(2)`, as `argparse` does.
    """
    args = _parser().parse_args(argv)
    try:
        code = args.command(args)
        print(end="", flush=True)  # what cannot be written is said here, not when Python exits
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python writes at its exit
        return 128 + signal.SIGPIPE
    except (CacheError, report.ReportError, OSError) as error:
        print(f"specrl: {error}", file=sys.stderr)
    except sqlite3.Error as error:
        print(f"specrl: the trajectory cache in {args.dir} is damaged or in use: {error}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="specrl", description="Tools for speculative rollouts.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    cache = commands.add_parser("cache", help="look into a trajectory cache, or trim it")
    actions = cache.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, command: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        action = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        action.add_argument("dir", metavar="DIR", type=Path, help="directory of the cache")
        action.set_defaults(command=command)
        return action

    add(
        "stats",
        _stats,
        "what a cache holds, for which settings, and how many damaged files were moved aside (for rows, see verify)",
    )
    show = add("show", _show, "list trajectories, latest used first")
    show.add_argument(
        "--prompt", metavar="HEX", type=_hex, help="only those of the prompt whose key begins with HEX, and their ids"
    )
    show.add_argument("--limit", metavar="N", type=_count, default=20, help="at most so many (default: %(default)s)")
    add("verify", _verify, "check every trajectory; the exit code is 1 if one does not check out")
    prune = add("prune", _prune, "forget trajectories and shrink the file")
    what = prune.add_mutually_exclusive_group(required=True)
    what.add_argument("--max-mib", metavar="M", type=_mib, help="forget the least recently used ones, down to M MiB")
    what.add_argument(
        "--after-step",
        metavar="N",
        type=_count,
        help="forget those newer than optimizer step N; refused while a run uses the cache",
    )

    run = commands.add_parser(
        "report",
        help="reward, tokens and seconds of a run, as a table and a chart",
        description="Report on a run from its specrl.jsonl: by epoch the mean reward, the tokens of all completions, "
        "how many of them were generated, the share that was reused, and the seconds of the rollouts and of the whole "
        "optimizer steps; then what verifying took and an estimate of the time that reuse saved. With reuse and vLLM, "
        "the seconds of the rollouts leave out sending weights, waking and sleeping; those of the steps do not. What a "
        "log does not tell stays empty.",
    )
    run.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="output directory of the run")
    run.add_argument(
        "--baseline", metavar="PLAIN_RUN_DIR", type=Path, help="that of a run without reuse, to compare with"
    )
    run.add_argument("--output", metavar="FILE.png", type=_png, help="chart (default: RUN_DIR/specrl_report.png)")
    run.set_defaults(command=_report)
    return parser


# -- commands


def _open(directory: Path) -> TrajectoryCache:
    inside = directory / "spec_cache"  # the output directory of a run is a likely guess
    if inside.is_dir() and not (directory / FILE_NAME).exists():
        raise CacheError(f"there is no trajectory cache in {directory}, but there may be one in {inside}")
    return TrajectoryCache(directory)


def _stats(args: argparse.Namespace) -> int:
    with _open(args.dir) as cache:
        stats, fingerprint = cache.stats(), cache.fingerprint
    assert fingerprint is not None  # an existing cache has one
    lines = {
        "rows": f"{stats.rows:,}",
        "prompts": f"{stats.prompts:,}",
        "tokens": f"{stats.tokens:,}",
        "MiB": f"{stats.mib:,.2f}",
        "bytes per token": f"{stats.mib * (1 << 20) / stats.tokens:.1f}" if stats.tokens else "-",
        "oldest step": "-" if stats.oldest_step is None else stats.oldest_step,
        "newest step": "-" if stats.newest_step is None else stats.newest_step,
        "damaged files": len(list(args.dir.glob(DAMAGED_FILES))),
    } | fingerprint.flat()
    width = max(map(len, lines))
    for name, value in lines.items():
        print(f"{name:{width}}  {value}")
    return 0


def _show(args: argparse.Namespace) -> int:
    with _open(args.dir) as cache:
        # Iterating, unlike a look-up, leaves alone when a trajectory was last used.
        if args.prompt is None:
            shown = list(islice(cache, args.limit))
        else:
            shown = [trajectory for trajectory in cache if trajectory.prompt.hex().startswith(args.prompt)]
    if args.prompt is not None:
        prompts = {trajectory.prompt.hex() for trajectory in shown}
        if len(prompts) != 1:
            raise CacheError(f"{len(prompts) or 'no'} prompts in {args.dir} have a key that begins with {args.prompt}")
        print(f"prompt {prompts.pop()}")
        shown = shown[: args.limit]
    rows = [["prompt", "slot", "step", "length", "finish", "reward", "mean log-prob", "oldest age"]]
    for t in shown:
        reward = "" if t.reward is None else f"{t.reward:.3f}"
        numbers = [f"{t.logprobs.mean():.3f}", str(t.ages.max())]
        key = t.prompt.hex()[:_KEY_DIGITS]
        rows.append([key, str(t.slot), str(t.step), str(len(t.tokens)), t.finish_reason, reward, *numbers])
    print(report.align(rows))
    if len(shown) == args.limit:
        print(f"At most {args.limit} are shown: see --limit.", file=sys.stderr)
    if args.prompt is not None:
        for t in shown:
            print(f"slot {t.slot}:", *t.tokens)
    return 0


def _verify(args: argparse.Namespace) -> int:
    with _open(args.dir) as cache:
        rows, damaged = cache.verify()
    print(f"{rows} rows, {damaged or 'none'} of them damaged")
    return 1 if damaged else 0


def _prune(args: argparse.Namespace) -> int:
    with _open(args.dir) as cache:
        forgotten = 0
        if args.after_step is not None:
            cache.claim()  # a run would lose what it is about to reuse
            forgotten = cache.rewind(args.after_step)
        # Without a limit it only shrinks the file.
        forgotten += cache.prune(math.inf if args.max_mib is None else args.max_mib)
        print(f"{forgotten} rows forgotten, {len(cache)} left ({cache.mib:,.2f} MiB)")
        cache.release()
    return 0


def _report(args: argparse.Namespace) -> int:
    run = report.load(args.run_dir)
    baseline = None if args.baseline is None else report.load(args.baseline)
    print(report.table(run, baseline))
    if costs := report.costs(run):
        print(costs)
    path = args.output or args.run_dir / "specrl_report.png"
    try:
        report.draw(run, baseline, path)
    except report.ReportError as error:
        if args.output:
            raise
        print(f"specrl: no chart: {error}", file=sys.stderr)  # nobody asked for it
        return 0
    except OSError as error:
        raise report.ReportError(f"the chart cannot be written: {error}") from error
    print(f"Chart: {path}")
    return 0


# -- arguments


def _hex(text: str) -> str:
    if not text or set(text.lower()) - set("0123456789abcdef"):
        raise argparse.ArgumentTypeError(f"{text!r} is not hexadecimal")
    return text.lower()


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 18:  # SQLite's integers have 64 bits
        raise argparse.ArgumentTypeError(f"{text!r} is not a count from 0")
    return int(text)


def _mib(text: str) -> float:
    try:
        if (mib := float(text)) >= 0:
            return mib
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a size in MiB")


def _png(text: str) -> Path:
    if not text.lower().endswith(".png"):
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .png")
    return Path(text)


if __name__ == "__main__":
    sys.exit(main())
