"""vLLM's own server, as TRL's documentation starts it, and weight updates that need no NCCL."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import requests
from safetensors.torch import save_file
from trl.generation.vllm_client import VLLMClient

# As TRL's documentation says.
WEIGHT_TRANSFER = ("--weight-transfer-config", '{"backend": "nccl"}')


@contextmanager
def serve(model: str, log: Path, *options: str, **environment: str) -> Iterator[str]:
    """A server of a model, in fp32; gives its address.

    `vllm serve` runs the module that is started here. The command itself asks for the metadata of a distribution named
    `vllm`, which a CPU build does not have. Weight transfer needs a GPU, and [`WEIGHT_TRANSFER`] among the options.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = os.environ | dict(
        VLLM_SERVER_DEV_MODE="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS="1",
    )
    variables |= environment
    variables.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # a server's engine is always a process of its own
    address = f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        server = subprocess.Popen(
            [
                *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model),
                *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"),
                *("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", *options),
            ],
            env=variables,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_for(server, address, log)
        yield address
    finally:
        server.terminate()
        server.wait(30)


def wait_for(server: subprocess.Popen, address: str, log: Path, timeout_s: float = 180.0) -> None:
    """Return once the server answers."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end and server.poll() is None:
        try:
            requests.get(f"{address}/health", timeout=5).raise_for_status()
            return
        except requests.RequestException:
            time.sleep(0.2)
    raise RuntimeError(f"the server did not start:\n{log.read_text()[-5000:]}")


def metric(address: str, name: str, **labels: str) -> float:
    """Sum of a counter or gauge of the server over all its series that have these labels."""
    lines = requests.get(f"{address}/metrics", timeout=30).text.splitlines()
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith((name + "{", name + " ")) and all(label in line for label in wanted)
    )


class FileUpdates(VLLMClient):
    """TRL's client, but weights travel by a file: TRL sends them by NCCL, which a CPU does not have.

    The policy of the server really moves: it reads every update that TRL makes, by vLLM's own `reload_weights`.
    """

    def init_communicator(self, device=0):
        self._weights = tempfile.TemporaryDirectory(prefix="weights-")

    def update_named_params(self, metadata, named_params):
        save_file(
            {name: weights.detach().contiguous() for name, weights in named_params},
            Path(self._weights.name, "model.safetensors"),
        )
        self._post(
            f"{self.base_url}/collective_rpc",
            json={"method": "reload_weights", "kwargs": {"weights_path": self._weights.name}},
        )


def update_by_files() -> None:
    """Have TRL's trainers use this client."""
    import trl.generation.vllm_generation as generation

    generation.VLLMClient = FileUpdates
