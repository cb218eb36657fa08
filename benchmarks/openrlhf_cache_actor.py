"""How fast the cache actor of the OpenRLHF adapter answers, and what share of a step that is.

Engines, as many processes as are asked for, each with many prompts under way, do what rollout actors do: ask for
a prompt's drafts in one call, hand its new trajectories back in one. Prints one JSON object.

    python benchmarks/openrlhf_cache_actor.py --engines 2 --prompts 128 --samples 8 --tokens 1024 --step_s 60
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import ray

from openrlhf_integration.cache_actor import Rules, running_cache, start_cache
from specrl_plugins import Fingerprint, ReusePolicy, Trajectory, prompt_key


class Client:
    """An engine that takes no time to generate."""

    def __init__(self, samples: int, tokens: int):
        self.cache = running_cache()
        self.samples, self.tokens = samples, tokens

    async def roll_out(self, prompts: list[int]) -> list[float]:
        """Seconds of each call: two a prompt."""
        return [s for pair in await asyncio.gather(*map(self._prompt, prompts)) for s in pair]

    async def _prompt(self, prompt: int) -> tuple[float, float]:
        key = prompt_key([prompt])
        start = time.perf_counter()
        visit = await self.cache.visit.remote(key, self.samples)
        looked_up = time.perf_counter() - start
        rng = np.random.default_rng([prompt, visit.step])
        made = [
            Trajectory(
                prompt=key,
                slot=slot,
                tokens=rng.integers(0, 150_000, self.tokens).astype(np.int32),  # as hard to compress as can be
                logprobs=-rng.exponential(1.0, self.tokens).astype(np.float32),
                ages=np.zeros(self.tokens, np.uint16),
                finish_reason="stop",
                cap=self.tokens,
                step=visit.step,
            )
            for slot in range(self.samples)
        ]
        start = time.perf_counter()
        await self.cache.store.remote(made)
        return looked_up, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=128, help="prompts of a step")
    parser.add_argument("--samples", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a response")
    parser.add_argument("--epochs", type=int, default=3, help="visits of each prompt; the first finds nothing")
    parser.add_argument("--step_s", type=float, help="seconds of a training step, to state the share of")
    options = parser.parse_args()

    ray.init(
        num_cpus=options.engines + 1, object_store_memory=512 * 2**20, include_dashboard=False, log_to_driver=False
    )
    with tempfile.TemporaryDirectory() as directory:
        rules = Rules(ReusePolicy(), 150_000, guard=False)
        cache = start_cache(Path(directory), Fingerprint("none", "none", 150_000, "vllm"), 1e6, rules)
        clients = [
            ray.remote(num_cpus=1)(Client).remote(options.samples, options.tokens) for _ in range(options.engines)
        ]
        ray.get([client.roll_out.remote([]) for client in clients])
        seconds, calls = [], []
        for epoch in range(options.epochs):
            ray.get([cache.policy_is.remote(epoch), cache.begin.remote(True)])
            start = time.perf_counter()
            shares = [list(range(i, options.prompts, options.engines)) for i in range(options.engines)]
            made = ray.get([client.roll_out.remote(share) for client, share in zip(clients, shares, strict=True)])
            if epoch:  # once there are drafts
                seconds.append(time.perf_counter() - start)
                calls += [s for part in made for s in part]
        rows, mib = ray.get(cache.size.remote())
    step = float(np.median(seconds))
    print(
        json.dumps(
            vars(options)
            | {
                "calls_per_s": round(2 * options.prompts / step, 1),
                "seconds_a_step_if_all_at_once": round(step, 3),
                "call_ms_median": round(1e3 * float(np.median(calls)), 2),
                "share_of_step": None if options.step_s is None else round(step / options.step_s, 4),
                "cache_rows": rows,
                "cache_mib": round(mib, 1),
            }
        )
    )
    ray.shutdown()


if __name__ == "__main__":
    main()
