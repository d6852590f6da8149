"""Log-probabilities and entropies from logits whose vocabulary is split over tensor-parallel ranks.

A slice of rows is looked at at a time, and again in backward, where the gradient takes the logits' place, so that
beside the logits no tensor of their size exists (151,936 words x 16,384 tokens in float32 would take 10 GB).
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# On a GPU one kernel reads a row of logits and writes three numbers, or its gradient; unfused, memory traffic is five
# times that. Nothing else is kept of a slice there, and a call costs a host as much as some hundred rows a GPU.
_IS_FUSED = torch.cuda.is_available()
_SLICE_ELEMENTS = 1 << 29 if _IS_FUSED else 1 << 26  # the latter are 256 MiB of float32 per temporary
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
    return _VocabParallelLogProbs.apply(logits, labels, 1.0 / temperature, vocab_size, group)


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits, labels, scale, vocab_size, group):
        columns = logits.shape[1]
        first = group.rank() * columns if group else 0
        valid = min(max(vocab_size - first, 0), columns)
        mine = (labels >= first) & (labels < first + valid)
        local = torch.where(mine, labels - first, -1)

        step = max(1, _SLICE_ELEMENTS // columns // 16 * 16)  # slices are aligned, else compiled code copies them
        parts = [_local_sums(rows, scale, valid) for rows in _slices(logits, step)]
        maximum, total, weighted = (torch.cat(column) for column in zip(*parts, strict=True))
        label = torch.where(mine, logits.gather(1, local.clamp(min=0)[:, None])[:, 0].float() * scale, 0.0)
        if group and group.size() > 1:
            local_maximum = maximum.clone()
            dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
            shrink = torch.exp(local_maximum - maximum)
            sums = torch.stack([total * shrink, weighted * shrink, label])
            dist.all_reduce(sums, group=group)
            total, weighted, label = sums
        log_total = maximum + torch.log(total)
        entropy = log_total - weighted / total
        ctx.save_for_backward(logits, local, log_total, entropy)
        ctx.scale, ctx.valid, ctx.step = scale, valid, step
        return label - log_total, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_prob, grad_entropy):
        logits, *of_rows = ctx.saved_tensors
        grad = logits.detach()
        columns = (tensor.split(ctx.step) for tensor in (*of_rows, grad_log_prob, grad_entropy))
        for rows in zip(_slices(grad, ctx.step), *columns, strict=True):
            _to_gradient(*rows, ctx.scale, ctx.valid)
        return grad, None, None, None, None


def _slices(logits: Tensor, step: int) -> tuple[Tensor, ...]:
    """Of so many rows; the number of columns is constant to a kernel, which then loads eight at a time."""
    slices = logits.split(step)
    for rows in slices:
        torch._dynamo.mark_static(rows, 1)
    return slices


@_fused
def _local_sums(logits: Tensor, scale: float, valid: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per row over this rank's words: the maximum m of z, the sum of exp(z - m), the sum of z exp(z - m)."""
    z = _scaled(logits, scale, valid)
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
    log_p = _scaled(logits, scale, valid) - log_total[:, None]
    is_label = torch.arange(logits.shape[1], device=logits.device) == local[:, None]
    slope = (log_p + entropy[:, None]) * grad_entropy[:, None] + grad_log_prob[:, None]
    logits.copy_((is_label * grad_log_prob[:, None] - torch.exp(log_p) * slope) * scale)


def _scaled(logits: Tensor, scale: float, valid: int) -> Tensor:
    z = logits.float() * scale
    if valid < z.shape[1]:
        z[:, valid:] = -1e30  # finite, so that p * z is 0 and not nan
    return z
