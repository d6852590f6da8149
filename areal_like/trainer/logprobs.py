"""Log-probabilities and entropies of words, from logits whose vocabulary is split over tensor-parallel ranks.

A slice of rows is looked at at a time, and again in backward, where the gradient takes the logits' place, so that
beside the logits no tensor of their size exists. With the output layer's weight instead of logits, no more logits exist
than those of a slice (151,936 words x 16,384 tokens in bfloat16 would take 5 GB).
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# On a GPU one kernel reads a row of logits and writes three numbers, or its gradient; unfused, memory traffic is five
# times that. A call costs a host as much as some hundred rows a GPU.
_IS_FUSED = torch.cuda.is_available()
_SLICE_ELEMENTS = 1 << 28 if _IS_FUSED else 1 << 26  # 0.5 GiB of bfloat16; 256 MiB of float32 per temporary
_fused = partial(torch.compile, dynamic=True) if _IS_FUSED else lambda function: function


def log_probs_and_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    """log p(label) and the entropy of p = softmax(logits / temperature), both `[rows]`, float32, differentiable once.

    `logits` is `[rows, padded vocabulary / tp]`; `labels`, whole-vocabulary ids, are `[rows]`. Columns from
    `vocab_size` on are padding and have probability 0. The result is the same on every rank of `group`; None: this rank
    has the whole vocabulary. The backward pass overwrites `logits`, which nothing else may read by then.
    """
    return _OfLogits.apply(logits, labels, 1.0 / temperature, vocab_size, group)


def log_probs_and_entropy_of_hidden(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup | None,
    zeros: bool = False,
) -> tuple[Tensor, Tensor]:
    """The same from hidden states `[rows, hidden]` and the output layer's `weight` `[padded vocabulary / tp, hidden]`.

    Logits of several slices are made again in backward ("Cut Your Losses in Large-Vocabulary Language Models",
    arXiv:2411.09009). The gradient of `hidden` is the same on every rank of `group`. A trained weight's is added to
    `weight.main_grad`, the buffer of Megatron's data parallelism, at that buffer's precision; autograd is given none,
    or `zeros`, which Megatron's hook asks for where it sends gradients while others are computed.
    """
    return _OfHidden.apply(hidden, weight, labels, 1.0 / temperature, vocab_size, group, zeros)


class _OfLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits, labels, scale, vocab_size, group):
        step, local, valid = _split(labels, logits.shape[1], vocab_size, group)
        log_prob, entropy, log_total = _measure(logits.split(step), local.split(step), scale, valid, group)
        ctx.save_for_backward(logits, local, log_total, entropy)
        ctx.scale, ctx.valid, ctx.step = scale, valid, step
        return log_prob, entropy

    @staticmethod
    def backward(ctx: Any, *grads):
        logits, *of_rows = ctx.saved_tensors
        grad = logits.detach()
        for rows, *columns in zip(*(tensor.split(ctx.step) for tensor in (grad, *of_rows, *grads)), strict=True):
            _to_gradient(_static(rows), *columns, ctx.scale, ctx.valid)
        return grad, None, None, None, None


class _OfHidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden, weight, labels, scale, vocab_size, group, zeros):
        step, local, valid = _split(labels, len(weight), vocab_size, group)
        kept = hidden @ weight.t() if len(hidden) <= step else None
        slices = [kept] if kept is not None else (rows @ weight.t() for rows in hidden.split(step))
        log_prob, entropy, log_total = _measure(slices, local.split(step), scale, valid, group)
        ctx.save_for_backward(kept, weight, hidden, local, log_total, entropy)
        ctx.scale, ctx.valid, ctx.step, ctx.group, ctx.zeros = scale, valid, step, group, zeros
        return log_prob, entropy

    @staticmethod
    def backward(ctx: Any, *grads):
        kept, weight, hidden, *of_rows = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        slices = (tensor.split(ctx.step) for tensor in (grad_hidden, hidden, *of_rows, *grads))
        for grad_rows, rows, *columns in zip(*slices, strict=True):
            logits = rows @ weight.t() if kept is None else kept
            _to_gradient(_static(logits), *columns, ctx.scale, ctx.valid)
            torch.mm(logits, weight, out=grad_rows)
            if ctx.needs_input_grad[1]:
                _add_product(weight.main_grad, logits.t(), rows)
            del logits  # before those of the next slice
        if ctx.group and ctx.group.size() > 1:
            dist.all_reduce(grad_hidden, group=ctx.group)
        zeros = weight.new_zeros(()).expand_as(weight) if ctx.needs_input_grad[1] and ctx.zeros else None
        return grad_hidden, zeros, None, None, None, None, None


def _split(labels: Tensor, columns: int, vocab_size: int, group: dist.ProcessGroup | None) -> tuple[int, Tensor, int]:
    """Rows of a slice; labels among this rank's words, -1 for others', `[rows]`; how many of its columns are words."""
    first = group.rank() * columns if group else 0
    valid = min(max(vocab_size - first, 0), columns)
    local = torch.where((labels >= first) & (labels < first + valid), labels - first, -1)
    return max(1, _SLICE_ELEMENTS // columns // 16 * 16), local, valid  # aligned, else compiled code copies slices


def _measure(
    slices: Iterable[Tensor],
    labels: Iterable[Tensor],
    scale: float,
    valid: int,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """log p(label), entropy and the logarithm of the softmax's denominator, `[rows]`; `labels` are local."""
    parts = []
    for logits, local in zip(slices, labels, strict=True):
        label = logits.gather(1, local.clamp(min=0)[:, None])[:, 0].float() * scale
        parts.append((*_local_sums(_static(logits), scale, valid), torch.where(local >= 0, label, 0.0)))
        del logits  # before those of the next slice
    maximum, total, weighted, label = (torch.cat(column) for column in zip(*parts, strict=True))
    if group and group.size() > 1:
        local_maximum = maximum.clone()
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        shrink = torch.exp(local_maximum - maximum)
        sums = torch.stack([total * shrink, weighted * shrink, label])
        dist.all_reduce(sums, group=group)
        total, weighted, label = sums
    log_total = maximum + torch.log(total)
    return label - log_total, log_total - weighted / total, log_total


