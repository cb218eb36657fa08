"""Drafting inside of the vLLM engine: the setting reaches it, and what it samples is the policy's all the same."""

from __future__ import annotations

import functools
import gc

import numpy as np
import pytest

pytest.importorskip("trl")
pytest.importorskip("vllm")

import repeater
import torch
import trl
import vllm_cpu
from frequencies import kolmogorov
from trl_runs import CheckedGRPOTrainer, build, history, settings

from specrl_plugins.vllm import VLLMEngine
from trl_integration import SpecGRPOConfig, SpecGRPOTrainer, SpecRLOOConfig

pytestmark = [pytest.mark.trl, pytest.mark.vllm]

ENGINE = dict(use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.2, vllm_max_model_length=64)


@pytest.fixture(autouse=True)
def counting_vllm(monkeypatch):
    """TRL's engine with vLLM's own counters."""
    import trl.generation.vllm_generation as generation

    vllm_cpu.repair()
    monkeypatch.setattr(generation, "LLM", functools.partial(generation.LLM, disable_log_stats=False))


def accepted(llm):
    """Drafted tokens that were kept."""
    return sum(m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens")


@pytest.mark.parametrize("verifier", ["trainer", "engine"])
def test_a_run_reuses_and_drafts_and_its_log_probs_are_right(tiny_model, tmp_path, verifier):
    changes = ENGINE | dict(spec_verifier=verifier, spec_vllm_speculative_config=repeater.SPECULATIVE_CONFIG)
    trainer = build(tiny_model, settings(tmp_path, **changes), trainer=CheckedGRPOTrainer)
    assert trainer.vllm_generation.llm.llm_engine.vllm_config.speculative_config.method == "custom_class"
    trainer.train()
    assert accepted(trainer.vllm_generation.llm) > 0
    assert min(history(trainer, "spec/reused_token_fraction")[4:]) > 0
    assert trainer.checked_rows > 0
    assert all(value < 1e-4 for value in history(trainer, "sampling/sampling_logp_difference/max"))
    del trainer.vllm_generation.llm._original
    gc.collect()


def test_it_works_without_reuse_and_leaves_other_engines_alone(tiny_model, tmp_path):
    changes = ENGINE | dict(use_spec_rollout=False, max_steps=2)
    config = settings(tmp_path / "on", **changes, spec_vllm_speculative_config=repeater.SPECULATIVE_CONFIG)
    trainer = build(tiny_model, config, trainer=SpecGRPOTrainer)
    assert trainer.spec_rollout is None
    trainer.train()
    assert accepted(trainer.vllm_generation.llm) > 0
    plain = build(tiny_model, settings(tmp_path / "off", **changes), trainer=SpecGRPOTrainer)
    assert plain.vllm_generation.llm.llm_engine.vllm_config.speculative_config is None


def test_what_is_sampled_with_drafts_is_the_policys_own(tiny_model, policy):
    """Where each of 2,000 x 11 tokens lies in its own distribution, by the policy, is uniform (Kolmogorov, seed 0).

    At temperature 0.3, so that many drafts are accepted. Against the distribution of temperature 0.4 the same tokens
    are far off. Their log-probs, as vLLM reports them, are those of the policy.
    """
    import trl.generation.vllm_generation as generation
    from vllm import SamplingParams

    llm = generation.LLM(
        model=tiny_model, max_model_len=256, gpu_memory_utilization=0.2, logprobs_mode="processed_logprobs",
        speculative_config=repeater.SPECULATIVE_CONFIG,
    )  # fmt: skip
    torch.manual_seed(0)
    prompt, rows = [5, 6, 7], 2000
    sampling = SamplingParams(temperature=0.3, logprobs=0, ignore_eos=True)
    made = VLLMEngine(llm, sampling).generate([prompt] * rows, [12] * rows)
    assert accepted(llm) > rows
    tokens = torch.tensor(np.array([one.tokens for one in made]), dtype=torch.long)
    ids = torch.cat([torch.tensor(prompt).expand(rows, -1), tokens], 1)
    with torch.no_grad():
        logits = policy(ids).logits[:, len(prompt) - 1 : -1].double()
    logprobs = (logits / 0.3).log_softmax(-1).gather(2, tokens[..., None])[..., 0]
    np.testing.assert_allclose(np.array([one.logprobs for one in made]), logprobs.numpy(), atol=1e-4)
    within = np.random.default_rng(0).random((rows, 11))

    def places(temperature):
        chances = (logits[:, 1:] / temperature).softmax(-1)  # the first token of a response has no draft
        ends, own = chances.cumsum(-1).gather(2, tokens[:, 1:, None]), chances.gather(2, tokens[:, 1:, None])
        return (ends - own * torch.tensor(within)[..., None]).flatten().numpy()

    assert kolmogorov(places(0.3)) < 2.2
    assert kolmogorov(places(0.4)) > 4


@pytest.mark.parametrize("config", [SpecGRPOConfig, SpecRLOOConfig])
def test_on_the_command_line_it_is_json(tmp_path, config):
    given = ["--output_dir", str(tmp_path), "--bf16", "false", "--use_vllm", "--vllm_mode", "colocate"]
    given += ["--spec_vllm_speculative_config", '{"method": "ngram", "model": "7", "num_speculative_tokens": 16}']
    (args,) = trl.TrlParser(config).parse_args_and_config(given)
    assert args.spec_vllm_speculative_config == {"method": "ngram", "model": "7", "num_speculative_tokens": 16}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(spec_vllm_speculative_config="suffix"), "a dictionary or JSON of one, as vLLM takes it, not 'suffix'"),
        (dict(spec_vllm_speculative_config='{"method": "suffix"'), "JSON of one, as vLLM takes it, not"),
        (dict(spec_vllm_speculative_config="[16]"), r"not \[16\]"),
        (dict(spec_vllm_speculative_config={}), "not {}"),
        (dict(spec_vllm_speculative_config={"method": "suffix", "num_speculative_tokens": 200}), "at most 128"),
        (dict(spec_vllm_speculative_config={"model": "small"}, vllm_enable_sleep_mode=True), "would not come back"),
        (
            dict(spec_vllm_speculative_config=repeater.SPECULATIVE_CONFIG, vllm_mode="server"),
            "vllm serve --speculative-config",
        ),
        (dict(spec_vllm_speculative_config=repeater.SPECULATIVE_CONFIG, use_vllm=False), "use_vllm=True"),
        (dict(spec_vllm_speculative_config=repeater.SPECULATIVE_CONFIG, min_p=0.1), "min_p"),
        (
            dict(
                spec_vllm_speculative_config=repeater.SPECULATIVE_CONFIG,
                generation_kwargs={"logit_bias": {5: 3.0}},
                use_spec_rollout=False,
            ),
            "logit_bias",
        ),
    ],
    ids=lambda value: None,
)
def test_what_no_engine_would_see_is_refused(tmp_path, changes, named):
    with pytest.raises(ValueError, match=named):
        settings(tmp_path, **ENGINE | changes)


def test_an_engine_that_loses_the_temperature_of_drafts_is_refused(tiny_model, tmp_path, monkeypatch):
    """As vLLM 0.29's CPU build does, before the tests repair it."""
    import vllm.utils.cpu_triton_utils as kernels
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("kernels of a GPU are right")
    monkeypatch.setattr(kernels.expand_kernel, "func", kernels._expand_kernel_impl)
    config = settings(tmp_path, **ENGINE, spec_vllm_speculative_config=repeater.SPECULATIVE_CONFIG)
    with pytest.raises(ValueError, match="loses the temperature of drafted tokens"):
        build(tiny_model, config)
