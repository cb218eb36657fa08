"""A stand-in for a vLLM `LLM`, through which a framework's own generation code can be made to do our work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm import LLM, RequestOutput, SamplingParams

from specrl_plugins.intercept import Intercepted
from specrl_plugins.ranks import Ranks
from specrl_plugins.vllm.engine import VLLMEngine


class InterceptedLLM(Intercepted[VLLMEngine]):
    """Behaves as the `LLM` it wraps, but for two calls.

    `generate`, inside [`run_instead`], runs a piece of work of ours where the framework wanted to generate: after it
    woke the engine and synchronised the weights, before it puts the engine to sleep.

    `reset_prefix_cache` fails loudly where vLLM would answer `False`: the framework resets after each update of the
    weights, and blocks that survive hold keys and values of the old ones.

    Args:
        llm (`LLM`): the engine to stand in for.
        ranks (`Ranks`, *optional*): the processes that share it, where it is tensor-parallel. Defaults to this one.
    """

    def __init__(self, llm: LLM, ranks: Ranks | None = None):
        super().__init__(llm)
        self._ranks = ranks

    def generate(
        self, prompts: Any, sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, **kwargs: Any
    ) -> list[RequestOutput]:
        """As `LLM.generate`; inside [`run_instead`] it returns no outputs, which `work` has already handed over."""
        work = self._taken_work()
        if work is None:
            return self._original.generate(prompts, sampling_params=sampling_params, **kwargs)
        if not isinstance(sampling_params, SamplingParams):
            raise TypeError("expected one SamplingParams for the whole batch")
        work(VLLMEngine(self._original, sampling_params, self._ranks))
        return []

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """As `LLM.reset_prefix_cache`.

        Raises:
            RuntimeError: blocks were in use, so stale ones remain.
        """
        if not self._original.reset_prefix_cache(*args, **kwargs):
            raise RuntimeError(
                "vLLM could not reset its prefix cache (blocks are in use): keys and values of old weights would be "
                "read. A request that was never finished or aborted does this."
            )
        return True
