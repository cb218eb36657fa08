"""Hidden states of an asynchronous engine, between ordinary requests. Run in a process of its own: vLLM looks at its
environment once a process.

    python async_taps.py MODEL OUT TENSOR_PARALLEL_SIZE

writes the states of [`GROUPS`], and what [`ORDINARY`] gave beside them and alone, to the file OUT.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

import numpy as np

rng = np.random.default_rng(3)
GROUPS = [[rng.integers(4, 47, n).tolist() for n in rng.integers(1, 250, 6)] for _ in range(6)]
ORDINARY = [[token] for token in range(5, 21)]  # a CPU engine fails on a seeded request that is cut into chunks


async def main(model: str, out: str, tensor_parallel_size: str) -> None:
    from async_taps import untapped  # by this name the workers find it
    from vllm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.utils import random_uuid

    from specrl_plugins.vllm import AsyncHiddenStates

    engine = AsyncLLMEngine.from_engine_args(
        AsyncEngineArgs(
            model=model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            max_num_batched_tokens=64,
            max_num_seqs=16,
            kv_cache_memory_bytes=64 << 20,
            tensor_parallel_size=int(tensor_parallel_size),
            worker_extension_cls="openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap",
        )
    )

    async def ask(tokens, params):
        (output,) = [o async for o in engine.generate({"prompt_token_ids": tokens}, params, random_uuid())]
        return output

    async def ordinary(number):
        params = SamplingParams(max_tokens=30, seed=number, output_kind=RequestOutputKind.FINAL_ONLY)
        return list((await ask(ORDINARY[number], params)).outputs[0].token_ids)

    async def group(number):
        await asyncio.sleep(0.02 * number)  # one tap opens while another is open, and some open after all closed
        return await tap.of(GROUPS[number])

    tap = AsyncHiddenStates(ask, engine.collective_rpc)
    alone = await asyncio.gather(*map(ordinary, range(len(ORDINARY))))
    together = asyncio.gather(*map(ordinary, range(len(ORDINARY))))
    states = await asyncio.gather(*map(group, range(len(GROUPS))))
    report = {"states": [s.tolist() for s in states], "alone": alone, "together": await together}
    report["untapped"] = await engine.collective_rpc("apply_model", args=(untapped,))
    engine.shutdown()
    with open(out, "w") as file:
        json.dump(report, file)


def untapped(model) -> bool:
    return "compute_logits" not in vars(model)


if __name__ == "__main__":
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # or two workers want two NUMA nodes
    asyncio.run(main(*sys.argv[1:]))
