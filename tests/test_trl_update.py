"""The update without padding: TRL's gradients, from narrower micro-batches."""

from __future__ import annotations

import functools
import inspect
import itertools

import pytest

pytest.importorskip("trl")

import numpy as np
import torch
import trl
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    MixtralConfig,
    MixtralForCausalLM,
    TrainerCallback,
)
from trl.trainer.utils import split_tensor_dict
from trl_runs import PROMPTS, RecordedReward, build, history, settings, timeless
from trl_update import ComparedGRPOTrainer, ComparedRLOOTrainer, seldom

from trl_integration import SpecGRPOConfig, SpecGRPOTrainer, SpecRLOOConfig
from trl_integration.checks import UnsupportedSetting, keeps_padding
from trl_integration.micro_batches import DIVISORS, MicroBatches, trimmed

pytestmark = pytest.mark.trl

LOSSES = ["grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"]
# Four micro-batches of four rows, of prompts and completions of many lengths.
ROWS = dict(per_device_train_batch_size=4, gradient_accumulation_steps=4, max_completion_length=24)
UNEVEN = [*PROMPTS, "12345+1=?", "7+7+7+7+7=?"]


def compared(tiny_model, tmp_path, trainer=ComparedGRPOTrainer, parts=None, **changes):
    """A run of ours in float64, every generation batch of which is compared with TRL."""
    config = SpecRLOOConfig if trainer is ComparedRLOOTrainer else SpecGRPOConfig
    args = settings(tmp_path, config, **ROWS | dict(num_train_epochs=2) | changes)
    built = build(tiny_model, args, trainer=trainer, prompts=UNEVEN, **parts or {})
    built.train()
    assert built.differences and max(built.differences) < 1e-9, max(built.differences)
    return built


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_every_loss_has_trls_gradient(tiny_model, tmp_path, loss_type, beta):
    trainer = compared(tiny_model, tmp_path, loss_type=loss_type, beta=beta)
    widths = [prompt + completion for _, prompt, completion in trainer.shapes[0]]
    if loss_type == "bnpo":  # in TRL's order
        assert widths != sorted(widths, reverse=True) or len(set(widths)) == 1
    else:
        assert trainer.shapes[0] != trainer.wide[0]
    assert all(share <= 1 for share in history(trainer, "spec/update/real_token_share"))


@pytest.mark.parametrize(
    "changes",
    [
        dict(num_iterations=2),
        dict(steps_per_generation=8),
        dict(steps_per_generation=2),
        dict(steps_per_generation=6),
        dict(steps_per_generation=8, num_iterations=2),
        dict(mask_truncated_completions=True, max_completion_length=12),
        dict(importance_sampling_level="sequence"),
        dict(loss_type="luspo", importance_sampling_level="sequence"),
        dict(entropy_coef=0.01),
        dict(use_adaptive_entropy=True),
        dict(top_entropy_quantile=0.3),
        dict(off_policy_mask_threshold=0.1, num_iterations=2),
        dict(delta=1.5, num_iterations=2),
        dict(beta=0.1, use_bias_correction_kl=True, num_iterations=2),
        dict(pad_to_multiple_of=8),
        dict(gradient_checkpointing=True),
        dict(temperature=1.3),
        dict(top_k=5, num_iterations=2),
    ],
    ids=lambda changes: "-".join(f"{name}={value}" for name, value in changes.items()),
)
def test_every_setting_has_trls_gradient(tiny_model, tmp_path, changes):
    trainer = compared(tiny_model, tmp_path, **changes)
    if multiple := changes.get("pad_to_multiple_of"):
        assert not any(width % multiple for shapes in trainer.shapes for _, *widths in shapes for width in widths)


@pytest.mark.parametrize("changes", [dict(), dict(beta=0.1), dict(num_iterations=2), dict(steps_per_generation=8)])
def test_rloo_has_trls_gradient(tiny_model, tmp_path, changes):
    compared(tiny_model, tmp_path, ComparedRLOOTrainer, **changes)


def never(completions, **kwargs):
    return [0.0] * len(completions)


