"""Real TRL runs of the tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import trl
import truncation
from accelerate.utils import gather_object, is_peft_model
from datasets import Dataset
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, TrainerCallback
from trl.distributed import DistributedBackend

from specrl_plugins import prompt_key
from trl_integration import SpecGRPOConfig, SpecGRPOTrainer, SpecRLOOTrainer

# With a small KV cache: by default it takes half of the memory, and seconds to set up.
CONTINUOUS_BATCHING = dict(
    use_transformers_continuous_batching=True,
    transformers_continuous_batching_config=dict(block_size=16, num_blocks=32, max_batch_tokens=128),
)
PROMPTS = [f"{a}+{b}=?" for a in range(3) for b in range(2)]

METRICS = {
    "reused_token_fraction", "draft_hit_rate", "draft_accept_rate", "full_reuse_rate", "prefix_length_mean",
    "generated_tokens", "reused_tokens", "log_ratio_mean", "draft_age_mean", "reward_gap", "new_reward_fraction",
    "time/lookup_s", "time/verify_s", "time/generate_s", "time/store_s", "cache_rows", "cache_mib",
}  # fmt: skip


def reward_digits(completions, **kwargs):
    """Share of digits: something that the tiny model learns."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum(x.isdigit() for x in text) / (len(text) + 1) for text in texts]


def settings(output_dir, config=SpecGRPOConfig, **changes):
    content = dict(
        output_dir=str(output_dir),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=12,
        num_train_epochs=3,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        gradient_checkpointing=False,
        seed=7,
    )
    if config.__name__.startswith("Spec"):
        # Timing must not decide anything in a test.
        content |= dict(use_spec_rollout=True, spec_guard=False)
        # More is reused, and for longer, than by default.
        content |= dict(spec_log_lenience=0.5, spec_refresh_rate=0.0, spec_carry_limit=0)
    return config(**(content | changes))


def build(model, args, trainer=SpecGRPOTrainer, prompts=PROMPTS, tokenizer=None, **changes):
    content = dict(
        model=model,
        args=args,
        reward_funcs=reward_digits,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(tokenizer or model, padding_side="left"),
    )
    return trainer(**(content | changes))


def history(trainer, name):
    """Values of a metric over the steps that logged it."""
    return [entry[name] for entry in trainer.state.log_history if entry.get(name) is not None]


def timeless(trainer):
    """All that a trainer logged, but for what depends on timing."""
    return [
        {k: v for k, v in entry.items() if "time" not in k and "per_second" not in k}
        for entry in trainer.state.log_history
    ]


@contextmanager
def whole_weights(trainer) -> Iterator[dict[str, torch.Tensor]]:
    """Every rank has the policy's weights whole while open, by name, whatever they are sharded by."""
    backend = DistributedBackend(trainer.accelerator)
    with (
        backend.gather_params(list(trainer.model.parameters())),
        backend.summon_full_params(trainer.model, writeback=False),
    ):
        yield {
            name: weight.full_tensor() if isinstance(weight, DTensor) else weight
            for name, weight in trainer.model.named_parameters()
        }


def plain_model(trainer):
    """What recomputes: the policy or, where it is sharded or on a GPU, a copy of it in one piece on the CPU."""
    backend = DistributedBackend(trainer.accelerator)
    if trainer.accelerator.device.type == "cpu" and not (backend.is_fsdp or backend.is_zero3):
        return trainer.model
    policy = trainer.accelerator.unwrap_model(trainer.model)
    plain = unsharded(policy)
    if is_peft_model(policy):
        with torch.random.fork_rng(devices=[]):
            plain = type(policy)(plain, policy.peft_config["default"]).eval()
    with whole_weights(trainer) as weights:
        plain.load_state_dict({name: weight.detach().cpu() for name, weight in weights.items()})
    return plain


def reference_model(policy):
    """What the policy was before it was trained, in one piece on the CPU."""
    reference = unsharded(policy)
    reference.load_state_dict(load_file(f"{policy.config.name_or_path}/model.safetensors"))
    return reference


def unsharded(policy):
    """A model of the policy's kind, without adapters, its weights still to be loaded (`from_pretrained` shards)."""
    base = policy.get_base_model() if is_peft_model(policy) else policy
    with torch.random.fork_rng(devices=[]):  # the run's own random numbers stay as they were
        return type(base)(base.config).eval()


