"""TRL training in several processes: data-parallel, sharded, on several nodes."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")

import trl_pruning
import trl_tools
from forked_ranks import fork
from trl_runs import CONTINUOUS_BATCHING, CheckedGRPOTrainer, build, history, settings

from specrl_plugins import TrajectoryCache
from specrl_plugins.cache import CLAIM_NAME

pytestmark = [pytest.mark.trl, pytest.mark.slow]

# Two ranks of 6 rows: three prompts a step, the second of which straddles the ranks, and two steps an epoch.
ROWS = dict(per_device_train_batch_size=6, num_train_epochs=3)
EPOCH = 2
ZERO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_allow_untested_optimizer": True,
}
SHARDED = {
    f"fsdp{version}": dict(
        fsdp="full_shard auto_wrap",
        fsdp_config={"version": version, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    )
    for version in (1, 2)
}
# Both need a GPU.
FSDP1_ON_CPU = dict(cpu_ram_efficient_loading=False, sync_module_states=False)
for stage in (2, 3):
    # A threshold below the size of the tiny model's matrices, so that stage 3 shards them.
    optimization = {"stage": stage, "stage3_param_persistence_threshold": 100}
    SHARDED[f"zero{stage}"] = dict(deepspeed=ZERO | {"zero_optimization": optimization})
# With a reference pass, made by switching the adapters off.
LORA = dict(beta=0.05, lora=dict(r=4, target_modules=["q_proj", "v_proj"]), learning_rate=1e-2)
HALTED = dict(max_steps=3, save_strategy="steps", save_steps=3, shuffle_dataset=False)
CHECKPOINTING = dict(gradient_checkpointing=True, gradient_checkpointing_kwargs=dict(use_reentrant=False))
EVALUATED = dict(eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=4, num_generations_eval=4)
# Twelve rows of a rank: its second prompt's group straddles the ranks.
PRUNED = trl_pruning.SETTINGS | dict(per_device_train_batch_size=12)
# Three micro-batches of four rows on each rank.
COMPARED = dict(per_device_train_batch_size=4, gradient_accumulation_steps=3, max_completion_length=24, compared=True)
COMPARED |= dict(beta=0.05, num_train_epochs=2)
TWICE_AS_MANY = [f"{a}+{b}=?" for a in range(4) for b in range(3)]
ENGINE = dict(use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.1, vllm_max_model_length=64)
# A CPU build of vLLM would give every process the same core.
VARIABLES = dict(ACCELERATE_USE_CPU="true", GLOO_SOCKET_IFNAME="lo", VLLM_CPU_OMP_THREADS_BIND="nobind")


def launch(model, output, runs, ranks=2, nodes=1, timeout_s=300, **environment):
    """Train in `nodes` torchruns of `ranks` processes; returns their exit codes and what the last of them printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tests = Path(__file__).parent
    variables = os.environ | VARIABLES | dict(OMP_NUM_THREADS="1") | environment
    variables["PYTHONPATH"] = os.pathsep.join([str(tests.parent), str(tests), os.environ.get("PYTHONPATH", "")])
    launchers = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", f"--nnodes={nodes}"),
                *(f"--node_rank={node}", "--master_addr=127.0.0.1", f"--master_port={port}"),
                *(str(tests / "trl_ranks.py"), model, str(output), json.dumps(runs)),
            ],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(nodes)
    ]
    try:
        printed = [launcher.communicate(timeout=timeout_s)[0] for launcher in launchers]
    finally:  # what hangs would go on, with the locks that it holds
        for launcher in launchers:
            launcher.terminate()
            launcher.wait()
    return [launcher.returncode for launcher in launchers], printed[-1]


def train(model, output, runs, **environment):
    """Train in two processes; returns what each saw of each run."""
    codes, printed = fork(model, output, runs, **VARIABLES | environment)
    assert not any(codes), printed[-5000:]
    return {name: seen(output / name, 2) for name in runs}


def train_by_torchrun(model, output, runs, ranks=2, nodes=1):
    """As [`train`], in processes that `torchrun` starts on each node."""
    codes, printed = launch(model, output, runs, ranks, nodes)
    assert not any(codes), printed[-5000:]
    return {name: seen(output / name, ranks * nodes) for name in runs}


