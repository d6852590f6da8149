"""The form of weights between trainer ranks and servers, whichever software these run."""

from collections.abc import Sequence

ONLY_ADAPTER = "policy"  # name of the adapter of a run with one
EXPORT_LAYOUT = "tensors"  # key of the layout of an exported bucket

type Layout = Sequence[tuple[str, str, Sequence[int]]]
"""Name, dtype and shape of each tensor of a bucket."""
