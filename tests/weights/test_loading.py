"""What a model's `load_weights` copies is copied again at each update, without asking it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from areal_like.rollout.sglang import loading
from areal_like.rollout.sglang.loading import addresses, load, renew_copies
from areal_like.transfer import Layout


class Model(torch.nn.Module):
    """Loads as SGLang does: two matrices in one parameter, a part of a tensor, and a padded one of another dtype."""

    def __init__(self, *, scaled: bool = False, cleared: bool = False) -> None:
        super().__init__()
        self.both = torch.nn.Parameter(torch.zeros(4, 3, dtype=torch.bfloat16))
        self.cut = torch.nn.Parameter(torch.zeros(2, 2))
        self.norm = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        self.scaled, self.cleared, self.asked = scaled, cleared, 0

    def load_weights(self, weights: Any) -> None:
        self.asked += 1
        for name, tensor in weights:
            if name in ("a", "b"):
                self.both.data.narrow(0, 2 * (name == "b"), 2).copy_(tensor)
            elif name == "wide":
                self.cut.data.copy_(tensor.narrow(1, 2, 2))
            else:
                self.norm[:3].data.copy_(tensor * 2 if self.scaled else tensor)
                self.norm[2 if self.cleared else 3 :].data.fill_(0)


SIZES = {"wide": (2, 4), "a": (2, 3), "b": (2, 3), "norm": (3,)}


def bucket(start: float) -> tuple[dict[str, Tensor], Tensor, Layout]:
    """Tensors, and the same as one of bytes with its layout."""
    tensors = {
        name: torch.arange(start, start + torch.Size(size).numel()).reshape(size).to(dtype)
        for name, size in SIZES.items()
        for dtype in [torch.float32 if name in ("wide", "norm") else torch.bfloat16]
    }
    # as it lies in memory that is larger than the bucket
    flat = torch.cat([torch.zeros(8, dtype=torch.uint8)] + [t.flatten().view(torch.uint8) for t in tensors.values()])[
        8:
    ]
    return tensors, flat, [(name, str(t.dtype)[6:], t.shape) for name, t in tensors.items()]


def check(model: Model, tensors: dict[str, Tensor]) -> None:
    assert torch.equal(model.both, torch.cat([tensors["a"], tensors["b"]]))
    assert torch.equal(model.cut, tensors["wide"][:, 2:])
    expected = (tensors["norm"] * (1 + model.scaled)).bfloat16().tolist()
    assert model.norm.tolist() == [*expected[:2], 0 if model.cleared else expected[2], 0, 0]


@pytest.mark.parametrize("large", [1, 2**20])
def test_a_model_that_copies_is_asked_once(monkeypatch: pytest.MonkeyPatch, large: int) -> None:
    monkeypatch.setattr(loading, "LARGE", large)
    model = Model()
    for start in range(3):
        tensors, flat, layout = bucket(start)
        load(model, flat, layout, addresses(model))
        check(model, tensors)
    assert model.asked == 1


@pytest.mark.parametrize("more", ["scaled", "cleared"])
def test_a_model_that_does_more_is_asked_each_time(more: str) -> None:
    model = Model(**{more: True})
    for start in range(3):
        tensors, flat, layout = bucket(start)
        load(model, flat, layout, addresses(model))
        check(model, tensors)
    assert model.asked == 3


@pytest.mark.parametrize("replaced", [False, True])
def test_parameters_that_have_moved_are_loaded_anew(replaced: bool) -> None:
    model = Model()
    for start in range(2):
        tensors, flat, layout = bucket(start)
        load(model, flat, layout, addresses(model))
        if replaced:
            model.both = torch.nn.Parameter(model.both.data.clone())
        else:
            model.both.data = model.both.data.clone()
    tensors, flat, layout = bucket(5)
    load(model, flat, layout, addresses(model))
    check(model, tensors)
    assert model.asked == 3


class InThreads(Model):
    def load_weights(self, weights: Any) -> None:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(super().load_weights, list(weights)).result()


def test_a_model_that_copies_in_threads_is_asked_each_time() -> None:
    model = InThreads()
    for start in (0, 40):
        tensors, flat, layout = bucket(start)
        load(model, flat, layout, addresses(model))
        check(model, tensors)


QUERIES, LATENT = "layers.0.self_attn.q_a_proj.weight", "layers.0.self_attn.kv_a_proj_with_mqa.weight"


class Latent(torch.nn.Module):
    """Joins two tensors as SGLang's deepseek_v2 does: only where they come together."""

    def __init__(self, *, fused: bool = True) -> None:
        super().__init__()
        name = "fused_qkv_a_proj_with_mqa" if fused else "kv_a_proj_with_mqa"
        self.projection = torch.nn.ParameterDict({name: torch.zeros(3 if fused else 1, 2)})
        self.fused = fused

    def load_weights(self, weights: Any) -> None:
        given = dict(weights)
        if self.fused and QUERIES in given and LATENT in given:
            self.projection["fused_qkv_a_proj_with_mqa"].data.copy_(torch.cat([given[QUERIES], given[LATENT]]))
        if not self.fused:
            self.projection["kv_a_proj_with_mqa"].data.copy_(given[LATENT])


def send(model: Latent, name: str, tensor: Tensor) -> None:
    """Load a bucket of one tensor, whose memory is overwritten afterwards."""
    flat = tensor.clone().flatten().view(torch.uint8)
    load(model, flat, [(name, "float32", tensor.shape)], addresses(model))
    flat.zero_()


@pytest.mark.parametrize("first", [QUERIES, LATENT])
def test_a_half_waits_for_the_other_half_in_a_later_bucket(first: str) -> None:
    model = Latent()
    for start in (1.0, 50.0, 100.0):
        halves = {QUERIES: torch.full((2, 2), start), LATENT: torch.full((1, 2), start + 1)}
        send(model, first, halves.pop(first) if start != 50 else torch.zeros(2 if first == QUERIES else 1, 2))
        if start == 50:
            continue  # an update that is interrupted
        send(model, *halves.popitem())
        assert model.projection["fused_qkv_a_proj_with_mqa"][:, 0].tolist() == [start, start, start + 1]


def test_a_projection_that_has_no_other_half_is_loaded_at_once() -> None:
    model = Latent(fused=False)
    send(model, LATENT, torch.ones(1, 2))
    assert model.projection["kv_a_proj_with_mqa"].tolist() == [[1, 1]]


def test_a_router_that_keeps_its_weights_in_float32_has_the_new_ones() -> None:
    from sglang.srt.models.glm4_moe import Glm4MoeGate

    gate = Glm4MoeGate(SimpleNamespace(n_routed_experts=4, hidden_size=3)).bfloat16()
    states = torch.ones(1, 3, dtype=torch.bfloat16)
    for value in (1.0, 2.0):
        with torch.inference_mode():
            gate.weight.data.fill_(value)
            renew_copies(torch.nn.Sequential(gate))
            assert gate(states).tolist() == [[3 * value] * 4]
            held = gate._weight_fp32.data_ptr()
    assert gate._weight_fp32.data_ptr() == held
