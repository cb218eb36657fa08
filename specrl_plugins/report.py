"""What reuse did to a run, from the log that it left behind: a table and a chart, beside a plain run's if given."""

from __future__ import annotations

import json
import logging
import math
import os
import statistics
from collections.abc import Sequence
from itertools import dropwhile, groupby
from pathlib import Path
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

RUN_LOG = "specrl.jsonl"

# Columns of the table, each with the format of its cells.
_COLUMNS = {
    "reward": "{:.3f}",
    "tokens": "{:,.0f}",
    "generated": "{:,.0f}",
    "reused": "{:.1%}",
    "rollout s": "{:,.1f}",
    "step s": "{:,.1f}",
}
_COMPARED = ("tokens", "generated", "rollout s", "step s")

_STAGES = [f"spec/time/{stage}_s" for stage in ("lookup", "verify", "generate", "store")]
_PRUNING_STAGES = [f"prune/time/{stage}_s" for stage in ("judge", "learn")]
# What is read of a line of the log, beside its step and epoch.
_NUMBERS = {
    *("reward", "step_time", "rollout/completion_tokens", "rollout/seconds", "spec/time/spared_s"),
    *("spec/generated_tokens", "spec/reused_tokens", "spec/draft_accept_rate"),
    *_STAGES,
    *_PRUNING_STAGES,
}

# Of the Okabe-Ito palette, which colour-blind readers can tell apart.
_PLAIN, _REUSE, _ACCEPT = "#5f5f5f", "#0072B2", "#D55E00"
_STEP_LABEL = "optimizer step (bold: running mean)"
# A running mean spans this share of a run.
_SMOOTHED_SHARE = 0.05


class ReportError(RuntimeError):
    """There is nothing to report, or no means to draw it; the message says what is missing."""


def load(run_dir: str | os.PathLike) -> list[dict[str, Any]]:
    """What each logged step of a run took, in order.

    A run that was resumed, or begun anew in the same directory, logs steps again: what it logged last counts, and
    what an earlier attempt logged beyond that is left out. So are lines that a crash cut off.

    Args:
        run_dir (`str` or `Path`): output directory of the run, which holds its `specrl.jsonl`.

    Returns:
        One `dict` a logged step. An amount is the sum over the `steps` optimizer steps since the entry before (several
        where `logging_steps` is above 1), and `None` where the log does not tell:

        | key | type | meaning |
        | --- | --- | --- |
        | `step` | `int` | optimizer step, from 1 |
        | `steps` | `int` | optimizer steps since the entry before |
        | `epoch` | `int` | epoch of `step`, from 1 |
        | `reward` | `float` | mean reward |
        | `tokens` | `float` | tokens of all completions |
        | `generated` | `float` | those that the engine sampled |
        | `reused` | `float` | those taken over from drafts |
        | `accept_rate` | `float` | reused tokens / tokens of the drafts that were scored |
        | `rollout_s` | `float` | seconds of the rollouts, with all that reuse adds to them |
        | `verify_s` | `float` | those of scoring drafts and deciding on them |
        | `spared_s` | `float` | seconds of the trainer's log-prob pass that this made unnecessary |
        | `step_s` | `float` | seconds of the whole steps |

        With reuse and vLLM, `rollout_s` leaves out what `spec/time/generate_s` does: sending weights, waking and
        sleeping. A number that is not finite is one that the log does not tell.

        A plain run tells its rollout seconds only if it logs `rollout/seconds`, summed since the entry before.

    Raises:
        ReportError: there is no log, or no training step in it.
    """
    path = Path(run_dir) / RUN_LOG
    if not path.is_file():
        raise ReportError(f"there is no {RUN_LOG} in {run_dir}: not the output directory of a run that logs one")
    lines = path.read_text(errors="replace").splitlines()
    run: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            entry = _entry(line)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            if number < len(lines) or line.endswith("}"):  # else a crash cut it off
                logger.warning("line %d of %s is damaged and was left out", number, path)
            continue
        if entry is None:
            continue
        step = entry["step"]
        while run and run[-1]["step"] >= step:
            run.pop()
        steps = step - (run[-1]["step"] if run else 0)
        epoch = max(1, math.ceil(entry["epoch"] - 1e-6))
        run.append({"step": step, "steps": steps, "epoch": epoch, **_amounts(entry, steps)})
    if not run:
        raise ReportError(f"{path} holds no training step")
    return run


