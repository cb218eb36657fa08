"""What counts as the same tokenizer."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, ByT5Tokenizer

from specrl_plugins.fingerprint import tokenizer_hash


@pytest.fixture
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model, padding_side="left")


CHANGES = {
    "pre_tokenizer": pre_tokenizers.Split(Regex(r"\d+|[\s\S]"), behavior="isolated"),  # digits stay together
    "normalizer": normalizers.Lowercase(),
    "post_processor": processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)]),
    "decoder": decoders.WordPiece(),
}


@pytest.mark.parametrize("part", CHANGES)
def test_the_same_vocabulary_used_otherwise_is_another_tokenizer(tokenizer, tiny_model, part):
    before = tokenizer_hash(tokenizer)
    setattr(tokenizer.backend_tokenizer, part, CHANGES[part])
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(tiny_model).get_vocab()
    assert tokenizer_hash(tokenizer) != before


def test_another_vocabulary_is_another_tokenizer(tokenizer):
    before = tokenizer_hash(tokenizer)
    tokenizer.add_tokens(["<more>"])
    assert tokenizer_hash(tokenizer) != before


def test_neither_use_nor_saving_and_loading_changes_a_tokenizer(tokenizer, tiny_model, tmp_path):
    before = tokenizer_hash(tokenizer)
    tokenizer(["1+1=?", "10"], padding=True, truncation=True, max_length=4, return_tensors="pt")
    assert tokenizer.backend_tokenizer.padding and tokenizer.backend_tokenizer.truncation
    assert tokenizer_hash(tokenizer) == before
    tokenizer.padding_side = "right"
    tokenizer(["1+1=?", "10"], padding="max_length", max_length=9)
    assert tokenizer_hash(tokenizer) == before
    tokenizer.save_pretrained(tmp_path)
    for directory in (tmp_path, tiny_model):
        assert tokenizer_hash(AutoTokenizer.from_pretrained(directory)) == before


def test_a_tokenizer_written_in_python_is_told_by_its_class_its_vocabulary_and_what_it_does():
    class OneCase(ByT5Tokenizer):
        def _tokenize(self, text, **kwargs):
            return super()._tokenize(text.lower())

    plain = ByT5Tokenizer()
    assert tokenizer_hash(plain) == tokenizer_hash(ByT5Tokenizer())
    assert tokenizer_hash(plain) != tokenizer_hash(ByT5Tokenizer(extra_ids=3))
    OneCase.__qualname__ = ByT5Tokenizer.__qualname__
    assert tokenizer_hash(plain) != tokenizer_hash(OneCase())


@pytest.mark.openrlhf
def test_openrlhfs_adapter_tells_tokenizers_apart(tokenizer, tiny_model, tmp_path):
    pytest.importorskip("openrlhf")
    from transformers import AutoConfig

    from openrlhf_integration.start import fingerprint_of

    tokenizer.backend_tokenizer.pre_tokenizer = CHANGES["pre_tokenizer"]
    tokenizer.save_pretrained(tmp_path)
    AutoConfig.from_pretrained(tiny_model).save_pretrained(tmp_path)
    ours, theirs = fingerprint_of(tiny_model, True), fingerprint_of(str(tmp_path), True)
    assert ours.tokenizer != theirs.tokenizer and ours.vocab_size == theirs.vocab_size
