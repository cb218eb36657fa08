"""TRL runs of the tiny model in several processes: `torchrun` starts this script in each of them.

    python -m torch.distributed.run --nproc_per_node 2 tests/trl_ranks.py MODEL OUTPUT '{"a": {"learning_rate": 0.001}}'

One run after the other, by name. Every rank recomputes its rollouts ([`trl_runs.Checked`]) and leaves what it saw in
`OUTPUT/NAME/rank-N.json`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import vllm_cpu
import vllm_server
from accelerate.utils import gather_object
from transformers import TrainerCallback
from trl_runs import PROMPTS, CheckedGRPOTrainer, CheckedRLOOTrainer, RecordedReward, build, settings

from trl_integration import SpecGRPOConfig, SpecRLOOConfig


class DiesAt(TrainerCallback):
    """Kills the second rank after a step."""

    def on_step_end(self, args, state, control, **kwargs):
        if args.process_index == 1 and state.global_step == int(os.environ["DIES_AT_STEP"]):
            os.kill(os.getpid(), signal.SIGKILL)


def run(model: str, output: Path, rloo=False, resume=None, lora=None, prompts=PROMPTS, **changes) -> None:
    args = settings(output, SpecRLOOConfig if rloo else SpecGRPOConfig, **changes)
    reward, more = RecordedReward(), {}
    if lora is not None:
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(**lora)
    if changes.get("vllm_mode") == "server":
        vllm_server.update_by_files()
    elif changes.get("use_vllm"):
        vllm_cpu.repair()
    trainer_class = CheckedRLOOTrainer if rloo else CheckedGRPOTrainer
    trainer = build(model, args, trainer=trainer_class, reward_funcs=reward, prompts=prompts, **more)
    if "DIES_AT_STEP" in os.environ:
        trainer.add_callback(DiesAt())
    trainer.train(resume_from_checkpoint=resume)
    core = trainer.spec_rollout
    seen = {
        "checked_rows": trainer.checked_rows,
        "total": vars(core.total),
        "history": trainer.state.log_history,
        "completions": reward.completions,
        "nodes": core.ranks.nodes,
        "cache_rows": len(core.cache),
        "cache": str(core.cache.directory),
        "weights": gather_object([sum(p.detach().double().abs().sum().item() for p in trainer.model.parameters())]),
    }
    (output / f"rank-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(seen))


def main(model: str, output: str, runs: str) -> None:
    torch.set_num_threads(1)
    for name, changes in json.loads(runs).items():
        run(model, Path(output) / name, **changes)


if __name__ == "__main__":
    main(*sys.argv[1:])
