"""Hidden states out of running vLLM engines, against those of a transformers forward."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")

import repeater
import torch

from specrl_plugins.vllm import HiddenStates, hidden_states
from specrl_plugins.vllm.hidden_states import TOP, Tap, close_tap, open_tap, tapped_params, tapped_states

pytestmark = pytest.mark.vllm

# Both forwards are in float32; the largest values of the tiny model's states are about 4.
ATOL = 1e-5


def build(model, **changes):
    import vllm_cpu
    from vllm import LLM

    vllm_cpu.repair()
    settings = dict(
        max_model_len=256,
        # Few tokens a step, so that prompts are cut into chunks, which share steps with what is sampled.
        max_num_batched_tokens=64,
        max_num_seqs=16,
        gpu_memory_utilization=0.2,
        kv_cache_memory_bytes=64 << 20,
        enforce_eager=True,
        dtype="float32",
        disable_log_stats=False,
    )
    return LLM(model=model, **settings | changes)


@pytest.fixture(scope="module")
def engine(tiny_model):
    return build(tiny_model)


def contexts(count, seed=0, longest=255):
    rng = np.random.default_rng(seed)
    return [rng.integers(4, 47, n).tolist() for n in rng.integers(1, longest + 1, count)]


def plain(policy, contexts):
    """The last layer's output after the final norm, at the last token."""
    with torch.no_grad():
        outputs = [policy(torch.tensor([context]), output_hidden_states=True) for context in contexts]
    return np.stack([output.hidden_states[-1][0, -1].numpy() for output in outputs])


def untapped(model):
    return "compute_logits" not in vars(model)


def run(llm, requests):
    """The answers to `(context, params)` pairs that are in the engine together."""
    for number, (context, params) in enumerate(requests):
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": context}, params)
    outputs = {}
    while llm.llm_engine.has_unfinished_requests():
        outputs |= {int(output.request_id): output for output in llm.llm_engine.step() if output.finished}
    return [outputs[number] for number in range(len(requests))]


def run_tapped(llm, tapped, ordinary):
    """The states of contexts, and the answers to `(context, params)` pairs that are in the engine with them."""
    middle = len(ordinary) // 2
    requests = ordinary[:middle] + [(context, tapped_params()) for context in tapped] + ordinary[middle:]
    llm.apply_model(open_tap)
    outputs = run(llm, requests)
    answers = hidden_states._answers(outputs[middle : middle + len(tapped)])
    (states,) = llm.apply_model(lambda model: tapped_states(model, answers))
    llm.apply_model(close_tap)
    return np.stack(states), outputs[:middle] + outputs[middle + len(tapped) :]


def ordinary_requests():
    """Seeded and greedy ones, some that want prompt log-probs."""
    from vllm import SamplingParams

    # A CPU engine fails on a seeded request whose prompt is cut into chunks: these have one token.
    seeded = [([5 + n], SamplingParams(max_tokens=60, seed=n, logprobs=0, temperature=0.8)) for n in range(20)]
    greedy = [
        (context, SamplingParams(max_tokens=60, temperature=0.0, prompt_logprobs=[None, 0][n % 2]))
        for n, context in enumerate(contexts(20, seed=2, longest=180))
    ]
    return [request for pair in zip(seeded, greedy, strict=True) for request in pair]


