"""GRPO with TRL and speculative rollouts on a verifiable task.

A TRL script with two changes: the config and the trainer come from `trl_integration`, and `--use_spec_rollout true`
turns reuse on. Every other flag is TRL's.

    python examples/trl/train_grpo.py \
        --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --task chain_sum --output_dir out \
        --use_vllm true --vllm_mode colocate --num_train_epochs 10 --num_generations 8 \
        --per_device_train_batch_size 64 --max_completion_length 512 --learning_rate 1e-6 \
        --use_spec_rollout true --report_to wandb

The same through `accelerate launch --num_processes 1`. The tasks come from the package `reasoning-gym`; the command
above needs `pip install -e '.[trl,vllm]' reasoning-gym wandb`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import reasoning_gym
from datasets import Dataset
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from trl_integration import SpecGRPOConfig, SpecGRPOTrainer


@dataclass
class TaskArguments:
    task: str = field(default="chain_sum", metadata={"help": "Name of a reasoning-gym task."})
    prompts: int = field(default=256, metadata={"help": "How many prompts the data set holds."})
    task_seed: int = field(default=0, metadata={"help": "Seed of the data set."})


INSTRUCTION = "Think step by step, then give the final answer between <answer> and </answer>."


def main(task: TaskArguments, args: SpecGRPOConfig, model: ModelConfig) -> None:
    problems = reasoning_gym.create_dataset(task.task, size=task.prompts, seed=task.task_seed)
    dataset = Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": f"{problem['question']}\n{INSTRUCTION}"}], "problem": index}
            for index, problem in enumerate(problems)
        ]
    )

    def correctness(completions: list, problem: list[int], **kwargs: object) -> list[float]:
        """The task's own score of what stands between the answer tags."""
        found = [
            re.findall(r"<answer>(.*?)</answer>", completion[0]["content"], re.DOTALL) for completion in completions
        ]
        return [
            problems.score_answer(answers[-1].strip() if answers else None, problems[index])
            for answers, index in zip(found, problem, strict=True)
        ]

    args.model_init_kwargs = dict(
        revision=model.model_revision, attn_implementation=model.attn_implementation, dtype=model.dtype
    ) | (args.model_init_kwargs or {})
    trainer = SpecGRPOTrainer(
        model=model.model_name_or_path,
        args=args,
        reward_funcs=correctness,
        train_dataset=dataset,
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model(args.output_dir)


if __name__ == "__main__":
    main(*TrlParser((TaskArguments, SpecGRPOConfig, ModelConfig)).parse_args_and_config())
