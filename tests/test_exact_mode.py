"""The exact mode: past responses are drafts of the engine, and every response is a fresh sample of the policy."""

from __future__ import annotations

import functools
import gc

import numpy as np
import pytest

pytest.importorskip("trl")
pytest.importorskip("vllm")

import repeater
import torch
import vllm_cpu
from frequencies import SURPRISE, kolmogorov, surprise_of_tokens
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl_runs import CheckedGRPOTrainer, build, history, settings

from specrl_plugins.book_proposer import speculative_config
from specrl_plugins.engine import Drafts
from specrl_plugins.vllm import VLLMEngine
from trl_integration import SpecGRPOTrainer
from trl_integration.checks import UnsupportedSetting

pytestmark = [pytest.mark.trl, pytest.mark.vllm]

ENGINE = dict(use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.2, vllm_max_model_length=64)
EXACT = ENGINE | dict(spec_mode="exact", spec_draft_tokens=4)
PROMPT, TOKENS = [5, 6, 7], 12


@pytest.fixture(autouse=True)
def counting_vllm(monkeypatch):
    """TRL's engine with vLLM's own counters."""
    import trl.generation.vllm_generation as generation

    vllm_cpu.repair()
    monkeypatch.setattr(generation, "LLM", functools.partial(generation.LLM, disable_log_stats=False))


def counted(llm, name):
    return sum(m.value for m in llm.get_metrics() if m.name == f"vllm:spec_decode_num_{name}_tokens")


@torch.no_grad()
def sampled(policy, rows):
    """Responses of `TOKENS` tokens to `PROMPT`, of shape `(rows, tokens)`."""
    ids = torch.tensor(PROMPT).expand(rows, -1)
    for _ in range(TOKENS):
        ids = torch.cat([ids, policy(ids).logits[:, -1].softmax(-1).multinomial(1)], 1)
    return ids[:, len(PROMPT) :]


@torch.no_grad()
def chances(policy, responses):
    """Of all next tokens at each token of the responses, `(rows, tokens, vocabulary)`, float64."""
    ids = torch.cat([torch.tensor(PROMPT).expand(len(responses), -1), responses], 1)
    return policy(ids).logits[:, len(PROMPT) - 1 : -1].double().softmax(-1)


def places(policy, responses):
    """Where each token lies in its own distribution, by the policy: uniform on (0, 1) if it was sampled from it."""
    of_all = chances(policy, responses)
    ends, own = of_all.cumsum(-1).gather(2, responses[..., None]), of_all.gather(2, responses[..., None])
    within = np.random.default_rng(0).random((*responses.shape, 1))
    return (ends - own * torch.tensor(within)).flatten().numpy()


