"""The weight version of each token, as a server labels them (`versions.py`)."""

import numpy as np
import orjson

from areal_like.types import Ints

LABELS = "token_weight_versions"


class WrongLabels(ValueError):
    """A server did not label each of an answer's tokens with a version."""


def token_versions(labels: bytes, tokens: int) -> Ints:
    """Return the version of each of an answer's `tokens`, `[tokens]`; `labels` are a JSON list.

    Raises WrongLabels where they are not that many whole numbers, none smaller than the one before.
    """
    try:
        first = labels[1:-1].partition(b",")[0]
        if labels == b"[%b]" % b",".join([first] * tokens) and tokens:  # as long as no update came between
            return np.full(tokens, int(first.strip(b'"')), np.int32)
        versions = np.array([int(label) for label in orjson.loads(labels)], np.int32)
    except (TypeError, ValueError, OverflowError):
        said = labels[:80].decode(errors="replace")
        raise WrongLabels(f"labelled tokens with {said}, which are not weight versions") from None
    if len(versions) != tokens:
        raise WrongLabels(f"labelled {len(versions)} tokens of {tokens} with their weight version")
    if (versions[1:] < versions[:-1]).any():
        raise WrongLabels("labelled tokens with an older weight version than tokens before them")
    return versions
