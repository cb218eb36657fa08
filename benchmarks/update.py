"""TRL's step but for the rollout: with TRL's padding, and without it.

GRPO trainers of one shape, with random weights, train on given responses through `trainer.train()`, as if vLLM had
sampled them: TRL makes a pass for the old log-probs, to correct such samples, and one over a reference (`beta` > 0);
then comes the update, in micro-batches of as many rows as the shape says, with gradient checkpointing, TRL's default.
After a step of short responses that is not counted, the steps have the lengths of

- `paper`: SPEC-RL's figures (`replay_rollouts.published`): 512 responses, 848 tokens on average, 4,096 at most;
- `smollm2`: about those of the training runs here: 512 responses, 223 tokens on average, 512 at most. Exponential, cut
  at the cap.

Sides:

    trl       TRL's own trainer                       trimmed   the plugin's, as it is shipped
    masked    the same with rows padded on both sides, as in TRL, and so with a mask
    packed    the same with rows end to end, by a variable-length attention kernel (`packed.py`)

    PYTHONPATH=. python benchmarks/update.py --output OUT.json                     # one GPU; about 6 minutes on an H200
    PYTHONPATH=. python benchmarks/update.py --output OUT.json --shape tiny        # a rehearsal on a CPU
    PYTHONPATH=. python benchmarks/update.py --output OUT.json --shape tiny --scale 4 --repeats 3      # in minutes

Rollouts of the `paper` responses are measured by `replay_rollouts.py`; a whole step is the sum of the two. OUT.json is
rewritten after each measurement, and printed at the end. Sides are built anew for each repeat, in turns; memory is that
of one side alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import core
import numpy as np
import replay_rollouts
import torch
import trl
from datasets import Dataset
from numpy.typing import NDArray
from replay_rollouts import SAMPLES, Shape
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl.trainer.utils import add_fused_lm_head

from specrl_plugins import Rollout, RolloutCounts, prompt_key
from specrl_plugins.response import Response
from specrl_plugins.trajectory import assign_slots
from trl_integration import SpecGRPOConfig, SpecGRPOTrainer

BETA = 0.001
STAGES = ("old_logprobs", "reference", "update", "step")


@dataclass(frozen=True)
class Profile:
    """Tokens of each row of a generation batch, arrays of shape `(rows,)`."""

    name: str
    prompts: NDArray[np.int64]  # the same for the samples of a prompt
    responses: NDArray[np.int64]


def profiles(rows: int, scale: int) -> list[Profile]:
    """A short one to warm up, and those that are measured."""
    published = replay_rollouts.published(replay_rollouts.Setting(rows=rows * scale), scale)
    rng = np.random.default_rng(replay_rollouts.SEED)
    ended = np.clip(1 + rng.exponential(230, rows), 2, 512) // scale
    short = np.repeat(rng.integers(64, 129, rows // SAMPLES), SAMPLES) // scale
    return [
        Profile("warm-up", np.maximum(1, published.prompts // 8), np.maximum(1, published.responses // 32)),
        Profile("paper", np.maximum(1, published.prompts), published.responses),
        Profile("smollm2", np.maximum(1, short), np.maximum(1, ended).astype(np.int64)),
    ]


class Given:
    """Mixed into a trainer, above all else: its responses are given, and its stages are timed."""

    def begin(self, plan: list[Profile]) -> None:
        """Take what is trained on, a profile for each step."""
        self.plan, self.done = plan, []  # type: ignore[var-annotated]
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._in_experience = False
        self._computed = 0
        self.accelerator.unwrap_model(self.model).register_forward_pre_hook(self._count, with_kwargs=True)
        self.add_callback(Steps(self))
        # As if vLLM sampled: from here on nothing asks for the engine but what is overridden.
        self.use_vllm = True
        self.beta, self.ref_model = BETA, self.reference

    def _count(self, model: Any, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            self._computed += kwargs["input_ids"].numel()

    def given(self, rows: int) -> tuple[list[list[int]], float]:
        """Responses of this step, and the log-prob of each token, nats."""
        rng = np.random.default_rng([replay_rollouts.SEED, len(self.done)])
        vocabulary = self.model.config.vocab_size
        lengths = self.plan[len(self.done)].responses.tolist()
        assert len(lengths) == rows
        return [rng.integers(1, vocabulary, length).tolist() for length in lengths], -float(np.log(vocabulary))

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start = now()
        yield
        self._seconds[stage] += now() - start

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self._in_experience, start = True, now()
        output = super()._generate_and_score_completions(inputs)
        self._in_experience, self._experience_s = False, now() - start
        self._real = int(output["prompt_mask"].sum() + output["completion_mask"].sum())
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        return output

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._in_experience:
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        with self.timed("reference" if model is self.ref_model else "old_logprobs"):
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)


class Steps(TrainerCallback):
    """Files what a step took."""

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.trainer._seconds = dict.fromkeys(STAGES, 0.0)
        self.trainer._computed, self._start = 0, now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        trainer, step = self.trainer, now() - self._start
        seconds = trainer._seconds | {"step": step, "update": step - trainer._experience_s}
        peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
        trainer.done.append(
            {
                "profile": trainer.plan[len(trainer.done)].name,
                "seconds": {name: round(value, 4) for name, value in seconds.items()},
                "update_peak_gib": peak and round(peak, 3),
                "real_tokens": trainer._real,
                "update_tokens": trainer._computed,
            }
        )


class PlainTrainer(Given, trl.GRPOTrainer):
    """TRL's."""

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        tokens, logprob = self.given(len(prompt_ids))
        return tokens, [[logprob] * len(row) for row in tokens]


