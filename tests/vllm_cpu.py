"""What a CPU build of vLLM (0.29) needs before its results are right. For tests only; the product has none of it."""

from __future__ import annotations

import functools
from typing import Any


def repair() -> None:
    """Make TRL's colocated engine right on a CPU. Call before an engine is built; does nothing on a GPU."""
    import trl.generation.vllm_generation as generation
    import vllm._custom_ops as custom_ops
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or hasattr(generation.LLM, "__wrapped__"):
        return
    # Packed linear weights are made once, when the model is loaded: a later weight update leaves them stale.
    custom_ops._supports_onednn = False
    expand_any_type()
    engine = generation.LLM

    # TRL passes neither dtype nor eager mode: the engine would be bf16, six times slower here, and compile for minutes.
    # A CPU engine refuses the sleep option, though its sleep and wake-up are there (and free nothing).
    @functools.wraps(engine)
    def cpu_engine(*args: Any, enable_sleep_mode: bool = False, **kwargs: Any) -> Any:
        # Engines of earlier tests stay in memory: each gets as little KV cache as the tiny model needs.
        return engine(*args, dtype="float32", enforce_eager=True, kv_cache_memory_bytes=64 << 20, **kwargs)

    generation.LLM = cpu_engine


def expand_any_type() -> None:
    """Speculative decoding spreads each row's temperature over its draft tokens, as whole numbers and into a copy."""
    import vllm.utils.cpu_triton_utils as kernels

    def expand(output: Any, values: Any, ends: Any, replace_from: int, replace_to: int, **_: Any) -> None:
        values = values.masked_fill(values == replace_from, replace_to)
        output.copy_(values.repeat_interleave(ends.diff(prepend=ends.new_zeros(1))))

    kernels.expand_kernel.func = expand
