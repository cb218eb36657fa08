"""The sampled distribution, against its definition and against what vLLM samples and reports."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("trl")

import torch
import truncation
from frequencies import SURPRISE, surprise_of_tokens

from trl_integration.distribution import SampledDistribution

pytestmark = pytest.mark.trl

# Together they leave other tokens when they are taken in another order.
ORDERED = [dict(top_p=0.8, min_p=0.3), dict(top_k=3, top_p=0.7), dict(top_k=6, min_p=0.2), truncation.SETTINGS[-1]]


def distribution(sampler, temperature=1.0, top_k=0, top_p=1.0, min_p=None):
    return SampledDistribution(temperature, top_k, top_p, min_p, sampler)


@pytest.fixture(params=["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def sampler(request):
    if request.param == "vllm":
        pytest.importorskip("vllm")
    return request.param


@pytest.mark.parametrize("settings", [*truncation.SETTINGS, *ORDERED], ids=truncation.name)
def test_log_probs_are_those_of_the_definition(sampler, settings):
    logits = torch.tensor(2 * np.random.default_rng(0).normal(size=(400, 50)), dtype=torch.float32)
    expected = truncation.log_probs(logits, sampler, **settings)
    sampled = distribution(sampler, **settings)
    for token in range(50):
        scored = sampled.token_logprobs(logits.clone(), torch.full((400,), token)).numpy()
        np.testing.assert_allclose(scored, expected[:, token], atol=1e-5)


def test_the_order_of_the_cuts_is_told_apart_by_these_settings():
    logits = 2 * np.random.default_rng(0).normal(size=(400, 50))
    for settings in (ORDERED[0], ORDERED[-1]):
        kept = [np.isfinite(truncation.log_probs(logits, sampler, **settings)) for sampler in ("transformers", "vllm")]
        assert (kept[0] != kept[1]).any(1).mean() > 0.1


@pytest.mark.parametrize("settings", [dict(top_k=10**6), dict(min_p=0.0), dict(top_k=0, top_p=1.0)], ids=str)
def test_settings_that_keep_every_token(sampler, settings):
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(20)
    scored = distribution(sampler, **settings).token_logprobs(logits.clone(), tokens)
    torch.testing.assert_close(scored, logits.log_softmax(-1)[tokens, tokens])


def test_what_is_no_number_stays_visible(sampler):
    """The core tells it from a token without probability."""
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    logits[1, 7] = torch.nan
    scored = distribution(sampler, **truncation.SETTINGS[-1]).token_logprobs(logits, torch.tensor([0, 1, 2]))
    assert scored.isnan().tolist() == [False, True, False]


@pytest.mark.vllm
@pytest.mark.parametrize("settings", [*truncation.SETTINGS, ORDERED[0]], ids=truncation.name)
def test_what_vllm_samples_has_the_frequencies_and_log_probs_that_are_scored(llm, policy, settings):
    """8,000 first tokens after one prompt by chi-square against their scores, deviate below 4, seed 0.

    A score is that of the trainer's verifier. The same tokens are far from the chances without these settings (above
    10). Log-probs of 64 longer responses, as vLLM reports them, equal a second score to 1e-4. Requests have no seeds
    of their own, as in TRL: generators with neighbouring seeds are not independent, by more than this test allows.
    """
    from vllm import SamplingParams

    from specrl_plugins.vllm import VLLMEngine

    sampled, prompt = distribution("vllm", **settings), [5, 6, 7]
    engine = VLLMEngine(llm, SamplingParams(**(dict(logprobs=0, top_k=0) | settings)))
    params = engine.sampling_params.clone()
    params.n, params.max_tokens, params.detokenize = 8000, 1, False
    torch.manual_seed(0)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling_params=params, use_tqdm=False)
    tokens = np.array([one.token_ids[0] for one in output.outputs])

    vocabulary = torch.arange(policy.config.vocab_size)[:, None]
    every = torch.cat([torch.tensor(prompt).expand(len(vocabulary), 3), vocabulary], 1)
    with torch.no_grad():
        scored = sampled.logprobs(policy, every, torch.ones_like(every), 1)[:, 0]
        plain = distribution("vllm").logprobs(policy, every, torch.ones_like(every), 1)[:, 0]
    assert surprise_of_tokens(tokens, scored.exp().numpy()) < SURPRISE
    assert surprise_of_tokens(tokens, plain.exp().numpy()) > 10

    for made in engine.generate([prompt] * 64, [12] * 64):
        ids = torch.tensor([prompt + made.tokens.tolist()])
        with torch.no_grad():
            again = sampled.logprobs(policy, ids, torch.ones_like(ids), len(made.tokens))[0].numpy()
        np.testing.assert_allclose(made.logprobs, again, atol=1e-4)
