"""The newest figures: copied from the result files into `results/summary.json`, and from there into `docs/results.md`.

    python benchmarks/summarise.py           # writes benchmarks/results/summary.json, and pruning.json beside it
    python benchmarks/summarise.py --docs    # and the tables and charts of docs/results.md

Runs of `train_side_by_side.py` are looked for in the folders of `TRAININGS`.

Each figure has a list of places where it may be found; the first one that exists is taken, and said. A figure that
nothing has measured is left out. In `docs/results.md` only what is between `<!-- table: NAME -->` and `<!-- end -->` is
written; figures in the text around the tables are written by hand.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
REPLAYED = "spec-rl-512-rows-0.67-reused-900-tokens"  # the setting that the figures of the replay are of
MOST_REPLAYED = "spec-rl-2048-rows-0.67-reused-900-tokens"
RUN_REPLAYED = "run-reuse-1024"  # lengths of a training run with long answers
# The folders of `train_side_by_side.py`, by the names of their tables in `docs/results.md` and of their charts there.
TRAININGS = {
    "sweep": "sweep-h200",
    "suffix": "suffix-h200",
    "large-batch-seeds": "large-batch-seeds-h200",
    "large-batch": "large-batch-h200",
    "large-batch-lenience": "large-batch-lenience-h200",
    "low-rate": "low-rate-h200",
    "training": "train-h200",
    "guard": "guard-h200",
    "lenience": "lenience-h200",
    "pruning": "pruning-h200",
}
LARGE_BATCH = (TRAININGS["large-batch-seeds"], TRAININGS["large-batch"])  # 1,024 responses a step
DEFAULTS = (TRAININGS["sweep"], TRAININGS["suffix"])  # 512
UPDATE = "update-h200"
LOW_RATE, HIGH_RATE, PRUNED = (TRAININGS[name] for name in ("low-rate", "training", "pruning"))
WITHIN_SPREAD = "within plain's spread"  # the goal of the reward after as many steps
THE_PRODUCT = "the product of the two"
REPLAYS = {"spec-rl": "replay-narrow-h200", "run": "replay-narrow-long-answers-h200"}  # by what the lengths are of
REPLAY_COMMAND = f"python benchmarks/replay_rollouts.py --output benchmarks/results/{REPLAYS['spec-rl']}"

Path_ = tuple[str | int, ...]


@dataclass(frozen=True)
class Place:
    """Where a figure may be found.

    Args:
        directory (`str`): below `benchmarks/results`; its `summary.json` is meant.
        value (`Path_`): keys and indices that lead to it in there.
        over (`Path_`, *optional*): the figure is `value` divided by what this leads to.
    """

    directory: str
    value: Path_
    over: Path_ | None = None

    def read(self, results: Path) -> dict[str, Any] | None:
        """The figure with where it is from; `None` where it is not there."""
        summary = _load(results, self.directory)
        value, over = _at(summary, self.value), _at(summary, self.over) if self.over else 1.0
        if value is None or over is None:
            return None
        return {
            "value": value / over if self.over else value,
            "from": _paths(self.value, self.over),
            "origins": [_origin(self.directory, summary, self.value, self.over)],
        }


@dataclass(frozen=True)
class Pooled:
    """A ratio over all seeds of several folders of `train_side_by_side.py`: the sum of one over the sum of the other.

    Args:
        directories (`tuple[str, ...]`): below `benchmarks/results`.
        value, over (`Path_`): lead from `settings` to a value for each seed (a list), or to their mean, which then
            counts once for each seed.
    """

    directories: tuple[str, ...]
    value: Path_
    over: Path_

    def read(self, results: Path) -> dict[str, Any] | None:
        """The figure with where it is from; `None` where a seed has not got it, or not finished in both settings."""
        summaries = {directory: _load(results, directory) for directory in self.directories}
        sums = [[self._sum(summary, path) for summary in summaries.values()] for path in (self.value, self.over)]
        seeds = [[self._seeds(summary, path) for summary in summaries.values()] for path in (self.value, self.over)]
        if any(part is None for parts in sums + seeds for part in parts) or seeds[0] != seeds[1]:
            return None
        return {
            "value": sum(sums[0]) / sum(sums[1]),
            "from": f"sums over seeds, {_paths(self.value, self.over)}",
            "origins": [_origin(directory, summary) for directory, summary in summaries.items()],
        }

    @staticmethod
    def _sum(summary: Any, path: Path_) -> float | None:
        found, seeds = _at(summary, ("settings", *path)), Pooled._seeds(summary, path)
        if isinstance(found, list):
            return None if None in found else sum(found)
        return None if found is None or seeds is None else found * len(seeds)

    @staticmethod
    def _seeds(summary: Any, path: Path_) -> list[str] | None:
        """The seeds of a setting, where all of them finished."""
        setting = _at(summary, ("settings", path[0]))
        return setting["finished"] if setting and len(setting["finished"]) == len(setting["steps"]) else None


@dataclass(frozen=True)
class Weighed:
    """A mean over folders of `train_side_by_side.py`, weighed by the inverse squares of standard errors.

    Args:
        directories (`tuple[str, ...]`): below `benchmarks/results`.
        value (`Path_`): leads from `settings` to the value; its error has the same name and `_error`.
    """

    directories: tuple[str, ...]
    value: Path_

    def read(self, results: Path) -> dict[str, Any] | None:
        """The figure with its standard error, with the chi-squared of what it is the mean of, and where it is from."""
        summaries = {directory: _load(results, directory) for directory in self.directories}
        path = ("settings", *self.value)
        values = [_at(summary, path) for summary in summaries.values()]
        errors = [_at(summary, (*path[:-1], f"{path[-1]}_error")) for summary in summaries.values()]
        if None in values or not all(errors):
            return None
        weights = [1 / error**2 for error in errors]
        mean = sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)
        return {
            "value": mean,
            "error": sum(weights) ** -0.5,
            "chi_squared": sum(w * (value - mean) ** 2 for w, value in zip(weights, values, strict=True)),
            "from": f"{_paths(self.value)}, weighed by their errors",
            "origins": [_origin(directory, summary) for directory, summary in summaries.items()],
        }


@dataclass(frozen=True)
class WholeStep:
    """A whole step at the lengths of SPEC-RL's paper, TRL's seconds / ours: rollouts of one run, the rest of another.

    Args:
        without (`tuple[str, ...]`): stages that the step does not have.
    """

    without: tuple[str, ...] = ()

    def read(self, results: Path) -> dict[str, Any] | None:
        """The figure with where it is from; `None` where a part of it is not there."""
        files = {directory: _load(results, directory) for directory in (REPLAYS["spec-rl"], UPDATE)}
        replay, update = files.values()
        paths = {
            side: (("settings", REPLAYED, "seconds", kind, "total_s"), ("medians", "paper", side))
            for side, kind in (("trl", "plain"), ("trimmed", "trainer"))
        }
        found = {side: (_at(replay, rollout), _at(update, rest)) for side, (rollout, rest) in paths.items()}
        if any(part is None for parts in found.values() for part in parts):
            return None
        slow, fast = (
            rollout + rest["step"] - sum(rest[stage] for stage in self.without) for rollout, rest in found.values()
        )
        origins = [_origin(directory, summary) for directory, summary in files.items()]
        return {"value": slow / fast, "from": "sums of " + " and ".join(map(_paths, paths["trl"])), "origins": origins}


def _load(results: Path, directory: str) -> Any:
    path = results / directory / "summary.json"
    return json.loads(path.read_text()) if path.exists() else None


def _paths(*paths: Path_ | None) -> str:
    return " / ".join(".".join(map(str, path)) for path in paths if path)


def _replay(name: str, setting: str = REPLAYED) -> Place:
    return Place(REPLAYS["spec-rl"], ("settings", setting, "ratios", name))


def _replayed_run(name: str) -> Place:
    return Place(REPLAYS["run"], ("settings", RUN_REPLAYED, "ratios", name))


def _trl(plain: Path_, reuse: Path_) -> Place:
    return Place("trl-h200", ("runs", *plain), ("runs", *reuse))


def _training(directory: str, value: Path_, over: Path_ | None = None) -> Place:
    return Place(directory, ("settings", *value), ("settings", *over) if over else None)


def _against_plain(directories: tuple[str, ...]) -> dict[str, Place | Pooled]:
    """What the shipped defaults gained over plain, with all seeds of these folders."""
    seconds = {share: [(run, "learned", share, "seconds") for run in ("plain", "guard")] for share in ("0.8", "0.9")}
    steps = {stage: [(run, "step", stage) for run in ("plain", "guard")] for stage in ("rollout_s", "step_s")}
    spread = [("plain", "final", kind) for kind in ("sd", "mean")]
    return {
        "rollout_speedup": Pooled(directories, *steps["rollout_s"]),
        "step_speedup": Pooled(directories, *steps["step_s"]),
        "time_to_reward": Pooled(directories, *seconds["0.9"]),
        "time_to_reward_80": Pooled(directories, *seconds["0.8"]),
        "final_reward": Pooled(directories, ("guard", "final", "mean"), ("plain", "final", "mean")),
        "plain_spread": _training(directories[0], *spread),  # the second folder has one seed
        "draft_step_speedup": Pooled(directories, ("guard", "without", "step_s"), ("guard", "with_drafts", "step_s")),
    }


def _update(name: str) -> Place:
    return Place(UPDATE, (name,))


def _pruned(*value: str) -> Place:
    return _training(PRUNED, value)


def _steps(slow: str, fast: str) -> Place:
    return _training(PRUNED, (slow, "step", "step_s"), (fast, "step", "step_s"))


def _openrlhf(stage: str) -> Place:
    after = ("medians_after_first_epoch", f"timing/{stage}")
    return Place("openrlhf-h200", ("runs", "plain", *after), ("runs", "reuse", *after))


_CORE = ("now", 0, "caches", 0)
_CORE_SECONDS = ("runs", 0, "seconds_a_million_tokens", "all", "cpu_s", "median")

_LARGE, _SMALL = _against_plain(LARGE_BATCH), _against_plain(DEFAULTS)

FIGURES: dict[str, tuple[str, str | None, Sequence[Place | Pooled | Weighed]]] = {
    # name: what it is, its goal, where it may be found (best first)
    "rollout_speedup": (
        "rollout stage from the second epoch on, plain / reuse verified by the trainer (the default), all included",
        ">= 2.2",
        [_replay("rollout_speedup_trainer"), _trl(("plain", "warm", "rollout_s"), ("reuse", "warm", "rollout_s"))],
    ),
    "rollout_speedup_engine": (
        "the same, verified by the engine",
        ">= 2.2",
        [_replay("rollout_speedup_engine"), _trl(("plain", "warm", "rollout_s"), ("engine", "warm", "rollout_s"))],
    ),
    "rollout_speedup_2048": (
        "as `rollout_speedup`, with 2,048 responses at once in place of 512",
        ">= 2.2",
        [_replay("rollout_speedup_trainer", MOST_REPLAYED)],
    ),
    "rollout_speedup_2048_engine": (
        "the same, verified by the engine",
        ">= 2.2",
        [_replay("rollout_speedup_engine", MOST_REPLAYED)],
    ),
    "limit_share": (
        "prefill of the drafts and decoding of the missing tokens, both bare / our rollout stage, trainer",
        ">= 0.9",
        [_replay("limit_share_trainer")],
    ),
    "limit_share_engine": ("the same, verified by the engine", ">= 0.9", [_replay("limit_share_engine")]),
    "limit_share_with_logprobs": (
        "as `limit_share`, but the limit returns the log-probs that TRL asks for",
        None,
        [_replay("limit_share_with_logprobs_trainer")],
    ),
    "limit_share_with_logprobs_engine": (
        "the same, verified by the engine",
        None,
        [_replay("limit_share_with_logprobs_engine")],
    ),
    "verify_over_prefill": (
        "verification by the trainer / the engine's bare prefill of the same tokens",
        "<= 1.25",
        [_replay("verify_over_prefill_trainer")],
    ),
    "verify_over_prefill_engine": (
        "verification by the engine / its bare prefill of the same tokens",
        "<= 1.25",
        [_replay("verify_over_prefill_engine")],
    ),
    "cold_over_plain": (
        "rollout stage of the first epoch, where nothing is cached: ours / plain",
        "<= 1",
        [_replay("cold_over_plain"), _trl(("reuse", "cold", "rollout_s"), ("plain", "cold", "rollout_s"))],
    ),
    "rollout_speedup_run": (
        "as `rollout_speedup`, with the lengths of a training run: 1,024 responses, 39% of their tokens reused",
        ">= 2.2",
        [_replayed_run("rollout_speedup_trainer")],
    ),
    "rollout_speedup_run_engine": (
        "the same, verified by the engine",
        ">= 2.2",
        [_replayed_run("rollout_speedup_engine")],
    ),
    "limit_share_run": ("`limit_share` of the same", ">= 0.9", [_replayed_run("limit_share_trainer")]),
    "limit_share_run_engine": (
        "the same, verified by the engine",
        ">= 0.9",
        [_replayed_run("limit_share_engine")],
    ),
    "verify_over_prefill_run": (
        "`verify_over_prefill` of the same",
        "<= 1.25",
        [_replayed_run("verify_over_prefill_trainer")],
    ),
    "verify_over_prefill_run_engine": (
        "the same, verified by the engine",
        "<= 1.25",
        [_replayed_run("verify_over_prefill_engine")],
    ),
    "cold_over_plain_run": ("`cold_over_plain` of the same", "<= 1", [_replayed_run("cold_over_plain")]),
    "rollout_speedup_training": (
        "rollout stage of training from the second epoch on, plain / the shipped defaults, 1,024 responses a step",
        None,
        [_LARGE["rollout_speedup"]],
    ),
    "step_speedup": (
        "whole training step of the same, plain / the shipped defaults",
        ">= 1.5",
        [_LARGE["step_speedup"]],
    ),
    "time_to_reward": (
        "seconds until 90% of plain's reward at the end, plain / the shipped defaults, three seeds",
        ">= 1.43",
        [_LARGE["time_to_reward"]],
    ),
    "time_to_reward_80": ("the same until 80%", None, [_LARGE["time_to_reward_80"]]),
    "final_reward": (
        "expected reward after the last steps of the same, the shipped defaults / plain",
        WITHIN_SPREAD,
        [_LARGE["final_reward"]],
    ),
    "plain_spread": (
        "plain's reward at the end with 1,024 responses a step: standard deviation over two seeds / mean",
        None,
        [_LARGE["plain_spread"]],
    ),
    "draft_step_speedup": (
        "whole step of the same runs without drafts / with them, each seed counting alike",
        None,
        [_LARGE["draft_step_speedup"]],
    ),
    "rollout_speedup_training_512": (
        "`rollout_speedup_training` with 512 responses a step, three seeds",
        None,
        [_SMALL["rollout_speedup"]],
    ),
    "step_speedup_512": (
        "`step_speedup` of the same",
        ">= 1.5",
        [_SMALL["step_speedup"]],
    ),
    "time_to_reward_512": (
        "`time_to_reward` of the same",
        ">= 1.43",
        [_SMALL["time_to_reward"]],
    ),
    "time_to_reward_80_512": (
        "the same until 80%",
        None,
        [_SMALL["time_to_reward_80"]],
    ),
    "final_reward_512": (
        "`final_reward` of the same",
        WITHIN_SPREAD,
        [_SMALL["final_reward"]],
    ),
    "plain_spread_512": (
        "the same with 512 responses a step",
        None,
        [_SMALL["plain_spread"]],
    ),
    "draft_step_speedup_512": (
        "`draft_step_speedup` of the same",
        None,
        [_SMALL["draft_step_speedup"]],
    ),
    "draft_step_taught": (
        "gain of expected reward by steps with drafts / by plain's steps of the same number",
        None,
        [Weighed((*LARGE_BATCH, *DEFAULTS, LOW_RATE), ("guard", "with_drafts", "taught"))],
    ),
    "step_without_drafts_taught": (
        "the same of steps without drafts in the same runs",
        None,
        [Weighed((*LARGE_BATCH, *DEFAULTS, LOW_RATE), ("guard", "without", "taught"))],
    ),
    "rollout_speedup_lenience_0.5": (
        "rollout stage of training, plain / log-lenience 0.5 without a carry-over limit, one seed, which unlearns",
        None,
        [_training(DEFAULTS[0], ("lenience-0.5+carry-0", "against_plain", "rollout_s"))],
    ),
    "suffix_speedup": (
        "rollouts with reuse from the second epoch on, without drafts of the engine / with vLLM's suffix decoding",
        None,
        [_training(DEFAULTS[1], ("guard", "step", "rollout_s"), ("reuse+suffix", "step", "rollout_s"))],
    ),
    "step_speedup_pausing": (
        "whole step, plain / the defaults with a guard that counted half of what is not new, and mostly paused",
        ">= 1.5",
        [_training(LOW_RATE, ("guard", "against_plain", "step_s"))],
    ),
    "time_to_reward_pausing": (
        "seconds until 90% of plain's final reward, in the same runs",
        ">= 1.43",
        [_training(LOW_RATE, ("guard", "against_plain", "seconds_to_0.9"))],
    ),
    "final_reward_pausing": (
        "expected reward after the last steps of the same runs, with reuse / plain",
        WITHIN_SPREAD,
        [_training(LOW_RATE, ("guard", "against_plain", "final"))],
    ),
    "step_speedup_high_rate": (
        "whole step, plain / reuse without the guard",
        ">= 1.5",
        [_training(HIGH_RATE, ("reuse", "against_plain", "step_s"))],
    ),
    "time_to_reward_80_high_rate": (
        "seconds until 80% of plain's final reward, plain / reuse without the guard; 90% was not reached",
        None,
        [_training(HIGH_RATE, ("reuse", "against_plain", "seconds_to_0.8"))],
    ),
    "final_reward_high_rate": (
        "expected reward after the last steps, reuse without the guard / plain",
        WITHIN_SPREAD,
        [_training(HIGH_RATE, ("reuse", "against_plain", "final"))],
    ),
    "update_speedup": (
        "update of 512 responses of 848 tokens, at most 4,096, the shape of Qwen3-1.7B: TRL's / without padding",
        ">= 3",
        [_update("update_speedup")],
    ),
    "update_memory_ratio": (
        "its most memory, without padding / TRL's",
        "<= 1",
        [_update("update_memory_ratio")],
    ),
    "real_token_share": (
        "tokens of prompts and completions, of all that it computes",
        ">= 0.85",
        [_update("real_token_share")],
    ),
    "reference_speedup": (
        "the reference's log-probs of the same, TRL's pass / ours",
        None,
        [_update("reference_speedup")],
    ),
    "step_speedup_paper_lengths": (
        "whole step with the same 512 responses, TRL's / ours with two thirds reused: rollouts and rest, of a run each",
        ">= 2.5",
        [WholeStep()],
    ),
    "step_speedup_paper_lengths_without_reference": (
        "the same without a reference",
        ">= 2.5",
        [WholeStep(without=("reference",))],
    ),
    "update_speedup_smollm2": (
        "`update_speedup` of 512 responses of 223 tokens, at most 512",
        None,
        [_update("update_speedup_smollm2")],
    ),
    "old_logprobs_speedup": (
        "the pass for the old log-probs of the same 512 responses of 848 tokens, TRL's / ours",
        None,
        [_update("old_logprobs_speedup")],
    ),
    "prune_step_speedup": (
        "whole training step: all of 16 responses a prompt trained on / pruned to 8",
        ">= 1.7",
        [_steps("plain+wide", "plain+prune")],
    ),
    "reuse_step_speedup": ("whole training step, in the same runs: plain / reuse", None, [_steps("plain", "reuse")]),
    "reuse_time_to_reward": (
        "seconds of training until 90% of plain's final reward, in the same runs: plain / reuse",
        None,
        [_training(PRUNED, ("reuse", "against_plain", "seconds_to_0.9"))],
    ),
    "both_step_speedup": (
        "all of 16 responses a prompt trained on / pruned to 8, with reuse",
        THE_PRODUCT,
        [_steps("plain+wide", "prune")],
    ),
    "head_auc": (
        "chance that of a success and a failure the quality head scores the success higher",
        None,
        [_pruned("plain+prune", "drift", "head_auc")],
    ),
    "head_auc_in_groups": (
        "the same for two responses to one prompt, both ended or both not: what pruning depends on",
        None,
        [_pruned("plain+prune", "drift", "head_auc_in_groups")],
    ),
    "core_seconds_per_million_tokens": (
        "CPU seconds of looking up, accepting, assembling and storing a million tokens, one core, 10,000 held",
        "<= 0.3",
        [Place("core", (*_CORE, *_CORE_SECONDS))],
    ),
    "core_seconds_per_million_tokens_faster_machine": (
        "the same on a faster machine, by the code before the last change of the cache",
        "<= 0.3",
        [Place("core", ("faster_machine", *_CORE[1:], *_CORE_SECONDS))],
    ),
    "bytes_per_token": (
        "bytes on disk of a cached token, filled in one go",
        "<= 5",
        [Place("core", (*_CORE, "bytes_a_token_when_new"))],
    ),
    "bytes_per_token_in_use": (
        "the same after processes have replaced each row several times",
        "<= 5",
        [Place("core", (*_CORE, "bytes_a_token_after_rollouts"))],
    ),
    "openrlhf_rollout_speedup": (
        "OpenRLHF: generation from the second epoch on, plain / reuse, all included",
        None,
        [_openrlhf("generation")],
    ),
    "openrlhf_step_speedup": ("OpenRLHF: whole step, plain / reuse", None, [_openrlhf("step_total")]),
}


# What was to be reached: the figures that say whether it was, each with a word on what sets it apart.
GOALS = {
    "rollout stage from the second epoch on, plain / ours, all included": {
        "rollout_speedup": "512 responses of 848 tokens, two thirds reused ",
        "rollout_speedup_engine": "verified by the engine ",
        "rollout_speedup_2048": "2,048 of 929 tokens ",
        "rollout_speedup_2048_engine": "by the engine ",
        "rollout_speedup_run": "1,024 of 193 tokens, 39% reused ",
        "rollout_speedup_run_engine": "by the engine ",
    },
    "share of the limit: the engine's bare prefill of the drafts and decoding of the rest": {
        "limit_share": "512 responses ",
        "limit_share_engine": "by the engine ",
        "limit_share_run": "1,024 ",
        "limit_share_run_engine": "by the engine ",
    },
    "verification / a bare prefill of the same tokens": {
        "verify_over_prefill": "512 responses ",
        "verify_over_prefill_engine": "by the engine ",
        "verify_over_prefill_run": "1,024 ",
        "verify_over_prefill_run_engine": "by the engine ",
    },
    "rollout of the first epoch, where nothing is cached, ours / plain": {
        "cold_over_plain": "512 responses ",
        "cold_over_plain_run": "1,024 ",
    },
    "whole training step, plain / the shipped defaults": {
        "step_speedup": "1,024 responses ",
        "step_speedup_512": "512 responses ",
    },
    "reward after as many steps, the shipped defaults / plain": {
        "final_reward": "1,024 responses ",
        "final_reward_512": "512 responses ",
    },
    "seconds until 90% of plain's reward at the end, plain / the shipped defaults": {
        "time_to_reward": "1,024 responses ",
        "time_to_reward_512": "512 responses ",
    },
    "update without padding, TRL's / ours": {"update_speedup": "512 responses of 848 tokens "},
    "its most memory, ours / TRL's": {"update_memory_ratio": ""},
    "real tokens, of all that the update computes": {"real_token_share": ""},
    "whole step at those lengths, TRL's / ours": {
        "step_speedup_paper_lengths": "with a reference ",
        "step_speedup_paper_lengths_without_reference": "without ",
    },
    "whole step, 16 responses a prompt trained on / pruned to 8": {"prune_step_speedup": ""},
    "the same with reuse, against pruning and reuse alone": {"both_step_speedup": ""},
    "CPU seconds of the core for a million tokens, one core": {
        "core_seconds_per_million_tokens": "",
        "core_seconds_per_million_tokens_faster_machine": "on a faster machine ",
    },
    "bytes on disk of a cached token": {"bytes_per_token": "new ", "bytes_per_token_in_use": "in use "},
}


def _at(summary: Any, path: Path_) -> Any:
    for key in path:
        try:
            summary = summary[key]
        except (KeyError, IndexError, TypeError):
            return None
    return summary


def _origin(directory: str, summary: dict[str, Any], *paths: Path_ | None) -> dict[str, Any]:
    """A result file, with command, commit, hardware and versions: what stands nearest to the figures in it."""
    nearest: dict[str, Any] = {}
    commands: list[str] = []
    for path in [path for path in paths if path] or [("settings",)]:
        nodes = [summary]
        for key in path[:-1]:
            nodes.append(nodes[-1][key])
        for node in (node for node in nodes if isinstance(node, dict)):
            nearest |= {name: node[name] for name in ("commit", "versions", "python") if name in node}
            if machine := _hardware(node):
                nearest["hardware"] = machine
        given = [
            node[name] for node in nodes if isinstance(node, dict) for name in ("command", "commands") if name in node
        ]
        commands += given[-1] if given and isinstance(given[-1], list) else given[-1:]
    return {
        "source": f"benchmarks/results/{directory}/summary.json",
        "command": list(dict.fromkeys(commands)),
        "commit": nearest["commit"],
        "hardware": nearest["hardware"],
        "versions": nearest["versions"] | ({"python": nearest["python"]} if "python" in nearest else {}),
    }


def _hardware(node: dict[str, Any]) -> str | None:
    if "hardware" in node:
        return node["hardware"]
    if "device" in node:
        return f"{node['device']}, {node['cores']} CPU cores"
    if "gpus" in node:
        return ", ".join(node["gpus"])
    if isinstance(node.get("machine"), dict):
        return f"{node['machine']['cpu']}, {node['machine']['cores']} CPU cores, shared"
    return None


def summarise(results: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """The newest figures, by name, each with what it is and where it is from."""
    summary = {}
    for name, (what, goal, places) in FIGURES.items():
        if found := next((entry for place in places if (entry := place.read(results))), None):
            rounded = {key: float(f"{value:.4g}") for key, value in found.items() if isinstance(value, float)}
            summary[name] = {"what": what, **({"goal": goal} if goal else {}), **found, **rounded}
    return summary


def pruning(results: Path = RESULTS) -> dict[str, Any] | None:
    """What the runs with pruning, and those that they are compared with, showed; `None` where there are none."""
    summary = _load(results, PRUNED)
    settings = summary["settings"] if summary else {}
    if not any("head_auc" in setting["drift"] for setting in settings.values()):
        return None
    figures = summarise(results)
    names = ("prune_step_speedup", "reuse_step_speedup", "both_step_speedup", "head_auc")
    return {
        **{name: figures[name]["value"] for name in names if name in figures},
        **_origin(PRUNED, summary),
        "rewards": {name: setting["curves"] for name, setting in settings.items()},
        "tokens": {n: {k: s["step"].get(k) for k in ("tokens", "generated")} for n, s in settings.items()},
        "seconds": {n: {k: v for k, v in s["step"].items() if k.endswith("_s")} for n, s in settings.items()},
        "pruning": {n: s["drift"] for n, s in settings.items() if "head_auc" in s["drift"]},
    }


# SPEC-RL (arXiv 2509.23232), table 13: seconds a step on 8 H100, from the second epoch on the same prompts.
# name: plain rollout; with reuse: rollout, verification, assembly
PUBLISHED = {
    "SPEC-RL, Qwen3-1.7B, GRPO": (309.9, 135.2, 22.1, 1.5),
    "SPEC-RL, Qwen3-8B, GRPO": (768.2, 305.8, 74.7, 1.3),
    "SPEC-RL, Qwen3-8B, DAPO": (699.2, 243.0, 51.0, 1.1),
}


def stages(results: Path = RESULTS) -> dict[str, tuple[float, float, float, float]]:
    """Seconds of the rollout stage, SPEC-RL's and ours: plain; with reuse generation, verification, and the rest."""
    rows = dict(PUBLISHED)
    if (replayed := _load(results, REPLAYS["spec-rl"])) is not None:
        seconds = replayed["settings"][REPLAYED]["seconds"]
        for verifier in ("trainer", "engine"):
            if verifier in seconds and "plain" in seconds:
                took = seconds[verifier]
                rest = took["total_s"] - took["generate_s"] - took["verify_s"]
                name = f"replay, Qwen3-1.7B's shape, by the {verifier}"
                rows[name] = (seconds["plain"]["total_s"], took["generate_s"], took["verify_s"], rest)
    if (trained := _load(results, "trl-h200")) is not None:
        runs = trained["runs"]
        for run, verifier in (("reuse", "trainer"), ("engine", "engine")):
            took = runs[run]["warm_stages_s"]
            total = runs[run]["warm"]["rollout_s"]
            rest = total - took["generate_s"] - took["verify_s"]
            plain = runs["plain"]["warm"]["rollout_s"]
            name = f"training, SmolLM2-135M, TRL, by the {verifier}"
            rows[name] = (plain, took["generate_s"], took["verify_s"], rest)
    return rows