class TrimmedTrainer(Given, SpecGRPOTrainer):
    """The plugin's. All responses count as sampled afresh, so that none is known beforehand."""

    def _roll_out(self, prompts: list[list[int]], single_turn: Any) -> Rollout:
        tokens, logprob = self.given(len(prompts))
        keys = [prompt_key(prompt) for prompt in prompts]
        responses = [
            Response(
                prompt,
                key,
                slot,
                tokens=np.array(row, np.int32),
                logprobs=np.full(len(row), logprob, np.float32),
                ages=np.zeros(len(row), np.uint16),
                finish_reason="stop",
            )
            for prompt, key, slot, row in zip(prompts, keys, assign_slots(keys), tokens, strict=True)
        ]
        step = self.state.global_step + 1
        return Rollout(responses, self.max_completion_length, step, RolloutCounts(rows=len(prompts)))


class MaskedTrainer(TrimmedTrainer):
    """Rows stay where TRL puts them in a micro-batch."""

    def begin(self, plan: list[Profile]) -> None:
        super().begin(plan)
        self._micro_batches = replace(self._micro_batches, stands_left=False)


class PackedTrainer(TrimmedTrainer):
    """Rows of a micro-batch end to end."""

    def begin(self, plan: list[Profile]) -> None:
        from packed import PACKED

        super().begin(plan)
        self.accelerator.unwrap_model(self.model).set_attn_implementation(PACKED)

    def _get_per_token_logps_and_entropies(self, model: Any, *rows: Any, **kwargs: Any) -> Any:
        if self._updates:
            from packed import packed_logprobs

            return packed_logprobs(self, model, *rows)
        return super()._get_per_token_logps_and_entropies(model, *rows, **kwargs)


SIDES = {"trl": PlainTrainer, "trimmed": TrimmedTrainer, "masked": MaskedTrainer, "packed": PackedTrainer}


def measure(kind: type, shape: Shape, directory: Path, plan: list[Profile], output: Path) -> list[dict[str, Any]]:
    """Train a step on each profile; what it took, but for the first."""
    on_gpu, rows = torch.cuda.is_available(), len(plan[0].prompts)

    def model() -> Any:
        with torch.device("cuda" if on_gpu else "cpu"):  # random weights of this size take minutes on a CPU
            torch.manual_seed(0)
            config = AutoConfig.from_pretrained(directory)
            return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, shape.config["dtype"]))

    settings = dict(
        output_dir=str(output), per_device_train_batch_size=shape.scored_rows, num_generations=SAMPLES,
        gradient_accumulation_steps=rows // shape.scored_rows, max_steps=len(plan), shuffle_dataset=False,
        max_completion_length=max(int(profile.responses.max()) for profile in plan), learning_rate=1e-6, bf16=on_gpu,
        use_cpu=not on_gpu, vllm_importance_sampling_mode="token_truncate", report_to="none", save_strategy="no",
        disable_tqdm=True, logging_steps=1000,
    )  # fmt: skip
    config: Any = trl.GRPOConfig
    if issubclass(kind, SpecGRPOTrainer):
        config = partial(SpecGRPOConfig, use_spec_rollout=True, spec_guard=False)
    rng = np.random.default_rng(replay_rollouts.SEED)
    trainer = kind(
        model=model(),
        args=config(**settings),
        reward_funcs=lambda completions, **kwargs: rng.random(len(completions)).tolist(),
        # The tokenizer has a token for each letter.
        train_dataset=Dataset.from_dict(
            {"prompt": ["a" * tokens for profile in plan for tokens in profile.prompts[::SAMPLES].tolist()]}
        ),
        processing_class=AutoTokenizer.from_pretrained(directory, padding_side="left"),
    )
    trainer.reference = model().eval()
    add_fused_lm_head(trainer.reference)
    trainer.begin(plan)
    trainer.train()
    return trainer.done[1:]


