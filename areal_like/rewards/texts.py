"""Decoding of long responses, which takes milliseconds: done in workers, so that the event loop stays free."""

import array
import functools
from collections.abc import Callable, Sequence
from typing import Any


@functools.cache
def decoder(source: str) -> Callable[[Sequence[bytes], bool], list[str]]:
    """Return a function that decodes responses, each the bytes of 32-bit token ids, as `Tokenizer.decode` does.

    Its second argument is whether to keep special tokens. `source` is a `tokenizer.json`: its path or its content.
    """
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(source) if source.startswith("{") else Tokenizer.from_file(source)

    def decode(responses: Sequence[bytes], special: bool) -> list[str]:
        return [backend.decode(array.array("i", ids).tolist(), skip_special_tokens=not special) for ids in responses]

    return decode


def of_each(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Return a function that calls `function` with each item of its first argument."""
    return lambda each, *others: [function(one, *others) for one in each]