def _static(logits: Tensor) -> Tensor:
    """With a constant number of columns to a kernel, which then loads eight at a time."""
    if _IS_FUSED:
        torch._dynamo.mark_static(logits, 1)
    return logits


def _add_product(to: Tensor, left: Tensor, right: Tensor) -> None:
    """A product of bfloat16 is added in float32 without a tensor of its own where there are kernels for that."""
    if to.dtype == left.dtype:
        to.addmm_(left, right)
    elif to.is_cuda:
        torch.addmm(to, left, right, out_dtype=to.dtype, out=to)
    else:
        to.add_(left @ right)


@_fused
def _local_sums(logits: Tensor, scale: float, valid: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per row over this rank's words: the maximum m of z, the sum of exp(z - m), the sum of z exp(z - m)."""
    z = _scale(logits, scale, valid)
    maximum = z.amax(1)
    weight = torch.exp(z - maximum[:, None])
    return maximum, weight.sum(1), (weight * z).sum(1)


@_fused
def _to_gradient(
    logits: Tensor,
    local: Tensor,
    log_total: Tensor,
    entropy: Tensor,
    grad_log_prob: Tensor,
    grad_entropy: Tensor,
    scale: float,
    valid: int,
) -> None:
    """In place; d log p(label) / dz = onehot - p; dH / dz = -p (log p + H)."""
    log_p = _scale(logits, scale, valid) - log_total[:, None]
    is_label = torch.arange(logits.shape[1], device=logits.device) == local[:, None]
    slope = (log_p + entropy[:, None]) * grad_entropy[:, None] + grad_log_prob[:, None]
    logits.copy_((is_label * grad_log_prob[:, None] - torch.exp(log_p) * slope) * scale)


def _scale(logits: Tensor, scale: float, valid: int) -> Tensor:
    z = logits.float() * scale
    if valid < z.shape[1]:
        z[:, valid:] = -1e30  # finite, so that p * z is 0 and not nan
    return z