@pytest.mark.parametrize("reward", [seldom, never])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_rows_without_advantage_are_left_out_of_every_loss(tiny_model, tmp_path, loss_type, reward):
    changes = dict(loss_type=loss_type, spec_skip_zero_advantage=True)
    trainer = compared(tiny_model, tmp_path, parts=dict(reward_funcs=reward), **changes)
    shares = history(trainer, "spec/update/skipped_row_share")
    rows = [[shape[0] for shape in shapes] for shapes in trainer.shapes]
    assert all(len(sizes) == 4 and min(sizes) >= 1 for sizes in rows)  # as many backward calls as TRL's
    assert shares == [1 - sum(sizes) / 16 for sizes in rows]
    assert set(shares) == {0.75} if reward is never else any(0 < share < 0.75 for share in shares)


@pytest.mark.parametrize(
    ("trainer", "changes"),
    [
        (ComparedGRPOTrainer, dict(num_iterations=2)),
        (ComparedGRPOTrainer, dict(steps_per_generation=8, loss_type="grpo")),
        (ComparedGRPOTrainer, dict(mask_truncated_completions=True, max_completion_length=12, loss_type="bnpo")),
        (ComparedRLOOTrainer, dict()),
        (ComparedRLOOTrainer, dict(beta=0.1)),
    ],
)
def test_rows_without_advantage_are_left_out_of_every_schedule(tiny_model, tmp_path, trainer, changes):
    found = compared(tiny_model, tmp_path, trainer, dict(reward_funcs=seldom), spec_skip_zero_advantage=True, **changes)
    assert bool(changes.get("beta")) or max(history(found, "spec/update/skipped_row_share")) > 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(beta=0.1), "beta=0.1"),
        (dict(entropy_coef=0.01), "entropy_coef"),
        (dict(use_adaptive_entropy=True), "use_adaptive_entropy"),
        (dict(top_entropy_quantile=0.5), "top_entropy_quantile=0.5"),
        (dict(spec_trim_padding=False), "spec_trim_padding=False"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_leaving_rows_out_is_refused_where_they_count(tiny_model, tmp_path, changes, named):
    with pytest.raises(UnsupportedSetting, match=f"spec_skip_zero_advantage=True.*{named}"):
        build(tiny_model, settings(tmp_path, spec_skip_zero_advantage=True, **changes))


def same_loss(name):
    """A method of a subclass that calls TRL's."""

    def method(self, *args, **kwargs):
        return getattr(super(Subclass, self), name)(*args, **kwargs)

    Subclass = type("Subclass", (SpecGRPOTrainer,), {name: method})
    return Subclass


def patched(name):
    """TRL's trainer by a library that replaces a method of it, and puts TRL's name and documentation on its own."""
    original = inspect.getattr_static(trl.GRPOTrainer, name)
    function = getattr(original, "__func__", original)
    wrapped = functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs))
    return type(original)(wrapped) if isinstance(original, staticmethod) else wrapped


@pytest.mark.parametrize(
    "name", ["compute_loss", "_compute_loss", "_prepare_inputs", "get_off_policy_mask", "get_high_entropy_mask"]
)
@pytest.mark.parametrize("by", ["subclass", "patch", "assignment"])
def test_a_loss_that_is_not_trls_keeps_its_padding(tiny_model, tmp_path, name, by, monkeypatch, capsys):
    """What it does with a micro-batch, and with its padding, is not known."""
    trainer = same_loss(name) if by == "subclass" else SpecGRPOTrainer
    if by == "patch":
        monkeypatch.setattr(trl.GRPOTrainer, name, patched(name))
    config = settings(tmp_path, **ROWS, max_steps=1)
    if by != "assignment":
        built = build(tiny_model, config, trainer=trainer)
        assert built._micro_batches is None
        built.train()
        assert f"{name}` is not TRL's" in capsys.readouterr().out
        with pytest.raises(UnsupportedSetting, match=f"{name}` is not TRL's"):
            build(tiny_model, settings(tmp_path / "skip", spec_skip_zero_advantage=True), trainer=trainer)
        return
    built = build(tiny_model, config)
    setattr(built, name, getattr(built, name))
    built.train()
    assert f"`{name}` of the trainer was replaced" in capsys.readouterr().out
    assert not history(built, "spec/update/real_token_share")


def test_a_kind_of_loss_that_is_not_known_keeps_trls_padding(tiny_model, tmp_path, monkeypatch):
    monkeypatch.delitem(DIVISORS, "dapo")
    trainer = build(tiny_model, settings(tmp_path, **ROWS, num_train_epochs=1))
    assert "dapo" in keeps_padding(trainer) and trainer._micro_batches is None


