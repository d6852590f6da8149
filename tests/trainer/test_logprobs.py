from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from areal_like.core.trainer import logprobs


class OneRank:
    """A tensor-parallel group of one."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize("slice_elements", [1 << 26, 30, 13 * 20])
def test_values_and_gradients_equal_log_softmax(monkeypatch, slice_elements):
    monkeypatch.setattr(logprobs, "_SLICE_ELEMENTS", slice_elements)
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(40, 13, generator=generator)).requires_grad_()
    labels = torch.tensor([0, 10, 3, 3, 7] * 8)
    weights, entropy_weights = torch.randn(2, 40, generator=generator)
    log_p = torch.log_softmax(logits[:, :11] / 0.7, -1)
    expected, expected_entropy = log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    (expected_gradient,) = torch.autograd.grad((expected * weights + expected_entropy * entropy_weights).sum(), logits)

    values, entropy = logprobs.log_probs_and_entropy(logits, labels, temperature=0.7, vocab_size=11, group=OneRank())
    (gradient,) = torch.autograd.grad((values * weights + entropy * entropy_weights).sum(), logits)
    torch.testing.assert_close(values, expected)
    torch.testing.assert_close(entropy, expected_entropy)
    torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("slice_elements", [1 << 26, 30, 13 * 20])
@pytest.mark.parametrize(
    ("trained", "zeros", "cap"), [(True, True, None), (True, False, None), (False, True, None), (True, False, 2.0)]
)
def test_hidden_states_and_a_weight_give_the_same(monkeypatch, slice_elements, trained, zeros, cap):
    monkeypatch.setattr(logprobs, "_SLICE_ELEMENTS", slice_elements)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 6, generator=generator).requires_grad_()
    weight = torch.randn(13, 6, generator=generator).requires_grad_(trained)
    labels = torch.tensor([0, 10, 3, 3, 7] * 8)
    weights, entropy_weights = torch.randn(2, 40, generator=generator)
    said = {"temperature": 0.7, "vocab_size": 11, "group": OneRank()}

    logits = hidden @ weight.t()
    logits = cap * torch.tanh(logits / cap) if cap else logits
    expected = logprobs.log_probs_and_entropy(logits, labels, **said)
    (expected[0] * weights + expected[1] * entropy_weights).sum().backward()
    of_hidden, of_weight = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    weight.main_grad = torch.ones(13, 6)

    values, entropy = logprobs.log_probs_and_entropy_of_hidden(hidden, weight, labels, **said, zeros=zeros, cap=cap)
    (values * weights + entropy * entropy_weights).sum().backward()
    torch.testing.assert_close((values, entropy), expected)
    torch.testing.assert_close(hidden.grad, of_hidden)
    assert (weight.grad is not None) == (trained and zeros), "Megatron's hook asks for one and adds it"
    added = weight.main_grad - 1 + (0 if weight.grad is None else weight.grad)
    torch.testing.assert_close(added, of_weight if trained else torch.zeros(13, 6))


def test_no_more_logits_exist_than_those_of_a_slice(monkeypatch):
    monkeypatch.setattr(logprobs, "_SLICE_ELEMENTS", 16 * 13)
    hidden, weight = torch.randn(40, 6, requires_grad=True), torch.randn(13, 6, requires_grad=True)
    weight.main_grad, made = torch.zeros(13, 6), []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            result = function(*arguments, **(options or {}))
            made.extend(len(it) for it in tree_leaves(result) if isinstance(it, torch.Tensor) and it.shape[1:] == (13,))
            return result

    said = {"temperature": 1.0, "vocab_size": 13, "group": None}
    with Seen():
        values, _ = logprobs.log_probs_and_entropy_of_hidden(hidden, weight, torch.arange(40) % 13, **said)
        values.sum().backward()
    assert max(made) == 16


def test_a_product_of_bfloat16_is_added_in_float32():
    weight = torch.randn(13, 6, dtype=torch.bfloat16, requires_grad=True)
    weight.main_grad = torch.full((13, 6), 1000.0)
    hidden, labels = torch.randn(8, 6, dtype=torch.bfloat16), torch.arange(8)
    said = {"temperature": 1.0, "vocab_size": 13, "group": None}
    logprobs.log_probs_and_entropy_of_hidden(hidden, weight, labels, **said)[0].sum().backward()
    added = (weight.main_grad - 1000).abs()
    assert ((added > 0) & (added < 1)).any()  # bfloat16 has steps of 4 there


def test_no_row_is_no_loss():
    logits = torch.zeros(0, 6, requires_grad=True)
    empty = torch.zeros(0, dtype=torch.long)
    values, _ = logprobs.log_probs_and_entropy(logits, empty, temperature=1.0, vocab_size=6, group=OneRank())
    values.sum().backward()
    assert values.shape == (0,)


@pytest.mark.parametrize("slice_elements", [1 << 26, 13 * 20])
@pytest.mark.parametrize("of_hidden", [False, True])
def test_choices_have_values_and_gradients_of_log_softmax(monkeypatch, slice_elements, of_hidden):
    monkeypatch.setattr(logprobs, "_SLICE_ELEMENTS", slice_elements)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(40, 6, generator=generator), torch.randn(13, 6, generator=generator)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    labels = torch.tensor([0, 10, 3, 3, 7] * 8)
    choices = torch.stack([torch.randperm(11, generator=generator)[:4] for _ in labels])  # some have the label too
    weights, entropy_weights = torch.randn(2, 40, generator=generator)
    of_choices = torch.randn(40, 4, generator=generator)

    def total(values, entropy, chosen):
        return (values * weights + entropy * entropy_weights).sum() + (chosen * of_choices).sum()

    log_p = torch.log_softmax((hidden @ weight.t())[:, :11] / 0.7, -1)
    expected = log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1), log_p.gather(1, choices)
    total(*expected).backward()
    gradients, hidden.grad, weight.grad = (hidden.grad, weight.grad), None, None

    said = {"temperature": 0.7, "vocab_size": 11, "group": OneRank(), "choices": choices}
    weight.main_grad = torch.zeros(13, 6)
    if of_hidden:
        made = logprobs.log_probs_and_entropy_of_hidden(hidden, weight, labels, **said)
    else:
        made = logprobs.log_probs_and_entropy(hidden @ weight.t(), labels, **said)
    torch.testing.assert_close(made, expected)
    total(*made).backward()
    torch.testing.assert_close((hidden.grad, weight.main_grad if of_hidden else weight.grad), gradients)
