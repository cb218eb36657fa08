"""Speculative rollouts and online pruning for OpenRLHF.

python -m openrlhf_integration.train_ppo_ray --use_spec_rollout ...
"""
