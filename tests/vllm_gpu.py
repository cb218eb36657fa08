"""TRL's colocated engine as tests on a GPU want it. For tests only; the product has none of it."""

from __future__ import annotations

import functools
from typing import Any


def in_fp32() -> None:
    """Have it compute in fp32, so that it can be compared. Call before an engine is built; does nothing on a CPU."""
    import trl.generation.vllm_generation as generation
    from vllm.platforms import current_platform

    if not current_platform.is_cuda() or hasattr(generation.LLM, "__wrapped__"):
        return
    engine = generation.LLM

    # TRL passes neither dtype nor eager mode: the engine would be bf16, and compile for half a minute.
    # With the cache's size given, vLLM does not measure memory, which other processes on the GPU would disturb.
    @functools.wraps(engine)
    def gpu_engine(*args: Any, **kwargs: Any) -> Any:
        return engine(*args, dtype="float32", enforce_eager=True, kv_cache_memory_bytes=64 << 20, **kwargs)

    generation.LLM = gpu_engine
