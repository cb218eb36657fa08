"""Metrics of speculative rollouts.

Everything is counted in sums over rows and tokens; a ratio is taken last. So counts of several batches, or of several
processes, add up to the right ratio, which a mean of ratios would not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields


@dataclass
class RolloutCounts:
    """Sums over the rows of one or more batches. Add them up with `+`."""

    rows: int = 0
    """Responses made."""
    completion_tokens: int = 0
    """Tokens of all responses, reused and generated."""
    generated_tokens: int = 0
    """Tokens that the engine sampled."""
    reused_tokens: int = 0
    """Tokens taken over from drafts."""
    engine_drafted_tokens: int = 0
    """Tokens that the engine drafted from past responses while it generated."""
    engine_accepted_tokens: int = 0
    """Of these, tokens that it sampled."""
    draft_rows: int = 0
    """Rows for which the cache had a trajectory of an earlier step."""
    verified_rows: int = 0
    """Rows whose draft was scored under the current policy."""
    drafted_tokens: int = 0
    """Tokens of the drafts that were scored."""
    reuse_rows: int = 0
    """Rows that reused at least one token."""
    full_reuse_rows: int = 0
    """Rows that needed no generation, and were not given up."""
    log_ratio_sum: float = 0.0
    """Sum of log q - log p over reused tokens, nats."""
    age_sum: int = 0
    """Sum over reused tokens of the visits since they were sampled."""
    reuse_reward_sum: float = 0.0
    """Sum of rewards of rows with reuse."""
    reuse_rewards: int = 0
    """Rows with reuse whose reward is known."""
    fresh_reward_sum: float = 0.0
    """Sum of rewards of rows without reuse."""
    fresh_rewards: int = 0
    """Rows without reuse whose reward is known."""
    reward_changes: int = 0
    """Rows with reuse whose reward is known, that of the draft, and that of another response to the prompt."""
    reward_change_sum: float = 0.0
    """Over these, half the squared difference between the reward and that of the draft."""
    reward_spread_sum: float = 0.0
    """Over these, the variance of rewards among the responses to the prompt: as large as the former where a reward has
    nothing to do with that of the draft."""
    refreshed_rows: int = 0
    """Drafts left aside by the refresh rate."""
    outlived_rows: int = 0
    """Drafts left aside by the carry-over limit."""
    paused_rows: int = 0
    """Rows for which no draft was looked up, because reuse does not pay or to compare it with plain batches."""
    dropped_vocabulary: int = 0
    """Drafts left aside for a token id outside the model's vocabulary."""
    dropped_length: int = 0
    """Drafts left aside because the prompt leaves no room for them in what the engine can score."""
    dropped_nonfinite: int = 0
    """Drafts left aside for a log-prob under the current policy that is NaN or infinite."""
    unstored_rows: int = 0
    """Responses that were not cached: a log-prob is no number, or the disk refused."""
    nonfinite_rows: int = 0
    """Of these, those whose log-probs are NaN or infinite."""
    corrupt_rows: int = 0
    """Rows of the cache that did not check out, each of them a miss; a damaged file counts as one."""
    corrected_rows: int = 0
    """Rows that the trainer corrects for having been sampled by another policy."""
    masked_rows: int = 0
    """Of these, rows that its correction leaves out of the loss altogether."""
    exchanged_bytes: int = 0
    """Bytes of trajectories sent to other nodes."""
    judged_rows: int = 0
    """Rows that online pruning looked at, at the detection length."""
    pruned_rows: int = 0
    """Of these, rows that it gave up before they had ended."""
    given_up_tokens: int = 0
    """Tokens of all rows that are not trained on, whether these had ended or not."""
    went_on_rows: int = 0
    """Of these, rows that went on beyond the detection length."""
    went_on_tokens: int = 0
    """Tokens that the latter were sampled beyond where they were judged."""
    lookup_s: float = 0.0
    """Seconds of looking up drafts."""
    verify_s: float = 0.0
    """Seconds of scoring drafts and deciding on them."""
    generate_s: float = 0.0
    """Seconds of generating; without those of sending weights to vLLM, waking it and putting it to sleep, which a plain
    rollout has too."""
    store_s: float = 0.0
    """Seconds of storing trajectories."""
    judge_s: float = 0.0
    """Seconds of judging responses at the detection length."""
    learn_s: float = 0.0
    """Seconds of learning to judge."""
    spared_s: float = 0.0
    """Seconds of the trainer's own log-prob pass that verification made unnecessary (an estimate, from the tokens that
    pass was spared and the seconds a token that verifying took)."""
    step_s: float = 0.0
    """Seconds of training since the batch before was stored: of a whole step, without evaluations and checkpoints. 0
    for the first batch of a run."""

    def __add__(self, other: RolloutCounts) -> RolloutCounts:
        return RolloutCounts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    @property
    def seconds(self) -> float:
        """Seconds that the rollouts cost, net of what they spared the trainer."""
        spent = self.lookup_s + self.verify_s + self.generate_s + self.store_s + self.judge_s + self.learn_s
        return spent - self.spared_s

    @property
    def dropped_drafts(self) -> int:
        """Drafts that could not be used."""
        return self.dropped_vocabulary + self.dropped_length + self.dropped_nonfinite

    @property
    def refused_rows(self) -> int:
        """Responses that the disk refused."""
        return self.unstored_rows - self.nonfinite_rows

    @property
    def mostly_unstored(self) -> bool:
        """Whether more than half of the responses were not cached, and cannot come back as drafts."""
        return 2 * self.unstored_rows > self.rows

    @property
    def trained_tokens(self) -> int:
        """Tokens of the responses that are trained on."""
        return self.completion_tokens - self.given_up_tokens

    @property
    def new_reward_fraction(self) -> float | None:
        """How much of the batch's rewards is drawn anew: of rows without reuse all, of the others as much as their
        squared change since the last visit is of what it would be by chance. `None` where that is not known: rewards
        come later, drafts have none, or all responses to a prompt earn the same."""
        if not self.reuse_rows:
            return 1.0 if self.rows else None
        if not self.reward_spread_sum or 2 * self.reward_changes < self.reuse_rewards:
            return None
        redrawn = min(self.reward_change_sum / self.reward_spread_sum, 1.0)
        return 1 - (1 - redrawn) * self.reuse_rewards / (self.reuse_rewards + self.fresh_rewards)

    def metrics(self) -> dict[str, float]:
        """Ratios and totals, by the names that every framework logs. What has no denominator is left out.

        | name | meaning |
        | --- | --- |
        | `spec/reused_token_fraction` | reused tokens / all completion tokens |
        | `spec/draft_hit_rate` | rows with a cached trajectory of an earlier step / rows that were looked up |
        | `spec/draft_accept_rate` | reused tokens / tokens of the drafts that were scored |
        | `spec/full_reuse_rate` | rows that needed no generation / rows |
        | `spec/fresh_row_rate` | rows without a reused token / rows |
        | `spec/prefix_length_mean` | reused tokens / rows whose draft was scored |
        | `spec/generated_tokens` | tokens that the engine sampled |
        | `spec/reused_tokens` | tokens taken over from drafts |
        | `spec/engine_draft_accept_rate` | tokens that the engine sampled as drafted / tokens that it drafted |
        | `spec/engine_draft_fraction` | tokens that the engine sampled as drafted / tokens that it sampled |
        | `spec/log_ratio_mean` | mean of log q - log p over reused tokens, nats: how far the policy has moved |
        | `spec/draft_age_mean` | mean visits since a reused token was sampled |
        | `spec/reward_gap` | mean reward of rows with reuse - mean reward of rows without |
        | `spec/new_reward_fraction` | rewards drawn anew / rows: what a batch teaches, see [`new_reward_fraction`] |
        | `spec/refresh_rate` | drafts left aside by the refresh rate / rows |
        | `spec/outlived_rate` | drafts left aside by the carry-over limit / rows |
        | `spec/paused_rate` | rows not looked up: reuse does not pay, or is compared with plain batches / rows |
        | `spec/dropped_drafts` | drafts that could not be used (vocabulary, context length, no log-probs) |
        | `spec/unstored_rows` | responses that were not cached |
        | `spec/corrupt_rows` | rows of the cache that were damaged, and misses; a damaged file counts as one |
        | `spec/masked_row_rate` | rows that importance correction leaves out of the loss / rows that it looked at |
        | `spec/exchanged_mib` | trajectories that all ranks sent to other nodes, MiB; only with several nodes |
        | `spec/time/lookup_s` | seconds of looking up drafts |
        | `spec/time/verify_s` | seconds of scoring drafts and deciding on them |
        | `spec/time/generate_s` | seconds of generating, but for sending weights to vLLM, waking it and its sleep |
        | `spec/time/store_s` | seconds of storing trajectories |
        | `spec/time/spared_s` | seconds of the trainer's log-prob pass that verification saved |
        | `prune/pruned_fraction` | responses given up at the detection length / responses started |
        | `prune/saved_tokens` | tokens that these were not sampled: an estimate, by the mean of those that went on |
        | `prune/time/judge_s` | seconds of judging responses at the detection length |
        | `prune/time/learn_s` | seconds of learning to judge |

        `spec/cache_rows` and `spec/cache_mib`, and those of the pruner, are added by
        [`SpeculativeRollout.take_metrics`].
        """
        metrics = {
            "spec/generated_tokens": float(self.generated_tokens),
            "spec/reused_tokens": float(self.reused_tokens),
            "spec/dropped_drafts": float(self.dropped_drafts),
            "spec/unstored_rows": float(self.unstored_rows),
            "spec/corrupt_rows": float(self.corrupt_rows),
            "spec/time/lookup_s": self.lookup_s,
            "spec/time/verify_s": self.verify_s,
            "spec/time/generate_s": self.generate_s,
            "spec/time/store_s": self.store_s,
            "spec/time/spared_s": self.spared_s,
        }
        ratios = {
            "spec/reused_token_fraction": (self.reused_tokens, self.completion_tokens),
            "spec/draft_hit_rate": (self.draft_rows, self.rows - self.paused_rows),
            "spec/draft_accept_rate": (self.reused_tokens, self.drafted_tokens),
            "spec/full_reuse_rate": (self.full_reuse_rows, self.rows),
            "spec/fresh_row_rate": (self.rows - self.reuse_rows, self.rows),
            "spec/prefix_length_mean": (self.reused_tokens, self.verified_rows),
            "spec/engine_draft_accept_rate": (self.engine_accepted_tokens, self.engine_drafted_tokens),
            "spec/log_ratio_mean": (self.log_ratio_sum, self.reused_tokens),
            "spec/draft_age_mean": (self.age_sum, self.reused_tokens),
            "spec/refresh_rate": (self.refreshed_rows, self.rows),
            "spec/outlived_rate": (self.outlived_rows, self.rows),
            "spec/paused_rate": (self.paused_rows, self.rows),
            "spec/masked_row_rate": (self.masked_rows, self.corrected_rows),
        }
        metrics |= {name: part / whole for name, (part, whole) in ratios.items() if whole}
        if self.engine_drafted_tokens:
            metrics["spec/engine_draft_fraction"] = self.engine_accepted_tokens / self.generated_tokens
        if self.judged_rows:
            metrics |= {
                "prune/pruned_fraction": self.pruned_rows / self.judged_rows,
                "prune/saved_tokens": self.pruned_rows * self.went_on_tokens / max(self.went_on_rows, 1),
                "prune/time/judge_s": self.judge_s,
                "prune/time/learn_s": self.learn_s,
            }
        if self.exchanged_bytes:
            metrics["spec/exchanged_mib"] = self.exchanged_bytes / 2**20
        if self.new_reward_fraction is not None:
            metrics["spec/new_reward_fraction"] = self.new_reward_fraction
        if self.reuse_rewards and self.fresh_rewards:
            metrics["spec/reward_gap"] = (
                self.reuse_reward_sum / self.reuse_rewards - self.fresh_reward_sum / self.fresh_rewards
            )
        return metrics


def totals(of_ranks: Sequence[RolloutCounts]) -> RolloutCounts:
    """Counts of a batch that ranks rolled out side by side: rows and tokens add up, seconds are the mean of the ranks.

    Args:
        of_ranks (`Sequence[RolloutCounts]` of length `ranks`): what each of them counted.
    """
    total = sum(of_ranks, RolloutCounts())
    for stage in (f.name for f in fields(total) if f.name.endswith("_s")):
        setattr(total, stage, getattr(total, stage) / len(of_ranks))
    return total
