"""TRL runs of the tiny model that prune, and a trainer that recomputes what they judge by and store."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from trl_runs import AsMade, plain_model, settings

from specrl_plugins import prompt_key
from trl_integration import SpecGRPOTrainer

LENGTH = 4
# Two rows of each of six prompts survive of four, three steps an epoch; the head has much to learn from in each.
SETTINGS = dict(
    spec_prune=True,
    spec_prune_detection_length=LENGTH,
    spec_prune_warmup_steps=4,
    per_device_train_batch_size=48,
    num_generations=8,
    num_train_epochs=8,
    learning_rate=1e-4,
)


def pruning_settings(output_dir, **changes):
    return settings(output_dir, **(SETTINGS | changes))


def reward_told_at_detection(completion_ids, **kwargs):
    """1 where the token at the detection length is even: the hidden state there tells it."""
    return [float(ids[:LENGTH][-1] % 2 == 0) for ids in completion_ids]


class CheckedPruning(SpecGRPOTrainer, AsMade):
    """Recomputes every rollout with a plain forward: hidden states, log-probs and what was stored, and the old
    log-probs of the loss. Tolerance: 1e-4 nats, and 1e-3 of a hidden state's largest entry (fp32; batches are padded
    differently)."""

    def _roll_out(self, *args):
        rollout = super()._roll_out(*args)
        self.rollouts = [*getattr(self, "rollouts", []), rollout]
        return rollout

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        rollout = self.rollouts[-1]
        trained = [
            ids[mask.bool()].tolist()
            for ids, mask in zip(output["completion_ids"], output["completion_mask"], strict=True)
        ]
        first_turns = [response.tokens.tolist() for response in rollout.responses]
        if self.tools:  # which go on, with what the tools answered and was written then
            trained = [ids[: len(turn)] for ids, turn in zip(trained, first_turns, strict=True)]
        assert trained == first_turns
        assert [r.key for r in rollout.responses] == [
            prompt_key(ids[mask.bool()].tolist())
            for ids, mask in zip(output["prompt_ids"], output["prompt_mask"], strict=True)
        ]
        everything = rollout.responses + rollout.pruned
        stored = self.spec_rollout.cache.get_many([(response.key, response.slot) for response in everything])
        model = plain_model(self)
        for response, trajectory in zip(everything, stored, strict=True):
            with torch.no_grad():
                seen = model(torch.tensor([response.prompt + response.tokens.tolist()]), output_hidden_states=True)
            logits = seen.logits[0, len(response.prompt) - 1 : -1] / self.temperature
            logprobs = logits.log_softmax(1).numpy()
            logprobs = logprobs[np.arange(len(response.tokens)), response.tokens]
            if self.args.use_spec_rollout:
                assert trajectory.tokens.tolist() == response.tokens.tolist()
                assert trajectory.finish_reason == response.finish_reason
                assert (trajectory.reward is None) == any(response is row for row in rollout.pruned)
                np.testing.assert_allclose(trajectory.logprobs, logprobs, atol=1e-4)
            if rollout.judged is not None:
                judged = rollout.judged.hidden[rollout.judged.rows[response.key, response.slot]]
                at = len(response.prompt) + min(LENGTH, len(response.tokens)) - 1
                state = seen.hidden_states[-1][0, at].numpy()
                np.testing.assert_allclose(judged, state, atol=1e-3 * np.abs(state).max())
        for row, found in enumerate(self.as_made.get("old_per_token_logps", ())):
            prompt, completion = (
                output[f"{part}_ids"][row][output[f"{part}_mask"][row].bool()] for part in ("prompt", "completion")
            )
            with torch.no_grad():
                logits = model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
            logprobs = (logits / self.temperature).log_softmax(1).gather(1, completion[:, None])[:, 0]
            np.testing.assert_allclose(found[: len(completion)], logprobs, atol=1e-4)
        return output


def check_counts(trainer):
    """What holds for a whole run of one process that has begun to prune."""
    for rollout in trainer.rollouts:
        started = len(rollout.responses) + len(rollout.pruned)
        assert started in (len(rollout.responses), 2 * len(rollout.responses))
        assert rollout.counts.pruned_rows == sum(r.finish_reason == "pruned" for r in rollout.pruned)
        assert not any(response.finish_reason == "pruned" for response in rollout.responses)
        groups = Counter(response.key for response in rollout.responses)
        assert set(groups.values()) == {trainer.num_generations}
    assert not trainer.rollouts[0].pruned
    assert trainer.spec_rollout.total.pruned_rows > 0
