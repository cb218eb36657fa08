"""TRL's pass for the old log-probs: every row padded to the longest of all, and in narrow forwards.

The lengths are those of `replay_rollouts.py` with the figures of SPEC-RL, 850 tokens a response of a cap of 4096, its
rows and lengths divided by `--scale`; the model has one of its shapes and random weights. In turns, `--repeats` times
after one to warm up:

- `padded`: TRL's own call, all rows in one tensor, in batches of the size of the update's.
- `narrow`: as the plugin makes it, with the same batch size for the longest rows.

Prints one JSON object: seconds of each (medians and all), tokens that were computed, padding included, and the largest
difference between the log-probs of both, in nats.

    PYTHONPATH=. python benchmarks/old_logprobs.py                                 # one GPU
    PYTHONPATH=. python benchmarks/old_logprobs.py --shape tiny --scale 4          # on a CPU
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import core
import numpy as np
import replay_rollouts
import torch
import trl
from torch.nn.utils.rnn import pad_sequence

from trl_integration.padding import narrow_logprobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=replay_rollouts.SHAPES, default="qwen3-1.7b")
    parser.add_argument("--scale", type=int, help="what rows and lengths are divided by (default: the shape's)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commit", help="what is measured, where the checkout has no history to ask")
    options = parser.parse_args()
    shape = replay_rollouts.SHAPES[options.shape]
    lengths = replay_rollouts.published(replay_rollouts.Setting(), options.scale or shape.scale)
    with tempfile.TemporaryDirectory() as directory:
        replay_rollouts.save_model(shape, Path(directory))
        trainer = replay_rollouts.make_trainer(shape, Path(directory))
        report = measure(trainer, lengths, shape, options.repeats)
    print(json.dumps(replay_rollouts.header(options.shape, options.commit or core.commit()) | report, indent=1))


def measure(
    trainer: Any, lengths: replay_rollouts.Lengths, shape: replay_rollouts.Shape, repeats: int
) -> dict[str, Any]:
    """Both passes over the same rows, in turns."""
    device = trainer.accelerator.device
    computed = {"padded": 0, "narrow": 0}

    torch.manual_seed(0)
    rows = [
        [torch.randint(1, shape.config["vocab_size"], (n,)) for n in part.tolist()]
        for part in (lengths.prompts, lengths.responses)
    ]
    prompts, continuations = ([row.numpy().astype(np.int32) for row in part] for part in rows)
    # TRL's layout: prompts padded on the left, completions on the right.
    parts = [(rows[0], "left"), (rows[1], "right")]
    ids = [pad_sequence(part, True, padding_side=side).to(device) for part, side in parts]
    masks = [
        pad_sequence([torch.ones_like(row) for row in part], True, padding_side=side).to(device) for part, side in parts
    ]
    sequences, mask, keep = torch.cat(ids, 1), torch.cat(masks, 1), ids[1].size(1)
    forward = partial(trl.GRPOTrainer._get_per_token_logps_and_entropies, trainer, trainer.model)

    def counted(name: str, *inputs: Any, **settings: Any) -> torch.Tensor:
        computed[name] += inputs[0].numel()
        return forward(*inputs, **settings)[0].float()

    def padded() -> np.ndarray:
        logprobs = counted("padded", sequences, mask, keep, batch_size=shape.scored_rows).cpu().numpy()
        return np.concatenate([row[: len(tokens)] for row, tokens in zip(logprobs, continuations, strict=True)])

    def narrow() -> np.ndarray:
        made = narrow_logprobs(partial(counted, "narrow"), prompts, continuations, shape.scored_rows, device)
        return np.concatenate(made)

    passes: dict[str, Callable[[], np.ndarray]] = {"padded": padded, "narrow": narrow}
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    with torch.no_grad():
        difference = float(np.abs(padded() - narrow()).max())
        tokens = dict(computed)
        for _ in range(repeats):
            for name, run in passes.items():
                start = time.perf_counter()
                run()
                seconds[name].append(round(time.perf_counter() - start, 4))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "rows": len(sequences),
        "longest_response": keep,
        "mean_response": round(float(lengths.responses.mean()), 1),
        "tokens": tokens,
        "seconds": medians,
        "ratio": round(medians["padded"] / medians["narrow"], 3),
        "all_seconds": seconds,
        "largest_difference": difference,
    }


if __name__ == "__main__":
    main()
