"""Models and TRL's loss in float64 throughout, so that what ought to be equal is equal to nine digits."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding


class RMSNorm(LlamaRMSNorm):
    def forward(self, hidden):  # transformers' goes over float32
        return torch.nn.functional.rms_norm(hidden, self.weight.shape, self.weight, self.variance_epsilon)


class RotaryEmbedding(LlamaRotaryEmbedding):
    def forward(self, x, position_ids):  # likewise
        angles = position_ids[:, :, None].double() * self.inv_freq.double().to(x.device)
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def doubled(model):
    """A Llama in float64, in place."""
    model.double()
    for module in model.modules():
        if type(module) is LlamaRMSNorm:
            module.__class__ = RMSNorm
        elif type(module) is LlamaRotaryEmbedding:
            module.__class__ = RotaryEmbedding
    return model


def _logprobs(hidden, weight, bias, labels, temperature, *_):
    logits = torch.nn.functional.linear(hidden, weight, bias) / temperature
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, labels[:, None])[:, 0], entropy, None, None, None


@contextmanager
def double_head():
    """TRL's output head in float64 while open: its own computes in float32, whatever it is given."""
    with mock.patch("trl.trainer.utils._ChunkedLogProbFunction", SimpleNamespace(apply=_logprobs)):
        yield