def tables(results: Path = RESULTS) -> dict[str, str]:
    """The tables of `docs/results.md`, by name."""
    summary = summarise(results)
    return {
        "goals": _goals(summary),
        "figures": _figures(summary),
        "core": _core(results),
        "stages": _stages(stages(results), results),
        "step-stages": _step_stages(results),
        "replay": _replayed(results),
        **{name: _trained(results, directory, f"{name}.png") for name, directory in TRAININGS.items()},
    }


def _goals(summary: dict[str, dict[str, Any]]) -> str:
    """What was to be reached, and whether it was."""
    lines = [["goal", "", "measured"]]
    for what, names in GOALS.items():
        goal = FIGURES[next(iter(names))][1]
        found = [
            f"{label}{_shown(summary[name])} ({'reached' if _reached(summary, name) else 'missed'})"
            for name, label in names.items()
            if name in summary
        ]
        lines.append([what, goal or "", "; ".join(found) or "not yet"])
    return _markdown(lines)


def _reached(summary: dict[str, dict[str, Any]], name: str) -> bool:
    """Whether a figure with a goal reaches it; plain's spread is that of two seeds, see `plain_spread`."""
    value, goal = summary[name]["value"], summary[name]["goal"]
    if goal == WITHIN_SPREAD:
        return value >= 1 - summary[name.replace("final_reward", "plain_spread")]["value"]
    if goal == THE_PRODUCT:
        return value >= summary["prune_step_speedup"]["value"] * summary["reuse_step_speedup"]["value"]
    relation, bound = goal.split()
    return value >= float(bound) if relation == ">=" else value <= float(bound)


