"""OpenRLHF on a cluster of two nodes, real raylets on this machine, with the launcher as a job: `ray job submit`."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("openrlhf")
pytest.importorskip("vllm")
pytest.importorskip("ray")
pytest.importorskip("aiohttp_cors", reason="the job server comes with ray[default]")

from openrlhf_runs import LENIENT, PROMPTS, flags, history

from specrl_plugins import TrajectoryCache

pytestmark = [pytest.mark.openrlhf, pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]

ROOT = Path(__file__).parents[1]
RAY = str(Path(sys.executable).with_name("ray"))

JOB = """
import json, os, sys
import ray
from ray.util.state import list_actors
import openrlhf_integration
from openrlhf_runs import train

assert openrlhf_integration.__file__.startswith(os.getcwd())  # what the job brought along
train(sys.argv[2:])
(head,) = [node["NodeID"] for node in ray.nodes() if "node:__internal_head__" in node["Resources"]]
places = {actor.class_name: "head" if actor.node_id == head else "other" for actor in list_actors(limit=1000)}
with open(sys.argv[1], "w") as file:
    json.dump(places, file)
"""


def free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@pytest.fixture
def cluster(tmp_path):
    """Address of the job server of a head without GPUs and a node with two (Ray takes our word for them)."""
    # Socket paths have little room, and the address of a cluster in Ray's own folder would be found by others.
    directory = tempfile.mkdtemp(prefix="ray-")
    gcs, dashboard, client, *agents = free_ports(5)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests" / "shims"), "RAY_USAGE_STATS_ENABLED": "0"}
    environment.pop("RAY_ADDRESS", None)
    common = ["--block", "--node-ip-address=127.0.0.1", "--num-cpus=4", "--object-store-memory=100000000"]
    head = ["--head", f"--port={gcs}", f"--temp-dir={directory}", f"--ray-client-server-port={client}", "--num-gpus=0"]
    head += ["--include-dashboard=true", f"--dashboard-port={dashboard}"]
    nodes = [head, [f"--address=127.0.0.1:{gcs}", "--num-gpus=2"]]
    running = []
    try:
        for number, (node, agent) in enumerate(zip(nodes, agents, strict=True)):
            line = [RAY, "start", *node, *common, f"--dashboard-agent-listen-port={agent}"]
            with open(tmp_path / f"node{number}.log", "w") as log:
                running.append(subprocess.Popen(line, env=environment, stdout=log, stderr=log))
            wait_until(lambda number=number: nodes_alive(dashboard) > number, running[-1], log.name)
        yield f"http://127.0.0.1:{dashboard}"
    finally:
        for node in reversed(running):
            node.terminate()
        for node in running:
            node.wait(60)
        shutil.rmtree(directory, ignore_errors=True)


def nodes_alive(dashboard: int) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{dashboard}/api/v0/nodes", timeout=10) as answer:
            nodes = json.load(answer)["data"]["result"]["result"]
    except OSError:
        return 0
    return sum(node["state"] == "ALIVE" for node in nodes)


def wait_until(condition, process: subprocess.Popen, log: str, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < end, Path(log).read_text()
        time.sleep(0.5)


def test_a_job_on_two_nodes(cluster, tiny_model, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    for package in ("openrlhf_integration", "specrl_plugins"):
        shutil.copytree(ROOT / package, work / package, ignore=shutil.ignore_patterns("__pycache__"))
    for module in ("openrlhf_runs.py", "vllm_cpu.py"):
        shutil.copy(ROOT / "tests" / module, work)
    (work / "job.py").write_text(JOB)
    line = flags(
        tiny_model,
        tmp_path,
        *["--use_spec_rollout", "--spec.refresh_rate", "0", "--spec.guard", "false", *LENIENT],
        rollout__batch_size=len(PROMPTS),
        logger__tensorboard_dir=tmp_path / "tensorboard",
    )
    entry_point = [sys.executable, "job.py", tmp_path / "places.json", *line]
    job = subprocess.run(
        [RAY, "job", "submit", "--address", cluster, "--working-dir", work, "--", *entry_point],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=600,
    )
    assert job.returncode == 0, job.stdout
    first, second = history(tmp_path / "tensorboard")
    assert first["train/spec/reused_tokens"] == 0
    assert second["train/spec/reused_tokens"] > 0 and second["train/spec/draft_hit_rate"] == 1
    places = json.loads((tmp_path / "places.json").read_text())
    assert places["RolloutCache"] == "head"
    assert places["CpuRolloutActor"] == places["CpuPolicyActor"] == "other"  # where the GPUs are
    with TrajectoryCache(tmp_path / "out" / "spec_cache") as cache:
        assert cache.verify() == (len(PROMPTS) * 4, 0)
