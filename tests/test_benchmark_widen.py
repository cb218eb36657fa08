"""A widened model is the same function as the small one, whatever its head, its biases and its KV heads."""

from __future__ import annotations

import json
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from conftest import build_tiny_model  # noqa: E402
from test_benchmarks import BENCHMARKS, ROOT, run  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

sys.path.append(str(BENCHMARKS))
import widen  # noqa: E402

IDS = torch.arange(48).reshape(2, 24)  # tokens that every model here knows


def tied_model(**changes) -> LlamaForCausalLM:
    """With a tied head, more query heads than KV heads, a head size of its own, and biases; no two weights alike."""
    torch.manual_seed(0)
    settings = dict(
        vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, tie_word_embeddings=True, attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return model


@pytest.fixture(scope="module", params=["untied", "tied"])
def small(request, tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model) if request.param == "untied" else tied_model()


@torch.no_grad()
def logprobs(model, ids=IDS):
    """Of all next tokens, `(rows, tokens, vocabulary)`."""
    return model(ids).logits.double().log_softmax(-1)


def largest_difference(model, other, ids=IDS):
    """Of their log-probs, which is also said on standard output."""
    difference = (logprobs(model, ids) - logprobs(other, ids)).abs().max().item()
    print(f"largest difference of log-probs: {difference:.1e}")
    return difference


@pytest.mark.parametrize("times", [1, 2, 3, 4])
def test_a_wide_model_is_the_same_function(small, times):
    wide = widen.widened(small, times)
    assert largest_difference(small, wide) < 1e-5
    assert logprobs(small).std() > 0.5  # so that there is something to be wrong about
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        assert getattr(wide.config, name) == times * getattr(small.config, name)
    assert wide.config.head_dim == small.config.head_dim
    for name, weight in wide.named_parameters():
        alone = small.get_parameter(name)
        once = name in ("model.embed_tokens.weight", "lm_head.weight") or weight.ndim == 1
        copies = times if once else times**2
        assert weight.numel() == copies * alone.numel()
        assert weight.count_nonzero() == copies * alone.count_nonzero()


def test_a_wide_model_generates_what_the_small_one_does(small):
    wide = widen.widened(small, 2)
    greedy = dict(do_sample=False, max_new_tokens=16, attention_mask=torch.ones_like(IDS))
    assert torch.equal(small.generate(IDS, **greedy), wide.generate(IDS, **greedy))


@pytest.mark.parametrize("shard", ["2GB", "100KB"])
def test_a_wide_checkpoint_loads(tmp_path, monkeypatch, shard):
    """With the end tokens of the small model's generation config, and its tokenizer."""
    monkeypatch.setattr(widen, "SHARD", shard)
    small = build_tiny_model(tmp_path / "small", more_eos=2)
    widen.write_widened(small, tmp_path / "wide", 3)
    assert len(list((tmp_path / "wide").glob("*.safetensors"))) == 1 or shard == "100KB"
    wide, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "wide", output_loading_info=True)
    assert not any(loading.values())
    model = AutoModelForCausalLM.from_pretrained(small)
    assert largest_difference(model, wide) < 1e-5
    assert wide.generation_config.eos_token_id == model.generation_config.eos_token_id
    before, after = (AutoTokenizer.from_pretrained(path) for path in (small, tmp_path / "wide"))
    assert before.get_vocab() == after.get_vocab() and before.chat_template == after.chat_template


@pytest.mark.slow
def test_a_tied_checkpoint_is_written_in_another_dtype(tmp_path, tiny_model):
    """And is tied again when it is loaded; 2 divides without rounding."""
    tied_model().save_pretrained(tmp_path / "small")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "small")
    run("widen.py", tmp_path / "small", tmp_path / "wide", "--times", 2, "--dtype", "bfloat16")
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "bfloat16"
    wide = AutoModelForCausalLM.from_pretrained(tmp_path / "wide")
    assert wide.lm_head.weight is wide.model.embed_tokens.weight
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=torch.bfloat16)
    assert largest_difference(small.float(), wide.float()) < 1e-5


