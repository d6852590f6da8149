"""Everything that knows SGLang."""

from collections.abc import Sequence

LAUNCHER = "areal_like.backends.sglang.launcher"
KEEP_ALIVE_S = 600  # time that a server keeps an idle connection
WATCH, COMPARE = "watch", "compare"  # instead of handles, before and after an update with checksums
NOTE, COMPARE_NOTED = "note", "compare noted"  # instead of handles, before and after weights are sent once more
ADAPTERS = "adapters"  # instead of handles, for an update of adapters alone
FILES = "files"  # instead of handles, for an update by full copies and deltas
EXPORT_LAYOUT = "tensors"  # key of the layout of an exported bucket
TOKEN_VARIABLE = "AREAL_LIKE_SERVER_TOKEN"  # an argument would show the token to every user of the host
WEIGHTS_INTERFACE_VARIABLE = "AREAL_LIKE_WEIGHTS_INTERFACE"  # where gloo listens for new weights

type Layout = Sequence[tuple[str, str, Sequence[int]]]
"""Name, dtype and shape of each tensor of a bucket."""
