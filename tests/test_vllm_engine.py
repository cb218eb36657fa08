"""vLLM as the engine of a rollout, against a plain forward."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch

from specrl_plugins import ReusePolicy, SpeculativeRollout, TrajectoryCache

pytestmark = pytest.mark.vllm

# Nats. In fp32 an H200 with vLLM 0.26 came within 1.5e-3 of a plain forward on the CPU.
TOLERANCE = 5e-3 if torch.cuda.is_available() else 1e-4
PROMPTS = [[5, 6, 7], [8], [5, 6, 7, 9, 10, 11, 12]]


def engine(llm, **changes):
    from vllm import SamplingParams

    from specrl_plugins.vllm import VLLMEngine

    return VLLMEngine(llm, SamplingParams(**(dict(max_tokens=16, temperature=1.0, logprobs=0) | changes)))


def plain(policy, prompt, tokens, temperature=1.0):
    with torch.no_grad():
        logits = policy(torch.tensor([prompt + list(tokens)])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(np.asarray(tokens, np.int64))[:, None])[:, 0].numpy()


def test_scores_are_those_of_a_plain_forward(llm, policy):
    rng = np.random.default_rng(0)
    drafts = [rng.integers(0, 48, n).astype(np.int32) for n in (1, 20, 7)]
    for scored, prompt, draft in zip(engine(llm).score(PROMPTS, drafts), PROMPTS, drafts, strict=True):
        np.testing.assert_allclose(scored, plain(policy, prompt, draft), atol=TOLERANCE)


# On a GPU these read the prefix cache. A CPU build without Triton has the older model runner, which must not.
@pytest.mark.parametrize("beyond_a_block", [-100, -1, 0, 1, 5])
def test_scores_are_the_same_whatever_the_prefix_cache_holds(llm, policy, beyond_a_block):
    from specrl_plugins.vllm.engine import may_read_cache

    config = llm.llm_engine.vllm_config
    block = config.cache_config.block_size
    rng = np.random.default_rng(abs(beyond_a_block))
    prompt = rng.integers(4, 48, max(1, block + beyond_a_block)).tolist()
    draft = rng.integers(4, 48, 110).astype(np.int32)
    drafts = [draft, draft, draft.copy(), draft[:104].copy(), draft[:1], *rng.integers(4, 48, (2, 30)).astype(np.int32)]
    drafts[2][80:] = rng.integers(4, 48, 30)  # its beginning is that of the first, past the end of a block
    prompts = [prompt] * len(drafts)
    # One context, divided in two ways.
    prompts.append(prompt + draft[:40].tolist())
    drafts.append(draft[40:])
    expected = [plain(policy, *row) for row in zip(prompts, drafts, strict=True)]
    assert llm.reset_prefix_cache()
    for _ in range(2):
        outputs = answers(llm)
        for scored, exact in zip(engine(llm).score(prompts, drafts), expected, strict=True):
            np.testing.assert_allclose(scored, exact, atol=TOLERANCE)
        found = sum(output.num_cached_tokens for output in outputs)
        assert bool(found) == may_read_cache(config)
        computed = sum(len(output.prompt_token_ids) for output in outputs) - found
        assert computed <= sum(len(p) + len(d) + 1 for p, d in zip(prompts, drafts, strict=True))


def answers(llm):
    """A list to which each answer of the engine is added from here on."""
    outputs = []
    generate = type(llm).generate.__get__(llm)

    def noted(*args, **kwargs):
        outputs.extend(made := generate(*args, **kwargs))
        return made

    llm.generate = noted
    return outputs


def test_requests_are_scored_the_same_whatever_the_prefix_cache_holds(llm, policy):
    from specrl_plugins.vllm import VLLMRequest
    from specrl_plugins.vllm.engine import may_read_cache

    async def ask(tokens, params):
        return llm.generate([{"prompt_token_ids": tokens}], sampling_params=params, use_tqdm=False)[0]

    rng = np.random.default_rng(4)
    prompt, draft = rng.integers(4, 48, 20).tolist(), rng.integers(4, 48, 200).astype(np.int32)
    reads_cache = may_read_cache(llm.llm_engine.vllm_config)
    request = VLLMRequest(ask, prompt, engine(llm).sampling_params, 256, reads_cache)
    assert llm.reset_prefix_cache()
    for _ in range(2):
        outputs = answers(llm)
        scored = asyncio.run(request.score(prompt, draft))
        np.testing.assert_allclose(scored, plain(policy, prompt, draft), atol=TOLERANCE)
    assert bool(outputs[0].num_cached_tokens) == reads_cache


@pytest.mark.parametrize(
    "options",
    [
        dict(enable_prefix_caching=False),
        # Prompts are computed a few tokens at a time, many at once, in a cache that does not hold them.
        dict(max_num_batched_tokens=256, long_prefill_token_threshold=24, scheduler_reserve_full_isl=False),
    ],
    ids=["no prefix cache", "preempted"],
)
def test_scores_are_right_without_a_prefix_cache_and_after_preemption(tiny_model, policy, options):
    from vllm import LLM

    other = LLM(
        model=tiny_model,
        max_model_len=256,
        enforce_eager=True,
        dtype="float32",
        gpu_memory_utilization=0.2,
        max_num_seqs=16,
        kv_cache_memory_bytes=1 << 20,
        disable_log_stats=False,
        **options,
    )
    rng = np.random.default_rng(6)
    prompt = rng.integers(4, 48, 20).tolist()
    draft = rng.integers(4, 48, 220).astype(np.int32)
    drafts = [draft[: 220 - 3 * i].copy() for i in range(16)]
    for row in drafts[8:]:
        row[120:] = rng.integers(4, 48, len(row) - 120)
    for _ in range(2):
        for scored, tokens in zip(engine(other).score([prompt] * 16, drafts), drafts, strict=True):
            np.testing.assert_allclose(scored, plain(policy, prompt, tokens), atol=TOLERANCE)
    preemptions = sum(metric.value for metric in other.get_metrics() if metric.name == "vllm:num_preemptions")
    assert bool(preemptions) == ("enable_prefix_caching" not in options)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_each_row_stops_at_its_budget_with_the_log_probs_of_what_was_sampled(llm, policy, temperature):
    budgets = [1, 12, 5]
    made = engine(llm, temperature=temperature).generate(PROMPTS, budgets)
    for continuation, prompt, budget in zip(made, PROMPTS, budgets, strict=True):
        assert 1 <= len(continuation.tokens) <= budget
        assert continuation.finish_reason == "stop" or len(continuation.tokens) == budget
        expected = plain(policy, prompt, continuation.tokens, temperature)
        np.testing.assert_allclose(continuation.logprobs, expected, atol=TOLERANCE)


@pytest.mark.parametrize(
    "changes",
    [dict(temperature=0.7), dict(top_p=0.9), dict(top_k=5), dict(min_p=0.1), dict(repetition_penalty=1.2)],
    ids=lambda changes: next(iter(changes)),
)
def test_scoring_is_refused_where_another_distribution_is_sampled(llm, changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        engine(llm, **changes).score([[5]], [np.array([6], np.int32)])


def test_a_rollout_continues_from_the_prefix_that_scoring_left_in_the_kv_cache(llm, policy, tmp_path, fingerprint):
    prompts = [[5 + i % 3, 6, 7] for i in range(24)]
    with TrajectoryCache(tmp_path, fingerprint) as cache:
        core = SpeculativeRollout(cache, ReusePolicy(rule="random"), vocab_size=48)
        core.store(core.run(engine(llm), prompts, cap=20, step=1))
        rollout = core.run(engine(llm), prompts, cap=20, step=2)
    assert rollout.counts.reused_tokens and rollout.counts.generated_tokens
    for response in rollout.responses:
        np.testing.assert_allclose(response.logprobs, plain(policy, response.prompt, response.tokens), atol=TOLERANCE)


def test_scoring_leaves_the_prefix_in_the_kv_cache_for_the_continuation(llm):
    assert llm.reset_prefix_cache()
    prompt, draft = [5, 6, 7], np.random.default_rng(1).integers(4, 48, 200).astype(np.int32)
    request = [{"prompt_token_ids": prompt + draft[:180].tolist()}]
    params = engine(llm, max_tokens=1).sampling_params

    def cached_tokens():
        return llm.generate(request, sampling_params=params, use_tqdm=False)[0].num_cached_tokens

    engine(llm).score([prompt], [draft])
    assert cached_tokens() >= 128  # the whole blocks of it: a CPU build's hold 128 tokens
    assert llm.reset_prefix_cache()
    assert cached_tokens() == 0


def test_a_prefix_cache_that_cannot_be_reset_is_an_error(llm):
    from specrl_plugins.vllm import InterceptedLLM

    intercepted = InterceptedLLM(llm)
    assert intercepted.reset_prefix_cache()
    llm.enqueue([{"prompt_token_ids": list(range(5, 45))}], sampling_params=engine(llm).sampling_params)
    llm.llm_engine.step()  # its blocks are in use now
    with pytest.raises(RuntimeError, match="prefix cache"):
        intercepted.reset_prefix_cache()
    llm.wait_for_completion(use_tqdm=False)
    assert intercepted.reset_prefix_cache()


def test_the_stand_in_passes_everything_else_through(llm):
    from specrl_plugins.vllm import InterceptedLLM

    intercepted = InterceptedLLM(llm)
    assert intercepted.llm_engine is llm.llm_engine
    outputs = intercepted.generate(
        [{"prompt_token_ids": [5, 6]}], sampling_params=engine(llm).sampling_params, use_tqdm=False
    )
    assert len(outputs[0].outputs[0].token_ids) > 0
    with pytest.raises(RuntimeError, match=r"without calling LLM\.generate"):
        intercepted.run_instead(lambda engine: None, lambda: None)


# With others beside a token's own it is left to vLLM. In a batch with such requests all have the columns for them.
@pytest.mark.parametrize("top", [[0, 0, 0], [2, 2, 2], [0, 2, 0]])
@pytest.mark.parametrize("flat", [True, False])
def test_log_probs_filed_fast_are_those_that_vllm_files(llm, flat, top):
    from dataclasses import asdict, is_dataclass

    from vllm import SamplingParams

    from specrl_plugins.vllm.logprobs import filed_fast

    rng = np.random.default_rng(3)
    requests = [{"prompt_token_ids": rng.integers(4, 48, length).tolist()} for length in (1, 2, 150)]
    same = dict(max_tokens=9, seed=5, ignore_eos=True, detokenize=False, flat_logprobs=flat)
    params = [SamplingParams(prompt_logprobs=count, logprobs=count, **same) for count in top]

    def results():
        assert llm.reset_prefix_cache()
        for output in llm.generate(requests, sampling_params=params, use_tqdm=False):
            completion = output.outputs[0]
            yield completion.token_ids, completion.cumulative_logprob
            for logprobs in (output.prompt_logprobs, completion.logprobs):
                yield asdict(logprobs) if is_dataclass(logprobs) else logprobs

    expected = list(results())
    with filed_fast():
        assert list(results()) == expected
    assert list(results()) == expected  # and vLLM's own again


def test_a_kv_cache_too_small_for_all_drafts_still_holds_the_last_ones_for_their_continuation(tiny_model):
    from vllm import LLM

    small = LLM(
        model=tiny_model,
        max_model_len=256,
        enforce_eager=True,
        dtype="float32",
        gpu_memory_utilization=0.2,
        logprobs_mode="processed_logprobs",
        kv_cache_memory_bytes=4 << 20,  # 32 blocks of 128 tokens: 16 of the 48 drafts
    )
    hits = []
    generate = small.generate

    def counted(*args, **kwargs):
        outputs = generate(*args, **kwargs)
        hits.append(sum(output.num_cached_tokens or 0 for output in outputs))
        return outputs

    small.generate = counted
    rng = np.random.default_rng(2)
    prompts = [rng.integers(4, 48, 4).tolist() for _ in range(48)]
    drafts = [rng.integers(4, 48, 200).astype(np.int32) for _ in prompts]
    contexts = [prompt + draft[:150].tolist() for prompt, draft in zip(prompts, drafts, strict=True)]
    speculative = engine(small, seed=1)
    speculative.score(prompts, drafts)
    made = speculative.generate(contexts, [4] * len(contexts))
    assert hits[-1] >= 128 * 8  # in the order of scoring: none
    again = speculative.generate(contexts[:1], [4])
    assert made[0].tokens.tolist() == again[0].tokens.tolist()  # answers are in the order of what was asked
