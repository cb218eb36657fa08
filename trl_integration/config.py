"""TRL's configs with the settings of speculative rollouts beside them."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from trl import GRPOConfig, RLOOConfig

from specrl_plugins import ReusePolicy, ReuseRule
from specrl_plugins.pruning import PruningSettings
from specrl_plugins.rollout import Drafting, Mode
from specrl_plugins.setting import check_number
from specrl_plugins.vllm_drafting import check_speculative_config


@dataclass
class SpecRolloutArguments:
    r"""
    Settings of speculative rollouts, added to those of a TRL config.

    Parameters:
        use_spec_rollout (`bool`, *optional*, defaults to `False`):
            Whether to reuse past completions. With `False` the trainer is TRL's own.
        spec_rule (`str`, *optional*, defaults to `"speculative"`):
            How much of a past completion is reused: `"speculative"` keeps its verified prefix (SPEC-RL), `"random"`
            cuts it at random, `"full"` keeps all of it. The last two are baselines for comparison.
        spec_log_lenience (`float`, *optional*, defaults to `0.0`):
            Log of the lenience l of the speculative rule, in nats. 0 is the classical speculative rule; more reuses
            more and is further off policy.
        spec_refresh_rate (`float`, *optional*, defaults to `0.1`):
            Share of rows that are sampled afresh whatever the cache holds.
        spec_carry_limit (`int`, *optional*, defaults to `2`):
            Most visits of a prompt that a token is carried over before its row is sampled afresh. 0 sets no limit.
        spec_verifier (`str`, *optional*, defaults to `"trainer"`):
            What scores past completions: `"trainer"`, the trainer's own forward, whose result is then not computed
            again where TRL wants it to correct vLLM's samples; or `"engine"`, vLLM.
        spec_reused_logprobs (`str`, *optional*, defaults to `"verified"`):
            What TRL's importance-sampling correction is told of reused tokens: `"verified"`, their log-probs under the
            current policy, which keeps them; or `"behaviour"`, those under the policy that wrote them, bounded by the
            acceptance rule.
        spec_mode (`str`, *optional*, defaults to `"reuse"`):
            What past completions are for: `"reuse"` trains on their verified prefixes again; `"exact"` samples every
            completion afresh, and has the colocated vLLM engine draft from past ones, which saves time alone.
        spec_draft_tokens (`int`, *optional*):
            Most tokens that the colocated vLLM engine drafts from past completions in a step of its own; 0 drafts
            nothing. Not set: 16 in the exact mode, 0 with reuse, where it drafts what is left to generate.
        spec_draft_rows (`int`, *optional*, defaults to `64`):
            Nothing is drafted while more rows than these are running: a rollout ends with its longest rows, and drafts
            cost most where many run.
        spec_cache_dir (`str`, *optional*):
            Folder of the trajectory cache. Defaults to `spec_cache` in `output_dir`.
        spec_cache_max_mib (`float`, *optional*, defaults to `4096`):
            Size of the cache in MiB above which the least recently used trajectories are forgotten.
        spec_guard (`bool`, *optional*, defaults to `True`):
            Whether to pause reuse for some batches where a step with it is measured to take longer than what it
            teaches is worth. The pauses depend on timing: switch it off for runs that must repeat exactly.
        spec_trim_padding (`bool`, *optional*, defaults to `True`):
            Whether the update, the pass for the old log-probs and that of the reference leave out padding: rows of
            similar length share a micro-batch, as wide as the longest of them. Gradients are TRL's. With `False` these
            passes are TRL's own.
        spec_skip_zero_advantage (`bool`, *optional*, defaults to `False`):
            Whether the update leaves out rows whose advantage is exactly zero. Gradients are TRL's; entropy and clip
            ratios are logged without these rows. Refused where such rows add to the loss.
        spec_vllm_speculative_config (`dict` or `str`, *optional*):
            What the colocated vLLM engine gets as its `speculative_config`, which TRL does not pass on: how it drafts
            what is left to generate. vLLM samples from the policy all the same. Works with reuse and without. Where
            many rows of a small model are generated at once, it takes longer than it saves.
        spec_prune (`bool`, *optional*, defaults to `False`):
            Whether to prune rollouts online: `num_generations` completions of a prompt are trained on, more are
            started, and those that look like teaching least are given up on the way. Works with reuse and without.
        spec_prune_detection_length (`int`, *optional*, defaults to `512`):
            Tokens of a completion after which it is judged.
        spec_prune_oversample (`float`, *optional*, defaults to `2.0`):
            Completions that are started for each one that is trained on.
        spec_prune_target_share (`float`, *optional*, defaults to `0.5`):
            Share of successes that the completions that are trained on should have, where that can be had.
        spec_prune_warmup_steps (`int`, *optional*, defaults to `20`):
            Rollouts from which the judge learns before it may prune. Until then no more are started than are trained
            on.
        spec_prune_success_reward (`float`, *optional*, defaults to `0.5`):
            A completion whose reward is above this is a success.
    """

    use_spec_rollout: bool = field(
        default=False,
        metadata={"help": "Whether to reuse past completions. With `False` the trainer is TRL's own."},
    )
    spec_rule: str = field(
        default="speculative",
        metadata={
            "help": "How much of a past completion is reused: its verified prefix ('speculative', SPEC-RL), up to a "
            "random cut ('random') or all of it ('full'). The last two are baselines.",
            "choices": [rule.value for rule in ReuseRule],
        },
    )
    spec_log_lenience: float = field(
        default=0.0,
        metadata={
            "help": "Log of the lenience of the speculative rule, in nats. 0 is the classical speculative rule; more "
            "reuses more and is further off policy."
        },
    )
    spec_refresh_rate: float = field(
        default=0.1, metadata={"help": "Share of rows that are sampled afresh whatever the cache holds."}
    )
    spec_carry_limit: int = field(
        default=2,
        metadata={
            "help": "Most visits of a prompt that a token is carried over before its row is sampled afresh. 0 sets no "
            "limit."
        },
    )
    spec_verifier: str = field(
        default="trainer",
        metadata={
            "help": "What scores past completions: 'trainer', the trainer's own forward, whose result is then not "
            "computed again where TRL wants it to correct vLLM's samples; or 'engine', vLLM.",
            "choices": ["trainer", "engine"],
        },
    )
    spec_reused_logprobs: str = field(
        default="verified",
        metadata={
            "help": "What TRL's importance-sampling correction is told of reused tokens: 'verified', their log-probs "
            "under the current policy, which keeps them; or 'behaviour', those under the policy that wrote them, "
            "bounded by the acceptance rule.",
            "choices": ["verified", "behaviour"],
        },
    )
    spec_mode: str = field(
        default="reuse",
        metadata={
            "help": "What past completions are for: 'reuse' trains on their verified prefixes again; 'exact' samples "
            "every completion afresh, and has the colocated vLLM engine draft from past ones, which saves time alone.",
            "choices": [mode.value for mode in Mode],
        },
    )
    spec_draft_tokens: int | None = field(
        default=None,
        metadata={
            "help": "Most tokens that the colocated vLLM engine drafts from past completions in a step of its own; 0 "
            "drafts nothing. Not set: 16 in the exact mode, 0 with reuse, where it drafts what is left to generate."
        },
    )
    spec_draft_rows: int = field(
        default=64,
        metadata={
            "help": "Nothing is drafted while more rows than these are running: a rollout ends with its longest rows, "
            "and drafts cost most where many run."
        },
    )
    spec_cache_dir: str | None = field(
        default=None, metadata={"help": "Folder of the trajectory cache. Not set: `spec_cache` in `output_dir`."}
    )
    spec_cache_max_mib: float = field(
        default=4096.0,
        metadata={"help": "Size of the cache in MiB above which the least recently used trajectories are forgotten."},
    )
    spec_guard: bool = field(
        default=True,
        metadata={
            "help": "Whether to pause reuse for some batches where a step with it is measured to take longer than what "
            "it teaches is worth. The pauses depend on timing: switch it off for runs that must repeat exactly."
        },
    )
    spec_trim_padding: bool = field(
        default=True,
        metadata={
            "help": "Whether the update, the pass for the old log-probs and that of the reference leave out padding: "
            "rows of similar length share a micro-batch, as wide as the longest of them. Gradients are TRL's. With "
            "`False` these passes are TRL's own."
        },
    )
    spec_skip_zero_advantage: bool = field(
        default=False,
        metadata={
            "help": "Whether the update leaves out rows whose advantage is exactly zero. Gradients are TRL's; entropy "
            "and clip ratios are logged without these rows. Refused where such rows add to the loss."
        },
    )
    spec_vllm_speculative_config: dict | str | None = field(
        default=None,
        metadata={
            "help": "`speculative_config` of the colocated vLLM engine, as JSON: how it drafts what is left to "
            'generate, for instance \'{"method": "suffix", "num_speculative_tokens": 16}\'. vLLM samples from the '
            "policy all the same."
        },
    )
    spec_prune: bool = field(
        default=False,
        metadata={
            "help": "Whether to prune rollouts online: `num_generations` completions of a prompt are trained on, more "
            "are started, and those that look like teaching least are given up on the way."
        },
    )
    spec_prune_detection_length: int = field(
        default=512, metadata={"help": "Tokens of a completion after which it is judged."}
    )
    spec_prune_oversample: float = field(
        default=2.0, metadata={"help": "Completions that are started for each one that is trained on."}
    )
    spec_prune_target_share: float = field(
        default=0.5,
        metadata={
            "help": "Share of successes that the completions that are trained on should have, where that can be had."
        },
    )
    spec_prune_warmup_steps: int = field(
        default=20,
        metadata={
            "help": "Rollouts from which the judge learns before it may prune. Until then no more are started than are "
            "trained on."
        },
    )
    spec_prune_success_reward: float = field(
        default=0.5, metadata={"help": "A completion whose reward is above this is a success."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]  # TRL's config comes next in every class that mixes this in
        self._check_speculative_config()
        for name in ("use_spec_rollout", "spec_guard", "spec_prune", "spec_trim_padding", "spec_skip_zero_advantage"):
            if not isinstance(getattr(self, name), bool):  # any string would count as true
                raise ValueError(f"`{name}` is True or False, not {getattr(self, name)!r}.")
        if self.spec_verifier not in ("trainer", "engine"):
            raise ValueError(f"`spec_verifier` is 'trainer' or 'engine', not {self.spec_verifier!r}.")
        if self.spec_reused_logprobs not in ("verified", "behaviour"):
            raise ValueError(f"`spec_reused_logprobs` is 'verified' or 'behaviour', not {self.spec_reused_logprobs!r}.")
        check_number("spec_cache_max_mib", self.spec_cache_max_mib, "a size in MiB, above 0", lambda value: value > 0)
        visits = "a whole number of visits, or 0 for no limit"
        check_number("spec_carry_limit", self.spec_carry_limit, visits, lambda value: value >= 0, whole=True)
        if self.spec_cache_dir is not None:
            if not isinstance(self.spec_cache_dir, str | os.PathLike) or not os.fspath(self.spec_cache_dir):
                raise ValueError(f"spec_cache_dir is the path of a folder, not {self.spec_cache_dir!r}")
            self.spec_cache_dir = os.path.expanduser(self.spec_cache_dir)
        try:
            Mode(self.spec_mode)
            self.drafting()
            self.reuse_policy()
        except ValueError as error:  # it begins with the setting's name in the core
            raise ValueError(f"spec_{error}") from error
        if self.spec_log_lenience < 0:  # the core knows what it means, but a user who sets it means something else
            raise ValueError(f"spec_log_lenience is 0 or more nats (the log of a factor), not {self.spec_log_lenience}")
        try:
            self.pruning_settings()
        except ValueError as error:  # likewise
            raise ValueError(f"spec_prune_{error}") from error

    def _check_speculative_config(self) -> None:
        name, config = "spec_vllm_speculative_config", self.spec_vllm_speculative_config
        if config is None:
            return
        if isinstance(config, str):
            with suppress(ValueError):  # what is no JSON is refused below
                config = self.spec_vllm_speculative_config = json.loads(config)
        try:
            check_speculative_config(config, self.vllm_enable_sleep_mode)  # type: ignore[attr-defined]
        except ValueError as error:
            raise ValueError(f"`{name}` {error}") from error
        if not self.use_vllm or self.vllm_mode != "colocate":  # type: ignore[attr-defined]
            raise ValueError(
                f"`{name}` is for an engine in this process: set `use_vllm=True` and `vllm_mode='colocate'`. A server "
                "is told when it is started: `vllm serve --speculative-config`."
            )
        if self.min_p or "logit_bias" in (self.generation_kwargs or {}):  # type: ignore[attr-defined]
            raise ValueError(
                f"`{name}` with `min_p` or `logit_bias`, which vLLM does not apply to draft tokens. Leave either out."
            )

    def drafting(self) -> Drafting:
        """How the engine drafts from past completions."""
        tokens = self.spec_draft_tokens
        if tokens is None:
            tokens = 16 if self.use_spec_rollout and self.spec_mode == Mode.EXACT else 0
        return Drafting(tokens, self.spec_draft_rows)

    def reuse_policy(self) -> ReusePolicy:
        """The core's policy of these settings."""
        return ReusePolicy(
            rule=ReuseRule(self.spec_rule),
            log_lenience=self.spec_log_lenience,
            refresh_rate=self.spec_refresh_rate,
            carry_limit=self.spec_carry_limit or None,
            seed=self.seed,  # type: ignore[attr-defined]
        )

    def pruning_settings(self) -> PruningSettings:
        """The pruner's settings of these."""
        return PruningSettings(
            detection_length=self.spec_prune_detection_length,
            oversample=self.spec_prune_oversample,
            target_share=self.spec_prune_target_share,
            warmup_steps=self.spec_prune_warmup_steps,
            success_reward=self.spec_prune_success_reward,
        )

    def cache_directory(self, node: int = 0) -> Path:
        """Folder of the trajectory cache of a node: SQLite does not work over network file systems.

        Args:
            node (`int`, *optional*, defaults to 0): number of the node; those after the first have it in the name.
        """
        directory = Path(self.spec_cache_dir or Path(self.output_dir) / "spec_cache")  # type: ignore[attr-defined]
        return directory.with_name(f"{directory.name}-node{node}") if node else directory


@dataclass
class SpecGRPOConfig(SpecRolloutArguments, GRPOConfig):
    """[`~trl.GRPOConfig`] with the settings of [`SpecRolloutArguments`]."""


@dataclass
class SpecRLOOConfig(SpecRolloutArguments, RLOOConfig):
    """[`~trl.RLOOConfig`] with the settings of [`SpecRolloutArguments`]."""
