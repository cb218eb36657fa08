"""The micro-batches of TRL's update, without the columns that none of their rows uses.

TRL pads each of them to the longest row of the whole generation batch. Names of tensors, losses and what these are
divided by are as read in TRL 1.16.0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import trl
from trl import RLOOTrainer

from trl_integration.padding import flush_left

Batch = dict[str, Any]

# Tensors with a column for each token of the prompt, of the completion, and of both.
_OF_PROMPT = {"prompt_ids", "prompt_mask"}
_OF_COMPLETION = {
    "completion_ids", "completion_mask", "tool_mask", "advantages", "old_per_token_logps", "ref_per_token_logps",
    "sampling_per_token_logps", "importance_sampling_ratio",
}  # fmt: skip
_OF_BOTH = {"token_type_ids", "mm_token_type_ids"}

# What a loss divides the sum over the rows of a micro-batch by: their number, the number of their tokens, or something
# that is the same for all micro-batches of a generation batch.
DIVISORS = {
    "grpo": "rows", "sapo": "rows", "dr_grpo": "rows", "luspo": "rows", "rloo": "rows",
    "bnpo": "tokens",
    "dapo": "generation batch", "cispo": "generation batch", "vespo": "generation batch",
}  # fmt: skip

LOSS_SCALE = "spec_loss_scale"
"""Key of a micro-batch that was made here: what makes up for TRL's dividing by its rows, where others were left out."""

# What TRL makes the loss of an update with: methods of its trainers, where they have them.
_OF_THE_LOSS = (
    "compute_loss", "_compute_loss", "_prepare_inputs", "get_high_entropy_mask", "get_off_policy_mask",
    "get_gamma_weights",
)  # fmt: skip
# Where these are from; TRL wraps some of them by PyTorch's decorators.
_WELL_KNOWN = [Path(inspect.getfile(package)).parent for package in (trl, torch, transformers)]


def loss_type(trainer: Any) -> str:
    """Name of a trainer's loss, a key of [`DIVISORS`] where it is known."""
    return "rloo" if isinstance(trainer, RLOOTrainer) else trainer.loss_type


def coupling(trainer: Any) -> list[str]:
    """What makes the weight of a row depend on the rows that share its micro-batch, each named by its setting.

    Args:
        trainer: of TRL, as built.
    """
    found = []
    if DIVISORS[loss_type(trainer)] == "tokens":
        found.append(f"`loss_type='{loss_type(trainer)}'`, a mean over the tokens of a micro-batch")
    return found + _beyond_rows(trainer)


def _beyond_rows(trainer: Any) -> list[str]:
    """Parts of the loss that are no sum over rows."""
    found = []
    if getattr(trainer, "_entropy_bonus_enabled", False):
        found.append("`entropy_coef` or `use_adaptive_entropy`, a mean over the tokens of a micro-batch")
    if getattr(trainer, "top_entropy_quantile", 1.0) < 1.0:
        found.append(f"`top_entropy_quantile={trainer.top_entropy_quantile}`, a quantile over a micro-batch")
    if trainer.aux_loss_enabled:
        found.append(
            f"`router_aux_loss_coef={trainer.router_aux_loss_coef}`, of how a micro-batch is spread over experts"
        )
    return found


def unknown_loss(trainer: Any) -> str | None:
    """Why it is not known here what a trainer's loss does with a micro-batch, if it is not: a kind that TRL has added,
    or a method of TRL's that a subclass, or a patch, has replaced.

    Args:
        trainer: of TRL, as built.
    """
    if loss_type(trainer) not in DIVISORS:
        return f"`loss_type='{loss_type(trainer)}'` is not known here"
    for name in _OF_THE_LOSS:
        if name in vars(trainer):
            return f"`{name}` of the trainer was replaced"
        for kind in type(trainer).__mro__:
            if name in vars(kind) and not _is_this_plugin(kind):
                method = vars(kind)[name]
                file = Path(inspect.getfile(getattr(method, "__func__", method)))
                if not any(package in file.parents for package in _WELL_KNOWN):
                    return f"`{kind.__name__}.{name}` is not TRL's"
                break
    return None


