"""Trainers that compare the gradient of every update with TRL's own, of the very same rows."""

from __future__ import annotations

from math import gcd

import torch
import trl
from double_precision import double_head, doubled

from trl_integration import SpecGRPOTrainer, SpecRLOOTrainer


def seldom(completions, **kwargs):
    """A reward that is the same within many groups, and within some but not all micro-batches."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(sum(x.isdigit() for x in text) >= 6) for text in texts]


class Compared:
    """Before a generation batch is trained on: the gradients of all its windows, by TRL's micro-batches and by ours.

    `differences` has, of each window, the largest difference of a gradient relative to the largest gradient; `shapes`
    the rows and tokens of each of our micro-batches, `wide` those of TRL's.
    """

    plain: type
    in_double = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.differences, self.shapes, self.wide = [], [], []
        if self.in_double:
            doubled(self.accelerator.unwrap_model(self.model))
            if getattr(self, "ref_model", None) is not None:
                doubled(self.accelerator.unwrap_model(self.ref_model))

    def train(self, *args, **kwargs):
        with double_head():
            return super().train(*args, **kwargs)

    def _trim(self, batches, narrow):
        wide = [self._with_trls_old_logprobs(dict(batch)) for batch in batches]
        ours = super()._trim(batches, narrow)
        window = gcd(self.args.steps_per_generation, self.args.gradient_accumulation_steps)
        assert len(ours) == len(wide)
        self.wide.append([self._shape(batch) for batch in wide])
        self.shapes.append([self._shape(batch) for batch in ours])
        for start in range(0, len(wide), window):
            expected = self._gradients(self.plain._compute_loss, wide[start : start + window])
            found = self._gradients(type(self)._compute_loss, ours[start : start + window])
            largest = max(gradient.abs().max().item() for gradient in expected)
            difference = max((a - b).abs().max().item() for a, b in zip(expected, found, strict=True))
            self.differences.append(difference / largest if largest else difference)
        return ours

    @staticmethod
    def _shape(batch):
        return len(batch["advantages"]), batch["prompt_ids"].size(1), batch["completion_ids"].size(1)

    def _with_trls_old_logprobs(self, batch):
        if not batch.keys() & {"old_logps", "old_per_token_logps"}:  # TRL's are then those of the loss
            return batch
        mask = batch["completion_mask"]
        with torch.no_grad():
            old = self.plain._get_per_token_logps_and_entropies(
                self,
                self.model,
                torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1),
                torch.cat([batch["prompt_mask"], mask], 1),
                mask.size(1),
            )[0]
        return batch | ({"old_logps": (old * mask).sum(1)} if "old_logps" in batch else {"old_per_token_logps": old})

    def _gradients(self, loss, batches):
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        total = sum(loss(self, self.model, batch) for batch in batches)
        gradients = torch.autograd.grad(total, parameters, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]


class ComparedGRPOTrainer(Compared, SpecGRPOTrainer):
    plain = trl.GRPOTrainer


class ComparedRLOOTrainer(Compared, SpecRLOOTrainer):
    plain = trl.RLOOTrainer
