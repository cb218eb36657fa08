"""TRL training runs with vLLM's own server, through `trainer.train()`.

All is real but for one thing: weights reach the server by a file instead of NCCL, which a CPU does not have (see
[`vllm_server.FileUpdates`]). The policy moves on both sides, and the log-probs of every rollout are recomputed.
"""

from __future__ import annotations

import copy
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("trl")
pytest.importorskip("vllm")
pytest.importorskip("uvicorn", reason="the server's requirements")

import torch
import trl.generation.vllm_generation as generation
import vllm_server
from conftest import build_tiny_model
from test_trl_ranks import ROWS, check, train
from transformers import AutoModelForCausalLM
from trl_pruning import SETTINGS, CheckedPruning, check_counts, reward_told_at_detection
from trl_runs import CheckedGRPOTrainer, CheckedRLOOTrainer, build, history, settings

from trl_integration import SpecGRPOConfig, SpecGRPOTrainer, SpecRLOOConfig
from trl_integration.checks import UnsupportedSetting
from trl_integration.server import ServerEngine

pytestmark = [pytest.mark.trl, pytest.mark.vllm, pytest.mark.slow]

CONTEXT = 20  # tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return build_tiny_model(tmp_path_factory.mktemp("server-model"), more_eos=3)


@pytest.fixture(scope="module")
def address(model, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    # Few at once: a step of 8 rows fills the server, and more rows wait.
    with vllm_server.serve(model, log, "--max-model-len", str(CONTEXT), "--max-num-seqs", "8") as address:
        yield address


@pytest.fixture(autouse=True)
def updates_by_files(monkeypatch):
    monkeypatch.setattr(generation, "VLLMClient", vllm_server.FileUpdates)


def make(model, address, output, config=SpecGRPOConfig, trainer=CheckedGRPOTrainer, parts=None, **changes):
    server = dict(use_vllm=True, vllm_mode="server", vllm_server_base_url=address)
    return build(model, settings(output, config, **(server | changes)), trainer=trainer, **(parts or {}))


def counted(address):
    """Tokens that the server has generated, and requests for completions that it has answered."""
    requested = dict(handler="/v1/completions", status="2xx")
    return np.array(
        [
            vllm_server.metric(address, "vllm:generation_tokens_total"),
            vllm_server.metric(address, "http_requests_total", **requested),
        ]
    )


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(spec_verifier="engine"),
        dict(temperature=0.7, top_k=20, vllm_importance_sampling_correction=False),
        dict(steps_per_generation=2, num_iterations=2, per_device_train_batch_size=4),
        dict(rloo=True),
    ],
    ids=lambda changes: "-".join(changes) or "default",
)
def test_reuse_begins_with_the_second_epoch_and_nothing_is_generated_beyond(model, address, tmp_path, changes):
    changes = dict(changes)
    kind = (SpecRLOOConfig, CheckedRLOOTrainer) if changes.pop("rloo", False) else (SpecGRPOConfig, CheckedGRPOTrainer)
    trainer = make(model, address, tmp_path, *kind, **changes)
    before = counted(address)
    trainer.train()
    tokens, answered = counted(address) - before
    hits = history(trainer, "spec/draft_hit_rate")
    first_epoch = len(hits) // 3
    assert hits == [0] * first_epoch + [1] * 2 * first_epoch
    assert trainer.checked_rows == len(hits) * 8
    # Stale weights in the server would show here.
    assert all(value < 1e-4 for value in history(trainer, "sampling/sampling_logp_difference/max"))
    # By the server's own count, every row got its budget and not a token more. A scored row takes one.
    total = trainer.spec_rollout.total
    assert total.reused_tokens > 0
    scored = total.verified_rows if changes.get("spec_verifier") == "engine" else 0
    assert tokens == total.generated_tokens + scored
    assert first_epoch <= answered <= total.rows + scored


def test_pruning(model, address, tmp_path):
    """Heads and survivors are asked for apart, with the weights of their step: TRL sends them before the first."""
    parts = dict(reward_funcs=reward_told_at_detection)
    trainer = make(model, address, tmp_path, trainer=CheckedPruning, parts=parts, **SETTINGS)
    before = counted(address)[0]
    trainer.train()
    check_counts(trainer)
    total = trainer.spec_rollout.total
    assert counted(address)[0] - before == total.generated_tokens
    assert total.reused_tokens > 0
    assert all(value < 1e-4 for value in history(trainer, "sampling/sampling_logp_difference/max"))


def test_a_first_epoch_makes_one_request_a_step_as_trl_does(model, address, tmp_path):
    counts = []
    for output, flag in (("plain", False), ("reuse", True)):
        args = dict(use_spec_rollout=flag, num_train_epochs=1)
        trainer = make(model, address, tmp_path / output, trainer=SpecGRPOTrainer, **args)
        before = counted(address)[1]
        trainer.train()
        counts.append(counted(address)[1] - before)
    assert counts == [3, 3]


def test_all_reused_needs_no_request(model, address, tmp_path):
    trainer = make(model, address, tmp_path, spec_rule="full", learning_rate=0.0)
    before = counted(address)[1]
    trainer.train()
    assert counted(address)[1] - before == 3
    assert history(trainer, "spec/full_reuse_rate") == [0, 0, 0] + [1] * 6


@pytest.mark.parametrize("verifier", ["trainer", "engine"])
def test_a_context_too_short_for_the_cap_ends_responses_without_failing(model, address, tmp_path, verifier):
    # Prompts have 5 tokens: 18 more do not fit. The config's length only tells the check. What is scored is accepted.
    lengths = dict(max_completion_length=18, vllm_max_model_length=CONTEXT)
    trainer = make(model, address, tmp_path, spec_verifier=verifier, learning_rate=0.0, **lengths)
    trainer.train()
    total = trainer.spec_rollout.total
    assert total.reused_tokens > 0
    assert total.dropped_length == 0


