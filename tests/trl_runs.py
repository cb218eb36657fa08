"""Real TRL runs of the tiny model."""

from __future__ import annotations

from datasets import Dataset
from transformers import AutoTokenizer

from trl_integration import SpecGRPOConfig, SpecGRPOTrainer

PROMPTS = [f"{a}+{b}=?" for a in range(3) for b in range(2)]


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
    if issubclass(config, SpecGRPOConfig) or "Spec" in config.__name__:
        # Timing must not decide anything in a test.
        content |= dict(use_spec_rollout=True, spec_guard=False, spec_refresh_rate=0.0)
    return config(**(content | changes))


def build(model, args, trainer=SpecGRPOTrainer, prompts=PROMPTS, **changes):
    content = dict(
        model=model,
        args=args,
        reward_funcs=reward_digits,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
    )
    return trainer(**(content | changes))


def history(trainer, name):
    """Values of a metric over the steps that logged it."""
    return [entry[name] for entry in trainer.state.log_history if entry.get(name) is not None]
