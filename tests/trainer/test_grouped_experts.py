"""Grouped products compute what a product per expert computes, and leave gradients where Megatron looks for them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import linear

from areal_like.backends.megatron.cpu import cuda as cpu

cpu.install()
# isort: split
from areal_like.backends.megatron import grouped_experts  # noqa: E402

SPLITS = [[3, 0, 5, 1], [0, 0, 0, 9], [9, 0, 0, 0]]


def make_layer(outputs: int = 8, inputs: int = 12, trained: bool = True) -> torch.nn.Module:
    torch.manual_seed(0)
    layer = torch.nn.Module()
    layer.num_gemms = 4
    for i in range(4):
        weight = torch.nn.Parameter(torch.randn(outputs, inputs), requires_grad=trained)
        weight.main_grad = torch.ones_like(weight)
        layer.register_parameter(f"weight{i}", weight)
    return layer


def one_by_one(layer, x, splits):
    parts = zip(x.split(splits), layer.parameters(), strict=True)
    return torch.cat([linear(part, weight) for part, weight in parts])


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("forward", [grouped_experts._forward, grouped_experts._forward_early])
def test_outputs_and_gradients_are_those_of_single_products(splits, forward):
    layer, x = make_layer(), torch.randn(9, 12, requires_grad=True)
    expected = one_by_one(layer, x, splits)
    of_x, *of_weights = torch.autograd.grad(expected.square().sum(), [x, *layer.parameters()])
    output, bias = forward(layer, x, splits)
    output.square().sum().backward()
    assert bias is None
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(x.grad, of_x)
    for weight, gradient in zip(layer.parameters(), of_weights, strict=True):
        torch.testing.assert_close(weight.main_grad, 1 + gradient)


def test_every_weight_has_a_gradient_for_megatrons_hook_where_gradients_are_sent_early():
    layer = make_layer()
    grouped_experts._forward_early(layer, torch.randn(9, 12), SPLITS[0])[0].sum().backward()
    assert all(weight.grad is not None and weight.grad_added_to_main_grad for weight in layer.parameters())


def test_frozen_weights_get_no_gradient():
    layer, x = make_layer(trained=False), torch.randn(9, 12, requires_grad=True)
    grouped_experts._forward(layer, x, SPLITS[0])[0].sum().backward()
    assert x.grad is not None and all((weight.main_grad == 1).all() for weight in layer.parameters())


def test_trained_weights_get_gradients_where_their_input_needs_none():
    layer = make_layer()
    grouped_experts._forward(layer, torch.randn(9, 12), SPLITS[0])[0].sum().backward()
    assert (layer.weight0.main_grad != 1).any() and (layer.weight1.main_grad == 1).all()


@pytest.mark.parametrize("forward", [grouped_experts._forward, grouped_experts._forward_early])
def test_a_rank_without_tokens_still_has_a_backward_pass(forward):
    layer, x = make_layer(), torch.randn(0, 12, requires_grad=True)
    output, _ = forward(layer, x, [0, 0, 0, 0])
    output.sum().backward()
    assert output.shape == (0, 8) and x.grad.shape == x.shape
    assert all((weight.grad == 0).all() for weight in layer.parameters())


def make_experts(monkeypatch, config=None, **sizes) -> torch.nn.Module:
    class Experts(torch.nn.Module):
        pass

    monkeypatch.setattr(grouped_experts, "TEGroupedMLP", Experts)
    experts, plain = Experts(), {"add_bias_linear": False, "fp8": None, "fp4": None, "params_dtype": torch.float32}
    flags = ("use_transformer_engine_op_fuser", "delay_wgrad_compute", "overlap_dispatch_backward_with_experts_wgrad")
    experts.config = SimpleNamespace(**{**plain, **dict.fromkeys(flags, False), **(config or {})})
    experts.linear_fc1, experts.linear_fc2 = make_layer(**sizes), make_layer(**sizes)
    return experts


def test_layers_are_grouped(monkeypatch):
    experts = make_experts(monkeypatch)
    assert grouped_experts.group_products([experts], sends_early=False) == 2
    assert experts.linear_fc1(torch.randn(9, 12), SPLITS[0])[0].shape == (9, 8)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({"add_bias_linear": True}, {}),
        ({"fp8": "e4m3"}, {}),
        ({"delay_wgrad_compute": True}, {}),
        ({"overlap_dispatch_backward_with_experts_wgrad": True}, {}),
        ({"use_transformer_engine_op_fuser": True}, {}),
        ({}, {"outputs": 6}),
        ({}, {"inputs": 10}),
    ],
)
def test_layers_that_kernels_do_not_support_stay_as_they_are(monkeypatch, config, sizes):
    assert grouped_experts.group_products([make_experts(monkeypatch, config, **sizes)], sends_early=False) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [[3, 0, 500, 1], [0, 0, 0, 504], [129, 127, 128, 120]])
@pytest.mark.parametrize("forward", [grouped_experts._forward, grouped_experts._forward_early])
def test_kernels_of_a_gpu_compute_the_same(splits, forward):
    """Groups of any size, also where a group's tokens do not fill a tile."""
    layer = make_layer(outputs=192, inputs=256).to("cuda", torch.bfloat16)
    for weight in layer.parameters():
        weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
    x = torch.randn(504, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    expected = one_by_one(layer, x, splits)
    of_x, *of_weights = torch.autograd.grad(expected.sum(), [x, *layer.parameters()])
    output, _ = forward(layer, x, splits)
    output.sum().backward()
    torch.testing.assert_close(output, expected, atol=0.2, rtol=0.02)
    torch.testing.assert_close(x.grad, of_x, atol=0.2, rtol=0.02)
    for weight, gradient in zip(layer.parameters(), of_weights, strict=True):
        torch.testing.assert_close(weight.main_grad, 1 + gradient.float(), atol=0.5, rtol=0.02)