def seen(run, ranks):
    """What each rank saw of a run."""
    return [json.loads((run / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def values(rank, name):
    return [entry[name] for entry in rank["history"] if name in entry]


def check(ranks, epochs=3, distributed="MULTI_CPU"):
    """What holds for every run: ranks agree, every draft was found, and each row was recomputed and right."""
    first, *others = ranks
    for rank in ranks:
        assert rank["checked_rows"] == epochs * 24 // len(ranks)
        assert rank["distributed"] == distributed
        assert len(set(rank["weights"])) == 1
    for other in others:
        assert other["total"] == first["total"]
    total = first["total"]
    assert total["rows"] == epochs * 24
    assert total["generated_tokens"] + total["reused_tokens"] == total["completion_tokens"]
    assert sum(values(first, "spec/generated_tokens")) == total["generated_tokens"]
    # Next epoch, prompts are on other ranks and in other groups: each of the 24 samples finds its own past.
    assert values(first, "spec/draft_hit_rate") == [0] * EPOCH + [1] * (epochs - 1) * EPOCH
    assert total["reused_tokens"] > 0
    assert first["cache_rows"] == 24


@pytest.fixture(scope="module")
def data_parallel(tiny_model, tmp_path_factory):
    output = tmp_path_factory.mktemp("ranks")
    unaligned = dict(steps_per_generation=2, gradient_accumulation_steps=3, per_device_train_batch_size=3)
    tools_model = trl_tools.build_model(tmp_path_factory.mktemp("tools-model"))
    runs = {
        "grpo": ROWS,
        "halted": ROWS | HALTED,
        "unaligned": ROWS | unaligned,
        "tools": ROWS | unaligned | trl_tools.SETTINGS | dict(tools_model=tools_model),
        "full": ROWS | dict(spec_rule="full", num_train_epochs=2, learning_rate=0.0),
        "rloo": ROWS | dict(rloo=True, beta=0.05),
        "lora-cut": ROWS | dict(top_k=20, min_p=0.05, lora=dict(r=4, target_modules=["q_proj"]), learning_rate=1e-2),
        "lora": ROWS | LORA,
        "continuous batching": ROWS | LORA | CONTINUOUS_BATCHING,
        "pruned": PRUNED | dict(num_train_epochs=16),
        "compared": COMPARED,
        "compared skipping": COMPARED | dict(spec_skip_zero_advantage=True, loss_type="grpo", beta=0.0),
        "compared iterations": COMPARED | dict(num_iterations=2, steps_per_generation=6, prompts=TWICE_AS_MANY),
        "compared rloo": COMPARED | dict(rloo=True, spec_skip_zero_advantage=True),
    }
    return output, train_by_torchrun(tiny_model, output, runs)


@pytest.mark.parametrize("name", ["grpo", "rloo", "lora", "lora-cut", "continuous batching"])
def test_every_rank_finds_what_any_rank_made(data_parallel, name):
    check(data_parallel[1][name])


@pytest.mark.parametrize("name", ["compared", "compared skipping", "compared iterations", "compared rloo"])
def test_every_rank_has_trls_gradient(data_parallel, name):
    first, second = data_parallel[1][name]
    for rank in (first, second):
        assert rank["differences"] and max(rank["differences"]) < 1e-9
    # Ranks have as many rows in a micro-batch, and the widest at the same time.
    for here, there in zip(first["micro_batches"], second["micro_batches"], strict=True):
        assert [rows for rows, *_ in here] == [rows for rows, *_ in there]
    if name != "compared":
        assert any(rows < 4 for batch in first["micro_batches"] for rows, *_ in batch) == ("iterations" not in name)
    assert first["weights"][0] == first["weights"][1]


def check_pruned(ranks):
    """Each rank trains on its own rows, of survivors that any rank sampled; the first one's pruner decides for all."""
    first, second = ranks
    assert first["total"] == second["total"] and first["total"]["pruned_rows"] > 0
    assert first["total"]["reused_tokens"] > 0
    for here, there in zip(first["rollouts"], second["rollouts"], strict=True):
        assert here[0] == there[0] == 12
        assert here[1] + there[1] in (0, 24)
    assert any(here[1] != 12 for here in first["rollouts"] if here[1])  # survivors had to move
    assert first["weights"][0] == first["weights"][1]


def test_pruned_groups_straddle_ranks(data_parallel):
    check_pruned(data_parallel[1]["pruned"])


def test_a_schedule_with_a_pass_for_old_log_probs(data_parallel):
    """Ranks with fewer rows to compute in that pass compute as many as the others: it does not hang."""
    first, second = data_parallel[1]["unaligned"]
    assert first["total"] == second["total"] and first["total"]["reused_tokens"] > 0
    assert first["weights"][0] == first["weights"][1]


def test_tools_that_ranks_call_differently_often(data_parallel):
    """Also in that pass, where rows that went on after their first turn are computed and others are not."""
    first, second = data_parallel[1]["tools"]
    assert first["total"] == second["total"] and first["total"]["reused_tokens"] > 0
    assert first["total"]["rows"] == first["checked_rows"] + second["checked_rows"]
    assert first["total"]["full_reuse_rows"] > first["went_on_rows"] + second["went_on_rows"] > 0
    assert first["weights"][0] == first["weights"][1]


def test_a_whole_epoch_without_anything_to_generate(data_parallel):
    first, second = data_parallel[1]["full"]
    check([first, second], epochs=2)
    epochs = [
        sorted(text for rank in (first, second) for batch in rank["completions"][start:end] for text in batch)
        for start, end in ((0, EPOCH), (EPOCH, 2 * EPOCH))
    ]
    assert epochs[0] == epochs[1]
    assert values(first, "spec/generated_tokens")[EPOCH:] == [0] * EPOCH


@pytest.mark.parametrize("name", SHARDED)
def test_sharded_models(tiny_model, tmp_path, name):
    kind = "fsdp" if "fsdp" in name else "deepspeed"
    if kind == "deepspeed":
        pytest.importorskip("deepspeed")
    unaligned = dict(steps_per_generation=2, gradient_accumulation_steps=3, per_device_train_batch_size=3)
    aligned = ROWS | SHARDED[name] | dict(num_train_epochs=2, use_cpu=False)
    if name == "fsdp1":
        aligned["fsdp_config"] = aligned["fsdp_config"] | FSDP1_ON_CPU
    on_cpu = dict(SHARDS=kind, ACCELERATE_USE_CPU="false")
    runs = {
        "aligned": aligned,
        "unaligned": aligned | unaligned,
        "lora": aligned | LORA | CHECKPOINTING | EVALUATED | dict(top_p=0.9),
        "pruned": aligned | PRUNED | dict(num_train_epochs=8),
    }
    if name != "fsdp1":  # of which torch cannot write a checkpoint on a CPU
        resumed = dict(resume=f"{tmp_path}/halted/checkpoint-3", spec_cache_dir=f"{tmp_path}/halted/spec_cache")
        runs["halted"] = aligned | HALTED
        runs["resumed"] = aligned | resumed | dict(shuffle_dataset=False, num_train_epochs=3)
    runs = train(tiny_model, tmp_path, runs, **on_cpu)
    assert all(rank["sharded_weights"] == (name != "zero2") for rank in runs["aligned"])
    check(runs["aligned"], epochs=2, distributed=kind.upper())
    check(runs["lora"], epochs=2, distributed=kind.upper())
    assert values(runs["lora"][0], "eval_reward")
    check_pruned(runs["pruned"])
    if "resumed" in runs:
        assert values(runs["resumed"][0], "spec/draft_hit_rate") == [0, 0, 1, 1, 1, 1]
    first, second = runs["unaligned"]
    assert first["total"] == second["total"] and first["total"]["reused_tokens"] > 0


@pytest.mark.vllm
@pytest.mark.parametrize(
    "changes",
    [dict(), dict(vllm_tensor_parallel_size=2, spec_verifier="engine")],
    ids=["an engine for each rank", "a tensor-parallel engine"],
)
def test_colocated_engines(tiny_model, tmp_path, changes):
    pytest.importorskip("vllm")
    run = ROWS | ENGINE | changes | dict(num_train_epochs=2)
    # A forked process ends without taking away the shared memory of such an engine, and the next one would find it.
    start = train_by_torchrun if "vllm_tensor_parallel_size" in changes else train
    check(start(tiny_model, tmp_path, {"engines": run})["engines"], epochs=2)


@pytest.mark.vllm
@pytest.mark.parametrize("name", ["fsdp2", "zero2", "zero3"])
def test_colocated_engines_of_sharded_models(tiny_model, tmp_path, name):
    """Weights are sent to the engine also after a forward that no backward followed: that of verification."""
    pytest.importorskip("vllm")
    kind = "fsdp" if "fsdp" in name else "deepspeed"
    run = ROWS | SHARDED[name] | ENGINE | dict(num_train_epochs=2, use_cpu=False)
    on_cpu = dict(SHARDS=kind, ACCELERATE_USE_CPU="false")
    for ranks in train(tiny_model, tmp_path, {"engines": run, "lora": run | LORA}, **on_cpu).values():
        check(ranks, epochs=2, distributed=kind.upper())


@pytest.mark.vllm
def test_fsdp_1_with_an_engine_is_refused(tiny_model, tmp_path):
    pytest.importorskip("vllm")
    run = ROWS | SHARDED["fsdp1"] | ENGINE | dict(use_cpu=False)
    run["fsdp_config"] = run["fsdp_config"] | FSDP1_ON_CPU
    sharding = VARIABLES | dict(SHARDS="fsdp", ACCELERATE_USE_CPU="false")
    codes, printed = fork(tiny_model, tmp_path, {"fsdp1": run}, **sharding)
    assert codes[0] and "UnsupportedSetting" in printed and "FSDP 1" in printed


def test_each_node_has_a_whole_cache(tiny_model, tmp_path):
    first, second = train_by_torchrun(tiny_model, tmp_path, {"nodes": ROWS}, ranks=1, nodes=2)["nodes"]
    assert first["nodes"] == second["nodes"] == [0, 1]
    check([first, second])
    assert (first["cache"], second["cache"]) == (f"{tmp_path}/nodes/spec_cache", f"{tmp_path}/nodes/spec_cache-node1")
    stored = []
    for rank in (first, second):
        with TrajectoryCache(rank["cache"]) as cache:
            assert cache.verify() == (24, 0)
            stored.append({(t.prompt, t.slot): (t.tokens.tolist(), t.logprobs.tolist(), t.step) for t in cache})
    assert stored[0] == stored[1]
    exchanged = values(first, "spec/exchanged_mib")
    assert len(exchanged) == 3 * EPOCH and all(0 < mib < 0.01 for mib in exchanged)


def test_a_run_goes_on_with_another_number_of_processes(data_parallel, tiny_model):
    """From the checkpoint of step 3 of two ranks, in one process: the slots are those of the whole batch."""
    output, _ = data_parallel
    args = settings(output / "halted", **ROWS | dict(per_device_train_batch_size=12, shuffle_dataset=False))
    trainer = build(tiny_model, args, trainer=CheckedGRPOTrainer)
    trainer.train(resume_from_checkpoint=str(output / "halted" / "checkpoint-3"))
    assert history(trainer, "spec/draft_hit_rate") == [0, 0, 1, 1, 1, 1]
    assert trainer.spec_rollout.total.reused_tokens > 0


def test_a_cache_in_use_stops_all_ranks(tiny_model, tmp_path):
    directory = tmp_path / "refused" / "spec_cache"
    directory.mkdir(parents=True)
    with (directory / CLAIM_NAME).open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        codes, printed = fork(tiny_model, tmp_path, {"refused": ROWS}, **VARIABLES)
    assert codes[0]
    assert "in use by another run" in printed and "another rank failed: CacheError" in printed


def test_when_a_rank_dies_the_others_end_and_the_cache_is_sound(tiny_model, tmp_path):
    codes, printed = launch(tiny_model, tmp_path, {"killed": ROWS}, DIES_AT_STEP="3")
    assert codes[0] != 0 and "exitcode  : -9" in printed
    with TrajectoryCache(tmp_path / "killed" / "spec_cache") as cache:
        rows, corrupt = cache.verify()
        assert corrupt == 0 and rows == 24
        assert max(trajectory.step for trajectory in cache) == 3