def table(run: list[dict[str, Any]], baseline: list[dict[str, Any]] | None = None) -> str:
    """A plain text table with a line an epoch, and one for all of them.

    Args:
        run (`list[dict]`): a run, see [`load`].
        baseline (`list[dict]`, *optional*): a plain run to set beside it, up to the last step that both logged. The
            last line is then plain / reuse: how many times less the run with reuse took.

    Raises:
        ReportError: the two runs have no logged step in common.
    """
    if baseline is None:
        rows = [[str(epoch), *_cells(summary)] for epoch, summary in _by_epoch(run).items()]
        return align([["epoch", *_COLUMNS], *rows, ["all", *_cells(_summary(run))]])
    common = {record["step"] for record in run} & {record["step"] for record in baseline}
    if not common:
        raise ReportError("the two runs have no logged step in common")
    last = max(common)
    plain = [record for record in baseline if record["step"] <= last]
    reuse = [record for record in run if record["step"] <= last]
    plain_epochs, reuse_epochs = _by_epoch(plain), _by_epoch(reuse)
    plain_all, reuse_all = _summary(plain), _summary(reuse)
    rows = [
        ["", *_side_by_side(list(_COLUMNS), [column if column == "reused" else "" for column in _COLUMNS])],
        ["epoch", *_side_by_side(["plain"] * len(_COLUMNS), ["reuse"] * len(_COLUMNS))],
    ]
    for epoch in sorted(plain_epochs | reuse_epochs):
        cells = _cells(plain_epochs.get(epoch, {})), _cells(reuse_epochs.get(epoch, {}))
        rows.append([str(epoch), *_side_by_side(*cells)])
    rows.append(["all", *_side_by_side(_cells(plain_all), _cells(reuse_all))])
    rows.append(["plain / reuse", *_side_by_side([""] * len(_COLUMNS), _ratios(plain_all, reuse_all))])
    text = align(rows)
    if run[-1]["step"] != baseline[-1]["step"]:
        text += f"\nThe runs differ in length: only steps up to {last} are compared."
    if any(record["reused"] for record in baseline):
        text += "\nThe baseline reused tokens too: it is no plain run."
    return text


def costs(run: list[dict[str, Any]]) -> str:
    """A few lines on what verifying drafts took and what reuse saved; empty for a run without.

    Args:
        run (`list[dict]`): a run, see [`load`].
    """
    known = [record for record in run if record["rollout_s"] is not None and record["tokens"]]
    reusing = [record for record in known if record["verify_s"] and record["accept_rate"] is not None]
    if not reusing:
        return ""
    rollout_s, verify_s, spared_s = (
        sum(record[name] or 0.0 for record in known) for name in ("rollout_s", "verify_s", "spared_s")
    )
    text = (
        f"Verifying took {verify_s:,.1f} s of the {rollout_s:,.1f} s of rollouts, and spared the trainer "
        f"{spared_s:,.1f} s of its pass for log-probs."
    )
    plain = [record["rollout_s"] / record["tokens"] for record in known if record["accept_rate"] is None]
    if plain:  # the first also pays for compilation and allocation
        cost = statistics.median(plain[1:] or plain)
        whole_s = cost * sum(record["tokens"] for record in known)
        text += (
            f"\nEstimated time saved: {whole_s - rollout_s + spared_s:,.1f} s of {whole_s:,.1f} s, at the "
            f"{1e3 * cost:.2f} ms that a token took without reuse."
        )
    return text