def summary(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of each side and profile, and TRL's over those of the plugin."""

    def median(side: str, profile: str, read: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(read(m) for m in measured if (m["side"], m["profile"]) == (side, profile))

    found: dict[str, Any] = {"medians": {}}
    sides = dict.fromkeys(m["side"] for m in measured)
    names = dict.fromkeys(m["profile"] for m in measured)
    for profile in names:
        medians = found["medians"][profile] = {
            side: {stage: median(side, profile, lambda m, stage=stage: m["seconds"][stage]) for stage in STAGES}
            | {
                "real_token_share": round(median(side, profile, lambda m: m["real_tokens"] / m["update_tokens"]), 4),
                "update_peak_gib": median(side, profile, lambda m: m["update_peak_gib"] or 0.0),
            }
            for side in sides
            if any((m["side"], m["profile"]) == (side, profile) for m in measured)
        }
        if not {"trl", "trimmed"} <= medians.keys():
            continue
        plain, ours = medians["trl"], medians["trimmed"]
        suffix = "" if profile == "paper" else f"_{profile}"
        found |= {f"{stage}_speedup{suffix}": round(plain[stage] / ours[stage], 3) for stage in STAGES[:3]}
        found[f"real_token_share{suffix}"] = ours["real_token_share"]
        if ours["update_peak_gib"]:
            found[f"update_memory_ratio{suffix}"] = round(ours["update_peak_gib"] / plain["update_peak_gib"], 3)
        found[f"rest_of_step_speedup{suffix}"] = round(plain["step"] / ours["step"], 3)
    return found


def now() -> float:
    """Seconds, once the GPU has done what it was asked."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON file")
    parser.add_argument("--shape", choices=replay_rollouts.SHAPES, default="qwen3-1.7b")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["trl", "trimmed"])
    parser.add_argument("--profiles", nargs="+", choices=("paper", "smollm2"), default=["paper", "smollm2"])
    parser.add_argument("--scale", type=int, help="what rows and lengths are divided by (default: the shape's)")
    parser.add_argument("--rows", type=int, help="responses at once (default: 512, so divided)")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--commit", help="what is measured, where the checkout has no history to ask")
    options = parser.parse_args()
    shape = replay_rollouts.SHAPES[options.shape]
    shape = replace(shape, scale=options.scale or shape.scale)
    rows = options.rows or 512 // shape.scale
    plan = [p for p in profiles(rows, shape.scale) if p.name in ("warm-up", *options.profiles)]
    report = replay_rollouts.header(options.shape, options.commit or core.commit()) | {
        "rows": rows,
        "profiles": {
            p.name: {"mean": round(float(p.responses.mean()), 1), "longest": int(p.responses.max())} for p in plan[1:]
        },
        "measured": [],
    }

    def write() -> None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        shown = report | summary(report["measured"])
        options.output.write_text(json.dumps(shown, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as directory:
        replay_rollouts.save_model(shape, Path(directory))
        for repeat in range(options.repeats):
            for side in options.sides[:: -1 if repeat % 2 else 1]:
                done = measure(SIDES[side], shape, Path(directory), plan, Path(directory) / f"{side}-{repeat}")
                report["measured"] += [{"side": side, "repeat": repeat, **step} for step in done]
                write()
                for step in done:
                    print(side, step, flush=True)
                gc.collect()
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
    print(options.output.read_text())


if __name__ == "__main__":
    main()
