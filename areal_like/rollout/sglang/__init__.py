"""Everything that knows SGLang."""

LAUNCHER = "areal_like.rollout.sglang.launcher"
COMMAND = "/weights_command"  # routes that our launcher adds
DOWNLOAD = "/download_weights"
GIVE_UP = "/give_up_weights_update_group"
TOKEN_VARIABLE = "AREAL_LIKE_SERVER_TOKEN"  # an argument would show the token to every user of the host
WEIGHTS_INTERFACE_VARIABLE = "AREAL_LIKE_WEIGHTS_INTERFACE"  # where gloo listens for new weights