def _is_this_plugin(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == __name__.partition(".")[0]


def unskippable(trainer: Any) -> list[str]:
    """Why rows without advantage cannot be left out of a trainer's update: what they add to the gradient all the same.

    Args:
        trainer: of TRL, as built.
    """
    found = _beyond_rows(trainer)
    if trainer.beta != 0.0 and not isinstance(trainer, RLOOTrainer):  # RLOO's is part of the reward
        found.append(f"`beta={trainer.beta}`, which pulls every row to the reference")
    return found


@dataclass(frozen=True)
class MicroBatches:
    """How generation batches are cut into micro-batches.

    Args:
        deals (`bool`): whether rows may change the micro-batch that TRL has dealt them to.
        divisor (`str`): what the loss divides a micro-batch by, see [`DIVISORS`].
        multiple (`int`): what widths are rounded up to.
        stands_left (`bool`): whether rows stand at the left of a forward, and none of it sees a mask.
        skips (`bool`): whether rows without advantage are left out.
        gather (callable): from something of this rank to that of all ranks, each of which calls it.
    """

    deals: bool
    divisor: str
    multiple: int
    stands_left: bool
    skips: bool
    gather: Callable[[Any], list[Any]]

    @classmethod
    def of(cls, trainer: Any, gather: Callable[[Any], list[Any]]) -> MicroBatches:
        """By the settings of a trainer, as built."""
        return cls(
            deals=not coupling(trainer),
            divisor=DIVISORS[loss_type(trainer)],
            multiple=trainer.pad_to_multiple_of or 1,
            stands_left=not trainer.aux_loss_enabled,  # which counts the tokens that the mask shows
            skips=trainer.args.spec_skip_zero_advantage,
            gather=gather,
        )

    def __call__(self, batches: Sequence[Batch], accumulated: int) -> list[Batch]:
        """As many micro-batches as TRL has made, trimmed; of those that share an optimizer step the longest rows come
        first, so that what does not fit in memory fails at once, and the widest of all ranks coincide.

        Where rows without advantage are left out, ranks still have as many rows in each: TRL gathers some metrics row
        by row. So that none is empty, some of those rows stay, the shortest ones.

        Args:
            batches (`Sequence[Batch]`): of a generation batch, in TRL's order.
            accumulated (`int`): micro-batches of an optimizer step.
        """
        # An optimizer step may begin at any multiple of its own number of micro-batches, counted from the start of an
        # epoch, and so at any multiple of this within a generation batch.
        size = gcd(len(batches), accumulated) if self.deals else 1
        windows = [_joined(batches[start : start + size]) for start in range(0, len(batches), size)]
        if not self.skips:
            return [part for window in windows for part in self._split(window, size, len(window["advantages"]))]
        advantaged = [int(_has_advantage(window).sum()) for window in windows]
        most = np.max(self.gather(advantaged), axis=0)  # of any rank
        kept = np.maximum(most, size).tolist()
        return [
            part for window, rows in zip(windows, kept, strict=True) for part in self._split(window, size, rows)
        ]  # fmt: skip

    def _split(self, window: Batch, parts: int, kept: int) -> list[Batch]:
        """So many micro-batches of a window, of `kept` of its rows together."""
        rows, tokens = len(window["advantages"]), int(_in_loss(window).sum())
        lengths = (window["prompt_mask"].sum(1) + window["completion_mask"].sum(1)).tolist()
        order = list(range(rows))
        if kept < rows:
            counts = _has_advantage(window).tolist()
            order.sort(key=lambda row: (not counts[row], lengths[row]))
        order = sorted(order[:kept], key=lengths.__getitem__, reverse=True)
        made = []
        for dealt in np.array_split(order, parts):
            part = _select(window, dealt.tolist())
            scale = 1.0
            if self.divisor == "rows":
                scale = len(dealt) * parts / rows
            elif self.divisor == "tokens" and kept < rows:  # TRL divides by one at least
                scale = max(1, int(_in_loss(part).sum())) / max(1, tokens)
            made.append(trimmed(part, self.multiple) | {LOSS_SCALE: scale})
        return made

    def forward(
        self, by_trl: Callable[..., Any], input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int
    ) -> Any:
        """TRL's forward over the rows of a micro-batch, see [`flush_left`]."""
        if not self.stands_left:
            return by_trl(input_ids, attention_mask, logits_to_keep)
        return flush_left(by_trl, input_ids, attention_mask, logits_to_keep, self.multiple)

    def tokens(self, batches: Sequence[Batch]) -> tuple[int, int]:
        """Tokens of micro-batches, and what the forwards over them compute, padding included."""
        real = computed = 0
        for batch in batches:
            masks = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
            lengths = masks.sum(1)
            real += int(lengths.sum())
            computed += len(lengths) * int(lengths.max()) if self.stands_left else masks.numel()
        return real, computed


def trimmed(batch: Batch, multiple: int = 1) -> Batch:
    """A micro-batch without the columns that no row uses; one of each kind is kept.

    Args:
        batch (`dict`): as TRL makes them, prompts padded on the left and completions on the right.
        multiple (`int`, *optional*): what widths are rounded up to.

    Returns:
        `dict`: of views.
    """
    longest = torch.stack([batch["prompt_mask"].sum(1).max(), batch["completion_mask"].sum(1).max()]).tolist()
    prompt, completion = (-(-max(1, tokens) // multiple) * multiple for tokens in longest)
    start = batch["prompt_ids"].size(1) - prompt  # TRL's widths are multiples too
    end = batch["prompt_ids"].size(1) + completion
    columns = {
        **dict.fromkeys(_OF_PROMPT, slice(start, None)),
        **dict.fromkeys(_OF_COMPLETION, slice(0, completion)),
        **dict.fromkeys(_OF_BOTH, slice(start, end)),
    }
    return {
        key: value[:, columns[key]] if key in columns and getattr(value, "ndim", 0) > 1 else value
        for key, value in batch.items()
    }


def untrimmable(batches: Sequence[Batch]) -> str | None:
    """Why it is not known which columns of a generation batch's micro-batches can be left out, if it is not."""
    known = _OF_PROMPT | _OF_COMPLETION | _OF_BOTH
    for batch in batches:
        columns = [key for key, value in batch.items() if getattr(value, "ndim", 0) > 1 and key not in known]
        if columns:
            return f"it is not known what the columns of {', '.join(sorted(columns))} are"
        prompt, completion = batch["prompt_mask"], batch["completion_mask"]
        if (prompt[:, 1:] < prompt[:, :-1]).any() or (completion[:, 1:] > completion[:, :-1]).any():
            return "a mask leaves tokens out in the middle of a row"
    return None


def _has_advantage(batch: Batch) -> torch.Tensor:
    """Whether a row has an advantage, of shape `(rows,)`."""
    return (batch["advantages"] != 0).reshape(len(batch["advantages"]), -1).any(1)


def _in_loss(batch: Batch) -> torch.Tensor:
    """The mask of the loss, of shape `(rows, completion tokens)`."""
    return batch["completion_mask"] * batch.get("tool_mask", 1)


def _joined(batches: Sequence[Batch]) -> Batch:
    """Micro-batches as one. What is a number, and so the same for all, stays."""

    def join(values: list[Any]) -> Any:
        if isinstance(values[0], torch.Tensor) and values[0].ndim:
            return torch.cat(values)
        return [row for value in values for row in value] if isinstance(values[0], list) else values[0]

    return {key: join([batch[key] for batch in batches]) for key in batches[0]}


def _select(batch: Batch, rows: Sequence[int]) -> Batch:
    """These rows of a batch."""

    def select(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.ndim:
            return value[torch.as_tensor(rows, device=value.device)]
        return [value[row] for row in rows] if isinstance(value, list) else value

    return {key: select(value) for key, value in batch.items()}
