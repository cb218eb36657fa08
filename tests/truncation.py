"""The sampled distribution from the definitions of its settings, in float64 and without the libraries' code."""

from __future__ import annotations

import numpy as np

# Every setting alone, and together so that the order of the cuts shows.
SETTINGS = [
    dict(temperature=0.6),
    dict(top_k=5),
    dict(top_p=0.7),
    dict(min_p=0.2),
    dict(temperature=1.7, top_k=12, top_p=0.8, min_p=0.3),
]


def name(settings) -> str:
    return "-".join(settings)


def log_probs(logits, sampler="transformers", temperature=1.0, top_k=0, top_p=1.0, min_p=None) -> np.ndarray:
    """Log-probs, nats, of the shape of `logits`, `(..., vocabulary)`; minus infinity for tokens that are cut."""
    weights = np.asarray(logits, np.float64) / temperature
    chances = np.exp(weights - weights.max(-1, keepdims=True))
    chances /= chances.sum(-1, keepdims=True)
    cuts = dict(top_k=lambda p: _top_k(p, top_k), top_p=lambda p: _top_p(p, top_p), min_p=lambda p: _min_p(p, min_p))
    orders = dict(transformers=("top_k", "top_p", "min_p"), vllm=("min_p", "top_k", "top_p"))
    for cut in orders[sampler]:
        chances = np.where(cuts[cut](chances), chances, 0)
        chances /= chances.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return np.log(chances)


def _top_k(p, k):
    """The k likeliest, and all that are as likely as the last of them."""
    return p >= np.sort(p, -1)[..., -(k or p.shape[-1]), None]


def _top_p(p, mass):
    """The fewest of the likeliest that have this mass."""
    order = np.argsort(-p, -1, kind="stable")
    ranked = np.take_along_axis(p, order, -1)
    before = np.cumsum(ranked, -1) - ranked
    kept = np.empty(p.shape, bool)
    np.put_along_axis(kept, order, (before < mass) | (mass == 1), -1)
    return kept


def _min_p(p, share):
    """All that have this share of the chance of the likeliest."""
    return p >= (share or 0) * p.max(-1, keepdims=True)