def draw(run: list[dict[str, Any]], baseline: list[dict[str, Any]] | None, path: str | os.PathLike) -> None:
    """Draw reward, tokens and reuse, side by side, into a PNG file of 1800 x 600 pixels.

    Args:
        run (`list[dict]`): a run, see [`load`].
        baseline (`list[dict]`, *optional*): a plain run to draw beside it.
        path (`str` or `Path`): the file; replaced if it exists.

    Raises:
        ReportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ReportError("drawing needs matplotlib: pip install 'specrl-plugins[report]'") from error
    reuses = any(record["reused"] is not None for record in run)
    series = [("reuse", _REUSE, run)] if reuses else [("plain", _PLAIN, run)]
    if baseline is not None:
        series.insert(0, ("plain", _PLAIN, baseline))
    with rc_context({"font.size": 10.5, "axes.spines.top": False, "axes.spines.right": False, "hatch.linewidth": 0.7}):
        figure = Figure(figsize=(12, 4), dpi=150, layout="constrained")
        left, middle, right = figure.subplots(1, 3)
        _draw_rewards(left, series)
        _draw_tokens(middle, series)
        _draw_reuse(right, run)
        for axes in (left, middle, right):
            if axes.has_data():
                # Below the axes: above the bars there is no room.
                place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.17), "ncols": 3}
                axes.legend(frameon=False, fontsize=9.5, handlelength=1.4, columnspacing=1.2, **place)
            else:
                axes.text(0.5, 0.5, "no data in the log", ha="center", va="center", transform=axes.transAxes)
                axes.set(xticks=[], yticks=[])
        figure.savefig(path)


def align(rows: Sequence[Sequence[str]]) -> str:
    """Lines of text with the cells of each column flush right.

    Args:
        rows (`Sequence[Sequence[str]]` of shape `(rows, columns)`): the cells.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


# -- the log


def _entry(line: str) -> dict[str, Any] | None:
    """What a line of the log says of a step, with `None` for numbers that are not finite; raises where it is damaged.

    `None` for an evaluation, or the summary of the whole run.
    """
    entry = json.loads(line)
    if not isinstance(entry, dict):
        raise ValueError("no entry of a log")
    if not entry.keys() & {"reward", "step_time"}:
        return None
    step, epoch = entry["step"], entry["epoch"]
    if type(step) is not int or step < 1 or not math.isfinite(step) or not math.isfinite(epoch):
        raise ValueError("no step, or no epoch")
    for name in _NUMBERS & entry.keys():
        if entry[name] is not None and not math.isfinite(entry[name]):
            entry[name] = None
    return entry


def _amounts(entry: dict[str, Any], steps: int) -> dict[str, float | None]:
    generated, reused = entry.get("spec/generated_tokens"), entry.get("spec/reused_tokens")
    if generated is None or reused is None:
        tokens = generated = entry.get("rollout/completion_tokens")
        rollout_s = entry.get("rollout/seconds")
    else:
        tokens = generated + reused
        seconds = [entry[stage] for stage in _STAGES if entry.get(stage) is not None]
        pruning_s = sum(entry.get(stage) or 0.0 for stage in _PRUNING_STAGES)
        rollout_s = sum(seconds) + pruning_s if len(seconds) == len(_STAGES) else None
    step_time = entry.get("step_time")  # TRL logs the mean of the steps, not their sum
    return {
        "reward": entry.get("reward"),
        "tokens": tokens,
        "generated": generated,
        "reused": reused,
        "accept_rate": entry.get("spec/draft_accept_rate"),
        "rollout_s": rollout_s,
        "verify_s": entry.get("spec/time/verify_s"),
        "spared_s": entry.get("spec/time/spared_s"),
        "step_s": None if step_time is None else step_time * steps,
    }


# -- the table


def _by_epoch(run: list[dict[str, Any]]) -> dict[int, dict[str, float | None]]:
    def epoch(record: dict[str, Any]) -> int:
        return record["epoch"]

    return {epoch: _summary(list(records)) for epoch, records in groupby(sorted(run, key=epoch), epoch)}


def _summary(records: list[dict[str, Any]]) -> dict[str, float | None]:
    """The value of each column over all `records`, `None` where the log does not tell."""

    def total(key: str) -> float | None:
        # Steps that optimize on an earlier rollout (`num_iterations` above 1) tell of none.
        values = [record[key] for record in records if record[key] is not None]
        return sum(values) if values else None

    rewarded = [record for record in records if record["reward"] is not None]
    tokens, reused = total("tokens"), total("reused")
    return {
        "reward": _divide(sum(r["reward"] * r["steps"] for r in rewarded), sum(r["steps"] for r in rewarded)),
        "tokens": tokens,
        "generated": total("generated"),
        "reused": _divide(reused, tokens),
        "rollout s": total("rollout_s"),
        "step s": total("step_s"),
    }