def sampled(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_states_are_those_of_a_plain_forward(engine, policy):
    asked = contexts(80)
    np.testing.assert_allclose(HiddenStates(engine).of(asked), plain(policy, asked), atol=ATOL)


def test_states_come_with_the_prefix_from_the_cache(engine, policy):
    asked = [context[:n] for n in (127, 128, 129, 200) for context in [contexts(1, seed=5)[0] * 200]]
    assert engine.reset_prefix_cache()
    (longest,) = run(engine, [(asked[-1], tapped_params())])
    assert longest.num_cached_tokens == 0
    for _ in range(2):  # the second time everything was computed before
        np.testing.assert_allclose(HiddenStates(engine).of(asked), plain(policy, asked), atol=ATOL)
    (longest,) = run(engine, [(asked[-1], tapped_params())])
    assert longest.num_cached_tokens >= 128


def test_states_of_requests_among_others_and_what_these_sample(engine, policy):
    tapped, ordinary = contexts(40, seed=1), ordinary_requests()
    alone = sampled(run(engine, ordinary))
    states, outputs = run_tapped(engine, tapped, ordinary)
    np.testing.assert_allclose(states, plain(policy, tapped), atol=ATOL)
    assert sampled(outputs) == alone


def test_nothing_is_left_behind(engine):
    def patched(hidden_states):
        return compute_logits(hidden_states)

    HiddenStates(engine).of([[5, 6, 7]])
    assert engine.apply_model(untapped) == [True]
    with pytest.raises(Exception, match="maximum model length of 256"):
        HiddenStates(engine).of([[5, 6, 7], [5] * 256])
    assert engine.apply_model(untapped) == [True]
    assert not engine.llm_engine.has_unfinished_requests()

    (model,) = engine.apply_model(lambda model: model)
    compute_logits, model.compute_logits = model.compute_logits, patched
    HiddenStates(engine).of([[5, 6, 7]])
    assert model.compute_logits is patched
    del model.compute_logits


def test_what_was_pushed_out_is_asked_for_again(engine, policy, monkeypatch):
    monkeypatch.setattr(hidden_states, "_HELD_ROWS", 16)  # one step's
    asked = contexts(40, seed=4, longest=3)
    np.testing.assert_allclose(HiddenStates(engine).of(asked), plain(policy, asked), atol=ATOL)
    with pytest.raises(RuntimeError, match="of 80 hidden states were not seen in 3 attempts"):
        HiddenStates(engine).of(contexts(80, seed=4, longest=3))
    assert engine.apply_model(untapped) == [True]


# vLLM may end the process group that engines of a process share with one of them: those above have one engine.


def test_states_where_requests_are_preempted(tiny_model, policy):
    llm = build(tiny_model, num_gpu_blocks_override=10)  # a CPU build's blocks hold 128 tokens
    tapped = contexts(40, seed=1)
    states, _ = run_tapped(llm, tapped, ordinary_requests()[1::2])
    np.testing.assert_allclose(states, plain(policy, tapped), atol=ATOL)
    assert sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")


@pytest.mark.parametrize(
    "changes",
    [
        dict(logprobs_mode="processed_logprobs"),
        dict(async_scheduling=False),
        dict(enable_prefix_caching=False),
        dict(speculative_config=repeater.SPECULATIVE_CONFIG),
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_states_from_engines_with_other_settings(tiny_model, policy, changes):
    tapped = contexts(20, seed=7)
    states, _ = run_tapped(build(tiny_model, **changes), tapped, ordinary_requests()[1::2])
    np.testing.assert_allclose(states, plain(policy, tapped), atol=ATOL)


def test_states_in_half_precision_are_told_apart(tiny_model, policy):
    # Samples of one prompt, which differ in a token some way back: of all these, each state is nearest to its own.
    (stem,) = [(contexts(1, seed=9)[0] * 100)[:100]]
    asked = [[*stem[:-5], token, *stem[-5:]] for token in range(4, 44)]
    states = HiddenStates(build(tiny_model, dtype="bfloat16")).of(asked)
    expected = plain(policy, asked)
    distances = np.abs(states[:, None] - expected[None]).mean(-1)
    # With room to spare: how half precision rounds depends on the processor.
    others = distances + np.diag(np.full(len(asked), np.inf))
    assert (2 * distances.diagonal() < others.min(1)).all()


@pytest.mark.parametrize("tensor_parallel_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_many_callers_of_an_asynchronous_engine(tiny_model, policy, tmp_path, tensor_parallel_size):
    from async_taps import GROUPS

    out = tmp_path / "states.json"
    script = Path(__file__).parent / "async_taps.py"
    command = [sys.executable, script, tiny_model, out, str(tensor_parallel_size)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    for states, group in zip(report["states"], GROUPS, strict=True):
        np.testing.assert_allclose(states, plain(policy, group), atol=ATOL)
    assert report["together"] == report["alone"]
    assert report["untapped"] == [True] * tensor_parallel_size


def test_rows_that_are_held_are_bounded(monkeypatch):
    monkeypatch.setattr(hidden_states, "_HELD_ROWS", 100)
    tap = Tap(lambda states: states)
    steps = torch.randn(30, 16, 50, generator=torch.Generator().manual_seed(0))
    for states in steps:
        tap(states)
    top = steps.log_softmax(-1).topk(TOP).values
    found = tap.find(top.flatten(0, 1))
    held = [state is not None for state in found]
    assert sum(held) == 96 and all(held[-96:])  # the last six steps
    np.testing.assert_array_equal(np.stack(found[-96:]), steps[-6:].flatten(0, 1))


def test_a_rank_that_computes_no_logits_has_no_states_and_others_are_asked():
    tap = Tap(lambda states: None)
    assert tap(torch.randn(3, 50)) is None
    nothing = tap.find(torch.zeros(2, TOP))
    assert nothing == [None, None]
    found = hidden_states._found([4, 7], [nothing, [np.ones(3), None]])
    assert list(found) == [4]


@pytest.mark.trl
def test_states_of_an_engine_that_trl_built_and_updated(tiny_model, tmp_path):
    pytest.importorskip("trl")
    import trl_runs
    import vllm_cpu
    from trl import GRPOConfig, GRPOTrainer

    vllm_cpu.repair()
    engine = dict(use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.2, vllm_max_model_length=64)
    args = trl_runs.settings(tmp_path, GRPOConfig, max_steps=2, **engine)
    trainer = trl_runs.build(tiny_model, args, trainer=GRPOTrainer)
    trainer.train()
    trainer.vllm_generation.sync_weights()
    asked = contexts(20, longest=63)
    states = HiddenStates(trainer.vllm_generation.llm).of(asked)
    np.testing.assert_allclose(states, plain(trainer.model, asked), atol=ATOL)
