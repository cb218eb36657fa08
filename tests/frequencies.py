"""Tests of frequencies. Each returns how surprising a sample is, as a standard normal deviate.

Seeds are fixed, so a test that passes once passes always; `SURPRISE` says how far from its mean a correct program
may lie: 4 standard deviations, a chance of 3 in 100,000 for each test that is written.
"""

from __future__ import annotations

import numpy as np

SURPRISE = 4.0


def chi_square(observed, expected) -> float:
    """Pearson's chi-square of counts against expected counts, made normal by Wilson and Hilferty's cube root."""
    observed, expected = np.asarray(observed, float), np.asarray(expected, float)
    assert expected.min() >= 5, "too few expected in a class for a chi-square test"
    assert np.isclose(observed.sum(), expected.sum())
    return _deviate(((observed - expected) ** 2 / expected).sum(), len(observed) - 1)


def surprise_of_tokens(tokens, chances) -> float:
    """Chi-square of sampled tokens against their chances; infinite where one came out that has none.

    Tokens that are expected fewer than 5 times are counted as one, with the next where these are too few.
    """
    counts = np.bincount(tokens, minlength=len(chances))
    if counts[chances == 0].any():
        return np.inf
    expected = len(tokens) * np.asarray(chances, float)
    order = np.argsort(expected)
    together = max(int((expected < 5).sum()), int(np.searchsorted(np.cumsum(expected[order]), 5)) + 1)
    rare, others = order[:together], order[together:]
    return chi_square([counts[rare].sum(), *counts[others]], [expected[rare].sum(), *expected[others]])


def homogeneity(a, b) -> float:
    """Chi-square of two rows of counts against one common distribution."""
    table = np.array([a, b], float)
    expected = table.sum(1, keepdims=True) * table.sum(0) / table.sum()
    assert expected.min() >= 5, "too few expected in a class for a chi-square test"
    return _deviate(((table - expected) ** 2 / expected).sum(), table.shape[1] - 1)


def binomial(successes: int, trials: int, chance: float) -> float:
    """Distance of a share from its chance, in standard deviations."""
    return abs(successes - trials * chance) / np.sqrt(trials * chance * (1 - chance))


def kolmogorov(sample) -> float:
    """Largest distance of the sample's distribution from the uniform one on (0, 1), times sqrt(n)."""
    ordered = np.sort(sample)
    n = len(ordered)
    above = np.arange(1, n + 1) / n - ordered
    below = ordered - np.arange(n) / n
    return float(np.sqrt(n) * max(above.max(), below.max()))


def _deviate(statistic: float, freedom: int) -> float:
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / np.sqrt(spread))
