"""A stand-in for a vLLM `LLM`, through which a framework's own generation code can be made to do our work."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from vllm import LLM, RequestOutput, SamplingParams

from specrl_plugins.ranks import Ranks
from specrl_plugins.vllm.engine import VLLMEngine

T = TypeVar("T")


class InterceptedLLM:
    """Behaves as the `LLM` it wraps, but for two calls.

    `generate`, inside [`run_instead`], runs a piece of work of ours where the framework wanted to generate: after it
    woke the engine and synchronised the weights, before it puts the engine to sleep.

    `reset_prefix_cache` fails loudly where vLLM would answer `False`: the framework resets after each update of the
    weights, and blocks that survive hold keys and values of the old ones.

    Args:
        llm (`LLM`): the engine to stand in for.
        ranks (`Ranks`, *optional*): the processes that share it, where it is tensor-parallel. Defaults to this one.

    Attributes:
        framework_s (`float`): seconds that the framework's calls took beside our work, summed over all of them.
    """

    def __init__(self, llm: LLM, ranks: Ranks | None = None):
        self._llm = llm
        self._ranks = ranks
        self.framework_s = 0.0
        self._work: Callable[[VLLMEngine], None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def run_instead(self, work: Callable[[VLLMEngine], T], framework_call: Callable[[], Any]) -> T:
        """Run `work` in place of the one `generate` that `framework_call` leads to; returns what `work` returned.

        Raises:
            RuntimeError: `framework_call` did not generate.
        """
        results: list[T] = []

        def timed(engine: VLLMEngine) -> None:
            start = time.perf_counter()
            results.append(work(engine))
            self.framework_s -= time.perf_counter() - start

        self._work = timed
        start = time.perf_counter()
        try:
            framework_call()
        finally:
            self._work = None
        self.framework_s += time.perf_counter() - start
        if not results:
            raise RuntimeError(
                "the framework generated without calling LLM.generate: this version of it is not supported."
            )
        return results[0]

    def generate(
        self, prompts: Any, sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, **kwargs: Any
    ) -> list[RequestOutput]:
        """As `LLM.generate`; inside [`run_instead`] it returns no outputs, which `work` has already handed over."""
        if self._work is None:
            return self._llm.generate(prompts, sampling_params=sampling_params, **kwargs)
        if not isinstance(sampling_params, SamplingParams):
            raise TypeError("expected one SamplingParams for the whole batch")
        work, self._work = self._work, None
        work(VLLMEngine(self._llm, sampling_params, self._ranks))
        return []

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """As `LLM.reset_prefix_cache`.

        Raises:
            RuntimeError: blocks were in use, so stale ones remain.
        """
        if not self._llm.reset_prefix_cache(*args, **kwargs):
            raise RuntimeError(
                "vLLM could not reset its prefix cache (blocks are in use): keys and values of old weights would be "
                "read. A request that was never finished or aborted does this."
            )
        return True