def test_a_wide_model_learns_as_the_small_one_does(small):
    """On a fixed batch, at 1/K of the learning rate; it stays a policy whose copies are alike."""
    start, losses = {name: weight.clone() for name, weight in small.state_dict().items()}, []
    for model, rate in ((widen.widened(small, 1), 3e-3), (widen.widened(small, 4), 3e-3 / 4)):
        optimizer = torch.optim.AdamW(model.train().parameters(), lr=rate, weight_decay=0.0)
        losses.append([])
        for _ in range(10):
            loss = model(IDS, labels=IDS).loss
            losses[-1].append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    print("losses of the small and the wide model:", losses)
    assert losses[1] == sorted(losses[1], reverse=True)
    first, last = losses[0][0], losses[0][-1]
    assert losses[1][0] == pytest.approx(first, abs=1e-5)
    assert losses[1][-1] - last < 0.5 * (first - last)
    assert torch.allclose(logprobs(model).exp().sum(-1), torch.ones(2, 24, dtype=torch.float64))
    hidden = model.model(IDS).last_hidden_state.unflatten(-1, (4, -1))
    assert (hidden - hidden[..., :1, :]).abs().max() < 1e-4
    assert all(torch.equal(weight, start[name]) for name, weight in small.state_dict().items())  # it was not trained


def with_an_adapter():
    pytest.importorskip("peft")
    from peft import LoraConfig

    model = tied_model()
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    return model


def quantized():
    model = tied_model()
    model.config.quantization_config = {"quant_method": "fp8"}
    return model


def of_another_architecture():
    sizes = dict(vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    return Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2))


@pytest.mark.parametrize(
    "make, times, why",
    [
        (of_another_architecture, 2, "not a Qwen2ForCausalLM"),
        (with_an_adapter, 2, "lora_A"),
        (quantized, 2, "quantized"),
        (tied_model, 0, "not 0"),
    ],
)
def test_other_models_are_refused_by_name(make, times, why):
    with pytest.raises(ValueError, match=why):
        widen.widened(make(), times)


@pytest.mark.slow
def test_a_real_model_is_the_same_function(tmp_path):
    """Up to what float32 is exact to here: the small model's own log-probs are 5e-5 off those in float64."""
    pytest.importorskip("gguf")
    sys.path.append(str(ROOT / "examples" / "demo"))
    import smollm2

    try:
        smollm2.find_gguf()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    path = smollm2.build(tmp_path / "small")
    small = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(path)("The sum of 12 and 30 is 42, and", return_tensors="pt").input_ids
    assert largest_difference(small, widen.widened(small, 2), ids) < 2e-4


@pytest.mark.trl
@pytest.mark.slow
def test_runs_train_a_wide_model(tmp_path):
    pytest.importorskip("trl")
    pytest.importorskip("reasoning_gym")
    small = ["--model", "tiny", "--prompts", 8, "--num_train_epochs", 1, "--warm_up_steps", 2, "--output", tmp_path]
    small += ["--max_completion_length", 24, "--learning_rate", 1e-4]
    run("train_side_by_side.py", *small, "--widen", 2, "--runs", "reuse")
    widths = {name: LlamaConfig.from_pretrained(tmp_path / name).hidden_size for name in ("warm_model", "wide_model")}
    assert widths == {"warm_model": 128, "wide_model": 256}
    (tmp_path / "warm_model" / "model.safetensors").unlink()  # so that no other run can begin with it
    run("train_side_by_side.py", *small, "--widen", 2, "--runs", "reuse", "plain")
    settings = json.loads((tmp_path / "summary.json").read_text())["settings"]
    assert {name: setting["finished"] for name, setting in settings.items()} == {
        name: ["seed-0"] for name in ("reuse", "plain")
    }
    with pytest.raises(AssertionError, match=r"other settings \(widen\)"):
        run("train_side_by_side.py", *small)
