"""Tokenizers of models that are made here: the generated problems' words, or bytes."""

import re
from typing import Literal

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from areal_like.demo import arithmetic

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_WORDS = (
    r"#### ?| ?[A-Za-z]+|\d|[^A-Za-z\d]"  # a word takes the blank before it along, so that joining tokens is decoding
)


def make_tokenizer(kind: Literal["arithmetic", "bytes"], *, images: bool = False) -> tokenizers.Tokenizer:
    """Return a tokenizer that ends a text with EOS; with `images` it has the tokens of a Qwen3-VL for them too."""
    made = _arithmetic_tokenizer() if kind == "arithmetic" else _byte_tokenizer()
    if images:
        made.add_special_tokens(list(IMAGE_TOKENS))
    return made


def _arithmetic_tokenizer() -> tokenizers.Tokenizer:
    """Return a tokenizer with one token per word and digit of the generated problems."""
    words = {word for sentence in arithmetic.sentences() for word in re.findall(_WORDS, sentence)}
    vocabulary = {token: index for index, token in enumerate([PAD, BOS, EOS, UNK, *sorted(words)])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.add_special_tokens([PAD, BOS, EOS, UNK])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(_WORDS), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _byte_tokenizer() -> tokenizers.Tokenizer:
    """Return a tokenizer with one token per byte of UTF-8."""
    tokens = [PAD, BOS, EOS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.add_special_tokens([PAD, BOS, EOS])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
