"""Log-probs over the support of a sampled token, against a dense masked softmax."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from areal_like.core.trainer import logprobs

ROWS, WORDS, PADDED, HIDDEN = 40, 22, 26, 6


class ThreadGroup:
    """A tensor-parallel group of two threads."""

    def __init__(self) -> None:
        self.barrier, self.given, self.local = threading.Barrier(2, timeout=60), {}, threading.local()

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return self.local.rank

    def all_reduce(self, tensor, op=torch.distributed.ReduceOp.SUM, group=None):
        self.given[self.rank()] = tensor.clone()
        self.barrier.wait()
        both = torch.stack([self.given[0], self.given[1]])
        tensor.copy_(both.amax(0) if op == torch.distributed.ReduceOp.MAX else both.sum(0))
        self.barrier.wait()


def _case(seed=0):
    """Hidden states, a weight, labels, supports (row 3 and 7: all), temperatures, and the loss's weights."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(ROWS, HIDDEN, generator=generator), torch.randn(PADDED, HIDDEN, generator=generator)
    labels = torch.randint(0, WORDS, (ROWS,), generator=generator)
    support = torch.full((ROWS, 5), -1, dtype=torch.int32)
    for row, label in enumerate(labels.tolist()):
        others = [word for word in torch.randperm(WORDS, generator=generator).tolist() if word != label]
        chosen = [*others[: row % 5], label]
        support[row, : len(chosen)] = torch.tensor(chosen)
    support[[3, 7]] = -1
    temperatures = 0.5 + torch.rand(ROWS, generator=generator)
    return hidden, weight, labels, support, temperatures, torch.randn(2, ROWS, generator=generator)


def _expected(logits, labels, support, temperature):
    """Log-probs and entropies by a softmax over all words, the others masked."""
    mask = torch.zeros(ROWS, WORDS, dtype=torch.bool)
    for row, words in enumerate(support.tolist()):
        mask[row, [word for word in words if word >= 0] or slice(None)] = True
    z = logits[:, :WORDS] / (temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature)
    log_p = torch.log_softmax(z.masked_fill(~mask, -torch.inf), -1)
    entropy = -torch.where(mask, log_p.exp() * log_p.masked_fill(~mask, 0), 0.0).sum(-1)
    return log_p.gather(1, labels[:, None])[:, 0], entropy


@pytest.mark.parametrize("slice_elements", [1 << 26, 16 * PADDED])
@pytest.mark.parametrize("per_token", [True, False])
def test_values_and_gradients_equal_a_masked_softmax(monkeypatch, slice_elements, per_token):
    monkeypatch.setattr(logprobs, "_SLICE_ELEMENTS", slice_elements)
    hidden, weight, labels, support, temperatures, (weights, of_entropy) = _case()
    temperature = temperatures if per_token else 0.7
    logits = (hidden @ weight.t()).requires_grad_()
    expected = _expected(logits, labels, support, temperature)
    (expected_gradient,) = torch.autograd.grad((expected[0] * weights + expected[1] * of_entropy).sum(), logits)

    made = logprobs.log_probs_and_entropy(
        logits, labels, temperature=temperature, vocab_size=WORDS, group=None, support=support
    )
    (gradient,) = torch.autograd.grad((made[0] * weights + made[1] * of_entropy).sum(), logits)
    torch.testing.assert_close(made, expected)
    torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("slice_elements", [1 << 26, 16 * PADDED])
@pytest.mark.parametrize("per_token", [True, False])
def test_two_tensor_parallel_ranks_give_the_same(monkeypatch, slice_elements, per_token):
    monkeypatch.setattr(logprobs, "_SLICE_ELEMENTS", slice_elements)
    hidden, weight, labels, support, temperatures, (weights, of_entropy) = _case(1)
    temperature = temperatures if per_token else 0.7
    hidden.requires_grad_(), weight.requires_grad_()
    expected = _expected(hidden @ weight.t(), labels, support, temperature)
    (expected[0] * weights + expected[1] * of_entropy).sum().backward()
    group = ThreadGroup()
    monkeypatch.setattr(logprobs.dist, "all_reduce", group.all_reduce)

    def rank(number):
        group.local.rank = number
        mine = weight.detach().chunk(2)[number].clone().requires_grad_()
        mine.main_grad, copied = torch.zeros_like(mine), hidden.detach().clone().requires_grad_()
        values, entropy = logprobs.log_probs_and_entropy_of_hidden(
            copied, mine, labels, temperature=temperature, vocab_size=WORDS, group=group, support=support
        )
        (values * weights + entropy * of_entropy).sum().backward()
        return values.detach(), entropy.detach(), copied.grad, mine.main_grad

    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(rank, range(2)))
    for values, entropy, of_hidden, _ in both:
        torch.testing.assert_close((values, entropy), expected)
        torch.testing.assert_close(of_hidden, hidden.grad)
    torch.testing.assert_close(torch.cat([it[3] for it in both]), weight.grad)


def test_words_outside_the_support_may_be_far_likelier_today():
    logits = torch.tensor([[0.0, 1.0, 500.0]]).requires_grad_()
    support = torch.tensor([[0, 1]])
    values, entropy = logprobs.log_probs_and_entropy(
        logits, torch.tensor([0]), temperature=0.1, vocab_size=3, group=None, support=support
    )
    (gradient,) = torch.autograd.grad((values + entropy).sum(), logits)
    expected = torch.log_softmax(torch.tensor([0.0, 10.0]), 0)[0]
    assert values.item() == pytest.approx(expected.item(), rel=1e-6)
    assert gradient[0, 2] == 0 and torch.isfinite(gradient).all()


def test_the_only_word_of_a_support_is_certain_and_has_no_gradient():
    logits = torch.randn(1, 5).requires_grad_()
    support = torch.tensor([[2, -1]])
    values, entropy = logprobs.log_probs_and_entropy(
        logits, torch.tensor([2]), temperature=1.0, vocab_size=5, group=None, support=support
    )
    (gradient,) = torch.autograd.grad((values + entropy).sum(), logits)
    assert values.item() == entropy.item() == 0 and not gradient.any()


def test_rows_without_a_support_are_those_of_the_whole_vocabulary_to_the_last_bit():
    hidden, weight, labels, support, _, _ = _case()
    said = {"temperature": 0.7, "vocab_size": WORDS, "group": None}
    plain = logprobs.log_probs_and_entropy(hidden @ weight.t(), labels, **said)
    mixed = logprobs.log_probs_and_entropy(hidden @ weight.t(), labels, **said, support=support)
    for one, other in zip(plain, mixed, strict=True):
        assert torch.equal(one[[3, 7]], other[[3, 7]]) and not torch.equal(one, other)
