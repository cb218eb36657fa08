"""Online rollout pruning, after ARRoL (arXiv 2603.24840): responses that teach little are given up half-way.

`QualityHead`, `Pruner` and `Judgement` need torch, which the rest of the core does not: they are imported when asked
for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specrl_plugins.pruning.calibrator import Calibrator
from specrl_plugins.pruning.discrimination import auc
from specrl_plugins.pruning.settings import PruningSettings
from specrl_plugins.pruning.survivors import draw, survival_probabilities
from specrl_plugins.pruning.voting import weighted_vote

if TYPE_CHECKING:
    from specrl_plugins.pruning.head import QualityHead
    from specrl_plugins.pruning.pruner import Judgement, Pruner

__all__ = [
    "Calibrator",
    "Judgement",
    "Pruner",
    "PruningSettings",
    "QualityHead",
    "auc",
    "draw",
    "survival_probabilities",
    "weighted_vote",
]


def __getattr__(name: str) -> Any:
    if name == "QualityHead":
        from specrl_plugins.pruning.head import QualityHead

        return QualityHead
    if name in ("Judgement", "Pruner"):
        from specrl_plugins.pruning import pruner

        return getattr(pruner, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
