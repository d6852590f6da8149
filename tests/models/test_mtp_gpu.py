"""Peak memory of a training step with a layer for multi-token prediction, on a GPU, against the memory model."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_mtp import write_mtp
from trainer_jobs import GPU, Setting, engine, make_batch

from allocation import BatchSpec, MegatronSettings, MemorySettings, ParallelSizes
from allocation.memory.items import CUDA, NCCL, RESERVE
from allocation.memory.megatron import trainer
from allocation.model_spec import load_model
from allocation.settings import Workload
from areal_like.core.algorithms.losses import sft
from areal_like.core.trainer.engine import Rendezvous
from areal_like.core.types import LossSpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SEQUENCES, LENGTH = 8, 1024
OF_ALL, OF_LAYER = 0.08, 0.15  # errors of the peak, and of what the layer adds to it
SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 64_000,
    "max_position_embeddings": 4096,
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def peak(rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting) -> int:
    """Most bytes that tensors take in the passes and the optimizer step of a third training step."""
    batch = make_batch(lengths=(LENGTH,) * SEQUENCES)
    batch.fields["loss_mask"] = np.ones_like(batch.fields["loss_mask"])
    with engine(rendezvous, listener, setting) as made:
        for _ in range(2):
            made.train(batch, LossSpec(sft))
        torch.cuda.reset_peak_memory_stats()
        made.train(batch, LossSpec(sft))
        return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("recompute", [{}, FULL], ids=["stored", "recomputed"])
def test_the_peak_with_the_layer_is_predicted(ranks, tmp_path: Path, recompute):
    write_mtp("glm4_moe", tmp_path, **SHAPE)
    model, tokens = load_model(str(tmp_path)), SEQUENCES * LENGTH
    batch = BatchSpec(SEQUENCES, max_length=LENGTH, max_tokens_per_mb=tokens)
    errors, added = {}, np.zeros(2)
    for trained in (False, True):
        megatron = {**recompute, "train_mtp_layers": trained}
        setting = Setting(tmp_path, bridge="megatron-bridge", machine=GPU, megatron=megatron, max_tokens_per_mb=tokens)
        (found,) = ranks.run(peak, 1, setting)
        work = Workload(model, MegatronSettings(**recompute), MemorySettings(mtp_trained=trained), batch)
        said = trainer("actor", ParallelSizes(), work).phase("forward and backward")
        predicted = sum(item.bytes for item in said.items if item.name not in (CUDA, NCCL, RESERVE))
        errors[trained] = predicted / found - 1
        added = np.array([found, predicted]) - added
        print(f"trained={trained}: {found / 2**30:.3f} GiB, predicted {predicted / 2**30:.3f}: {errors[trained]:+.1%}")
        print({item.name: round(item.bytes / 2**30, 3) for item in said.items})
    print(f"the layer adds {added[0] / 2**30:.3f} GiB, predicted {added[1] / 2**30:.3f}")
    assert all(abs(error) <= OF_ALL for error in errors.values()), errors
    assert abs(added[1] / added[0] - 1) <= OF_LAYER, added
