"""Log-probabilities and entropies from logits whose vocabulary is split over tensor-parallel ranks.

Only the rows that are asked for are looked at, a slice of them at a time and again in backward, so that beside the
logits and their gradient no tensor of their size exists (151,936 words x 16,384 tokens in float32 would take 10 GB).
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
    rows: Tensor,
    labels: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    """log p(label) and the entropy of p = softmax(logits[row] / temperature), both `[rows]`, float32, differentiable.

    `logits` is `[tokens, padded vocabulary / tp]`; `rows` and `labels`, whole-vocabulary ids, are `[rows]`. Columns
    from `vocab_size` on are padding and have probability 0. The result is the same on every rank of `group`; None: this
    rank has the whole vocabulary.
    """
    return _VocabParallelLogProbs.apply(logits, rows, labels, 1.0 / temperature, vocab_size, group)


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits, rows, labels, scale, vocab_size, group):
        columns = logits.shape[1]
        first = group.rank() * columns if group else 0
        valid = min(max(vocab_size - first, 0), columns)
        mine = (labels >= first) & (labels < first + valid)
        local = (labels - first).clamp(0, columns - 1)

        step = max(1, _SLICE_ELEMENTS // columns)
        parts = [_local_sums(logits, r, scale, valid) for r in rows.split(step)]
        maximum, total, weighted = (torch.cat(column) for column in zip(*parts, strict=True))
        label = torch.where(mine, logits[rows, local].float() * scale, 0.0)
        if group and group.size() > 1:
            local_maximum = maximum.clone()
            dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
            shrink = torch.exp(local_maximum - maximum)
            sums = torch.stack([total * shrink, weighted * shrink, label])
            dist.all_reduce(sums, group=group)
            total, weighted, label = sums
        log_total = maximum + torch.log(total)
        entropy = log_total - weighted / total
        ctx.save_for_backward(logits, rows, local, mine, log_total, entropy)
        ctx.scale, ctx.valid, ctx.step = scale, valid, step
        return label - log_total, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_prob, grad_entropy):
        logits, rows, local, mine, log_total, entropy = ctx.saved_tensors
        grad = torch.zeros_like(logits)
        slices = [t.split(ctx.step) for t in (rows, log_total, entropy, grad_log_prob, grad_entropy)]
        for r, log_total_s, entropy_s, g, h in zip(*slices, strict=True):
            _write_gradient(grad, logits, r, log_total_s, entropy_s, g, h, ctx.scale, ctx.valid)
        grad[rows, local] += torch.where(mine, grad_log_prob * ctx.scale, 0.0).to(grad.dtype)
        return grad, None, None, None, None, None


@_fused
def _local_sums(logits: Tensor, rows: Tensor, scale: float, valid: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per row over this rank's words: the maximum m of z, the sum of exp(z - m), the sum of z exp(z - m)."""
    z = _scaled(logits[rows], scale, valid)
    maximum = z.amax(1)
    weight = torch.exp(z - maximum[:, None])
    return maximum, weight.sum(1), (weight * z).sum(1)


@_fused
def _write_gradient(
    grad: Tensor,
    logits: Tensor,
    rows: Tensor,
    log_total: Tensor,
    entropy: Tensor,
    grad_log_prob: Tensor,
    grad_entropy: Tensor,
    scale: float,
    valid: int,
) -> None:
    """d log p(label) / dz = onehot - p, the one-hot part being added later; dH / dz = -p (log p + H)."""
    log_p = _scaled(logits[rows], scale, valid) - log_total[:, None]
    p = torch.exp(log_p)
    slope = (log_p + entropy[:, None]) * grad_entropy[:, None] + grad_log_prob[:, None]
    grad[rows] = (p * slope * -scale).to(grad.dtype)


def _scaled(logits: Tensor, scale: float, valid: int) -> Tensor:
    z = logits.float() * scale
    if valid < z.shape[1]:
        z[:, valid:] = -1e30  # finite, so that p * z is 0 and not nan
    return z
