from __future__ import annotations

import pytest
import torch

from areal_like.trainer import logprobs


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


def test_no_row_is_no_loss():
    logits = torch.zeros(0, 6, requires_grad=True)
    empty = torch.zeros(0, dtype=torch.long)
    values, _ = logprobs.log_probs_and_entropy(logits, empty, temperature=1.0, vocab_size=6, group=OneRank())
    values.sum().backward()
    assert values.shape == (0,)
