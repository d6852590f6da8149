"""Log-probabilities and entropies of tokens, from logits whose vocabulary is split over tensor-parallel ranks.

A slice of rows is looked at at a time, and again in backward, where the gradient takes the logits' place, so that
beside the logits no tensor of their size exists. With the output layer's weight instead of logits, only one slice's
logits exist (151,936 words x 16,384 tokens in bfloat16 would take 5 GB).
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# On a GPU one kernel reads a row of logits and writes three numbers, or its gradient; unfused, memory traffic is five
# times that. A call costs a host as much as some hundred rows a GPU.
_IS_FUSED = torch.cuda.is_available()
_SLICE_ELEMENTS = 1 << 28 if _IS_FUSED else 1 << 26  # 0.5 GiB of bfloat16; 256 MiB of float32 per temporary
_NEVER = -1e30  # logit of an id that has probability 0
_fused = partial(torch.compile, dynamic=True) if _IS_FUSED else lambda function: function

type Temperature = float | Tensor  # one for all rows, or `[rows]`


def log_probs_and_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: Temperature,
    vocab_size: int,
    group: dist.ProcessGroup | None,
    support: Tensor | None = None,
    choices: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return log p(label) and the entropy of p = softmax(logits / temperature), `[rows]`, float32, differentiable once.

    With `choices` `[rows, k]`, different whole-vocabulary ids of each row, also their log p, `[rows, k]`.

    `logits` is `[rows, padded vocabulary / tp]`; `labels`, whole-vocabulary ids, are `[rows]`. Columns from
    `vocab_size` on are padding and have probability 0. The result is the same on every rank of `group`; None: this rank
    has the whole vocabulary. The backward pass overwrites `logits`, which nothing else may read by then.

    `support` `[rows, width]` are the ids that each label was sampled from, its own among them, padded with -1: all
    other ids have probability 0. A row of -1 alone was sampled from the whole vocabulary.
    """
    made = _OfLogits.apply(logits, labels, support, choices, 1.0 / temperature, vocab_size, group)
    return made if choices is not None else made[:2]


def log_probs_and_entropy_of_hidden(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: Temperature,
    vocab_size: int,
    group: dist.ProcessGroup | None,
    support: Tensor | None = None,
    choices: Tensor | None = None,
    zeros: bool = False,
    in_fp32: bool = False,
    cap: float | None = None,
) -> tuple[Tensor, ...]:
    """Return both from hidden states `[rows, hidden]` and the output `weight` `[padded vocabulary / tp, hidden]`.

    Logits of several slices are made again in backward ("Cut Your Losses in Large-Vocabulary Language Models",
    arXiv:2411.09009). The gradient of `hidden` is the same on every rank of `group`. A trained weight's is added to
    `weight.main_grad`, the buffer of Megatron's data parallelism, at that buffer's precision; autograd is given none,
    or `zeros`, which Megatron's hook asks for where it sends gradients while others are computed. `in_fp32` keeps the
    logits in float32 instead of rounding them to the type of `hidden`. A soft `cap` bounds logits by a hyperbolic
    tangent, before the temperature.
    """
    scale = 1.0 / temperature
    made = _OfHidden.apply(hidden, weight, labels, support, choices, scale, vocab_size, group, zeros, in_fp32, cap)
    return made if choices is not None else made[:2]


