"""The calibrator: from the head's scores to chances of success."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class Calibrator:
    """Chance of success by score, learned online.

    The head is trained as if both classes were equally frequent, and the policy changes under it: its scores order
    responses and are no chances. The calibrator counts, for each of B equal buckets of the score, the responses and the
    successes among them, w_j and s_j. Both are multiplied by a decay before each update, so that what was seen long ago
    counts for little. The chance in bucket j is the mean of a Beta posterior, whose prior is worth c responses with the
    overall success rate m:

        q_j = (s_j + c m) / (w_j + c),        m = (sum_j s_j + 1) / (sum_j w_j + 2).

    Between the mean scores of two buckets q is interpolated linearly, beyond the outermost it is constant: a step at
    the edge of a bucket would tie all responses within it. Where a score is not a number, m is the answer.

    Calibration error: predictions are compared with labels before these are learned from. With the predictions in B
    equal buckets of their own, and counts that decay as above, it is

        sum_j |sum of labels in j - sum of predictions in j| / number of predictions.

    Noise alone makes it about 0.4 sqrt(B / n) for n predictions near one half.
    """

    BUCKETS = 10  # B
    SHRINKAGE = 4.0  # c, responses
    DECAY = 0.95

    def __init__(self):
        self._weight = np.zeros(self.BUCKETS)
        self._successes = np.zeros(self.BUCKETS)
        self._scores = np.zeros(self.BUCKETS)
        self._predicted = 0.0
        self._gap = np.zeros(self.BUCKETS)

    @property
    def success_rate(self) -> float:
        """m, the overall success rate."""
        return float((self._successes.sum() + 1) / (self._weight.sum() + 2))

    @property
    def error(self) -> float | None:
        """Expected calibration error; `None` before anything was predicted and seen."""
        return float(np.abs(self._gap).sum() / self._predicted) if self._predicted else None

    def probabilities(self, scores: NDArray) -> NDArray:
        """Chance of success of responses with these scores.

        Args:
            scores (`NDArray` of shape `(rows,)`): between 0 and 1; NaN where unknown.

        Returns:
            `NDArray[np.float64]` of shape `(rows,)`.
        """
        scores = np.asarray(scores, np.float64)
        seen = self._weight > 0
        if not seen.any():
            return np.full(len(scores), self.success_rate)
        posterior = (self._successes + self.SHRINKAGE * self.success_rate) / (self._weight + self.SHRINKAGE)
        between = np.interp(scores, self._scores[seen] / self._weight[seen], posterior[seen])
        return np.where(np.isnan(scores), self.success_rate, between)

    def update(self, scores: NDArray, labels: NDArray, weights: NDArray) -> None:
        """Learn what became of judged responses.

        Args:
            scores (`NDArray` of shape `(rows,)`): between 0 and 1.
            labels (`NDArray` of shape `(rows,)`): 1 for a success, 0 for a failure.
            weights (`NDArray` of shape `(rows,)`): how many responses each stands for, above 0.
        """
        predictions = self.probabilities(scores)
        self._predicted = self.DECAY * self._predicted + weights.sum()
        self._gap = self.DECAY * self._gap + self._sums(predictions, weights * (labels - predictions))
        self._weight = self.DECAY * self._weight + self._sums(scores, weights)
        self._successes = self.DECAY * self._successes + self._sums(scores, weights * labels)
        self._scores = self.DECAY * self._scores + self._sums(scores, weights * scores)

    def _sums(self, places: NDArray, values: NDArray) -> NDArray:
        """Sum of the values in each bucket, by places between 0 and 1."""
        bucket = np.minimum((places * self.BUCKETS).astype(np.int64), self.BUCKETS - 1)
        return np.bincount(bucket, values, self.BUCKETS)

    def state_dict(self) -> dict[str, Any]:
        """All counts, as plain numbers."""
        return {
            "weight": self._weight.tolist(),
            "successes": self._successes.tolist(),
            "scores": self._scores.tolist(),
            "predicted": float(self._predicted),
            "gap": self._gap.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._weight = np.array(state["weight"])
        self._successes = np.array(state["successes"])
        self._scores = np.array(state["scores"])
        self._predicted = state["predicted"]
        self._gap = np.array(state["gap"])
