"""Online rollout pruning, after ARRoL (arXiv 2603.24840): responses that teach little are given up half-way.

The only part of the core, beside the engine of vLLM, that needs PyTorch.
"""

from specrl_plugins.pruning.calibrator import Calibrator
from specrl_plugins.pruning.groups import GroupPruning
from specrl_plugins.pruning.head import QualityHead
from specrl_plugins.pruning.pruner import Judgement, Pruner
from specrl_plugins.pruning.settings import PruningSettings
from specrl_plugins.pruning.survivors import draw, survival_probabilities
from specrl_plugins.pruning.voting import weighted_vote

__all__ = [
    "Calibrator",
    "GroupPruning",
    "Judgement",
    "Pruner",
    "PruningSettings",
    "QualityHead",
    "draw",
    "survival_probabilities",
    "weighted_vote",
]
