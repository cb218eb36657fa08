"""Speculative rollouts for reinforcement learning of language models: reuse what the policy would write again."""

from specrl_plugins.acceptance import ReusePolicy, ReuseRule
from specrl_plugins.cache import CacheError, TrajectoryCache
from specrl_plugins.engine import Continuation, Engine
from specrl_plugins.fingerprint import Fingerprint, FingerprintMismatch
from specrl_plugins.guard import VerificationGuard
from specrl_plugins.metrics import RolloutCounts
from specrl_plugins.rollout import Response, Rollout, SpeculativeRollout
from specrl_plugins.trajectory import Trajectory, prompt_key

__version__ = "0.1.0"

__all__ = [
    "CacheError",
    "Continuation",
    "Engine",
    "Fingerprint",
    "FingerprintMismatch",
    "Response",
    "ReusePolicy",
    "ReuseRule",
    "Rollout",
    "RolloutCounts",
    "SpeculativeRollout",
    "Trajectory",
    "TrajectoryCache",
    "VerificationGuard",
    "prompt_key",
]
