"""Sampling through `model.generate` with a budget a row, against a plain forward and plain `generate`."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("trl")

import torch
import truncation
from frequencies import SURPRISE, surprise_of_tokens
from transformers import AutoModelForCausalLM, GenerationConfig

from trl_integration.distribution import SampledDistribution
from trl_integration.sampling import recorded_generate

pytestmark = pytest.mark.trl

EOS = [2, 10, 11]
PAD = 3


@pytest.fixture(scope="module")
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def tied_model(tiny_model):
    """Every second token is exactly as likely as the one before it."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        model.lm_head.weight[1::2] = model.lm_head.weight[::2]
    return model


def distribution(temperature=1.0, top_k=0, top_p=1.0, min_p=None):
    return SampledDistribution(temperature, top_k, top_p, min_p, "transformers")


def prompts(rows):
    return torch.randint(12, 40, (rows, 5), generator=torch.Generator().manual_seed(0))


def generate(model, cap, eos=EOS, pad=PAD, inputs=None, **sampling):
    torch.manual_seed(3)
    inputs = prompts(64) if inputs is None else inputs
    config = GenerationConfig(
        max_new_tokens=cap,
        do_sample=True,
        eos_token_id=eos,
        pad_token_id=pad,
        disable_compile=True,
        **(dict(top_k=0) | sampling),
    )
    output = model.generate(input_ids=inputs, attention_mask=torch.ones_like(inputs), generation_config=config)
    return inputs, output[:, inputs.size(1) :]


@pytest.mark.parametrize("sampling", [dict(), *truncation.SETTINGS], ids=truncation.name)
@pytest.mark.parametrize(("eos", "pad"), [(EOS, PAD), (EOS, 2), ([2], 2)], ids=["several", "pad-is-eos", "one"])
def test_rows_end_at_their_budget_or_end_token_with_right_log_probs(model, sampling, eos, pad):
    budgets = [1 + row % 9 for row in range(64)]
    with recorded_generate(model, budgets, eos, distribution(**sampling).warpers) as recorder:
        inputs, output = generate(model, 9, eos, pad, **sampling)
    stopped = 0
    for row, made in enumerate(recorder.continuations()):
        tokens = made.tokens.tolist()
        assert tokens == output[row, : len(tokens)].tolist()
        assert 1 <= len(tokens) <= budgets[row]
        assert not set(eos) & set(tokens[:-1])
        assert made.finish_reason == ("stop" if tokens[-1] in eos else "length")
        assert made.finish_reason == "stop" or len(tokens) == budgets[row]
        stopped += made.finish_reason == "stop"
        with torch.no_grad():
            logits = model(torch.cat([inputs[row], torch.tensor(tokens)])[None]).logits[0, 4:-1].numpy()
        expected = truncation.log_probs(logits, **sampling)[np.arange(len(tokens)), tokens]
        np.testing.assert_allclose(made.logprobs, expected, atol=1e-4)
    assert 0 < stopped < 64


@pytest.mark.parametrize("sampling", [dict(), *truncation.SETTINGS], ids=truncation.name)
def test_recording_does_not_change_what_is_sampled(model, tied_model, sampling):
    for policy in (model, tied_model):
        _, plain = generate(policy, 9, **sampling)
        with recorded_generate(policy, [9] * 64, EOS, distribution(**sampling).warpers):
            _, recorded = generate(policy, 9, **sampling)
        assert torch.equal(plain, recorded)


@pytest.mark.parametrize("ties", [False, True], ids=["", "ties"])
@pytest.mark.parametrize("sampling", truncation.SETTINGS, ids=truncation.name)
def test_what_is_sampled_has_the_frequencies_that_are_scored(model, tied_model, sampling, ties):
    """10,000 first tokens after one prompt by chi-square against their scores, deviate below 4, seed 3.

    The settings are those of plain `generate`. A score is that of the trainer's verifier. The same tokens are far
    from the chances without these settings (above 10). Ties: 5 and 12 kept tokens end within a pair of equals.
    """
    policy, rows = tied_model if ties else model, 10000
    with torch.no_grad():
        one = prompts(1)
        vocabulary = torch.arange(policy.config.vocab_size)[:, None]
        every = torch.cat([one.expand(len(vocabulary), 5), vocabulary], 1)
        scored = distribution(**sampling).logprobs(policy, every, torch.ones_like(every), 1)[:, 0]
        plain = distribution().logprobs(policy, every, torch.ones_like(every), 1)[:, 0]
    assert scored.exp().sum() == pytest.approx(1, abs=1e-5)
    _, output = generate(policy, 1, inputs=one.expand(rows, 5), **sampling)
    tokens = output[:, 0].numpy()
    assert surprise_of_tokens(tokens, scored.exp().numpy()) < SURPRISE
    assert surprise_of_tokens(tokens, plain.exp().numpy()) > 10


@pytest.mark.parametrize("ties", [False, True], ids=["", "ties"])
@pytest.mark.parametrize("sampling", truncation.SETTINGS, ids=truncation.name)
def test_a_second_score_of_what_was_sampled_equals_what_was_recorded(model, tied_model, sampling, ties, monkeypatch):
    """Rows and positions are also scored in more parts than one, as large vocabularies are."""
    policy, sampled = tied_model if ties else model, distribution(**sampling)
    with recorded_generate(policy, [12] * 64, [], sampled.warpers) as recorder, torch.no_grad():
        inputs, output = generate(policy, 12, [], **sampling)
    recorded = np.stack([made.logprobs for made in recorder.continuations()])
    sequences = torch.cat([inputs, output], 1)
    for bound in (1 << 26, 1000):
        monkeypatch.setattr("trl_integration.distribution._FORWARD_LOGITS", bound)
        monkeypatch.setattr("trl_integration.distribution._SORTED_LOGITS", bound)
        with torch.no_grad():
            scored = sampled.logprobs(policy, sequences, torch.ones_like(sequences), 12).numpy()
        np.testing.assert_allclose(scored, recorded, atol=1e-4)


def test_generate_is_itself_again_afterwards_also_after_an_error(model):
    with pytest.raises(KeyboardInterrupt), recorded_generate(model, [1], EOS, distribution().warpers):
        raise KeyboardInterrupt
    assert "generate" not in vars(model)
