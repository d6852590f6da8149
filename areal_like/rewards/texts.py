"""Work of milliseconds on responses of tens of thousands of tokens: in workers, so that the event loop is free."""

import array
import functools
from collections.abc import Callable, Sequence
from typing import Any


@functools.cache
def decoder(source: str) -> Callable[[Sequence[bytes]], list[str]]:
    """Return what makes texts of responses, each the bytes of 32-bit token ids, as `Tokenizer.decode` does.

    `source` is a `tokenizer.json`: its path, or what stands in it.
    """
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(source) if source.startswith("{") else Tokenizer.from_file(source)

    def decode(responses: Sequence[bytes]) -> list[str]:
        return [backend.decode(array.array("i", ids).tolist(), skip_special_tokens=True) for ids in responses]

    return decode


def of_each(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Return what calls the function with each of its first arguments."""
    return lambda each, *others: [function(one, *others) for one in each]
