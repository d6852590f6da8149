"""Everything that knows SGLang."""

LAUNCHER = "areal_like.rollout.sglang.launcher"
KEEP_ALIVE_S = 600  # for so long a server holds a connection that is idle
WATCH, COMPARE = "watch", "compare"  # what a server is told before and after an update with checksums
EXPORT_LAYOUT = "tensors"  # key of the layout of an exported bucket
TOKEN_VARIABLE = "AREAL_LIKE_SERVER_TOKEN"  # an argument would show the token to every user of the host
