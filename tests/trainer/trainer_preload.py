"""What every rank imports, so that the fork server does it once."""
# ruff: noqa: F401

import areal_like.trainer.megatron.engine

# isort: split
import areal_like.trainer.megatron.bridges.mbridge
import areal_like.trainer.megatron.bridges.megatron_bridge
