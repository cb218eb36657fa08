"""The micro-batches of TRL's update, without the columns that none of their rows uses.

TRL pads each of them to the longest row of the whole generation batch. Names of tensors, losses and what these are
divided by are as read in TRL 1.16.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np
import torch
from trl import GRPOTrainer, RLOOTrainer

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
"""Key of a micro-batch from which rows were left out: what makes up for TRL's dividing by those that are there."""


def loss_type(trainer: Any) -> str:
    """Name of a trainer's loss, a key of [`DIVISORS`] where it is known."""
    return "rloo" if isinstance(trainer, RLOOTrainer) else trainer.loss_type


def coupling(trainer: Any) -> list[str]:
    """What makes the weight of a row depend on the rows that share its micro-batch, each named by its setting.

    Args:
        trainer: of TRL, as built.
    """
    found = []
    if DIVISORS.get(loss_type(trainer)) not in ("rows", "generation batch"):
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
    for name in ("compute_loss", "_compute_loss"):
        ours = next(kind for kind in type(trainer).__mro__ if name in vars(kind) and not _is_this_plugin(kind))
        if ours not in (GRPOTrainer, RLOOTrainer):
            found.append(f"`{ours.__name__}.{name}`, a loss that is not known here")
    return found


def _is_this_plugin(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == __name__.partition(".")[0]


def unskippable(trainer: Any) -> list[str]:
    """Why rows without advantage cannot be left out of a trainer's update: what they add to the gradient all the same.

    Args:
        trainer: of TRL, as built.
    """
    found = _beyond_rows(trainer)
    if loss_type(trainer) not in DIVISORS:
        found.insert(0, f"`loss_type='{loss_type(trainer)}'`, a loss that is not known here")
    if trainer.beta != 0.0 and not isinstance(trainer, RLOOTrainer):  # RLOO's is part of the reward
        found.append(f"`beta={trainer.beta}`, which pulls every row to the reference")
    return found


@dataclass(frozen=True)
class MicroBatches:
    """How generation batches are cut into micro-batches.

    Args:
        window (`int`): micro-batches that always share an optimizer step, to which their rows may be dealt afresh; 1
            leaves rows in the micro-batch that TRL dealt them to.
        divisor (`str`): what the loss divides a micro-batch by, see [`DIVISORS`].
        multiple (`int`): what widths are rounded up to.
        stands_left (`bool`): whether rows stand at the left of a forward, and none of it sees a mask.
        skips (`bool`): whether rows without advantage are left out.
        gather (callable): from something of this rank to that of all ranks, each of which calls it.
    """

    window: int
    divisor: str
    multiple: int
    stands_left: bool
    skips: bool
    gather: Callable[[Any], list[Any]]

    @classmethod
    def of(cls, trainer: Any, gather: Callable[[Any], list[Any]]) -> MicroBatches:
        """By the settings of a trainer, as built."""
        args = trainer.args
        # An optimizer step may begin at any multiple of its own number of micro-batches, counted from the start of an
        # epoch, and so at any multiple of this within a generation batch.
        window = gcd(args.steps_per_generation, args.gradient_accumulation_steps)
        return cls(
            window=1 if coupling(trainer) else window,
            divisor=DIVISORS.get(loss_type(trainer), "unknown"),
            multiple=trainer.pad_to_multiple_of or 1,
            stands_left=not trainer.aux_loss_enabled,  # which counts the tokens that the mask shows
            skips=args.spec_skip_zero_advantage,
            gather=gather,
        )

    def __call__(self, batches: Sequence[Batch]) -> list[Batch]:
        """As many micro-batches as TRL has made, trimmed; in each window the longest rows first, so that what does not
        fit in memory fails at once, and the widest of all ranks coincide.

        Where rows without advantage are left out, ranks still have as many rows in each: TRL gathers some metrics row
        by row. So that none is empty, some of those rows stay, masked.
        """
        windows = [_joined(batches[start : start + self.window]) for start in range(0, len(batches), self.window)]
        if not self.skips:
            return [part for window in windows for part in self._split(window, len(window["advantages"]))]
        advantaged = [int(_has_advantage(window).sum()) for window in windows]
        most = np.max(self.gather(advantaged), axis=0)  # of any rank
        sizes = np.maximum(most, self.window).tolist()
        return [part for window, size in zip(windows, sizes, strict=True) for part in self._split(window, size)]

    def _split(self, window: Batch, size: int) -> list[Batch]:
        """The micro-batches of a window, of `size` rows together."""
        rows, tokens = len(window["advantages"]), int(_in_loss(window).sum())
        counts = _has_advantage(window) if self.skips else torch.ones(rows, dtype=torch.bool)
        if self.skips:
            window["completion_mask"] = window["completion_mask"] * counts[:, None]
        lengths = (window["prompt_mask"].sum(1) + window["completion_mask"].sum(1)).tolist()
        first = sorted(range(rows), key=list(zip(counts.tolist(), lengths, strict=True)).__getitem__, reverse=True)
        parts = [_select(window, part.tolist()) for part in np.array_split(first[:size], self.window)]
        for part in parts if self.skips else ():
            if self.divisor == "rows":
                part[LOSS_SCALE] = len(part["advantages"]) * self.window / rows
            elif self.divisor == "tokens":  # TRL divides by one at least
                part[LOSS_SCALE] = max(1, int(_in_loss(part).sum())) / max(1, tokens)
        return [trimmed(part, self.multiple) for part in parts]

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


def unknown_columns(batch: Batch) -> list[str]:
    """Names of tensors of which it is not known what their columns stand for."""
    known = _OF_PROMPT | _OF_COMPLETION | _OF_BOTH
    return sorted(key for key, value in batch.items() if getattr(value, "ndim", 0) > 1 and key not in known)


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
