"""What a cache that is too small for an epoch still finds: share of prompts, after the second epoch.

python benchmarks/eviction.py
"""

from __future__ import annotations

import argparse
import tempfile

import numpy as np

from specrl_plugins import Fingerprint, Trajectory, TrajectoryCache, prompt_key

PROMPTS, TOKENS, BATCH, EPOCHS = 600, 400, 20, 6
FINGERPRINT = Fingerprint("model", "tokenizer", 50_000, "trainer")


def trajectory(prompt: int, step: int, rng: np.random.Generator) -> Trajectory:
    return Trajectory(
        prompt=prompt_key([prompt]),
        slot=0,
        tokens=rng.integers(0, 50_000, TOKENS).astype(np.int32),
        logprobs=-rng.exponential(1.0, TOKENS).astype(np.float32),
        ages=np.zeros(TOKENS, np.uint16),
        finish_reason="stop",
        cap=TOKENS,
        step=step,
    )


def found(share: float | None, shuffled: bool) -> tuple[float, float]:
    """Share of prompts found, and size of the cache at the end in MiB.

    Args:
        share (`float`, *optional*): of the room that an epoch takes; `None` sets no limit.
        shuffled (`bool`): whether each epoch has an order of its own.
    """
    rng = np.random.default_rng(0)
    limit = None if share is None else share * found(None, shuffled)[1]
    hits = visits = step = 0
    with (
        tempfile.TemporaryDirectory() as directory,
        TrajectoryCache(directory, FINGERPRINT, max_mib=limit) as cache,
    ):
        for epoch in range(EPOCHS):
            order = rng.permutation(PROMPTS) if shuffled else np.arange(PROMPTS)
            for batch in order.reshape(-1, BATCH).tolist():
                step += 1
                drafts = cache.get_many([(prompt_key([prompt]), 0) for prompt in batch])
                if epoch > 1:
                    visits += len(drafts)
                    hits += sum(draft is not None for draft in drafts)
                cache.put_many([trajectory(prompt, step, rng) for prompt in batch])
        return hits / visits, cache.mib


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for shuffled in (True, False):
        shares = {share: found(share, shuffled)[0] for share in (0.95, 0.9, 0.75, 0.5)}
        order = "another order each epoch" if shuffled else "the same order"
        print(f"{order}:", ", ".join(f"room for {share:.0%}: {hit:.0%} found" for share, hit in shares.items()))


if __name__ == "__main__":
    main()
