"""What the adapter relies on in TRL, as it was read there."""

from __future__ import annotations

import inspect
import re

import pytest

pytest.importorskip("trl")

import trl

import trl_integration.trainer
from trl_integration import micro_batches

pytestmark = pytest.mark.trl


@pytest.mark.parametrize("trainer", [trl.GRPOTrainer, trl.RLOOTrainer])
def test_the_private_methods_of_trl_are_where_they_were_read(trainer):
    """Fails when TRL moves what the adapter overrides: read the new source, then adapt and raise the version."""
    expected = {
        "_generate_single_turn": ["self", "prompt_ids", "images", "multimodal_fields"],
        "_get_per_token_logps_and_entropies": ["self", "model", "input_ids", "attention_mask", "logits_to_keep"],
        "_calculate_rewards": ["self", "inputs", "prompts", "completions", "completion_ids_list"],
        "_generate_and_score_completions": ["self", "inputs"],
        "_prepare_inputs": ["self", "generation_batch"],
        "_compute_loss": ["self", "model", "inputs"],
    }
    listed = re.findall(r"^- `(\w+)`", trl_integration.trainer.__doc__, re.MULTILINE)
    assert sorted(listed) == sorted(expected)
    for name, parameters in expected.items():
        method = inspect.unwrap(getattr(trainer, name))
        assert list(inspect.signature(method).parameters)[: len(parameters)] == parameters, name
    source = inspect.getsource(trainer._generate_and_score_completions)
    order = [source.index(f"self.{call}(") for call in ("_generate", "_get_per_token_logps_and_entropies",
                                                        "_calculate_rewards")]  # fmt: skip
    assert order == sorted(order)


@pytest.mark.parametrize("trainer", [trl.GRPOTrainer, trl.RLOOTrainer])
def test_micro_batches_of_trl_are_what_they_were_when_they_were_read(trainer):
    """Fails when TRL changes what the update is cut out of, or what a loss divides by."""
    prepare = inspect.getsource(inspect.unwrap(trainer._prepare_inputs))
    assert "self._buffered_inputs = [unsplit_pixel_values_by_grid(batch) for batch in generation_batches]" in prepare
    assert "inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]" in prepare
    made = inspect.getsource(trainer._generate_and_score_completions)
    keys = set(re.findall(r'output\["(\w+)"\] =', made[made.index("output = {") :]))
    keys |= set(re.findall(r'^ {12}"(\w+)": ', made[made.index("output = {") :], re.MULTILINE))
    images = {"pixel_values", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "image_sizes", "num_images"}
    images |= {"num_tiles", "image_position_ids"}  # refused
    of_rows = {"num_items_in_batch", "old_logps"}  # one number, or one a row
    columns = micro_batches._OF_PROMPT | micro_batches._OF_COMPLETION | micro_batches._OF_BOTH
    assert keys - images - of_rows <= columns, keys
    loss = inspect.getsource(trainer._compute_loss)
    if trainer is trl.RLOOTrainer:
        assert "loss = per_sequence_loss.mean()" in loss
        return
    branches = loss[loss.index('mode = "train"') : loss.index("# Entropy bonus")]
    assert set(re.findall(r'"(\w+)"', branches)) - {"train", "eval", "num_items_in_batch", "token"} == (
        set(micro_batches.DIVISORS) - {"rloo"}
    )
