"""A fingerprint: everything that must be equal for two runs to share trajectories."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

# Letters, digits, spaces and signs, as tokenizers treat them differently.
_TEXT = "The ANSWER is 1,234.5 = x^2 - 67\t(isn't it?)\n\n  naïve, 東京 🙂"


class FingerprintMismatch(ValueError):
    """A cache was made under other settings than those it is opened with."""


@dataclass(frozen=True)
class Fingerprint:
    """What the trajectories of a cache depend on.

    Args:
        model (`str`): name or path of the model.
        tokenizer (`str`): hash of what turns text into ids and back, see [`tokenizer_hash`].
        vocab_size (`int`): rows of the model's embedding or ids of the tokenizer, whichever are fewer.
        scorer (`str`): what computes the stored log-probs, since those of two backends differ by rounding.
        sampling (`dict[str, Any]`): every setting that shapes what is sampled (temperature, top-p, end tokens, ...);
            values that JSON can hold.
    """

    model: str
    tokenizer: str
    vocab_size: int
    scorer: str
    sampling: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Fingerprint:
        """Raises `ValueError` where `text` is not a fingerprint."""
        content = json.loads(text)
        names = {f.name for f in fields(cls)}
        if not isinstance(content, dict) or set(content) != names or not isinstance(content["sampling"], dict):
            raise ValueError("not a fingerprint")
        return cls(**content)

    def flat(self) -> dict[str, Any]:
        """One name and value a setting, `sampling.` before those of the sampler."""
        content = asdict(self)
        sampling = content.pop("sampling")
        # JSON has no tuples: compare what a round trip through it leaves.
        return content | {f"sampling.{name}": json.loads(json.dumps(value)) for name, value in sampling.items()}

    def differences(self, other: Fingerprint) -> list[str]:
        """One line a setting that differs: its name, the value here, the value there."""
        mine, theirs = self.flat(), other.flat()
        return [
            f"{name}: {mine.get(name, 'not set')!r} in the cache, {theirs.get(name, 'not set')!r} now"
            for name in sorted(mine | theirs)
            if mine.get(name) != theirs.get(name)
        ]


def tokenizer_hash(tokenizer: Any) -> str:
    """Hash of what determines how a tokenizer turns text into ids and back, equal in every process.

    What tokenizers of the `tokenizers` library do is all in their serialisation, padding and truncation aside: each
    call may set these anew. Of others their class, vocabulary and the ids of a text of every kind are known.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): a tokenizer of transformers.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content = json.loads(backend.to_str()) | {"padding": None, "truncation": None}
    else:
        content = [type(tokenizer).__qualname__, tokenizer.get_vocab(), tokenizer.encode(_TEXT)]
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