def _divide(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _cells(summary: dict[str, float | None]) -> list[str]:
    values = [(form, summary.get(column)) for column, form in _COLUMNS.items()]
    return ["" if value is None else form.format(value) for form, value in values]


def _ratios(plain: dict[str, float | None], reuse: dict[str, float | None]) -> list[str]:
    ratios = [_divide(plain[column], reuse[column]) if column in _COMPARED else None for column in _COLUMNS]
    return ["" if ratio is None else f"{ratio:.2f}x" for ratio in ratios]


def _side_by_side(plain: list[str], reuse: list[str]) -> list[str]:
    """Cells of the two runs in turn; a plain run has nothing to say on `reused`."""
    pairs = zip(_COLUMNS, plain, reuse, strict=True)
    return [cell for column, *pair in pairs for cell in (pair[1:] if column == "reused" else pair)]


# -- the chart


def _draw_rewards(axes: Any, series: list[tuple[str, str, list[dict[str, Any]]]]) -> None:
    for label, colour, run in series:
        _curve(axes, run, [record["reward"] for record in run], label, colour)
    axes.set(title="Reward", xlabel=_STEP_LABEL, ylabel="mean reward", xlim=(0, None))


def _draw_tokens(axes: Any, series: list[tuple[str, str, list[dict[str, Any]]]]) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    series = [(label, colour, run) for label, colour, run in series if _summary(run)["generated"] is not None]
    width = 0.8 / max(1, len(series))
    for place, (label, colour, run) in enumerate(series):
        epochs = {epoch: summary for epoch, summary in _by_epoch(run).items() if summary["generated"] is not None}
        x = [epoch + width * (place - (len(series) - 1) / 2) for epoch in epochs]
        generated = np.array([summary["generated"] for summary in epochs.values()])
        axes.bar(x, generated, width * 0.92, color=colour, label=label)
        if label == "reuse":
            reused = np.array([summary["tokens"] for summary in epochs.values()]) - generated
            axes.bar(
                x,
                reused,
                width * 0.92,
                bottom=generated,
                facecolor="white",
                edgecolor=colour,
                linewidth=0.7,
                hatch="////",
                label="reused, not generated",
            )
    axes.use_sticky_edges = False
    axes.set(title="Tokens generated", xlabel="epoch", ylabel="tokens per epoch", ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))


def _draw_reuse(axes: Any, run: list[dict[str, Any]]) -> None:
    from matplotlib.ticker import PercentFormatter

    # The first visit of each prompt has no draft to reuse.
    drafted = list(dropwhile(lambda record: record["accept_rate"] is None, run))
    _curve(axes, drafted, [_divide(r["reused"], r["tokens"]) for r in drafted], "of all tokens", _REUSE)
    _curve(axes, drafted, [r["accept_rate"] for r in drafted], "of draft tokens (accept rate)", _ACCEPT)
    axes.set(title="Tokens reused", xlabel=_STEP_LABEL, ylabel="share of tokens", xlim=(0, None), ylim=(0, 1.02))
    axes.yaxis.set_major_formatter(PercentFormatter(1))


def _curve(axes: Any, run: list[dict[str, Any]], values: list[float | None], label: str, colour: str) -> None:
    """Light line through what was logged, strong one through its running mean."""
    points = [(record["step"], value) for record, value in zip(run, values, strict=True) if value is not None]
    if not points:
        return
    x, y = np.array(points, float).T
    window = max(1, round(_SMOOTHED_SHARE * len(run)))
    sums = np.cumsum(np.insert(y, 0, 0.0))
    ends = np.arange(1, len(y) + 1)
    starts = np.maximum(ends - window, 0)
    axes.plot(x, y, color=colour, alpha=0.3, linewidth=0.8)
    axes.plot(
        x,
        (sums[ends] - sums[starts]) / (ends - starts),
        color=colour,
        linewidth=1.8,
        label=label,
        marker="o" if len(y) == 1 else "",
    )
