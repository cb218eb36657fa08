"""What vLLM may be told of how to draft. It imports no vLLM, so that a command line can be checked anywhere."""

from __future__ import annotations

from typing import Any

MOST_TOKENS = 128
"""Draft tokens of a step of the engine. Where there are more, vLLM (0.26 to 0.29) fails in the middle of a rollout."""

_WITHOUT_WEIGHTS = {"suffix", "ngram", "ngram_gpu", "custom_class"}


def check_speculative_config(config: Any, sleeps: bool) -> None:
    """Refuse a `speculative_config` with which a run would fail later, or draft nothing of use.

    Args:
        config (`dict`): as vLLM takes it.
        sleeps (`bool`): whether the engine's weights are discarded between rollouts.

    Raises:
        ValueError: with what to do; the setting's name is to go before it.
    """
    if not isinstance(config, dict) or not config:
        raise ValueError(f"is a dictionary or JSON of one, as vLLM takes it, not {config!r}.")
    tokens = config.get("num_speculative_tokens")
    if isinstance(tokens, int) and tokens > MOST_TOKENS:
        raise ValueError(f"has `num_speculative_tokens` {tokens}: vLLM verifies at most {MOST_TOKENS} in a step.")
    if sleeps and config.get("method") not in _WITHOUT_WEIGHTS:
        raise ValueError(
            f"has the method {config.get('method')!r}, whose weights would not come back when the engine wakes: switch "
            f"sleep mode off, or use one without weights ({', '.join(sorted(_WITHOUT_WEIGHTS))})."
        )
