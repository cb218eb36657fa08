"""A model K times as wide that is the same function: what a large policy costs, with the answers of a small one.

    python benchmarks/widen.py MODEL OUTPUT --times K [--dtype bfloat16]

The wide model's next-token distribution is the small one's, up to rounding. Its matrices, its KV cache and the time it
takes are those of a model of its size: SmolLM2-135M becomes one of 1.8 (K = 4) or 7.0 billion weights (K = 8). Nothing
is filled up with zeros.

Every vector of the wide model is K copies of the small model's, one after another: the hidden state, the queries, keys
and values, what is inside the MLP. Each weight keeps this so, with `v` for the vocabulary and `o`, `i` for widths:

    embedding                    (v, i) -> (v, K i)       rows are repeated: the hidden state begins as K copies
    norms, biases                (i,)   -> (K i,)         repeated: the mean square of K copies is that of one, so that
                                                          RMSNorm divides each copy by what it divided one by
    linear maps                  (o, i) -> (K o, K i)     repeated both ways and divided by K: each output sums K equal
                                                          parts, and there are K copies of it
    head of its own              (v, i) -> (v, K i)       repeated and divided by K: logits sum K equal parts
    norm before a tied head      (i,)   -> (K i,)         repeated and divided by K: the head is the embedding, which
                                                          is not divided, so what it is given has to be

The size of a head stays, and so do rotary embeddings and the scale of attention scores: there are K times the query
heads, and K times the KV heads. The copies lie one after another, so that each query head finds the copy of its own KV
head. K = 2, 4, 8 divide without rounding.

In training the copies get equal gradients, and stay copies as far as rounding is alike: what the wide model learns is
what the small one would. AdamW moves every weight as far whatever its size, and K moved weights add up in each sum, so
that about 1/K of the small model's learning rate suits the wide one.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

SHARD = "2GB"
WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="checkpoint of a Llama")
    parser.add_argument("output", type=Path, help="folder of the wide checkpoint, which is made")
    parser.add_argument("--times", type=int, required=True, metavar="K", help="how many times as wide")
    parser.add_argument("--dtype", default="auto", help="of the weights that are written (default: as in MODEL)")
    options = parser.parse_args()
    if options.output.exists():
        parser.error(f"{options.output} exists")
    write_widened(options.model, options.output, options.times, options.dtype)


@torch.no_grad()
def widened(model: LlamaForCausalLM, times: int) -> LlamaForCausalLM:
    """A new model of the same function, `times` as wide, on the same device and of the same dtype.

    Args:
        model (`LlamaForCausalLM`): with a tied head or one of its own, with biases or without. It is not changed.
        times (`int`): how many times as wide.
    """
    wide = empty(model, times)
    weights = {name: _wide_weight(model, name, times) for name, _ in model.named_parameters()}
    wide.load_state_dict(weights, strict=False, assign=True)  # a tied head is not among them
    wide.tie_weights()
    wide.model.rotary_emb = LlamaRotaryEmbedding(wide.config, model.device)  # its frequencies are no weights
    return wide.train(model.training)


def write_widened(source: str | Path, output: Path, times: int, dtype: str = "auto") -> None:
    """Write the checkpoint of a model that is `times` as wide: weights, configs and, last, the tokenizer.

    The wide model never is in memory as a whole: each shard is made when it is written.

    Args:
        source (`str` or `Path`): checkpoint of the small model.
        output (`Path`): folder of the wide one; made if it is missing.
        times (`int`): how many times as wide.
        dtype (`str`, *optional*): of the weights, for instance `bfloat16`. Defaults to the small model's own.
    """
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    wide = empty(model, times)
    shards = split_torch_state_dict_into_shards(dict(wide.named_parameters()), max_shard_size=SHARD)
    output.mkdir(parents=True, exist_ok=True)
    for file, names in shards.filename_to_tensors.items():
        save_file({name: _wide_weight(model, name, times) for name in names}, output / file, {"format": "pt"})
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        (output / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    wide.config.save_pretrained(output)
    wide.generation_config.save_pretrained(output)
    AutoTokenizer.from_pretrained(source).save_pretrained(output)


def empty(model: LlamaForCausalLM, times: int) -> LlamaForCausalLM:
    """The wide model without memory for its weights, which are on torch's `meta` device.

    Raises:
        ValueError: for a model that cannot be widened, or not so many times.
    """
    if type(model) is not LlamaForCausalLM:
        raise ValueError(f"only a LlamaForCausalLM can be widened, not a {type(model).__name__}")
    if hasattr(model.config, "quantization_config"):
        raise ValueError("a quantized model cannot be widened: its scales belong to blocks of the small matrices")
    if times < 1:
        raise ValueError(f"a wide model is 1 or more times as wide, not {times}")
    config = copy.deepcopy(model.config)
    for name in WIDTHS:
        setattr(config, name, times * getattr(config, name))
    config.architectures, config.dtype = [type(model).__name__], model.dtype
    with torch.device("meta"):
        wide = LlamaForCausalLM(config).to(model.dtype)
    wide.generation_config = copy.deepcopy(model.generation_config)
    other = {name for name, _ in model.named_parameters()} ^ {name for name, _ in wide.named_parameters()}
    if other:
        raise ValueError(f"weights of a Llama can be widened, and no others: {', '.join(sorted(other))}")
    return wide


@torch.no_grad()
def _wide_weight(model: LlamaForCausalLM, name: str, times: int) -> torch.Tensor:
    """One weight of the wide model, of the shape that the table above gives; its name is the small model's."""
    weight = model.get_parameter(name)
    if name == "model.embed_tokens.weight":
        return weight.repeat(1, times)
    if name == "lm_head.weight":
        return (weight / times).repeat(1, times)
    if name == "model.norm.weight" and model.config.tie_word_embeddings:
        return (weight / times).repeat(times)
    if weight.ndim == 1:  # another norm, or a bias
        return weight.repeat(times)
    return (weight / times).repeat(times, times)


if __name__ == "__main__":
    main()
