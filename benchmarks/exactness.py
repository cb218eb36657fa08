"""What comes out of verification where the policy was trained on its drafts: samples of the policy, or something else.

    PYTHONPATH=. python benchmarks/exactness.py --output OUT.json [--chart OUT.png] [--samples 1000000]

Two parts, both on a CPU:

- `engine`: through vLLM, a tiny model that was trained on 64 responses of its own, which are its drafts. Each token
  that the exact mode samples has a place in its own distribution, which is enumerated. The places of `--samples`
  tokens are counted in 64 classes of equal chance: Pearson's chi-square. First tokens are also set against their one
  distribution, token by token.
- `bias`: a policy over 16 tokens that takes one gradient step on a group of 8 samples (REINFORCE with the group's mean
  as baseline, rewards 0 and 1), and then verifies these very samples. How much likelier this step has made what comes
  out: the mean of log p - log q, new and old policy, less what it is of fresh samples of the new one. With the rule
  min(1, p/q), as reuse has it, on the samples that the policy was trained on, and on as many others; and with the rule
  that an engine has for given drafts. The same of the mean reward. Over `--groups` groups.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import core
import numpy as np
import replay_rollouts
import torch
from numpy.typing import NDArray
from train_side_by_side import _free_port, _prepare_vllm

from specrl_plugins.acceptance import verified_prefix_lengths

PROMPT, LENGTH, DRAFTS, CLASSES = [5, 6, 7], 12, 64, 64
VOCABULARY, GROUP = 16, 8
STEPS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)  # learning rates: how far the policy moves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON file")
    parser.add_argument("--chart", type=Path, help="of the bias")
    parser.add_argument("--samples", type=int, default=1_000_000, help="tokens that the engine samples")
    parser.add_argument("--groups", type=int, default=20_000, help="of the bias, for each learning rate")
    options = parser.parse_args()
    report = replay_rollouts.header("tiny", core.commit()) | {"bias": bias(options.groups)}
    if options.chart:
        draw(report["bias"], options.chart)
    report["engine"] = through_the_engine(options.samples)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(options.output.read_text())


# -- a table


def bias(groups: int) -> list[dict[str, Any]]:
    """For each learning rate what comes out, less what fresh samples are: see above, with standard errors."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=VOCABULARY)
    rewards = (np.arange(VOCABULARY) % 2).astype(float)
    before = _softmax(logits)
    found = []
    for rate in STEPS:
        kinds = ("trained", "others", "exact")
        above: dict[str, dict[str, list[float]]] = {kind: {"log_ratio": [], "reward": []} for kind in kinds}
        moved, accepted = [], []
        for _ in range(groups):
            samples = rng.choice(VOCABULARY, GROUP, p=before)
            advantages = rewards[samples] - rewards[samples].mean()
            gradient = np.bincount(samples, advantages, VOCABULARY) / GROUP - before * advantages.mean()
            policy = _softmax(logits + rate * gradient)
            ratios = np.log(policy / before)
            moved.append(float(policy @ ratios))
            others = rng.choice(VOCABULARY, GROUP, p=before)
            verified = {"trained": samples, "others": others}
            kept = {kind: _accepted(before, policy, drafts, rng) for kind, drafts in verified.items()}
            accepted.append(float(kept["trained"].mean()))
            made = _given(policy, samples, rng)
            for name, values in (("log_ratio", ratios), ("reward", rewards)):
                own = float(policy @ values)  # of what is not kept, which is sampled from the policy
                for kind, drafts in verified.items():
                    above[kind][name].append(float(np.where(kept[kind], values[drafts] - own, 0.0).mean()))
                above["exact"][name].append(float(values[made].mean()) - own)
        found.append(
            {
                "learning_rate": rate,
                "kl_nats": _mean(moved)["mean"],
                "accepted": _mean(accepted)["mean"],
                **{kind: {name: _mean(values) for name, values in of.items()} for kind, of in above.items()},
            }
        )
    return found


def _softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    chances = np.exp(logits - logits.max())
    return chances / chances.sum()