def test_noise_that_depends_on_the_width_keeps_trls_padding(tiny_model, tmp_path, caplog):
    trainer = build(tiny_model, settings(tmp_path, **ROWS, neftune_noise_alpha=5.0))
    assert "neftune_noise_alpha" in keeps_padding(trainer) and trainer._micro_batches is None
    assert "neftune_noise_alpha" in caplog.text


class Holes(ComparedGRPOTrainer):
    """Leaves tokens in the middle of completions out of the loss, and of attention."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        output["completion_mask"] = output["completion_mask"].clone()
        output["completion_mask"][:, 2:5] = 0
        return output


def test_a_mask_with_holes_keeps_trls_padding(tiny_model, tmp_path, caplog):
    trainer = compared(tiny_model, tmp_path, Holes)
    assert trainer.shapes == trainer.wide
    assert caplog.text.count("a mask leaves tokens out in the middle of a row") == 1


class Halved(TrainerCallback):
    """Half as many micro-batches an optimizer step in the second epoch."""

    def on_epoch_begin(self, args, state, control, **kwargs):
        args.gradient_accumulation_steps = 4 if (state.epoch or 0) < 1 else 2


def test_rows_stay_in_their_optimizer_step_whatever_becomes_of_the_schedule(tiny_model, tmp_path):
    trainer = compared(tiny_model, tmp_path, parts=dict(callbacks=[Halved()]), loss_type="grpo", num_train_epochs=3)
    assert trainer.args.gradient_accumulation_steps == 2


class Reader(SpecGRPOTrainer):
    """Reads what TRL's batches hold."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self.seen = {*getattr(self, "seen", ()), *output}
        return output


def test_a_batch_holds_what_trls_holds(tiny_model, tmp_path):
    """With the old log-probs that TRL makes where an update does not end with the generation batch."""
    trainer = build(tiny_model, settings(tmp_path, **ROWS, steps_per_generation=3, max_steps=3), trainer=Reader)
    trainer.train()
    assert "old_per_token_logps" in trainer.seen


def experts(directory, tiny_model, **changes):
    """A tiny mixture of experts that balances their load, or not."""
    torch.manual_seed(0)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(directory)
    own = AutoConfig.from_pretrained(tiny_model)
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=16)
    ids = dict(vocab_size=own.vocab_size, eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id)
    MixtralForCausalLM(MixtralConfig(**sizes, **ids, num_key_value_heads=1, **changes)).save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_experts_whose_load_is_balanced_keep_their_company(tiny_model, tmp_path, coefficient):
    """In float32, since nothing of this model can be made to compute in float64."""
    model = experts(tmp_path / "model", tiny_model, router_aux_loss_coef=coefficient)

    class InSingle(ComparedGRPOTrainer):
        in_double = False

    trainer = build(model, settings(tmp_path / "out", **ROWS, num_train_epochs=1), trainer=InSingle, prompts=UNEVEN)
    assert trainer._micro_batches.deals == (coefficient == 0)
    assert trainer._micro_batches.stands_left == (coefficient == 0)
    trainer.train()
    assert max(trainer.differences) < 1e-4


@pytest.mark.parametrize("rope_type", ["dynamic", "default"])
def test_a_model_whose_positions_depend_on_the_width_keeps_trls_padding(tiny_model, tmp_path, rope_type, capsys):
    config = AutoConfig.from_pretrained(tiny_model)
    config.rope_parameters = dict(rope_type=rope_type, factor=2.0, rope_theta=10000.0)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    args = settings(tmp_path / "out", **ROWS, num_train_epochs=1)
    trainer = build(str(tmp_path / "model"), args, tokenizer=tiny_model)
    trainer.train()
    kept = rope_type == "dynamic"
    assert bool(history(trainer, "spec/update/real_token_share")) != kept
    assert ("keep TRL's, since the model's positions" in capsys.readouterr().out) == kept


def test_a_clipping_that_counts_padding_keeps_it(tiny_model, tmp_path):
    trainer = build(tiny_model, settings(tmp_path, loss_type="vespo"))
    assert keeps_padding(trainer) is None
    trainer.use_vllm, trainer.vllm_importance_sampling_mode = True, "token_truncate"
    assert keeps_padding(trainer) is None
    trainer.vllm_importance_sampling_clip_max = 0.9
    assert "vespo" in keeps_padding(trainer)


