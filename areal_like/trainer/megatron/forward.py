"""Packed micro-batches through Megatron's forward-backward schedules: one rank, a pipeline, a virtual pipeline."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from areal_like.trainer.device_batch import DeviceBatch, DeviceBatches


def forward_backward(
    models: Sequence[torch.nn.Module],
    micro_batches: DeviceBatches,
    function: Callable[[DeviceBatch, Tensor], Any],
    *,
    forward_only: bool = False,
) -> list:
    """Runs all micro-batches forward and backward; gives a list on the last pipeline stage, [] elsewhere.

    `function` makes of a micro-batch and the logits `[n, vocabulary / tp]` at its n `rows` the summed loss, the number
    of loss tokens and statistics, which are listed; with `forward_only` it makes anything, which is listed itself.
    """
    iterators = [iter(micro_batches) for _ in models]
    with torch.set_grad_enabled(not forward_only):
        return get_forward_backward_func()(
            forward_step_func=partial(_forward_step, function),
            data_iterator=iterators if len(models) > 1 else iterators[0],
            model=list(models) if len(models) > 1 else models[0],
            num_microbatches=len(micro_batches),
            seq_length=len(micro_batches.pack(0).tokens),  # unused: shapes travel with the activations
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )


def _forward_step(function: Callable, data_iterator: Any, model: torch.nn.Module) -> tuple[Tensor, Callable]:
    micro_batch: DeviceBatch = next(data_iterator)
    options = {"fp32_output": False} if model.config.bf16 else {}  # float32 logits would double the largest tensor
    ends, longest = micro_batch.cu_seqlens, micro_batch.max_seqlen
    output = model(
        input_ids=micro_batch.tokens,
        position_ids=micro_batch.positions,
        attention_mask=None,
        packed_seq_params=PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
        ),
        output_processor=_output_at_rows,
        output_processor_context=micro_batch.rows,
        **options,
    )
    return output, lambda output, non_loss_data=False: function(micro_batch, output)


def _output_at_rows(
    *,
    hidden_states: Tensor,
    output_layer: torch.nn.Module,
    output_weight: Tensor | None,
    context: Tensor,
    config: Any,
    scale_logits: Callable[[Tensor], Tensor],
    **_: Any,
) -> Tensor:
    """The output layer at the places `context` that predict a wanted token: the largest tensor has no other rows.

    Sequence-parallel ranks have different numbers of them, so their hidden states are gathered here, not in the layer.
    """
    if config.sequence_parallel:
        hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
    output_layer.sequence_parallel = False
    output, _ = output_layer(hidden_states.index_select(0, context), weight=output_weight)
    output_layer.sequence_parallel = config.sequence_parallel
    return scale_logits(output).squeeze(1)