def _core(results: Path) -> str:
    if (summary := _load(results, "core")) is None:
        return "Not measured yet."
    parts = ("look up", "accept", "assemble", "store", "all")
    lines = [["commit", "held", "processes", *(f"{part}, s" for part in parts), "bytes a token, new", "in use"]]
    for measured in (runs := summary["faster_machine"] + summary["now"]):
        for cache in measured["caches"]:
            for run in cache["runs"]:
                seconds = run["seconds_a_million_tokens"]
                disk = (cache[f"bytes_a_token_{when}"] for when in ("when_new", "after_rollouts"))
                lines.append(
                    [
                        f"`{measured['commit'][:7]}`",
                        f"{cache['held']:,}",
                        str(run["processes"]),
                        *(f"{seconds[part]['cpu_s']['median']:.4g}" for part in parts),
                        *(f"{size:.4g}" for size in disk),
                    ]
                )
    return f"{_commands(list(dict.fromkeys(measured['command'] for measured in runs)))}\n\n{_markdown(lines)}"


def _step_stages(results: Path) -> str:
    """Seconds and tokens of the parts of a training step."""
    parts = {
        **{"look up": "lookup_s", "verify": "verify_s", "spared": "spared_s", "generate": "generate_s"},
        **{"assemble": "assemble_s", "rollout": "rollout_s", "store": "store_s", "weight sync": "sync_s"},
        **{"old log-probs": "old_logprobs_s", "rewards": "rewards_s", "update": "update_s", "step": "step_s"},
    }
    lines = [["in", "run", "seeds", "drafted tokens", *(f"{part}, s" for part in parts)]]
    for directory in (*LARGE_BATCH, TRAININGS["large-batch-lenience"]):
        for name, setting in (_load(results, directory) or {"settings": {}})["settings"].items():
            step = setting["step"]
            drafted = f"{step['drafted']:,.0f}" if "drafted" in step else ""
            seconds = [f"{step[stage]:.3g}" if stage in step else "" for stage in parts.values()]
            seeds = ", ".join(seed.removeprefix("seed-") for seed in setting["curves"])
            lines.append([f"`{directory}`", f"`{name}`", seeds, drafted, *seconds])
    return _markdown(lines)


