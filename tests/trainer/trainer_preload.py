"""What every rank imports, so that the fork server does it once."""
# ruff: noqa: F401

import gc

import mutations  # before the engines

# isort: split
import areal_like.trainer.megatron.engine

# isort: split
import areal_like.trainer.fsdp.engine
import areal_like.trainer.megatron.bridges.mbridge
import areal_like.trainer.megatron.bridges.megatron_bridge
from areal_like.data.model_types import register_model_types

register_model_types()  # takes as long as a small engine

# An engine's end collects garbage: without this it walks through all that was imported, which took half of a job.
gc.collect()
gc.freeze()
