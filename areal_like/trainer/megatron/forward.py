"""Packed micro-batches through Megatron's forward-backward schedules: one rank, a pipeline, a virtual pipeline."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn.functional import pad

from areal_like.trainer.device_batch import DeviceBatch, DeviceBatches
from areal_like.trainer.hooks import EngineHooks
from areal_like.trainer.megatron.pack import pack_of
from areal_like.trainer.megatron.padding import router_padding

# From a micro-batch, hidden states `[rows, hidden]`, the output layer and its weight to `[n, …]` of its n wanted
# tokens.
Head = Callable[[DeviceBatch, Tensor, torch.nn.Module, Tensor], Tensor]


def forward_backward(
    models: Sequence[torch.nn.Module],
    micro_batches: DeviceBatches,
    head: Head,
    hooks: EngineHooks,
    loss: Callable[[DeviceBatch, Tensor], Any] | None = None,
) -> list:
    """Run all micro-batches forward and backward; return a list on the last pipeline stage, [] elsewhere.

    `loss` computes the summed loss, the number of loss tokens and statistics from a micro-batch and the output of
    `head`; the list has the statistics. Without `loss` only the forward pass runs, and the list has the outputs of
    `head`.
    """
    iterators = [iter(micro_batches) for _ in models]
    with hooks.during_pass(), torch.set_grad_enabled(loss is not None):
        result: list = get_forward_backward_func()(
            forward_step_func=partial(_step, head, loss, hooks),
            data_iterator=iterators if len(models) > 1 else iterators[0],
            model=list(models) if len(models) > 1 else models[0],
            num_microbatches=len(micro_batches),
            seq_length=len(micro_batches.pack(0).tokens),  # unused: shapes are sent with the activations
            micro_batch_size=1,
            forward_only=loss is None,
            collect_non_loss_data=loss is None,
        )
    return result


def _step(
    head: Head, loss: Callable | None, hooks: EngineHooks, data_iterator: Any, model: torch.nn.Module
) -> tuple[Tensor, Callable]:
    micro_batch: DeviceBatch = next(data_iterator)
    hooks.prepare_forward(model, micro_batch, trains=loss is not None)
    output: Tensor = model(
        input_ids=micro_batch.tokens,
        position_ids=micro_batch.positions,
        attention_mask=None,
        packed_seq_params=pack_of(micro_batch),
        padding_mask=router_padding(micro_batch.padding, model),
        output_processor=_at_rows,
        output_processor_context=(head, micro_batch),
    )
    return output, partial(loss, micro_batch) if loss else lambda output, non_loss_data: output


def _at_rows(
    *,
    hidden_states: Tensor,
    output_layer: torch.nn.Module,
    output_weight: Tensor | None,
    context: tuple[Head, DeviceBatch],
    config: Any,
    **_: Any,
) -> Tensor:
    """Run Megatron's hook after the last layer, so that the output layer computes only the needed rows.

    Sequence-parallel ranks have different numbers of rows, so their hidden states are gathered here, not in the layer.
    The rows of a layer for multi-token prediction that is trained come last; its hidden states follow the model's.
    """
    head, micro_batch = context
    weight = output_layer.weight if output_weight is None else output_weight
    own, *ahead = hidden_states.chunk(1 if micro_batch.ahead is None else 2)
    made = _run_head(head, micro_batch, own, output_layer, weight, config)
    if not ahead:
        return made
    further = _run_head(head, micro_batch.one_ahead(), ahead[0], output_layer, weight.detach(), config)
    return torch.cat([made, pad(further, (0, made.shape[1] - further.shape[1]))])


def _run_head(
    head: Head, micro_batch: DeviceBatch, hidden: Tensor, layer: torch.nn.Module, weight: Tensor, config: Any
) -> Tensor:
    if config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
    return head(micro_batch, hidden.index_select(0, micro_batch.rows).squeeze(1), layer, weight)
