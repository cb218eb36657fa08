"""vLLM as the engine of a rollout. The only part of the core that needs vLLM."""

from specrl_plugins.vllm.engine import VLLMEngine
from specrl_plugins.vllm.hidden_states import AsyncHiddenStates, HiddenStates
from specrl_plugins.vllm.intercept import InterceptedLLM
from specrl_plugins.vllm.request import VLLMRequest

__all__ = ["AsyncHiddenStates", "HiddenStates", "InterceptedLLM", "VLLMEngine", "VLLMRequest"]
