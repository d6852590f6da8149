"""A critic of any family has the values and gradients of transformers' layers under its head, each sequence alone."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from test_fsdp_families import LENGTHS, alone
from tiny_models import FSDP_DENSE, FSDP_EXPERTS, FSDP_OTHERS, VARIANTS
from tolerance import SEQUENCE, assert_close, assert_gradient, depth_of
from trainer_jobs import THOUSANDFOLD, Setting, engine, exported, make_batch, squared

from areal_like.backends.fsdp.checkpoint_names import in_checkpoint
from areal_like.backends.megatron.bridges.proven import FAMILIES
from areal_like.backends.training.value_head import HEAD_NAME, new_head
from areal_like.core.trainer.engine import Rendezvous
from areal_like.core.types import LossSpec

pytestmark = pytest.mark.covers("PPO with critic")

LONG = pytest.mark.long
SEED = 1  # of `trainer_jobs.engine`
SOON = ("llama", "gemma2", "mixtral", "deepseek_v3", "gpt_oss", "qwen3_next")
MEGATRON = [
    pytest.param(name, bridge, marks=[] if name in SOON and bridge == VARIANTS[name].bridges[0] else [LONG])
    for name in FAMILIES
    for bridge in VARIANTS[name].bridges
]


def values_and_updates(
    rendezvous: Rendezvous, listener: socket.socket | None, setting: Setting
) -> tuple[tuple[np.ndarray, np.ndarray], dict[str, np.ndarray]]:
    """Values of a new critic, and what its first step subtracts from each weight."""
    batch = make_batch(lengths=LENGTHS)
    with engine(rendezvous, listener, setting) as made:
        read, before = made.values(batch), exported(made)
        made.train(batch, LossSpec(squared))
        after = exported(made)
    return read, {name: before[name] - after[name] for name in before}


def expected_of(model: torch.nn.Module) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Values by token, NaN at the first of a sequence, and autograd's gradients by the names of a checkpoint."""
    batch = make_batch(lengths=LENGTHS)
    head = new_head(model.config.hidden_size, SEED).requires_grad_()
    ends = np.cumsum(batch.lengths)
    trained = torch.from_numpy(batch.fields["loss_mask"] > 0)
    trained[torch.from_numpy(ends - batch.lengths).long()] = False
    values = torch.full((len(trained),), torch.nan)
    for start, end in zip((ends - batch.lengths).tolist(), ends.tolist(), strict=True):
        tokens = torch.from_numpy(batch.tokens[start:end]).long()
        hidden = model.base_model(tokens[None], use_cache=False).last_hidden_state[0, :-1]
        own = (hidden @ head.T)[:, 0]
        values[start + 1 : end] = own.detach()
        distance = own - torch.from_numpy(batch.fields["advantages"][start + 1 : end])
        (distance.square() / 2 * trained[start + 1 : end]).sum().div(int(trained.sum())).backward()
    own = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
    gradients = {key: part.numpy() for name, grad in own for key, part in in_checkpoint(model, name, grad).items()}
    return values.numpy(), {**gradients, HEAD_NAME: head.grad.numpy()}


def assert_alike(ranks, path: Path, setting: Setting) -> None:
    ((places, values), updates), (expected, gradients) = (
        ranks.run(values_and_updates, 1, setting)[0],
        expected_of(alone(path)),
    )
    found = np.full(len(expected), np.nan)
    found[places] = values
    assert_close(found, expected, depth=SEQUENCE)
    assert updates.keys() >= gradients.keys()
    for key, gradient in gradients.items():
        assert_gradient(updates[key], gradient, depth_of(path.name), is_update=True, err_msg=key)


@pytest.mark.parametrize(("name", "bridge"), MEGATRON)
def test_values_and_gradients_on_megatron(ranks, tiny, name, bridge):
    path = tiny(name)
    assert_alike(ranks, path, Setting(path, bridge=bridge, optimizer=THOUSANDFOLD, role="critic"))


@pytest.mark.parametrize(
    "name",
    [
        name if name in SOON[2:] else pytest.param(name, marks=LONG)
        for name in (*FSDP_EXPERTS, *FSDP_DENSE, *FSDP_OTHERS)
    ],
)
def test_values_and_gradients_under_fsdp(ranks, tiny, name):
    path = tiny(name)
    assert_alike(ranks, path, Setting(path, backend="fsdp", optimizer=THOUSANDFOLD, role="critic"))
