"""The track record: how well responses were judged."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrl_plugins.pruning.discrimination import auc


class TrackRecord:
    """What was said of recent rows before their reward was known, and what became of them.

    These are the rows of the last `STEPS` steps, and at least the last `ROWS`: with large steps, two of them would
    leave it to chance whether a head is seen to be better than chance.
    """

    ROWS = 2048
    STEPS = 8

    def __init__(self):
        self._rows: dict[str, NDArray] = {
            "scores": np.zeros(0),
            "chances": np.zeros(0),
            "labels": np.zeros(0),
            "weights": np.zeros(0),
            "control": np.zeros(0, np.bool_),
            "groups": np.zeros(0, np.int64),
            "steps": np.zeros(0, np.int64),
        }
        self._groups = 0
        self._steps = 0
        self._surprise = 0.0

    def add(
        self, scores: NDArray, chances: NDArray, labels: NDArray, weights: NDArray, control: NDArray, groups: NDArray
    ) -> None:
        """Rows of one step.

        Args:
            scores, chances (`NDArray` of shape `(rows,)`): the head's, and the calibrator's, before they learned.
            labels (`NDArray` of shape `(rows,)`): 1 for a success, 0 for a failure.
            weights (`NDArray` of shape `(rows,)`): how many responses each stands for, above 0.
            control (`NDArray[np.bool_]` of shape `(rows,)`): whether the head had no say in the row's group.
            groups (`NDArray[np.int64]` of shape `(rows,)`): number, from 0, of what the row is compared with in this
                step.
        """
        new = {
            "scores": scores,
            "chances": chances,
            "labels": labels,
            "weights": weights,
            "control": control,
            "groups": self._groups + groups,  # the same prompt at another step is another group
            "steps": np.full(len(labels), self._steps),
        }
        self._groups += int(groups.max()) + 1
        self._steps += 1
        rows = {name: np.concatenate([old, new[name]]) for name, old in self._rows.items()}
        recent = int((rows["steps"] >= self._steps - self.STEPS).sum())
        self._rows = {name: values[-max(recent, self.ROWS) :] for name, values in rows.items()}
        self._measure()

    @property
    def surprise(self) -> float:
        """How far the AUC within groups is above 1/2, in standard errors of a head that knows nothing.

        Every row counts once here: of rows with given scores that are alike in having ended, chance decides which
        survive, so that under the hypothesis that labels do not depend on scores, those of survivors do not either.
        Weights would make an honest estimate of the AUC over all rows, as in the metrics, and a test that sees less.
        """
        return self._surprise

    def metrics(self) -> dict[str, float]:
        """What can be told so far, by names that follow `prune/`."""
        rows = self._rows
        if not len(rows["labels"]):
            return {}
        right = (rows["chances"] > 0.5) == (rows["labels"] == 1)
        metrics = {"head_accuracy": float(np.average(right, weights=rows["weights"]))}
        overall = auc(rows["scores"], rows["labels"], rows["weights"], np.zeros(len(rows["labels"]), np.int64))
        if overall is not None:
            metrics["head_auc"] = overall[0]
        in_groups = auc(rows["scores"], rows["labels"], rows["weights"], rows["groups"])
        if in_groups is not None:
            metrics["head_auc_in_groups"] = in_groups[0]
        if not rows["control"].all():
            metrics["survivor_positive_rate"] = float(rows["labels"][~rows["control"]].mean())
        if rows["control"].any():
            metrics["positive_rate_unpruned"] = float(rows["labels"][rows["control"]].mean())
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """All rows, as plain numbers."""
        return {
            "rows": {name: values.tolist() for name, values in self._rows.items()},
            "groups": self._groups,
            "steps": self._steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rows = {name: np.array(state["rows"][name], old.dtype) for name, old in self._rows.items()}
        self._groups, self._steps = state["groups"], state["steps"]
        self._measure()

    def _measure(self) -> None:
        rows = self._rows
        measured = auc(rows["scores"], rows["labels"], np.ones(len(rows["labels"])), rows["groups"])
        self._surprise = (measured[0] - 0.5) / measured[1] if measured is not None and measured[1] else 0.0
