"""Settings of TRL's colocated vLLM engine that TRL does not pass on."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
