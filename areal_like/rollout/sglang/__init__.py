"""Everything that knows SGLang."""

LAUNCHER = "areal_like.rollout.sglang.launcher"
KEEP_ALIVE_S = 600  # for so long a server holds a connection that is idle
TOKEN_VARIABLE = "AREAL_LIKE_SERVER_TOKEN"  # an argument would show the token to every user of the host
