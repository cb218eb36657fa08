"""What a TRL run of the tiny model needs to use tools: TRL's own loop, parser and template checks do the rest."""

from __future__ import annotations

from conftest import build_tiny_model
from transformers import AutoTokenizer
from trl_runs import PROMPTS

CHAT_PROMPTS = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
# Room for a first turn, for what the tool answers and for more turns.
SETTINGS = dict(max_completion_length=24, num_train_epochs=4, learning_rate=3e-4)

_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% for call in m['tool_calls'] or [] %}"
    "{{ call['function']['name'] }}{{ call['function']['arguments'] }}{% endfor %}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)
# Whatever follows one of these letters is the argument of a call: the untrained model calls in about half of its turns.
_RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "=",
    "fields": {
        "tool_calls": {
            "open_pattern": "[a-h]",
            "close": "</s>",
            "repeats": True,
            "content": "text",
            "transform": {"type": "function", "function": {"name": "spell", "arguments": {"word": "{content}"}}},
        },
        "content": {"close": "</s>", "content": "text"},
    },
}


def build_model(directory) -> str:
    """A tiny model whose responses are short, since many characters end them."""
    return build_tiny_model(directory, more_eos=8)


def tokenizer(model: str):
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    tokenizer.chat_template, tokenizer.response_template = _CHAT_TEMPLATE, _RESPONSE_TEMPLATE
    return tokenizer


def spell(word: str) -> str:
    """
    Spells a word.

    Args:
        word: the word.
    """
    return f"{len(word)}:"


def parts(model: str) -> dict:
    """What a trainer is built with, beside its config."""
    return dict(
        tools=[spell],
        reward_funcs=RecordedReward(),
        prompts=CHAT_PROMPTS,
        processing_class=tokenizer(model),
    )


class RecordedReward:
    """Rewards calls, and keeps every completion that it was asked about."""

    __name__ = "reward_calls"

    def __init__(self):
        self.completions = []

    def __call__(self, completions, **kwargs):
        self.completions.append(completions)
        return [sum(message["role"] == "tool" for message in completion) / 4 for completion in completions]