def _accepted(before: NDArray, policy: NDArray, drafts: NDArray, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Which drafts of one token the rule of reuse keeps."""
    old, new = (np.log(chances[drafts]).astype(np.float32)[:, None] for chances in (before, policy))
    return verified_prefix_lengths(list(old), list(new), list(rng.random((len(drafts), 1))), 0.0) == 1


def _given(policy: NDArray, drafts: NDArray, rng: np.random.Generator) -> NDArray[np.int64]:
    """What an engine samples, given these drafts: each with its own probability, or the rest without it."""
    kept = rng.random(len(drafts)) < policy[drafts]
    rest = np.tile(policy, (len(drafts), 1))
    rest[np.arange(len(drafts)), drafts] = 0
    ends = rest.cumsum(1)
    others = (rng.random((len(drafts), 1)) * ends[:, -1:] >= ends).sum(1)
    return np.where(kept, drafts, np.minimum(others, len(policy) - 1))


def _mean(values: list[float]) -> dict[str, float]:
    return {"mean": float(np.mean(values)), "error": float(np.std(values, ddof=1) / len(values) ** 0.5)}


def draw(found: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    labels = {
        "trained": "reuse: min(1, p/q), on the samples it was trained on",
        "others": "the same rule, on other samples of the old policy",
        "exact": "exact mode: a given draft x is accepted with p(x)",
    }
    for kind, label in labels.items():
        means, errors = ([point[kind]["log_ratio"][name] for point in found] for name in ("mean", "error"))
        axes.errorbar([point["kl_nats"] for point in found], means, errors, marker="o", capsize=3, label=label)
    axes.axhline(0, color="gray", linewidth=0.8)
    axes.set_xlabel("how far one step moves the policy (KL, nats)")
    axes.set_ylabel("log p - log q above that of fresh samples, nats")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


# -- an engine


def through_the_engine(samples: int) -> dict[str, Any]:
    """Chi-square of the exact mode's tokens, and of the drafts it was given."""
    _prepare_vllm()
    os.environ["MASTER_PORT"] = str(_free_port())
    from tiny_model import tiny_model
    from trl.generation import vllm_generation
    from vllm import SamplingParams

    from specrl_plugins.book_proposer import speculative_config
    from specrl_plugins.engine import Drafts
    from specrl_plugins.vllm import VLLMEngine

    torch.manual_seed(0)
    policy, tokenizer = tiny_model()
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
        drafts = torch.tensor(PROMPT).expand(DRAFTS, -1)
        for _ in range(LENGTH):
            drafts = torch.cat([drafts, policy(drafts).logits[:, -1].softmax(-1).multinomial(1)], 1)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    for _ in range(60):
        policy(drafts, labels=drafts).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    drafts = drafts[:, len(PROMPT) :]
    rows, found = -(-samples // LENGTH), []
    with tempfile.TemporaryDirectory() as directory:
        policy.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        llm = vllm_generation.LLM(
            model=directory, max_model_len=64, gpu_memory_utilization=0.2, logprobs_mode="processed_logprobs",
            speculative_config=speculative_config(4),
        )  # fmt: skip
        engine = VLLMEngine(llm, SamplingParams(temperature=1.0, ignore_eos=True))
        drafted = accepted = 0
        for start in range(0, rows, 8192):
            count = min(8192, rows - start)
            past = [drafts[row % DRAFTS].numpy().astype(np.int32) for row in range(count)]
            given = Drafts([b"one"] * count, past, 4, count)
            made = engine.generate_from_drafts([PROMPT] * count, [LENGTH] * count, given)
            found += [one.tokens for one in made]
            drafted, accepted = drafted + given.drafted, accepted + given.accepted
            print(f"{start + count} of {rows} rows", flush=True)
    responses = torch.tensor(np.array(found), dtype=torch.long)
    of_drafts = places(policy, drafts.repeat(-(-rows // DRAFTS), 1)[:rows])
    counts = np.bincount(responses[:, 0].numpy(), minlength=policy.config.vocab_size)
    expected = len(responses) * chances(policy, responses[:1])[0, 0].numpy()
    return {
        "tokens": responses.numel(),
        "engine_drafted_tokens": drafted,
        "engine_accepted_tokens": accepted,
        "places": uniform(places(policy, responses)),
        "places_of_the_drafts": uniform(of_drafts),
        "first_token": pearson(counts, expected),
    }


def chances(policy: Any, responses: Any) -> Any:
    """Of all next tokens at each token of the responses, of shape `(rows, tokens, vocabulary)`."""
    with torch.no_grad():
        ids = torch.cat([torch.tensor(PROMPT).expand(len(responses), -1), responses], 1)
        return policy(ids).logits[:, len(PROMPT) - 1 : -1].double().softmax(-1)


def places(policy: Any, responses: Any) -> NDArray[np.float64]:
    """Where each token lies in its own distribution: uniform on (0, 1) if it was sampled from it."""
    rng, found = np.random.default_rng(0), []
    for part in responses.split(4096):
        of_all = chances(policy, part)
        ends, own = of_all.cumsum(-1).gather(2, part[..., None]), of_all.gather(2, part[..., None])
        found.append((ends - own * torch.tensor(rng.random((*part.shape, 1)))).flatten().numpy())
    return np.concatenate(found)


def uniform(values: NDArray[np.float64]) -> dict[str, float]:
    counts = np.bincount(np.minimum((values * CLASSES).astype(int), CLASSES - 1), minlength=CLASSES)
    return pearson(counts, np.full(CLASSES, len(values) / CLASSES))


def pearson(observed: NDArray, expected: NDArray) -> dict[str, float]:
    """Pearson's chi-square; classes that are expected fewer than 5 times count as one."""
    rare = expected < 5
    observed, expected = (np.append(x[~rare], x[rare].sum()) for x in (observed, expected))
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = len(observed) - 1
    chance = torch.special.gammaincc(*(torch.tensor(value / 2, dtype=torch.float64) for value in (freedom, statistic)))
    return {"chi_square": round(statistic, 2), "freedom": freedom, "p_value": float(chance)}


if __name__ == "__main__":
    main()