def test_rows_of_one_batch_get_their_own_context_budget_and_copies(model, address, tmp_path):
    """More requests than the server takes at once, some of many prompts, some of many copies."""
    trainer = make(model, address, tmp_path, trainer=SpecGRPOTrainer)
    trainer.vllm_generation.sync_weights()
    rng = np.random.default_rng(0)
    alone = [rng.integers(8, 40, rng.integers(2, 9)).tolist() for _ in range(40)]
    contexts = [*alone, *alone[:5] * 4, *[alone[0]] * 10]
    rng.shuffle(contexts)
    budgets = rng.integers(1, 12, len(contexts)).tolist()
    engine = trainer.vllm_generation.engine
    continuations = engine.generate(contexts, budgets)
    policy = AutoModelForCausalLM.from_pretrained(model)
    eos = set(trainer.eos_token_ids)
    for context, budget, made in zip(contexts, budgets, continuations, strict=True):
        ids = made.tokens.tolist()
        assert len(ids) == budget if made.finish_reason == "length" else ids[-1] in eos and len(ids) <= budget
        assert not eos & set(ids[:-1])
        with torch.no_grad():
            logits = policy(torch.tensor([context + ids])).logits[0, len(context) - 1 : -1]
        plain = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        np.testing.assert_allclose(made.logprobs, plain, atol=1e-4)
    again = engine.score(contexts, [made.tokens for made in continuations])
    for made, scored in zip(continuations, again, strict=True):
        np.testing.assert_allclose(scored, made.logprobs, atol=1e-4)
    # Copies are samples of their own.
    longest = [tuple(made.tokens) for made in engine.generate([alone[0]] * 8, [11] * 8)]
    assert len(set(longest)) > 1
    before = counted(address)
    assert engine.generate([], []) == engine.score([], []) == []
    assert (counted(address) == before).all()


def test_what_the_server_refuses_is_said(model, address, tmp_path):
    engine = make(model, address, tmp_path, trainer=SpecGRPOTrainer).vllm_generation.engine
    with pytest.raises(RuntimeError, match="maximum context length is 20 tokens"):
        engine.generate([[9] * CONTEXT, [9]], [3, 3])


def test_a_server_that_returns_logits_is_refused(model, address, tmp_path, monkeypatch):
    class ServerOfLogits(vllm_server.FileUpdates):
        def get_server_info(self):
            info = super().get_server_info()
            info["model_config"]["logprobs_mode"] = "processed_logits"
            return info

    monkeypatch.setattr(generation, "VLLMClient", ServerOfLogits)
    with pytest.raises(UnsupportedSetting, match="processed_logits"):
        make(model, address, tmp_path)


class RankOfTwo:
    """One of two ranks, each a thread; see [`specrl_plugins.ranks.Ranks`]."""

    nodes = (0, 0)

    def __init__(self, index, shared, barrier):
        self.index, self._shared, self._barrier = index, shared, barrier

    def gather(self, mine):
        self._shared[self.index] = mine
        self._barrier.wait(60)
        gathered = list(self._shared)
        self._barrier.wait(60)
        return gathered


def test_when_the_server_fails_every_rank_says_so(model, address, tmp_path):
    main = make(model, address, tmp_path, trainer=SpecGRPOTrainer).vllm_generation._original
    other = copy.copy(main)
    del other.vllm_client  # TRL gives one to the main process alone
    shared, barrier = [None, None], threading.Barrier(2)

    def fail_then_go_on(generation, rank):
        engine = ServerEngine(generation, [2], rank)
        with pytest.raises(RuntimeError, match="maximum context length is 20 tokens"):
            engine.generate([[9] * (CONTEXT if rank.index else 1)], [3])
        # One rank has nothing to generate: it takes part.
        return [len(made.tokens) for made in engine.generate([[9, 10]] * rank.index, [1] * rank.index)]

    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(fail_then_go_on, generation, RankOfTwo(index, shared, barrier))
            for index, generation in enumerate([main, other])
        ]
    assert [run.result() for run in runs] == [[], [1]]


def test_a_prefix_cache_that_cannot_be_reset_is_an_error(model, address, tmp_path):
    """Somebody else's requests hold blocks of the cache: seconds of them, that end one by one."""
    intercepted = make(model, address, tmp_path, trainer=SpecGRPOTrainer).vllm_generation
    client = vllm_server.FileUpdates(base_url=address)
    others = threading.Thread(target=client.generate, kwargs=dict(prompts=[[9, 10, 11]] * 1000, max_tokens=16))
    others.start()
    while not vllm_server.metric(address, "vllm:num_requests_running"):
        time.sleep(0.01)
    with pytest.raises(RuntimeError, match="keys and values of old weights"):
        intercepted.sync_weights()
    others.join()
    intercepted.sync_weights()


def test_two_ranks_share_a_server(model, address, tmp_path):
    """The second prompt of a step straddles the ranks, and each has other rows to continue."""
    run = ROWS | dict(use_vllm=True, vllm_mode="server", vllm_server_base_url=address, num_train_epochs=2)
    before = counted(address)[0]
    runs = train(model, tmp_path, {name: run | dict(spec_verifier=name) for name in ("trainer", "engine")})
    for ranks in runs.values():
        check(ranks, epochs=2)
    totals = {name: ranks[0]["total"] for name, ranks in runs.items()}
    made = sum(total["generated_tokens"] for total in totals.values()) + totals["engine"]["verified_rows"]
    assert counted(address)[0] - before == made
