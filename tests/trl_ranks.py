"""TRL runs of the tiny model in several processes: `torchrun` starts this script in each of them, or they are forked
(`forked_ranks.py`).

    python -m torch.distributed.run --nproc_per_node 2 tests/trl_ranks.py MODEL OUTPUT '{"a": {"learning_rate": 0.001}}'

One run after the other, by name. Every rank recomputes its rollouts ([`trl_runs.Checked`]) and leaves what it saw in
`OUTPUT/NAME/rank-N.json`. Where `RESULTS` names a file, a line is added to it as each run ends.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from pathlib import Path

import sharding_cpu
import torch
import trl_tools
import vllm_cpu
import vllm_gpu
import vllm_server
from accelerate.utils import gather_object
from datasets import Dataset
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from trl_pruning import CheckedPruning, reward_told_at_detection
from trl_runs import (
    PROMPTS,
    Checked,
    CheckedGRPOTrainer,
    CheckedRLOOTrainer,
    RecordedReward,
    build,
    settings,
    whole_weights,
)
from trl_update import ComparedGRPOTrainer, ComparedRLOOTrainer, seldom

from trl_integration import SpecGRPOConfig, SpecRLOOConfig


class DiesAt(TrainerCallback):
    """Kills the second rank after a step."""

    def on_step_end(self, args, state, control, **kwargs):
        if args.process_index == 1 and state.global_step == int(os.environ["DIES_AT_STEP"]):
            os.kill(os.getpid(), signal.SIGKILL)


def run(
    model: str, output: Path, rloo=False, resume=None, lora=None, tools_model=None, compared=False, prompts=PROMPTS,
    **changes,
) -> None:  # fmt: skip
    start = time.perf_counter()
    args = settings(output, SpecRLOOConfig if rloo else SpecGRPOConfig, **changes)
    more = trl_tools.parts(tools_model) if tools_model else dict(reward_funcs=RecordedReward(), prompts=prompts)
    if changes.get("spec_prune"):
        more["reward_funcs"] = RecordedReward(reward_told_at_detection)
    if changes.get("spec_skip_zero_advantage"):
        more["reward_funcs"] = RecordedReward(seldom)
    if lora is not None:
        from peft import LoraConfig

        more["peft_config"] = LoraConfig(**lora)
    if changes.get("vllm_mode") == "server":
        if not torch.cuda.is_available():
            vllm_server.update_by_files()
    elif changes.get("use_vllm"):
        vllm_cpu.repair()
        vllm_gpu.in_fp32()
    trainer_class = CheckedRLOOTrainer if rloo else CheckedPruning if changes.get("spec_prune") else CheckedGRPOTrainer
    if compared:
        trainer_class = ComparedRLOOTrainer if rloo else ComparedGRPOTrainer
    if args.eval_strategy != "no":
        more["eval_dataset"] = Dataset.from_dict({"prompt": prompts[:4]})
    trainer = build(tools_model or model, args, trainer=trainer_class, **more)
    if "DIES_AT_STEP" in os.environ:
        trainer.add_callback(DiesAt())
    trainer.train(resume_from_checkpoint=resume)
    core = trainer.spec_rollout
    seen = {
        "checked_rows": getattr(trainer, "checked_rows", 0),
        "differences": getattr(trainer, "differences", {}),
        "micro_batches": getattr(trainer, "shapes", []),
        "went_on_rows": getattr(trainer, "went_on_rows", 0),
        "rollouts": [(len(done.responses), len(done.pruned)) for done in getattr(trainer, "rollouts", [])],
        "total": vars(core.total),
        "history": trainer.state.log_history,
        "completions": more["reward_funcs"].completions,
        "nodes": core.ranks.nodes,
        "cache_rows": len(core.cache),
        "cache": str(core.cache.directory),
        "distributed": trainer.accelerator.distributed_type.value,
        "sharded_weights": is_sharded(trainer),
        "weights": gather_object([weights(trainer)]),
        "seconds": time.perf_counter() - start,
    }
    (output / f"rank-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(seen))
    if "RESULTS" in os.environ:
        note(output, seen)


def weights(trainer) -> float:
    """Sum of the absolute weights, of all shards."""
    with whole_weights(trainer) as whole:
        return sum(weight.detach().double().abs().sum().item() for weight in whole.values())


def is_sharded(trainer) -> bool:
    """Whether this rank holds less than the whole of the weights."""
    parameters = list(trainer.model.parameters())
    held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters)
    with whole_weights(trainer) as whole:
        return held < sum(weight.numel() for weight in whole.values())


def note(output: Path, seen: dict) -> None:
    """Add a line about a run, of all its ranks, to the file of results."""
    ranks = gather_object([{name: seen[name] for name in ("checked_rows", "differences")}])
    if int(os.environ.get("RANK", 0)):
        return
    largest: dict[str, float] = {}
    for rank in ranks:
        for name, difference in rank["differences"].items():
            largest[name] = max(largest.get(name, 0.0), difference)
    line = {
        "launch": output.parent.name,
        "run": output.name,
        "ranks": len(ranks),
        "distributed": seen["distributed"],
        "sharded_weights": seen["sharded_weights"],
        "checked_rows": sum(rank["checked_rows"] for rank in ranks),
        "largest_difference_nats": largest,
        "draft_hit_rate": [entry["spec/draft_hit_rate"] for entry in seen["history"] if "spec/draft_hit_rate" in entry],
        "completion_tokens": seen["total"]["completion_tokens"],
        "generated_tokens": seen["total"]["generated_tokens"],
        "reused_tokens": seen["total"]["reused_tokens"],
        "seconds": round(seen["seconds"], 1),
    }
    with Path(os.environ["RESULTS"]).open("a") as results:
        results.write(json.dumps(line) + "\n")


def main(model: str, output: str, runs: str) -> None:
    torch.set_num_threads(1)
    if "SHARDS" in os.environ:
        sharding_cpu.allow(os.environ["SHARDS"])
    Checked.tolerance = float(os.environ.get("TOLERANCE", Checked.tolerance))
    for name, changes in json.loads(runs).items():
        run(model, Path(output) / name, **changes)
        # DeepSpeed's engine clears what is global in DeepSpeed when it is collected: not in the middle of the next run.
        gc.collect()
    if torch.distributed.is_initialized():  # its threads would run on while the interpreter goes, which may abort it
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