def _figures(summary: dict[str, dict[str, Any]]) -> str:
    """A table for each result file, or several of them together, with their commands above it."""
    parts, shown = [], []
    groups: dict[tuple, dict[str, dict[str, Any]]] = {}
    for name, entry in summary.items():
        key = tuple((origin["source"], *origin["command"]) for origin in entry["origins"])
        groups.setdefault(key, {})[name] = entry
    for group in groups.values():
        origins = next(iter(group.values()))["origins"]
        new = [origin for origin in origins if origin not in shown]
        parts += map(_run, new)
        if len(new) < len(origins):
            parts.append(f"Of {', '.join(map(_source, origins))}:")
        shown += new
        rows = [["figure", "value", "goal", "what it is"]]
        rows += [[f"`{n}`", _shown(e), e.get("goal", ""), e["what"]] for n, e in group.items()]
        parts.append(_markdown(rows))
    if missing := [f"`{name}`" for name in FIGURES if name not in summary]:
        parts.append(f"Not measured yet: {', '.join(missing)}.")
    return "\n\n".join(parts)


def _source(origin: dict[str, Any]) -> str:
    return f"[`{origin['source'].removeprefix('benchmarks/')}`](../{origin['source']})"


def _run(origin: dict[str, Any]) -> str:
    """A result file, what it was measured with, and its commands."""
    versions = ", ".join(f"{package} {version}" for package, version in origin["versions"].items())
    head = f"{_source(origin)}: {origin['hardware']}; {versions}; commit {origin['commit']}"
    return f"{head}\n\n{_commands(origin['command'])}"