def fp32_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return `hidden @ weight.t()` in float32, differentiable; gradients have the types of the arguments."""
    return _Fp32Logits.apply(hidden, weight)


class _OfLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits, labels, support, choices, scale, vocab_size, group):
        step, words, valid, support = _split(labels, choices, support, logits.shape[1], vocab_size, group)
        rows = zip(*_slices(step, words, support, scale), strict=True)
        log_probs, entropy, log_total = _measure(logits.split(step), rows, valid, group)
        ctx.save_for_backward(logits, support, words, log_total, entropy)
        ctx.scale, ctx.valid, ctx.step = scale, valid, step
        return log_probs[:, 0], entropy, log_probs[:, 1:]

    @staticmethod
    def backward(ctx: Any, *grads):
        logits, support, *of_rows = ctx.saved_tensors
        grad = logits.detach()
        for rows, *columns in zip(*_slices(ctx.step, grad, *of_rows, *grads, support, ctx.scale), strict=True):
            _to_gradients(rows, *columns, valid=ctx.valid)
        return grad, *[None] * 6


class _OfHidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden, weight, labels, support, choices, scale, vocab_size, group, zeros, in_fp32, cap):
        product = _fp32_product if in_fp32 else torch.mm
        product = partial(_capped_product, product, cap) if cap else product
        step, words, valid, support = _split(labels, choices, support, len(weight), vocab_size, group)
        whole = product(hidden, weight.t()) if len(hidden) <= step else None
        slices = [whole] if whole is not None else (product(rows, weight.t()) for rows in hidden.split(step))
        rows = zip(*_slices(step, words, support, scale), strict=True)
        log_probs, entropy, log_total = _measure(slices, rows, valid, group)
        ctx.save_for_backward(whole, weight, hidden, support, words, log_total, entropy)
        ctx.scale, ctx.valid, ctx.step, ctx.group, ctx.zeros, ctx.product = scale, valid, step, group, zeros, product
        ctx.cap = cap
        return log_probs[:, 0], entropy, log_probs[:, 1:]

    @staticmethod
    def backward(ctx: Any, *grads):
        whole, weight, hidden, support, *of_rows = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        slices = _slices(ctx.step, grad_hidden, hidden, *of_rows, *grads, support, ctx.scale)
        for grad_rows, rows, *columns in zip(*slices, strict=True):
            logits = ctx.product(rows, weight.t()) if whole is None else whole
            slope = 1 - (logits / ctx.cap) ** 2 if ctx.cap else None
            _to_gradients(logits, *columns, valid=ctx.valid)
            logits = (logits if slope is None else logits.mul_(slope)).to(weight.dtype)
            torch.mm(logits, weight, out=grad_rows)
            if ctx.needs_input_grad[1]:
                _add_product(weight.main_grad, logits.t(), rows)
            del logits  # before the logits of the next slice
        if ctx.group and ctx.group.size() > 1:
            dist.all_reduce(grad_hidden, group=ctx.group)
        zeros = weight.new_zeros(()).expand_as(weight) if ctx.needs_input_grad[1] and ctx.zeros else None
        return grad_hidden, zeros, *[None] * 9


class _Fp32Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        return _fp32_product(hidden.flatten(0, -2), weight.t()).unflatten(0, hidden.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad):
        hidden, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2).to(weight.dtype)
        of_weight = rows.t() @ hidden.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return (rows @ weight).view_as(hidden), of_weight


def _fp32_product(left: Tensor, right: Tensor) -> Tensor:
    """Return a product in float32. A GPU multiplies 16-bit numbers exactly and adds in float32."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _capped_product(product: Callable[[Tensor, Tensor], Tensor], cap: float, left: Tensor, right: Tensor) -> Tensor:
    return product(left, right).div_(cap).tanh_().mul_(cap)


