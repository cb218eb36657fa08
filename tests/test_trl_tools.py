"""TRL training runs with tools and environments: the first turn is reused, TRL does the others."""

from __future__ import annotations

import pytest

pytest.importorskip("trl")

import trl
import trl_tools
from datasets import Dataset
from trl_runs import CheckedGRPOTrainer, build, history, settings
from trl_update import ComparedGRPOTrainer

from trl_integration import SpecGRPOTrainer

pytestmark = pytest.mark.trl


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return trl_tools.build_model(tmp_path_factory.mktemp("tools-model"))


def tools_run(model, args, trainer=CheckedGRPOTrainer, **changes):
    return build(model, args, trainer=trainer, **(trl_tools.parts(model) | changes))


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(steps_per_generation=2, per_device_train_batch_size=4),
        dict(steps_per_generation=2, per_device_train_batch_size=4, mask_truncated_completions=True, temperature=1.3),
        dict(max_tool_calling_iterations=1, num_iterations=2, beta=0.05, spec_rule="full"),
    ],
    ids=lambda changes: "-".join(changes) or "default",
)
def test_the_first_turn_is_reused_and_log_probs_are_right(model, tmp_path, changes):
    trainer = tools_run(model, settings(tmp_path, **trl_tools.SETTINGS | changes))
    trainer.train()
    total = trainer.spec_rollout.total
    assert total.rows == trainer.checked_rows  # later turns are no rollouts
    fraction = history(trainer, "spec/reused_token_fraction")
    first_epoch = len(fraction) // 4
    assert fraction[:first_epoch] == [0] * first_epoch
    assert min(fraction[first_epoch:]) > 0
    # Of the first turns that were reused whole, some are the whole response and some are not.
    assert total.full_reuse_rows > trainer.went_on_rows > 0
    assert not any(history(trainer, "tools/failure_frequency"))


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo"])
def test_what_tools_answered_is_left_out_of_the_gradient_as_in_trl(model, tmp_path, loss_type):
    changes = dict(per_device_train_batch_size=2, gradient_accumulation_steps=4, num_train_epochs=2)
    args = settings(tmp_path, **trl_tools.SETTINGS | changes, loss_type=loss_type, spec_skip_zero_advantage=True)
    trainer = tools_run(model, args, trainer=ComparedGRPOTrainer)
    trainer.train()
    assert trainer.differences and max(trainer.differences) < 1e-9
    assert history(trainer, "tools/call_frequency") and max(history(trainer, "spec/update/skipped_row_share")) > 0


def test_flag_off_is_trl_and_flag_on_samples_the_same_first_epoch(model, tmp_path):
    runs = {}
    for name, trainer_class, enabled in (
        ("plain", trl.GRPOTrainer, False),
        ("off", SpecGRPOTrainer, False),
        ("on", CheckedGRPOTrainer, True),
    ):
        reward = trl_tools.RecordedReward()
        args = settings(tmp_path / name, **trl_tools.SETTINGS, use_spec_rollout=enabled)
        tools_run(model, args, trainer_class, reward_funcs=reward).train()
        runs[name] = reward.completions
    assert runs["off"] == runs["plain"]
    assert runs["on"][:3] == runs["plain"][:3]
    assert runs["on"][3:] != runs["plain"][3:]


def test_evaluation_with_tools_neither_reads_nor_writes_the_cache(model, tmp_path):
    args = settings(
        tmp_path, **trl_tools.SETTINGS, eval_strategy="epoch", per_device_eval_batch_size=4, num_generations_eval=4
    )
    trainer = tools_run(model, args, eval_dataset=Dataset.from_dict({"prompt": trl_tools.CHAT_PROMPTS[:4]}))
    trainer.train()
    assert history(trainer, "eval_tools/call_frequency")
    assert trainer.spec_rollout.total.rows == trainer.checked_rows == 12 * 8


def test_a_step_interrupted_by_a_tool_leaves_nothing_behind(model, tmp_path):
    calls = []

    def spell(word: str) -> str:
        """
        Spells a word.

        Args:
            word: the word.
        """
        calls.append(word)
        if len(calls) == 12:
            raise KeyboardInterrupt
        return trl_tools.spell(word)

    trainer = tools_run(model, settings(tmp_path, **trl_tools.SETTINGS), tools=[spell])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    before = trainer.checked_rows
    trainer.train()
    assert trainer.spec_rollout.total.rows == trainer.checked_rows - before == 12 * 8


class Environment:
    """Says in its first message what `spell` will add."""

    resets = 0
    changes = False

    def reset(self, **kwargs) -> str:
        Environment.resets += 1
        self.spelled = 0
        return f" {Environment.resets}" if Environment.changes else " go"

    def spell(self, word: str) -> str:
        """
        Spells a word.

        Args:
            word: the word.
        """
        self.spelled += 1
        return f"{len(word)}:"

    def get_reward(self) -> float:
        return float(self.spelled)


@pytest.mark.parametrize("changes", [False, True], ids=["same-prompt", "another-prompt"])
def test_environments(model, tmp_path, monkeypatch, caplog, changes):
    """Reuse follows the prompt that `reset` made; another one finds nothing, and that is said."""
    monkeypatch.setattr(Environment, "changes", changes)
    args = settings(tmp_path, **trl_tools.SETTINGS)
    trainer = tools_run(model, args, tools=None, reward_funcs=None, environment_factory=Environment)
    trainer.train()
    assert trainer.spec_rollout.total.rows == trainer.checked_rows == 12 * 8
    assert max(history(trainer, "reward")) > 0  # what the tools did to their environment
    if changes:
        assert trainer.spec_rollout.total.draft_rows == 0
        assert "no prompt has come back" in caplog.text
    else:
        assert min(history(trainer, "spec/reused_token_fraction")[3:]) > 0
        assert trainer.went_on_rows > 0
