"""How well scores tell successes from failures."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def auc(scores: NDArray, labels: NDArray, weights: NDArray, strata: NDArray) -> tuple[float, float] | None:
    """Area under the ROC curve within strata, and its standard error where scores mean nothing.

    Over all pairs of a success i and a failure j of one stratum, with P_ij = w_i w_j,

        AUC = sum P_ij ([s_i > s_j] + [s_i = s_j] / 2) / sum P_ij,

    the chance that the success has the higher score (Mann and Whitney's U over the number of pairs). If scores are
    independent of labels its mean is 1/2. Of two comparisons, the same one has covariance 1/4, two that share a row
    1/12, others 0, so that its variance is

        (sum P_ij^2 / 4 + sum_i ((sum_j P_ij)^2 - sum_j P_ij^2) / 12 + sum_j ((sum_i P_ij)^2 - sum_i P_ij^2) / 12)
        / (sum P_ij)^2,

    which with equal weights and one stratum of n successes and m failures is the well-known (n + m + 1) / (12 n m).
    Ties make it smaller.

    Args:
        scores (`NDArray` of shape `(rows,)`): finite.
        labels (`NDArray` of shape `(rows,)`): 1 for a success, 0 for a failure.
        weights (`NDArray` of shape `(rows,)`): how much a row counts, above 0.
        strata (`NDArray[np.int64]` of shape `(rows,)`): rows of different strata are not compared.

    Returns:
        AUC and standard error, or `None` where there is nothing to compare.
    """
    good, bad = np.flatnonzero(labels == 1), np.flatnonzero(labels == 0)
    pairs = np.outer(weights[good], weights[bad]) * (strata[good][:, None] == strata[bad])
    total = pairs.sum()
    if total == 0:
        return None
    above = np.sign(scores[good][:, None] - scores[bad]) / 2 + 0.5
    squares = (pairs**2).sum()
    shared = (pairs.sum(0) ** 2).sum() + (pairs.sum(1) ** 2).sum() - 2 * squares
    return float((pairs * above).sum() / total), float(np.sqrt(squares / 4 + shared / 12) / total)