def _commands(commands: list[str]) -> str:
    return "\n".join(f"    {command}" for command in commands)


def _stages(rows: dict[str, tuple[float, float, float, float]], results: Path) -> str:
    lines = [
        ["", "plain, s", "generation, s", "verification, s", "rest, s", "plain / generation", "plain / all of reuse"]
    ]
    for name, (plain, generation, verification, rest) in rows.items():
        seconds = [f"{value:.4g}" for value in (plain, generation, verification, rest)]
        everything = generation + verification + rest
        lines.append([name, *seconds, f"{plain / generation:.2f}x", f"{plain / everything:.2f}x"])
    trained = _load(results, "trl-h200")
    runs = [_run(_origin("trl-h200", trained, ("runs",)))] if trained else []
    return "\n\n".join([_markdown(lines), *runs])


def _replayed(results: Path) -> str:
    summaries = [summary for directory in REPLAYS.values() if (summary := _load(results, directory)) is not None]
    if not summaries:
        return f"Not measured yet:\n\n    {REPLAY_COMMAND}"
    kinds = ("plain", "cold", "trainer", "engine", "limit")
    seconds_of = [f"{kind}, s" for kind in kinds]
    lines = [["responses", "tokens each", "reused", *seconds_of, "trainer", "engine", "repeats", "commit"]]
    for setting in (setting for summary in summaries for setting in summary["settings"].values()):
        tokens, seconds = setting["tokens"], setting["seconds"]
        speedups = [setting["ratios"].get(f"rollout_speedup_{verifier}") for verifier in ("trainer", "engine")]
        lines.append(
            [
                f"{tokens['rows']:,}",
                f"{_tokens_a_row(tokens):.0f}",
                f"{tokens['reused_share']:.0%}",
                *(f"{seconds[kind]['total_s']:.4g}" if kind in seconds else "" for kind in kinds),
                *(f"{speedup:.2f}x" if speedup else "" for speedup in speedups),
                str(setting["repeats"]),
                setting["commit"],
            ]
        )
    commands = _commands([process["command"] for summary in summaries for process in summary["processes"]])
    chart = "![Seconds of a rollout stage, plain and with reuse; hollow: of an earlier commit](replay.png)"
    return f"{commands}\n\n{_markdown(lines)}\n\n{chart}"