def test_a_policy_that_was_trained_on_its_drafts_is_sampled_all_the_same(tiny_model, tmp_path):
    """Through the real engine, 4,000 rows of 12 tokens, seed 0: of all tokens the places in their distributions are
    uniform (Kolmogorov), and the first token has its chances (chi-square, 4 standard deviations). The drafts
    themselves, on which the policy was trained, are far off."""
    import trl.generation.vllm_generation as generation
    from vllm import SamplingParams

    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_pretrained(tiny_model)
    drafts = sampled(policy, 64)
    ids = torch.cat([torch.tensor(PROMPT).expand(len(drafts), -1), drafts], 1)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for _ in range(40):
        policy(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    policy.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path)
    llm = generation.LLM(
        model=str(tmp_path), max_model_len=64, gpu_memory_utilization=0.2, logprobs_mode="processed_logprobs",
        speculative_config=speculative_config(4),
    )  # fmt: skip
    rows = 4000
    given = Drafts([b"one"] * rows, [drafts[row % 64].numpy().astype(np.int32) for row in range(rows)], 4, 1000)
    engine = VLLMEngine(llm, SamplingParams(temperature=1.0, ignore_eos=True))
    made = engine.generate_from_drafts([PROMPT] * rows, [TOKENS] * rows, given)
    assert given.accepted == counted(llm, "accepted") > rows
    assert counted(llm, "draft") <= given.drafted
    responses = torch.tensor(np.array([one.tokens for one in made]), dtype=torch.long)
    own = chances(policy, responses)
    logprobs = own.log().gather(2, responses[..., None])[..., 0].numpy()
    np.testing.assert_allclose(np.array([one.logprobs for one in made]), logprobs, atol=1e-4)
    assert kolmogorov(places(policy, responses)) < 2.2
    assert surprise_of_tokens(responses[:, 0].numpy(), own[0, 0].numpy()) < SURPRISE
    assert kolmogorov(places(policy, drafts.repeat(rows // 64, 1))) > 4


def test_a_run_drafts_and_all_it_trains_on_is_fresh(tiny_model, tmp_path, capfd):
    trainer = build(tiny_model, settings(tmp_path, **EXACT), trainer=CheckedGRPOTrainer)
    trainer.train()
    told = capfd.readouterr().out
    assert "exact, every completion is sampled afresh; the engine drafts 4 tokens at most" in told
    assert f"of those generated {trainer.spec_rollout.total.engine_accepted_tokens} were drafted" in told
    assert history(trainer, "spec/reused_token_fraction") == [0.0] * 9
    assert history(trainer, "spec/fresh_row_rate") == [1.0] * 9
    assert history(trainer, "spec/draft_hit_rate") == [0.0] * 3 + [1.0] * 6
    rates, shares = (history(trainer, f"spec/engine_draft_{name}") for name in ("accept_rate", "fraction"))
    assert len(rates) == len(shares) == 6 and min(rates) > 0 and max(rates + shares) < 1
    assert trainer.checked_rows > 0
    assert all(value < 1e-4 for value in history(trainer, "sampling/sampling_logp_difference/max"))
    del trainer.vllm_generation.llm._original
    gc.collect()


def test_what_is_left_after_a_prefix_is_drafted_too(tiny_model, tmp_path):
    config = settings(tmp_path, **ENGINE, spec_draft_tokens=4, spec_log_lenience=0.0)
    trainer = build(tiny_model, config, trainer=CheckedGRPOTrainer)
    trainer.train()
    assert min(history(trainer, "spec/reused_token_fraction")[3:]) > 0
    assert max(history(trainer, "spec/engine_draft_fraction")) > 0
    assert trainer.checked_rows > 0
    del trainer.vllm_generation.llm._original
    gc.collect()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(use_vllm=False), "set `use_vllm=True` and `vllm_mode='colocate'`"),
        (dict(vllm_mode="server"), "set `use_vllm=True` and `vllm_mode='colocate'`"),
        (dict(spec_draft_tokens=0), "`spec_mode='exact'` with `spec_draft_tokens=0`"),
        (dict(spec_draft_tokens=200), "at most 128"),
        (dict(min_p=0.1), "`min_p=0.1`, which vLLM does not apply to draft tokens"),
        (dict(spec_vllm_speculative_config=repeater.SPECULATIVE_CONFIG), "an engine drafts in one way"),
        (dict(use_spec_rollout=False, spec_prune=True, spec_prune_detection_length=4), "no past completions"),
    ],
    ids=lambda value: None,
)
def test_what_cannot_draft_is_refused(tiny_model, tmp_path, changes, named):
    with pytest.raises(UnsupportedSetting, match=named):
        build(tiny_model, settings(tmp_path, **EXACT | changes), trainer=SpecGRPOTrainer)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(spec_mode="exactly"), "spec_mode is one of reuse, exact, not 'exactly'"),
        (dict(spec_draft_tokens=-1), "spec_draft_tokens is a whole number of tokens, 0 or more, not -1"),
        (dict(spec_draft_rows=0), "spec_draft_rows is a whole number of rows, at least 1, not 0"),
    ],
    ids=lambda value: None,
)
def test_settings_out_of_range_are_refused(tmp_path, changes, named):
    with pytest.raises(ValueError, match=named):
        settings(tmp_path, **EXACT | changes)
