"""A draft proposer for vLLM's `speculative_config`."""

from __future__ import annotations

SPECULATIVE_CONFIG = {"method": "custom_class", "model": f"{__name__}.Repeater", "num_speculative_tokens": 2}


class Repeater:
    """Drafts that the last token comes twice more."""

    def __init__(self, vllm_config):
        pass

    def load_model(self, *args, **kwargs):
        pass

    def propose(self, *args, **kwargs):
        (sampled,) = [argument for argument in args if isinstance(argument, list)]
        return [tokens[-1:] * 2 for tokens in sampled]
