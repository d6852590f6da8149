"""What every rank imports, so that the fork server does it once."""

from areal_like.trainer.megatron import cpu

if cpu.install():
    import areal_like.algorithms.losses
    import areal_like.config.schema
    import areal_like.trainer.megatron.bridges.mbridge
    import areal_like.trainer.megatron.bridges.megatron_bridge
    import areal_like.trainer.megatron.checkpoint
    import areal_like.trainer.megatron.engine
    import areal_like.trainer.megatron.forward
    import areal_like.trainer.megatron.hf_export  # noqa: F401