def test_switched_off_everything_is_trls(tiny_model, tmp_path):
    """The same numbers to the last bit, as long as nothing is reused."""
    runs = {}
    changes = ROWS | dict(beta=0.1, num_iterations=2, num_train_epochs=1)
    for name, trainer, args in (
        ("trl", trl.GRPOTrainer, settings(tmp_path / "trl", trl.GRPOConfig, **changes)),
        ("off", SpecGRPOTrainer, settings(tmp_path / "off", spec_trim_padding=False, **changes)),
    ):
        built = build(tiny_model, args, trainer=trainer, prompts=UNEVEN)
        built.train()
        runs[name] = [{k: v for k, v in line.items() if not k.startswith("spec/")} for line in timeless(built)]
    assert runs["off"] == runs["trl"]


@pytest.mark.parametrize("changes", [dict(), dict(loss_type="grpo", beta=0.05, num_iterations=2)], ids=["dapo", "kl"])
def test_twenty_steps_earn_the_same_rewards(tiny_model, tmp_path, changes):
    """In float32, nothing being reused: so completions are the same, and gradients as near as rounding allows."""
    runs = {}
    common = ROWS | dict(gradient_accumulation_steps=2, num_train_epochs=10, learning_rate=1e-4) | changes
    for name, trainer, args in (
        ("trl", trl.GRPOTrainer, settings(tmp_path / "trl", trl.GRPOConfig, max_steps=20, **common)),
        ("ours", SpecGRPOTrainer, settings(tmp_path / "ours", max_steps=20, spec_refresh_rate=1.0, **common)),
    ):
        reward = RecordedReward()
        built = build(tiny_model, args, trainer=trainer, prompts=UNEVEN, reward_funcs=reward)
        built.train()
        runs[name] = reward.completions, history(built, "reward"), history(built, "grad_norm")
    assert len(runs["trl"][2]) == 20 and runs["ours"][:2] == runs["trl"][:2]
    np.testing.assert_allclose(runs["ours"][2], runs["trl"][2], rtol=1e-3)


def test_an_adapter_has_trls_gradient(tiny_model, tmp_path):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    compared(tiny_model, tmp_path, parts=dict(peft_config=lora), beta=0.1, num_iterations=2)


class AdvantagePerToken(ComparedGRPOTrainer):
    """As a subclass may, it gives every token an advantage of its own."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        decay = 0.9 ** torch.arange(output["completion_ids"].size(1))
        output["advantages"] = output["advantages"][:, None] * decay
        return output


def test_advantages_of_tokens_follow_their_rows(tiny_model, tmp_path):
    compared(tiny_model, tmp_path, AdvantagePerToken)
    compared(tiny_model, tmp_path, AdvantagePerToken, dict(reward_funcs=seldom), spec_skip_zero_advantage=True)


class ColumnsOfItsOwn(SpecGRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        output["hints"] = torch.zeros(len(output["advantages"]), output["completion_ids"].size(1))
        return output


def test_a_batch_with_columns_that_nobody_knows_keeps_trls_padding(tiny_model, tmp_path, caplog):
    trainer = build(tiny_model, settings(tmp_path, **ROWS), trainer=ColumnsOfItsOwn, prompts=UNEVEN)
    trainer.train()
    assert not history(trainer, "spec/update/real_token_share")
    assert [record for record in caplog.messages if "hints" in record] == [
        "Padding: this generation batch keeps TRL's, and all of its rows, since it is not known what the columns of "
        "hints are."
    ]


# -- micro-batches alone


def made(prompts, completions, micro_batches, prompt_width=None, completion_width=None):
    """TRL's micro-batches of rows of such lengths; every number says of which row and token it is."""
    rows, wide = len(prompts), prompt_width or max(prompts)
    long = completion_width or max(completions)
    names = torch.arange(1, rows + 1)[:, None] * 1000
    prompt_mask = torch.arange(wide) >= wide - torch.tensor(prompts)[:, None]
    completion_mask = torch.arange(long) < torch.tensor(completions)[:, None]
    prompt_ids = (names + torch.arange(wide) - wide + torch.tensor(prompts)[:, None]) * prompt_mask
    completion_ids = (names + 500 + torch.arange(long)) * completion_mask
    batch = dict(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask.long(),
        completion_ids=completion_ids,
        completion_mask=completion_mask.long(),
        tool_mask=completion_mask.long(),
        advantages=torch.arange(1.0, rows + 1),
        num_items_in_batch=torch.tensor(sum(completions)),
        importance_sampling_ratio=names.float(),  # of sequences
        sampling_per_token_logps=completion_ids.float(),
        token_type_ids=torch.cat([prompt_ids, completion_ids], 1),
        names=[f"row {row}" for row in range(rows)],
        nothing=None,
    )
    return split_tensor_dict(batch, micro_batches)


LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=12, max_size=12)


@given(LENGTHS, st.sampled_from([1, 2, 3, 6]), st.sampled_from([1, 4]), st.booleans())
def test_every_row_keeps_all_that_is_its_own(lengths, window, multiple, same_width):
    prompts, completions = (list(part) for part in zip(*lengths, strict=True))
    widths = (12, 12) if same_width else (-(-max(prompts) // 4) * 4, max(4, -(-max(completions) // 4) * 4))
    batches = made(prompts, completions, 6, *widths)
    narrow = MicroBatches(True, "rows", multiple, stands_left=True, skips=False, gather=lambda mine: [mine])
    seen = []
    for number, batch in enumerate(narrow(batches, window)):
        rows = (batch["advantages"] - 1).long().tolist()
        seen += rows
        assert len(rows) == 2 and {row // 2 // window for row in rows} == {number // window}
        assert batch["names"] == [f"row {row}" for row in rows] and batch["nothing"] is None
        assert int(batch["num_items_in_batch"]) == sum(completions)
        assert batch["importance_sampling_ratio"].flatten().tolist() == [(row + 1) * 1000 for row in rows]
        prompt_width, width = batch["prompt_ids"].size(1), batch["completion_ids"].size(1)
        longest = max(1, *(prompts[row] for row in rows)), max(1, *(completions[row] for row in rows))
        assert (prompt_width, width) == tuple(-(-tokens // multiple) * multiple for tokens in longest)
        for place, row in enumerate(rows):
            name = (row + 1) * 1000
            own = [name + token for token in range(prompts[row])]
            written = [name + 500 + token for token in range(completions[row])]
            assert batch["prompt_ids"][place].tolist() == [0] * (prompt_width - len(own)) + own
            for key in ("completion_ids", "sampling_per_token_logps"):
                assert batch[key][place].tolist() == written + [0] * (width - len(written))
            for key in ("completion_mask", "tool_mask"):
                assert batch[key][place].sum() == len(written)
            both = batch["token_type_ids"][place]
            assert both.tolist() == batch["prompt_ids"][place].tolist() + batch["completion_ids"][place].tolist()
    assert sorted(seen) == list(range(12))
    total = [prompts[row] + completions[row] for row in seen]
    for start in range(0, 12, 2 * window):
        part = total[start : start + 2 * window]
        assert part == sorted(part, reverse=True)


@given(st.lists(st.booleans(), min_size=12, max_size=12), st.lists(st.integers(0, 12), min_size=2, max_size=2))
def test_ranks_have_as_many_rows_in_each_micro_batch(teach, elsewhere):
    batches = made([3] * 12, list(range(1, 13)), 4)
    for number, batch in enumerate(batches):
        batch["advantages"] = batch["advantages"] * torch.tensor(teach[3 * number : 3 * number + 3])
    other_rank = [min(6, count) for count in elsewhere]
    narrow = MicroBatches(True, "rows", 1, stands_left=True, skips=True, gather=lambda mine: [mine, other_rank])
    ours = narrow(batches, 2)
    for window in (0, 1):
        taught = sum(teach[6 * window : 6 * window + 6])
        size = max(2, taught, other_rank[window])
        parts = ours[2 * window : 2 * window + 2]
        assert [len(part["advantages"]) for part in parts] == [-(-size // 2), size // 2]
        assert sum(int((part["advantages"] != 0).sum()) for part in parts) == taught
        for part in parts:
            assert part["spec_loss_scale"] == len(part["advantages"]) / 3
            assert (part["completion_mask"].sum(1) > 0).all()
        idle = [6 * window + 1 + row for row in range(6) if not teach[6 * window + row]]  # tokens of their completions
        stand_ins = [part["completion_mask"].sum(1)[part["advantages"] == 0].tolist() for part in parts]
        assert sorted(itertools.chain.from_iterable(stand_ins)) == idle[: size - taught]


def test_a_micro_batch_without_any_completion_keeps_a_column():
    (batch,) = made([2, 3], [0, 0], 1, completion_width=5)
    assert trimmed(batch)["completion_ids"].shape == (2, 1)
