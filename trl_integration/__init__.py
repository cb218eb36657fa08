"""Speculative rollouts for TRL: the trainers and configs of TRL, with one flag more."""

from trl_integration.callback import RunLog
from trl_integration.config import SpecGRPOConfig, SpecRLOOConfig
from trl_integration.trainer import SpecGRPOTrainer, SpecRLOOTrainer

__all__ = ["RunLog", "SpecGRPOConfig", "SpecGRPOTrainer", "SpecRLOOConfig", "SpecRLOOTrainer"]
