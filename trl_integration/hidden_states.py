"""The last layer's hidden states of a forward, whoever makes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import is_peft_model


@contextmanager
def last_hidden_states(model: Any) -> Iterator[list[torch.Tensor]]:
    """Collects what the model hands to its language-model head: the last layer's states, after the final norm.

    A hook on the backbone sees them in every kind of forward: TRL's own leaves the head's module out.

    Args:
        model ([`~transformers.PreTrainedModel`] or PEFT model): the policy.

    Returns:
        A list to which each forward adds a tensor of shape `(batch, tokens, hidden)`.
    """
    inner = model.get_base_model() if is_peft_model(model) else model
    states: list[torch.Tensor] = []
    hook = inner.base_model.register_forward_hook(lambda module, args, output: states.append(output.last_hidden_state))
    try:
        yield states
    finally:
        hook.remove()
