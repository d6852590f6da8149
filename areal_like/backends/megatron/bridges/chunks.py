"""Builds one rank's model chunks from a bridge's provider, as Megatron-LM's `training.get_model` does."""

from collections.abc import Callable

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.enums import ModelType

from areal_like.backends.megatron.bridges.protocol import ModelSource
from areal_like.backends.megatron.mtp import train_mtp


def build_chunks(provide: Callable[..., torch.nn.Module], source: ModelSource) -> list[torch.nn.Module]:
    """Call `provide(pre_process, post_process, vp_stage)` on this rank's device: once, or for each virtual stage."""
    vpp = source.sizes.vpp
    chunks = []
    for stage in range(vpp) if vpp > 1 else [None]:
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=stage is None, vp_stage=stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=stage is None, vp_stage=stage)
        chunk = provide(pre_process=first, post_process=last, vp_stage=stage)
        chunk.model_type = ModelType.encoder_or_decoder
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        chunks.append(chunk.cuda(torch.cuda.current_device()))
    source.config.set_frequencies(chunks)
    if source.mtp:
        train_mtp(chunks)
    return chunks
