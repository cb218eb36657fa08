"""How well scores tell successes from failures."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def auc(scores: NDArray, labels: NDArray, weights: NDArray, strata: NDArray) -> tuple[float, float] | None:
    """Area under the ROC curve within strata, and its standard error where scores mean nothing.

    Over all pairs of a success i and a failure j of one stratum,

        AUC = sum w_i w_j ([s_i > s_j] + [s_i = s_j] / 2) / sum w_i w_j,

    the chance that the success has the higher score (Mann and Whitney's U over the number of pairs). With

        a_i = w_i / 2 * (sum of w_j with s_j < s_i - sum of w_j with s_j > s_i),        j of the stratum of i,

    AUC - 1/2 is the sum of the a_i of successes over the sum of w_i w_j: what pairs of two successes add cancels. If
    scores and weights are independent of labels, any n_1 of the n rows of a stratum may be the successes. Since its a_i
    have sum 0, the sum over successes then has mean 0 and variance n_1 (n - n_1) / (n (n - 1)) sum_i a_i^2, and strata
    are independent. With equal weights, no ties and one stratum this is the well-known (n + 1) / (12 n_1 (n - n_1)) for
    AUC. It holds for weights that depend on scores, as those of labels do after pruning.

    Args:
        scores (`NDArray` of shape `(rows,)`): finite.
        labels (`NDArray` of shape `(rows,)`): 1 for a success, 0 for a failure.
        weights (`NDArray` of shape `(rows,)`): how much a row counts, above 0.
        strata (`NDArray[np.int64]` of shape `(rows,)`): rows of different strata are not compared.

    Returns:
        AUC and standard error, or `None` where there is nothing to compare.
    """
    order = np.lexsort((scores, strata))
    scores, labels, weights, strata = scores[order], labels[order], weights[order], strata[order]
    _, stratum = np.unique(strata, return_inverse=True)
    weight = np.bincount(stratum, weights)
    pairs = (np.bincount(stratum, weights * labels) * np.bincount(stratum, weights * (1 - labels))).sum()
    if pairs == 0:
        return None
    # Rows that tie: same stratum, same score.
    tie = np.cumsum(np.append(True, (np.diff(stratum) != 0) | (np.diff(scores) != 0))) - 1
    tied = np.bincount(tie, weights)
    below = (np.cumsum(tied) - tied)[tie] - (np.cumsum(weight) - weight)[stratum]
    above = weight[stratum] - below - tied[tie]
    a = weights / 2 * (below - above)
    rows, successes = np.bincount(stratum), np.bincount(stratum, labels)
    spread = successes * (rows - successes) / np.maximum(rows * (rows - 1), 1)
    variance = (spread * np.bincount(stratum, a**2)).sum()
    return float(0.5 + a @ labels / pairs), float(np.sqrt(variance) / pairs)