def _split(
    labels: Tensor,
    choices: Tensor | None,
    support: Tensor | None,
    columns: int,
    vocab_size: int,
    group: dist.ProcessGroup | None,
) -> tuple[int, Tensor, int, Tensor | None]:
    """Return rows of a slice; labels and choices among this rank's ids, `[rows, 1 + k]`; the number of columns.

    Ids of other ranks are -1. Last the local ids of the support: -1 is padding, and -2 an id of another rank.
    Raises ValueError for choices beside a support.
    """
    if choices is not None and support is not None:
        raise ValueError("choices have log-probs over the whole vocabulary, and the support is a part of it")
    first = group.rank() * columns if group else 0
    valid = min(max(vocab_size - first, 0), columns)
    words = labels[:, None] if choices is None else torch.cat([labels[:, None], choices], 1)
    words = torch.where((words >= first) & (words < first + valid), words - first, -1)
    if support is not None:
        here = (support >= first) & (support < first + valid)
        support = (support - first).masked_fill_(~here & (support >= 0), -2).masked_fill_(support < 0, -1)
    return max(1, _SLICE_ELEMENTS // columns // 16 * 16), words, valid, support  # aligned, or compiled code copies


def _slices(step: int, *columns: Tensor | float | None) -> list[Iterable[Any]]:
    """Return columns in slices of rows; one that is not a tensor is the same for every row."""
    rows = next(len(column) for column in columns if isinstance(column, Tensor))
    count = max(1, -(-rows // step))
    return [column.split(step) if isinstance(column, Tensor) else [column] * count for column in columns]


def _measure(
    slices: Iterable[Tensor],
    rows: Iterable[tuple[Tensor, Tensor | None, float | Tensor]],
    valid: int,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log p of labels and choices, `[rows, 1 + k]`; entropy and the log of the softmax's denominator, `[rows]`.

    `rows` are local ids, supports and scales of the slices.
    """
    parts = []
    for logits, (words, support, scale) in zip(slices, rows, strict=True):
        of_words = logits.gather(1, words.clamp(min=0)).float() * _column(scale)
        parts.append((*_all_sums(logits, support, scale, valid), torch.where(words >= 0, of_words, 0.0)))
        del logits  # before the logits of the next slice
    maximum, total, weighted, of_words = (torch.cat(column) for column in zip(*parts, strict=True))
    if group and group.size() > 1:
        local_maximum = maximum.clone()
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        shrink = torch.exp(local_maximum - maximum)
        sums = torch.cat([total[:, None] * shrink[:, None], weighted[:, None] * shrink[:, None], of_words], 1)
        dist.all_reduce(sums, group=group)
        total, weighted, of_words = sums[:, 0], sums[:, 1], sums[:, 2:]
    log_total = maximum + torch.log(total)
    return of_words - log_total[:, None], log_total - weighted / total, log_total


def _all_sums(
    logits: Tensor, support: Tensor | None, scale: float | Tensor, valid: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `_local_sums` over the support of each row, over all ids of a row without one."""
    of_all = _fused_local_sums(_static(logits), _column(scale), valid)
    if support is None:
        return of_all
    of_support = _local_sums(_gather_support(logits, support), _column(scale), support.shape[1])
    maximum, total, weighted = (
        torch.where(support[:, 0] == -1, *both) for both in zip(of_all, of_support, strict=True)
    )
    return maximum, total, weighted


def _to_gradients(
    logits: Tensor,
    words: Tensor,
    log_total: Tensor,
    entropy: Tensor,
    grad_log_prob: Tensor,
    grad_entropy: Tensor,
    grad_choices: Tensor,
    support: Tensor | None,
    scale: float | Tensor,
    *,
    valid: int,
) -> None:
    """Compute `_to_gradient`, also for choices; the gradient of ids outside the support is 0."""
    local, choices, of_choices = words[:, 0], words[:, 1:], grad_choices.sum(1)
    of_rows = (log_total, entropy, grad_log_prob + of_choices, grad_entropy)
    if support is None:
        _fused_to_gradient(_static(logits), local, *of_rows, _column(scale), valid)
        if choices.shape[1]:  # of these the label's word has got too much
            added = torch.cat([-of_choices[:, None], grad_choices], 1).masked_fill_(words < 0, 0) * _column(scale)
            logits.scatter_add_(1, words.clamp(min=0), added.to(logits.dtype))
        return
    few = _gather_support(logits, support)
    _fused_to_gradient(_static(logits), local, *of_rows, _column(scale), valid)
    is_label = (support == local[:, None]) & (local >= 0)[:, None]
    place = torch.where(is_label.any(1), is_label.int().argmax(1), -1)
    _to_gradient(few, place, *of_rows, _column(scale), support.shape[1])
    logits.masked_fill_((support[:, 0] != -1)[:, None], 0)
    few.masked_fill_(support < 0, 0)
    logits.scatter_add_(1, support.clamp(min=0).long(), few.to(logits.dtype))  # 0 is added where many are added


def _gather_support(logits: Tensor, support: Tensor) -> Tensor:
    """Return logits of the support, `[rows, width]`, float32; with probability 0 where this rank has none."""
    return logits.gather(1, support.clamp(min=0).long()).float().masked_fill_(support < 0, _NEVER)


def _column(scale: float | Tensor) -> float | Tensor:
    return scale[:, None] if isinstance(scale, Tensor) else scale


def _static(logits: Tensor) -> Tensor:
    """Give a kernel a constant number of columns, so that it loads eight at a time."""
    if _IS_FUSED:
        torch._dynamo.mark_static(logits, 1)
    return logits


def _add_product(to: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a bfloat16 product in float32, without a temporary tensor where kernels allow it."""
    if to.dtype == left.dtype:
        to.addmm_(left, right)
    elif to.is_cuda:
        torch.addmm(to, left, right, out_dtype=to.dtype, out=to)
    else:
        to.add_(left @ right)


def _local_sums(logits: Tensor, scale: float | Tensor, valid: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return per row over this rank's words the maximum m of z, the sum of exp(z - m), the sum of z exp(z - m)."""
    z = _scale(logits, scale, valid)
    maximum = z.amax(1)
    weight = torch.exp(z - maximum[:, None])
    return maximum, weight.sum(1), (weight * z).sum(1)


def _to_gradient(
    logits: Tensor,
    local: Tensor,
    log_total: Tensor,
    entropy: Tensor,
    grad_log_prob: Tensor,
    grad_entropy: Tensor,
    scale: float | Tensor,
    valid: int,
) -> None:
    """Compute the gradient in place; d log p(label) / dz = onehot - p; dH / dz = -p (log p + H)."""
    log_p = _scale(logits, scale, valid) - log_total[:, None]
    is_label = torch.arange(logits.shape[1], device=logits.device) == local[:, None]
    slope = (log_p + entropy[:, None]) * grad_entropy[:, None] + grad_log_prob[:, None]
    logits.copy_((is_label * grad_log_prob[:, None] - torch.exp(log_p) * slope) * scale)


def _scale(logits: Tensor, scale: float | Tensor, valid: int) -> Tensor:
    z = logits.float() * scale
    if valid < z.shape[1]:
        z[:, valid:] = _NEVER  # finite, so that p * z is 0 and not nan
    return z


_fused_local_sums, _fused_to_gradient = _fused(_local_sums), _fused(_to_gradient)