def _reward(spread: dict[str, float]) -> str:
    return f"{spread['mean']:.3f}" + (f" ± {spread['sd']:.3f}" if spread["seeds"] > 1 else "")


def _trained(results: Path, directory: str, chart: str) -> str:
    if (summary := _load(results, directory)) is None:
        return "Not measured yet."
    head = ["run", "seeds", "tokens", "generated", "reused", "rollout, s", "old log-probs, s", "update, s", "step, s"]
    at = next(setting["at_seconds"]["seconds"] for setting in summary["settings"].values() if "at_seconds" in setting)
    lines = [[*head, f"reward after {at:.0f} s", "at the end", "seconds to 90%"]]
    for name, setting in summary["settings"].items():
        step = setting["step"]
        learned = setting.get("learned", {}).get("0.9", {"seconds": []})  # of what plain learned, where it ran
        took = [f"{seconds:.0f}" if seconds else "-" for seconds in learned["seconds"]]
        lines.append(
            [
                f"`{name}`",
                str(len(setting["steps"])),
                *(f"{step[kind]:,.0f}" for kind in ("tokens", "generated")),
                f"{step.get('reused_share', 0.0):.0%}",
                *(f"{step[stage]:.3g}" for stage in ("rollout_s", "old_logprobs_s", "update_s", "step_s")),
                _reward(setting["at_seconds"]) if "at_seconds" in setting else "",
                _reward(setting["final"]) + ("" if setting["finished"] else " (cut off)"),
                ", ".join(took),
            ]
        )
    chart = f"![Expected reward against seconds and against steps]({chart})"
    return f"{_commands(summary['command'])}\n\n{_markdown(lines)}\n\n{chart}"


