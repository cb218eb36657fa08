"""TRL training runs whose rollouts use transformers' continuous batching, through `trainer.train()`."""

from __future__ import annotations

import gc

import pytest

pytest.importorskip("trl")

from conftest import build_tiny_model
from datasets import Dataset
from trl_runs import CONTINUOUS_BATCHING, PROMPTS, CheckedGRPOTrainer, CheckedRLOOTrainer, build, history, settings

from trl_integration import SpecRLOOConfig

pytestmark = pytest.mark.trl


@pytest.fixture(autouse=True, scope="module")
def little_garbage():
    """Each rollout collects garbage: what has been imported need not be searched every time."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize(
    "changes",
    [
        dict(temperature=0.7, top_k=20, top_p=0.9, min_p=0.02),
        dict(steps_per_generation=2, mask_truncated_completions=True, per_device_train_batch_size=4),
    ],
    ids=lambda changes: "-".join(changes),
)
def test_reuse_begins_with_the_second_epoch_and_log_probs_are_right(tiny_model, tmp_path, changes):
    trainer = build(tiny_model, settings(tmp_path, **(CONTINUOUS_BATCHING | changes)), trainer=CheckedGRPOTrainer)
    trainer.train()
    fraction = history(trainer, "spec/reused_token_fraction")
    first_epoch = len(fraction) // 3
    assert fraction[:first_epoch] == [0] * first_epoch
    assert min(fraction[first_epoch:]) > 0
    assert trainer.checked_rows == trainer.spec_rollout.total.rows
    assert trainer.spec_rollout.total.generated_tokens > 0


def test_rloo_with_many_end_tokens(tmp_path):
    model = build_tiny_model(tmp_path / "model", more_eos=3)
    trainer = build(model, settings(tmp_path, SpecRLOOConfig, **CONTINUOUS_BATCHING), trainer=CheckedRLOOTrainer)
    trainer.train()
    assert trainer.spec_rollout.total.reused_tokens > 0
    assert trainer.checked_rows == trainer.spec_rollout.total.rows


def test_evaluation_neither_reads_nor_writes_the_cache(tiny_model, tmp_path):
    """TRL leaves the model in training mode after a batch; an evaluation of two batches must not become training."""
    args = settings(
        tmp_path,
        eval_strategy="steps",
        eval_steps=3,
        per_device_eval_batch_size=4,
        num_generations_eval=4,
        **CONTINUOUS_BATCHING,
    )
    dataset = Dataset.from_dict({"prompt": [*PROMPTS[:2], "9+9=?", "8-1=?"]})
    trainer = build(tiny_model, args, trainer=CheckedGRPOTrainer, eval_dataset=dataset)
    trainer.train()
    assert len(history(trainer, "eval_reward")) == 3
    assert trainer.spec_rollout.total.rows == trainer.checked_rows == 9 * 8
    assert len(trainer.spec_rollout.cache) == len(PROMPTS) * 4


def test_a_row_that_fails_ends_the_run_with_its_error(tiny_model, tmp_path):
    """The model's own `generate_batch` would leave it out, and TRL would pair prompts with the wrong completions."""
    config = dict(block_size=16, num_blocks=2, max_batch_tokens=128)
    args = settings(
        tmp_path, **CONTINUOUS_BATCHING | dict(transformers_continuous_batching_config=config, max_completion_length=60)
    )
    trainer = build(tiny_model, args)
    with pytest.raises(RuntimeError, match="continuous batching"):
        trainer.train()
