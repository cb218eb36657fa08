"""TRL training in two processes with a GPU each, over NCCL: sharded models, colocated engines, vLLM's own server.

    RESULTS=results.jsonl python -m pytest tests/test_trl_gpus.py -q

Launches of a few runs each share the GPUs, of which they need little, `AT_ONCE` of them at a time (8 if not given). A
line is added to `RESULTS` as a run ends. A run that fails is left out and those after it go on.

On a CPU, with `REHEARSE=1`, the same launches go one after the other, with [`sharding_cpu`] and gloo in place of NCCL,
and weights reach the server by a file.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest

pytest.importorskip("trl")
pytest.importorskip("vllm")
pytest.importorskip("deepspeed")

import test_trl_ranks
import torch
import vllm_server
from test_trl_ranks import FSDP1_ON_CPU, ROWS, SHARDED, check, launch, seen

ON_GPUS = torch.cuda.device_count() >= 2
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.trl,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not ON_GPUS and "REHEARSE" not in os.environ, reason="needs two GPUs"),
]

# Nats, of any log-prob of a run in fp32 on GPUs from the same on a CPU. A step moves them by far more.
TOLERANCE = 1e-3
EPOCHS = 2
# Seconds for all runs of a launch together.
TIME_LIMIT_S = 180 if ON_GPUS else 900
AT_ONCE = int(os.environ.get("AT_ONCE", 8 if ON_GPUS else 1))

BASE = ROWS | dict(num_train_epochs=EPOCHS, use_cpu=False)
# Too many steps for one pass: the old log-probs are computed.
UNALIGNED = dict(steps_per_generation=2, gradient_accumulation_steps=3, per_device_train_batch_size=3)
ENGINE = test_trl_ranks.ENGINE | dict(vllm_gpu_memory_utilization=0.03 if ON_GPUS else 0.1)
SERVER = dict(use_vllm=True, vllm_mode="server", vllm_max_model_length=64)
GENERATE = {"aligned": {}, "cut": dict(top_p=0.9), "unaligned": UNALIGNED}
COLOCATED = {
    "engine": ENGINE,
    "engine-verifies": ENGINE | dict(spec_verifier="engine"),
    "engine-unaligned": ENGINE | UNALIGNED,
}
SERVED = {"server": SERVER, "server-verifies": SERVER | dict(spec_verifier="engine")}

# Runs of each launch, by name. Those that take longest start first.
LAUNCHES = {
    "server-zero3": {n: SHARDED["zero3"] | run for n, run in SERVED.items()},
    "server-two-ranks": SERVED,
    "server-one-rank": {n: run | dict(per_device_train_batch_size=12) for n, run in SERVED.items()},
    "tensor-parallel": {n: run | dict(vllm_tensor_parallel_size=2) for n, run in COLOCATED.items()},
    # FSDP 1 is refused with an engine.
    **{
        f"{name}-colocated": {n: SHARDED[name] | run for n, run in COLOCATED.items()}
        for name in ("zero3", "fsdp2", "zero2")
    },
    "data-parallel": {**GENERATE, **COLOCATED},
    **{name: {n: SHARDED[name] | run for n, run in GENERATE.items()} for name in ("zero3", "fsdp1", "fsdp2", "zero2")},
}
ON_CPU = {name: {n: dict(run) for n, run in runs.items()} for name, runs in LAUNCHES.items()}
for run in ON_CPU["fsdp1"].values():
    run["fsdp_config"] = run["fsdp_config"] | FSDP1_ON_CPU
RUNS = [(name, run) for name, runs in (LAUNCHES if ON_GPUS else ON_CPU).items() for run in runs]


def kind_of(name):
    """What shards the model of a launch: `"fsdp"`, `"deepspeed"` or nothing."""
    return "fsdp" if "fsdp" in name else "deepspeed" if "zero" in name else None


def ranks_of(name):
    return 1 if name == "server-one-rank" else 2


def environment_of(name):
    # What is further off than this tolerance ends a run at once; the test looks at the rest.
    environment = dict(TOLERANCE="0.1", VLLM_HOST_IP="127.0.0.1")
    if ON_GPUS:
        # Triton's matrix products would be in TF32. Multicast over NVLink is not for machines that others share.
        environment |= dict(TRITON_F32_DEFAULT="ieee", VLLM_ALLREDUCE_USE_SYMM_MEM="0", NCCL_NVLS_ENABLE="0")
        environment |= dict(ACCELERATE_USE_CPU="false")
        if name == "server-one-rank":
            environment["CUDA_VISIBLE_DEVICES"] = "0"
    elif kind_of(name):
        environment |= dict(ACCELERATE_USE_CPU="false", SHARDS=kind_of(name))
    return environment


def note(**line):
    """Add a line to the file of results, where the environment names one."""
    if "RESULTS" in os.environ:
        with Path(os.environ["RESULTS"]).open("a") as results:
            results.write(json.dumps(line) + "\n")


def served(model, output, name):
    """A server of its own for a launch that wants one, on the last GPU; as a context."""
    if not name.startswith("server"):
        return nullcontext()
    options, environment = ["--max-model-len", "64", "--max-num-seqs", "16"], dict(VLLM_HOST_IP="127.0.0.1")
    if ON_GPUS:
        options += [*vllm_server.WEIGHT_TRANSFER, "--gpu-memory-utilization", "0.03"]
        options += ["--kv-cache-memory-bytes", str(64 << 20)]
        environment |= dict(CUDA_VISIBLE_DEVICES="1", TRITON_F32_DEFAULT="ieee", NCCL_NVLS_ENABLE="0")
    return vllm_server.serve(model, output / "server.log", *options, **environment)


def run_all(model, output, name, runs):
    """Have a launch do its runs; after one that fails, another does those that are left. Returns why each failed."""
    output.mkdir()
    failures, end = {}, time.monotonic() + TIME_LIMIT_S
    left = {run: BASE | settings for run, settings in runs.items()}
    try:
        with served(model, output, name) as address:
            for number, settings in enumerate(left.values()):
                if address is not None:
                    port = 51216 + 10 * list(LAUNCHES).index(name) + number
                    settings.update(vllm_server_base_url=address, vllm_group_port=port)
                if not ON_GPUS and not kind_of(name):
                    settings["use_cpu"] = True
            while left and (time_left := end - time.monotonic()) > 20:
                try:
                    _, printed = launch(
                        model, output, left, ranks_of(name), timeout_s=time_left, **environment_of(name)
                    )
                except subprocess.TimeoutExpired as error:
                    printed = (error.output or b"").decode(errors="replace") + "\n[rank?]: it took too long"
                (output / f"printed-{len(left)}.log").write_text(printed)
                unfinished = [run for run in left if not done(output / run, ranks_of(name))]
                if unfinished:
                    failures[unfinished[0]] = printed
                    note(launch=name, run=unfinished[0], failed=reason(printed))
                left = {run: left[run] for run in unfinished[1:]}
    except Exception as error:  # the server did not start
        failures |= dict.fromkeys(left, str(error))
        note(launch=name, failed=str(error)[-2000:])
    return failures | dict.fromkeys(left.keys() - failures.keys(), "no time was left")


def reason(printed):
    """The last exception that a rank printed, of all that a launch prints."""
    lines = [line for line in printed.splitlines() if line.startswith("[rank")]
    return "\n".join(lines[-15:] or printed.splitlines()[-15:])


def done(run, ranks):
    return all((run / f"rank-{rank}.json").exists() for rank in range(ranks))


@pytest.fixture(scope="module")
def launches(request, tiny_model, tmp_path_factory):
    """Where the launches of the selected tests left what they saw, and why runs failed."""
    output = tmp_path_factory.mktemp("gpus")
    selected: dict[str, dict] = {}
    for item in request.session.items:
        if item.path == request.path:
            name, run = item.callspec.params["name"], item.callspec.params["run"]
            selected.setdefault(name, {})[run] = (LAUNCHES if ON_GPUS else ON_CPU)[name][run]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures = {name: pool.submit(run_all, tiny_model, output / name, name, runs) for name, runs in selected.items()}
    return output, {name: future.result() for name, future in futures.items()}


@pytest.mark.parametrize(("name", "run"), RUNS, ids=lambda value: value)
def test_a_run_is_right(launches, name, run):
    output, failures = launches
    if run in failures[name]:
        pytest.fail(failures[name][run][-8000:])
    ranks = seen(output / name / run, ranks_of(name))
    kind = kind_of(name)
    distributed = kind.upper() if kind else "MULTI_GPU" if ON_GPUS else "MULTI_CPU"
    for rank in ranks:
        assert rank["sharded_weights"] == (kind is not None and "zero2" not in name)
        assert max(rank["differences"].values()) < TOLERANCE
    if "unaligned" not in run:
        check(ranks, epochs=EPOCHS, distributed=distributed)
    first, second = ranks[0], ranks[-1]
    assert first["distributed"] == distributed
    assert first["total"] == second["total"] and first["total"]["reused_tokens"] > 0
    assert len(set(first["weights"])) == 1