def _shown(entry: dict[str, Any]) -> str:
    return f"{entry['value']:.4g}" + (f" ± {entry['error']:.2g}" if "error" in entry else "")


def _markdown(rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def filled(text: str, tables: dict[str, str]) -> str:
    """The text with what is between the marks of each table replaced.

    Raises:
        ValueError: the text has no place for a table.
    """
    for name, table in tables.items():
        mark, end = f"<!-- table: {name} -->\n", "<!-- end -->"
        before, found, after = text.partition(mark)
        if not found or end not in after:
            raise ValueError(f"there is no `{mark.strip()}` followed by `{end}` to put a table into")
        text = f"{before}{mark}\n{table}\n\n{after[after.index(end) :]}"
    return text


def draw(results: Path = RESULTS, docs: Path = DOCS) -> None:
    """The charts of `docs/results.md`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # Of the Okabe-Ito palette, which colour-blind readers can tell apart.
    grey, blue, orange, green = "#5f5f5f", "#0072B2", "#D55E00", "#009E73"
    rows = stages(results)
    figure, axes = plt.subplots(figsize=(9, 0.5 * len(rows) + 1.2), layout="constrained")
    left = [0.0] * len(rows)
    for index, (part, colour) in enumerate((("generation", blue), ("verification", orange), ("rest", grey)), start=1):
        shares = [row[index] / row[0] for row in rows.values()]
        axes.barh(list(rows), shares, left=left, color=colour, label=part)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axes.axvline(1.0, color="black", linewidth=1, linestyle=":")
    axes.set_xlabel("seconds with reuse / seconds of the plain rollout (dotted)")
    axes.invert_yaxis()
    figure.legend(frameon=False, loc="outside upper center", ncols=3)
    figure.savefig(docs / "results.png", dpi=110)
    for chart, directory in TRAININGS.items():
        if (summary := _load(results, directory)) is None:
            continue
        curves = {name: setting["curves"] for name, setting in summary["settings"].items()}
        # What is compared first has the same colours in every chart.
        names = sorted(curves, key=lambda name: (name != "plain", name not in ("guard", "reuse"), name))
        colours = dict(zip(names, (grey, blue, orange, green, "#CC79A7", "#E69F00", "#56B4E9"), strict=False))
        figure, panels = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained", sharey=True)
        for name in names:
            for index, curve in enumerate(curves[name].values()):
                rewards = curve.get("policy", curve["reward"])
                style = dict(color=colours.get(name, "black"), label=None if index else name, linewidth=1.2)
                panels[0].plot(curve["seconds"], rewards, **style)
                panels[1].plot(range(1, len(rewards) + 1), rewards, **style)
        panels[0].set_xlabel("seconds of training")
        panels[1].set_xlabel("optimizer steps")
        panels[0].set_ylabel("expected reward")
        panels[0].legend(frameon=False, fontsize="small")
        figure.savefig(docs / f"{chart}.png", dpi=110)
    if (replayed := _load(results, REPLAYS["spec-rl"])) is None:
        return
    settings = replayed["settings"]
    tokens = {name: setting["tokens"] for name, setting in settings.items() if name.startswith("spec-rl")}
    base = tokens[REPLAYED]
    newest = settings[REPLAYED]["commit"]
    # A panel for each thing that is varied: the settings that are like the base one in the other two.
    alike = {"rows": lambda t: t["rows"], "reused": lambda t: t["reused_share"], "long": _tokens_a_row}
    labels = {"rows": "responses at once", "reused": "share of tokens reused", "long": "tokens a response"}
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    for panel, varied in zip(panels, alike, strict=True):
        others = [name for name in alike if name != varied]
        names = [n for n, t in tokens.items() if all(_near(alike[o](t), alike[o](base)) for o in others)]
        names.sort(key=lambda name: alike[varied](tokens[name]))
        for kind, colour in {"plain": grey, "trainer": blue, "engine": orange, "limit": green}.items():
            for commit in {settings[name]["commit"]: None for name in names}:  # they are not to be compared
                seconds = {
                    name: settings[name]["seconds"][kind]["total_s"]
                    for name in names
                    if settings[name]["commit"] == commit and kind in settings[name]["seconds"]
                }
                at = [alike[varied](tokens[name]) for name in seconds]
                own = dict(label=kind) if commit == newest else dict(markerfacecolor="none", linestyle=":")
                panel.plot(at, list(seconds.values()), marker="o", color=colour, **own)
        panel.set_xlabel(labels[varied])
        panel.set_ylim(bottom=0)
    panels[0].set_ylabel("seconds of the rollout stage")
    panels[0].legend(frameon=False)
    figure.savefig(docs / "replay.png", dpi=110)


def _tokens_a_row(tokens: dict[str, Any]) -> float:
    return tokens["response_tokens"] / tokens["rows"]


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= 0.25 * abs(b)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", action="store_true", help="also write the tables and charts of docs/results.md")
    options = parser.parse_args()
    (RESULTS / "summary.json").write_text(json.dumps(summarise(), indent=1) + "\n")
    if (found := pruning()) is not None:
        (RESULTS / "pruning.json").write_text(json.dumps(found, indent=1) + "\n")
    if options.docs:
        page = DOCS / "results.md"
        page.write_text(filled(page.read_text(), tables()))
        draw()


if __name__ == "__main__":
    main()
