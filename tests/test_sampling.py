"""Sampling through `model.generate` with a budget a row, against a plain forward and plain `generate`."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("trl")

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from trl_integration.sampling import recorded_generate

pytestmark = pytest.mark.trl

EOS = [2, 10, 11]
PAD = 3


@pytest.fixture(scope="module")
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model)


def generate(model, cap, temperature, eos=EOS, pad=PAD, rows=64):
    torch.manual_seed(3)
    inputs = torch.randint(12, 40, (rows, 5), generator=torch.Generator().manual_seed(0))
    config = GenerationConfig(
        max_new_tokens=cap,
        do_sample=True,
        temperature=temperature,
        eos_token_id=eos,
        pad_token_id=pad,
        top_k=0,
        disable_compile=True,
    )
    output = model.generate(input_ids=inputs, attention_mask=torch.ones_like(inputs), generation_config=config)
    return inputs, output[:, inputs.size(1) :]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize(("eos", "pad"), [(EOS, PAD), (EOS, 2), ([2], 2)], ids=["several", "pad-is-eos", "one"])
def test_rows_end_at_their_budget_or_end_token_with_right_log_probs(model, temperature, eos, pad):
    budgets = [1 + row % 9 for row in range(64)]
    with recorded_generate(model, budgets, eos, temperature) as recorder:
        inputs, output = generate(model, 9, temperature, eos, pad)
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
            logits = model(torch.cat([inputs[row], torch.tensor(tokens)])[None]).logits[0, 4:-1] / temperature
        plain = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()
        np.testing.assert_allclose(made.logprobs, plain, atol=1e-4)
    assert 0 < stopped < 64


def test_recording_does_not_change_what_is_sampled(model):
    _, plain = generate(model, 9, 1.0)
    with recorded_generate(model, [9] * 64, EOS, 1.0):
        _, recorded = generate(model, 9, 1.0)
    assert torch.equal(plain, recorded)


def test_generate_is_itself_again_afterwards_also_after_an_error(model):
    with pytest.raises(KeyboardInterrupt), recorded_generate(model, [1], EOS, 1.0):
        raise KeyboardInterrupt
    assert "generate" not in vars(model)
