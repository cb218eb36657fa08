"""Settings of TRL's colocated vLLM engine that TRL does not pass on."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def engine_settings(**settings: Any) -> Iterator[None]:
    """Have the engine built with these settings of `vllm.LLM` beside TRL's own.

    TRL builds it by the name `LLM` in the module of `VLLMGeneration`, as read in TRL 1.16.0.
    """
    import trl.generation.vllm_generation as generation

    built = generation.LLM
    generation.LLM = functools.partial(built, **settings)
    try:
        yield
    finally:
        generation.LLM = built


def refuse_wrong_drafting() -> None:
    """Refuse an engine on a CPU that samples wrongly where it drafts. Call once it is built.

    vLLM 0.29's CPU build takes each row's temperature for a whole number when it spreads it over the row's drafts, and
    then loses it.

    Raises:
        ValueError: naming the setting.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    temperatures = torch.tensor([0.5, 0.25])
    spread = expand_batch_to_tokens(temperatures, torch.tensor([2, 3], dtype=torch.int32), 3)
    if spread.tolist() != [0.5, 0.5, 0.25]:
        raise ValueError(
            "`spec_vllm_speculative_config`: this CPU build of vLLM loses the temperature of drafted tokens, so that "
            "what it samples would not be the policy's. Leave the setting out, or run on a GPU."
        )
