"""The tokens that end a response: all that a model's files name, as SGLang and vLLM take them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers

from areal_like.data.tokenizer_files import CONFIG, TokenizerError, read_json

type EndTokens = Mapping[int, Sequence[str]]
"""The files or keys that name each end token."""


def find_end_tokens(directory: Path, backend: tokenizers.Tokenizer, special: Mapping[str, str]) -> dict[int, list[str]]:
    """Return the end tokens of generation_config.json, config.json and the tokenizer; raise TokenizerError.

    Fine-tuning often changes one of the files alone: a base model with a new chat template keeps the
    generation_config.json of a model that ends texts, not turns.
    """
    known = set(backend.get_vocab().values())
    found: dict[int, list[str]] = {}
    for name in ("generation_config.json", "config.json"):
        ids = read_json(directory / name).get("eos_token_id")
        for token in ids if isinstance(ids, list) else () if ids is None else (ids,):
            if type(token) is not int or token not in known:
                raise TokenizerError(
                    f"{directory / name} has an eos_token_id that tokenizer.json does not contain: {token!r}"
                )
            found.setdefault(token, []).append(name)
    own = backend.token_to_id(special.get("eos_token", ""))
    if own is not None:
        found.setdefault(own, []).append(CONFIG)
    return found


def describe_end_tokens(backend: tokenizers.Tokenizer, tokens: EndTokens) -> str:
    """Return the end tokens with their ids and sources, such as `<|im_end|> (2; config.json)`."""
    return ", ".join(
        f"{backend.id_to_token(token)} ({'; '.join([str(token), ', '.join(sources)] if sources else [str(token)])})"
        for token, sources in tokens.items()
    )