class Checked:
    """Mixed into a trainer: recomputes every rollout with a plain forward and compares all that was made of it.

    Log-probs that are stored or said to be sampled are of the distribution that is sampled; the old log-probs of the
    loss are TRL's, of the whole distribution, and so are those of the reference. Tolerance of a log-prob: 1e-4 nats
    (fp32; batches are padded differently). The largest difference that was met is kept by what was compared.
    """

    tolerance = 1e-4

    def _generate_and_score_completions(self, inputs):
        on_device = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return on_device
        self.checked_rows, self.went_on_rows = getattr(self, "checked_rows", 0), getattr(self, "went_on_rows", 0)
        if not hasattr(self, "differences"):
            self.differences: dict[str, float] = {}
        # On the CPU, where it is compared.
        made = getattr(self, "as_made", {}) | on_device
        output = {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in made.items()}
        model = plain_model(self)
        # What was quantised is not what was saved.
        has_reference = "ref_per_token_logps" in output and not getattr(model, "is_quantized", False)
        reference = reference_model(model) if has_reference else None
        eos = set(self.eos_token_ids)
        prompts = [
            ids[mask.bool()].tolist() for ids, mask in zip(output["prompt_ids"], output["prompt_mask"], strict=True)
        ]
        keys = gather_object([prompt_key(prompt) for prompt in prompts])  # of all ranks
        for row, prompt in enumerate(prompts):
            place = self.accelerator.process_index * len(prompts) + row
            slot = keys[:place].count(keys[place])
            (stored,) = self.spec_rollout.cache.get_many([(keys[place], slot)])
            ids = stored.tokens.tolist()
            # What the trainer received is what was stored: never over the cap, one end token at the most, at the end.
            # With tools it may go on, with what they answered and what was written then.
            received, mask = output["completion_ids"][row], output["completion_mask"][row]
            kept = int(mask.sum())  # 0 where TRL masks a response that was cut
            whole = received[: max(kept, len(ids))].tolist()
            assert whole[: len(ids)] == ids
            if not getattr(self, "tools", None):
                assert (received[len(ids) :] == self._tokenizer.pad_token_id).all()
                ended = ids[-1] in eos or ids[-1] == self._tokenizer.pad_token_id  # by TRL's own count
                assert kept == (0 if self.mask_truncated_completions and not ended else len(ids))
            assert 0 < len(ids) <= self.max_completion_length
            assert not eos & set(ids[:-1])
            assert (ids[-1] in eos) == (stored.finish_reason == "stop")
            room = ((self.args.use_vllm and self.args.vllm_max_model_length) or 10**6) - len(prompt)
            assert stored.finish_reason == "stop" or len(ids) == min(self.max_completion_length, room)
            with torch.no_grad():
                logits = model(torch.tensor([prompt + whole])).logits[0, len(prompt) - 1 : -1].numpy()
            tempered, at = dict(temperature=self.temperature), (np.arange(len(whole)), whole)
            cut = tempered | dict(top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)
            sampler = "vllm" if self.args.use_vllm else "transformers"
            sampled = truncation.log_probs(logits, sampler, **cut)[at]
            plain = truncation.log_probs(logits, **tempered)[at]
            self._compare("stored", stored.logprobs, sampled[: len(ids)])
            if reference is not None:
                with torch.no_grad():
                    logits = reference(torch.tensor([prompt + whole])).logits[0, len(prompt) - 1 : -1].numpy()
                expected = truncation.log_probs(logits, **tempered)[at]
                self._compare("ref_per_token_logps", output["ref_per_token_logps"][row, :kept].numpy(), expected[:kept])
            written = output.get("tool_mask", output["completion_mask"])[row, :kept].bool().numpy()  # not by a tool
            for name, expected, known in (
                ("old_per_token_logps", plain, np.ones(kept, bool)),
                ("sampling_per_token_logps", sampled, written),
            ):
                if name in output:
                    self._compare(name, output[name][row, :kept].numpy()[known], expected[:kept][known])
            self.checked_rows += 1
            self.went_on_rows += bool(len(whole) > len(ids) and stored.ages.all())  # after a turn that was reused whole
        return on_device

    def _compare(self, name, found, expected):
        np.testing.assert_allclose(found, expected, atol=self.tolerance, err_msg=name)
        self.differences[name] = max(self.differences.get(name, 0.0), np.abs(found - expected).max(initial=0.0).item())


class AsMade(trl.GRPOTrainer):
    """Below ours: keeps in `as_made` what TRL makes of a rollout, with the old log-probs that the loss is spared."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self.as_made = dict(output)
        return output


class CheckedGRPOTrainer(Checked, SpecGRPOTrainer, AsMade):
    pass


class CheckedRLOOTrainer(Checked, SpecRLOOTrainer):
    pass


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def counting_rows(trainer, plain):
    """A trainer of this kind, of TRL's `plain`, that counts in `computed_rows` those that TRL's forward computes for
    log-probs of the policy, the loss aside."""

    class Counting(plain):
        computed_rows = 0

        def _get_per_token_logps_and_entropies(self, model, input_ids, *args, **kwargs):
            if model is self.model and not torch.is_grad_enabled():
                self.computed_rows += len(input_ids)
            return super()._get_per_token_logps_and_entropies(model, input_ids, *args, **kwargs)

    return type("CountingTrainer", (trainer, Counting), {})


SHIFT = -0.3


def shifted(trainer, plain):
    """A trainer of this kind, of TRL's `plain`, whose own forward tells log-probs that are `SHIFT` nats off."""

    class Shifted(plain):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            logprobs, *others = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            return logprobs + SHIFT, *others

    return type("ShiftedTrainer", (trainer, Shifted), {})


def stored_beyond_policy(trainer):
    """Every stored log-prob less that of the policy as it is now: at a learning rate of 0, as it always was."""
    differences = []
    for prompt in PROMPTS:
        ids = trainer.processing_class(prompt)["input_ids"]
        slots = [(prompt_key(ids), slot) for slot in range(trainer.num_generations)]
        for stored in trainer.spec_rollout.cache.get_many(slots):
            with torch.no_grad():
                logits = trainer.model(torch.tensor([ids + stored.tokens.tolist()])).logits[0, len(ids) - 1 : -1]
            at = np.arange(len(stored.tokens)), stored.tokens
            differences.append(stored.logprobs - logits.log_softmax(-1).numpy()[at])
    return np.concatenate(differences)


class RecordedReward:
    """The reward of the tiny runs, which also keeps every completion it was asked about."""

    __name__ = "reward_digits"

    def __init__(self, reward=reward_digits):
        self.completions, self.reward = [], reward

    def __call__(self, completions, **kwargs):
        self.completions.append(completions)
        return self.reward(completions=completions, **kwargs)
