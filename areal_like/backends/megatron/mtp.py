"""Training of a model's layer for multi-token prediction (MTP), the draft model of speculative decoding.

From the hidden state of a token and the embedding of the next one, the layer predicts the token after that
(DeepSeek-V3, arXiv:2412.19437, equations 21 to 25). Its loss has no gradient in the policy: hidden states, embedding
and output layer are detached. Places and labels come from the batch (`trainer/ahead.py`), because Megatron-core 0.19
shifts tokens sequence by sequence, and normalises the loss of each micro-batch by the micro-batch's own tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import gpt_model
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from torch import Tensor


@dataclass
class WithNextTokens(PackedSeqParams):
    """A pack with the token after each one of this rank, `[1, t]`."""

    next_tokens: Tensor | None = None


def train_mtp(models: Iterable[torch.nn.Module]) -> None:
    """Make the MTP layer of the last chunk compute hidden states in training passes, and leave the loss to the head."""
    gpt_model.process_mtp_loss = _keep_hidden_states
    for model in models:
        if model.mtp_process:
            model.mtp.forward = partial(_forward, model.mtp)


def _keep_hidden_states(hidden_states: Tensor, **_: Any) -> Tensor:
    return hidden_states


def _forward(
    block: MultiTokenPredictionBlock,
    *,
    hidden_states: Tensor,
    packed_seq_params: PackedSeqParams,
    embedding: torch.nn.Module,
    position_ids: Tensor,
    padding_mask: Tensor | None,
    rotary_pos_emb: Tensor | None,
    **_: Any,
) -> Tensor:
    """Return the policy's hidden states, followed in training passes by the layer's, `[2 t, 1, hidden]`."""
    if not isinstance(packed_seq_params, WithNextTokens):
        return hidden_states
    (layer,) = block.layers
    with torch.no_grad():
        following = embedding(input_ids=packed_seq_params.next_tokens, position_ids=position_ids)
    config = block.config
    every_layer = config.recompute_method == "uniform" and config.recompute_num_layers == 1  # all that it supports
    recomputed = config.recompute_granularity == "full" and every_layer and block.training
    compute = layer._checkpointed_forward if recomputed else layer._proj_and_transformer_layer
    own = compute(
        hidden_states=hidden_states.detach().requires_grad_(),  # a recomputed function needs an input with a gradient
        decoder_input=following,
        attention_mask=None,
        padding_mask=padding_mask,
        rotary_pos_emb=rotary_pos_emb,
        packed_seq_params=packed_seq_params,
    )
    return torch.cat([hidden_states, own])
