"""The op behind ``tk.linear_cross_entropy``: the cross entropy of ``input @ linear_weight.T + linear_bias``, of whose
logits no more than a block is in memory at a time.

Where the logits and their gradient fit the budget they are one block, of which a kernel makes the loss of each row, and
another one the gradient. Else a block is all rows by some classes, in float32. So each block of the weight's gradient
is one product over all rows, which is rounded once. The backward computes the logits again, which is one product of
four. It then serves any gradient of each row's loss, and nothing of the size of the weight waits between forward and
backward. Of 16 bits, a block has its logits in float32 a part at a time.

A sum or a mean whose logits fit the budget is worked out at once, and its gradients with it: three products. The
backward only multiplies them by the gradient of the loss. float32 takes several blocks of rows, which add to the
weight's gradient in place. 16 bits take one block alone: a sum over blocks of rows would be rounded for each block, or
need a second gradient in float32. Where a block has few rows, to read and write that sum costs what the product saves.

float16 has its gradients in float32 until they are multiplied, since the forward does not know the scale that keeps
small ones from becoming 0. That is so where they are small, and without weights of the classes, which may be too large
for the gradient of the logits in 16 bits. Else float16 computes its logits again.

Small gradients, and the logits of losses that are not reduced, are saved as autograd's own: each backward of a graph
finds them. Larger gradients are multiplied in place by the first backward, so that they are in memory once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.library import Library

from tk.ops import _register
from tk.ops.product import one_by_one

__all__ = ["linear_cross_entropy", "reduced", "total_of_rows"]

BUDGET_BYTES = 240 << 20  # of a call, beside the weight and the gradients: for 256 MiB, with room for what is small
BUDGET_ROWS = 8192  # that it is for: of more rows, the blocks of a backward may be larger in proportion
LEAST_CLASSES = 128  # of a block, however many rows there are: a kernel's tile of columns
SAVED_BYTES = 32 << 20  # for the backward, at most: what multiplies them finds them, and writes, in a large GPU's L2
FLOAT16_SCALE = 2.0**14  # of the gradient of logits, at most 1 by magnitude: the smallest number is then below 4e-12
LEAST_ROWS = 256  # of a block of rows among several: with fewer, adding to the weight's gradient takes most of the time

_library = Library("tk", "FRAGMENT")  # keeps what is registered alive
_ARGUMENTS = (
    "Tensor input, Tensor linear_weight, Tensor target, Tensor? linear_bias, Tensor? weight, SymInt ignore_index, "
    "float label_smoothing"
)
_library.define(f"linear_cross_entropy({_ARGUMENTS}, int config=-1, int mode=0) -> (Tensor, Tensor, Tensor)")
_library.define(
    f"linear_cross_entropy_backward(Tensor grad, Tensor base, Tensor log_sum, {_ARGUMENTS}, bool[] needs, "
    "int mode=0) -> (Tensor, Tensor, Tensor)"
)
_library.define(f"linear_cross_entropy_reduced({_ARGUMENTS}, bool is_mean, int mode=0) -> Tensor")
_library.define(
    f"linear_cross_entropy_at_once({_ARGUMENTS}, bool is_mean, bool[] needs, int mode=0) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define(f"linear_cross_entropy_with_logits({_ARGUMENTS}, int mode=0) -> (Tensor, Tensor)")
_library.define(
    f"linear_cross_entropy_from_logits(Tensor grad, Tensor logits, {_ARGUMENTS}, bool[] needs, int mode=0) "
    "-> (Tensor, Tensor, Tensor)"
)

# The loss of each row, and two numbers whose sum is the logsumexp of its logits.
linear_cross_entropy = torch.ops.tk.linear_cross_entropy.default
_backward = torch.ops.tk.linear_cross_entropy_backward.default  # (of input, linear_weight and linear_bias)
reduced = torch.ops.tk.linear_cross_entropy_reduced.default  # the sum or the mean of the losses, in float32
_at_once = torch.ops.tk.linear_cross_entropy_at_once.default  # that, and the gradients of _backward for it
_with_logits = torch.ops.tk.linear_cross_entropy_with_logits.default  # the loss of each row, and all logits
_from_logits = torch.ops.tk.linear_cross_entropy_from_logits.default  # the gradients of _backward, from these
_mm, _mm_out = _register.overloads("mm")
_, _addmm_out = _register.overloads("addmm")


# --- Kernels ---


class _Given(NamedTuple):
    """What each of the ops is given."""

    input: Tensor
    linear_weight: Tensor
    target: Tensor
    linear_bias: Tensor | None
    weight: Tensor | None
    ignore_index: int
    label_smoothing: float

    @property
    def classes(self) -> int:
        return self.linear_weight.shape[0]

    def in_float32(self) -> _Given:
        """What was given, with the weights of the classes in float32."""
        return self if self.weight is None else self._replace(weight=self.weight.float())


def _of_given(kernel: Callable[..., Any], before: int, checks: bool = False) -> Callable[..., Any]:
    """A kernel as the dispatcher calls it. before: how many arguments stand before those of ``_Given``. checks: whether
    an index that is no class raises IndexError."""

    def called(*args: Any) -> Any:
        end = before + len(_Given._fields)
        given = _Given(*args[before:end])
        if checks and (wrong := given.target[~_is_right(given)]).numel():
            message = f"target is {wrong[0].item()}, must be 0 to {given.classes - 1}"
            raise IndexError(f"tk.linear_cross_entropy: {message}")
        return kernel(*args[:before], given, *args[end:])

    return called


def _forward(given: _Given, config: int = -1, mode: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    input, _, target, _, weight, ignore_index, label_smoothing = given
    rows, classes = input.shape[0], given.classes
    if config < 0 and _rows_at_once(input, classes) >= rows:
        loss, _ = _loss_and_logits(given, mode)
        return loss, torch.zeros_like(loss), torch.zeros_like(loss)  # _gradients needs neither number
    if target.is_cuda:  # the host does not wait: a wrong one ends the process's context, as in ATen
        torch._assert_async(_is_right(given).all())
    log_sum = input.new_full((rows,), -torch.inf, dtype=torch.float32)
    base, picked, spread = (torch.zeros_like(log_sum) for _ in range(3))
    with torch._C._DisableAutocast():
        for block in _blocks(rows, 4, BUDGET_BYTES * 4 // 5, 0, classes):
            logits = _logits(given, block, mode)
            at, is_there = _places(target, block)
            picked = torch.where(is_there, logits.gather(1, at.unsqueeze(1)).squeeze(1), picked)
            if label_smoothing:
                spread = spread + _weighted_sum(logits, weight, block, mode)
            if input.dtype == torch.float32:
                base, log_sum = _rebased(logits, base, log_sum, block, mode)
            log_sum = torch.logaddexp(log_sum, torch.ops.tk.logsumexp(logits, config, mode))
            del logits  # before the next block is there
    log_sum = torch.where(log_sum.isinf(), torch.nan, log_sum)  # as ATen's of an infinite logit
    of_class, share, total = _factors(given)
    loss = of_class * (log_sum - (picked - base))
    if label_smoothing:
        loss = loss + share * (total * (log_sum + base) - spread)
    return torch.where(target == ignore_index, 0.0, loss), base, log_sum


def _rebased(logits: Tensor, base: Tensor, log_sum: Tensor, block: slice, mode: int) -> tuple[Tensor, Tensor]:
    """Makes the largest logit so far what log_sum counts from, and logits too, in place. The logarithm is then small,
    and so is its rounding, which is an error of a row's whole gradient. Of 16 bits it is nothing beside theirs."""
    largest = torch.ops.tk.row_amax(logits, 1.0, 1.0, -1, mode)
    largest = torch.where(largest.isinf(), base, largest)
    new = largest if block.start == 0 else torch.maximum(base, largest)
    logits.sub_(new.unsqueeze(1))
    return new, log_sum + (base - new)


def _gradients(
    grad: Tensor,
    base: Tensor,
    log_sum: Tensor,
    given: _Given,
    needs: Sequence[bool],
    mode: int = 0,
) -> tuple[Tensor, ...]:
    input, linear_weight, target, _, weight, ignore_index, label_smoothing = given
    if _rows_at_once(input, given.classes) >= input.shape[0]:
        return _gradients_of_one_block(grad, None, given, needs, mode)
    needs_input, needs_weight, needs_bias = needs
    _, grad_weight, grad_bias = _empty_gradients(input, linear_weight, (False, needs_weight, needs_bias))
    grad_input = input.new_zeros(input.shape if needs_input else 0, dtype=torch.float32)
    of_class, share, total = _factors(given)
    grad = torch.where(target == ignore_index, 0.0, grad)
    of_softmax, of_target, of_all = (grad * (of_class + share * total)).unsqueeze(1), grad * of_class, grad * share
    has_sums = needs_bias or label_smoothing != 0  # of what is not rounded yet, or with it
    with torch._C._DisableAutocast():
        for block, parts in _blocks_of_gradients(input, given.classes):
            if input.dtype == torch.float32:
                g = _logits(given, block, mode).sub_(base.unsqueeze(1))
            else:
                g = input.new_empty(input.shape[0], block.stop - block.start)
            for part in parts:
                rounded = g[:, part.start - block.start : part.stop - block.start]
                of_part = g
                if input.dtype != torch.float32:
                    of_part = _logits(given, part, mode)
                of_part.sub_(log_sum.unsqueeze(1)).exp_()
                at, is_there = _places(target, part)
                at, here = at.unsqueeze(1), torch.where(is_there, of_target, 0.0).unsqueeze(1)
                here = of_part.gather(1, at) * of_softmax - here
                to = of_part if has_sums else rounded
                torch.mul(of_part, of_softmax, out=to).scatter_(1, at, here.to(to.dtype))
                if label_smoothing:
                    of_part.sub_(of_all.unsqueeze(1) if weight is None else torch.outer(of_all, weight[part].float()))
                if needs_bias:
                    grad_bias[part] = torch.ops.tk.column_sum(of_part, -1, mode)
                if to is not rounded and of_part is not g:
                    rounded.copy_(of_part)
                del of_part, to, rounded  # before the next part is there
            if needs_weight:
                _mm_out(g.t(), input, None, *_settings(mode), out=grad_weight[block])
            if needs_input:
                _add_product(grad_input, g, linear_weight[block], mode)
            del g
    return grad_input.to(input.dtype), grad_weight, grad_bias


def _add_product(total: Tensor, g: Tensor, weight: Tensor, mode: int) -> None:
    """total += g @ weight, a slice of rows at a time: addmm would add to what has its operands' dtype alone."""
    rows = total.shape[0]
    n = max(1, _block_bytes(total) * 3 // 8 // (4 * max(1, weight.shape[1])))
    n = max(1, -(-rows // max(1, -(-rows // n))))  # as many slices, of one size
    for of_total, of_g in zip(total.split(n), g.split(n), strict=True):
        of_total.add_(_mm(of_g, weight, None, *_settings(mode, torch.float32)))


def _settings(mode: int, out_dtype: torch.dtype | None = None) -> tuple[Any, ...]:
    """The settings of a product without an activation, in torch's precision and the config that is expected to be
    fastest."""
    return 0, out_dtype, -1, -1, mode


def _blocks(rows: int, size: int, most: int, start: int, stop: int) -> Iterator[slice]:
    """Blocks of the classes start to stop. size: bytes that a logit takes. most: bytes of a block."""
    n = most // (size * max(1, rows)) // LEAST_CLASSES * LEAST_CLASSES
    n = max(n, LEAST_CLASSES)
    return (slice(first, min(first + n, stop)) for first in range(start, stop, n))


def _blocks_of_gradients(input: Tensor, classes: int) -> Iterator[tuple[slice, list[slice]]]:
    """Each with its parts. Large blocks add to the gradient of input, and so read and write it, less often. Of 16 bits
    no more than a part has its logits in float32: three eighths of the bytes, of which a large GPU's L2 holds most."""
    rows, size = input.shape[0], _block_bytes(input)
    if input.dtype == torch.float32:
        for block in _blocks(rows, 4, size * 5 // 8, 0, classes):
            yield block, [block]
        return
    for block in _blocks(rows, input.itemsize, size * 5 // 8, 0, classes):
        yield block, list(_blocks(rows, 4, size * 3 // 8, block.start, block.stop))


def _block_bytes(input: Tensor) -> int:
    """The bytes of a block in the backward, beside the gradient of input in float32."""
    most = BUDGET_BYTES * max(input.shape[0], BUDGET_ROWS) // BUDGET_ROWS - 4 * input.numel()
    return min(max(most, BUDGET_BYTES * 2 // 5), BUDGET_BYTES)


def _logits(given: _Given, block: slice, mode: int) -> Tensor:
    """block: of the classes."""
    bias = None if given.linear_bias is None else given.linear_bias[block]
    return _mm(given.input, given.linear_weight[block].t(), bias, *_settings(mode, torch.float32))


def _places(target: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """The targets' places in a block, and which of them are there."""
    is_there = (target >= block.start) & (target < block.stop)
    return torch.where(is_there, target - block.start, 0), is_there


def _weighted_sum(logits: Tensor, weight: Tensor | None, block: slice, mode: int) -> Tensor:
    if weight is None:
        return torch.ops.tk.row_sum(logits, -1, mode)
    ieee = (0, None, 0, -1, mode)
    return _mm(logits, weight[block].float().unsqueeze(1), None, *ieee).squeeze(1)


def _factors(given: _Given) -> tuple[Tensor, float, Tensor | int]:
    """The factors of a row's loss: (of (lse - logits[target]), of what smoothing adds, of lse in that). Smoothing adds
    a share of sum(weight · (lse - logits))."""
    target, classes = given.target, given.classes
    of_target, share = 1 - given.label_smoothing, given.label_smoothing / classes
    if given.weight is None:
        return torch.full_like(target, of_target, dtype=torch.float32), share, classes
    weight = given.weight.float()
    at = torch.where((target >= 0) & (target < classes), target, 0)
    return of_target * weight[at], share, weight.sum()


def _is_right(given: _Given) -> Tensor:
    target = given.target
    return ((target >= 0) & (target < given.classes)) | (target == given.ignore_index)


# --- All classes of a row at once ---


def _rows_at_once(input: Tensor, classes: int, size: int = 8) -> int:
    """Rows of a block of all classes; 0 where they are to be divided. size: bytes that a logit takes, with gradients
    those of the logit and of its gradient."""
    rows = input.shape[0]
    n = BUDGET_BYTES * 4 // 5 // (size * max(1, classes))
    if rows <= n:
        return max(1, rows)
    return n if size == 8 and input.dtype == torch.float32 and n >= LEAST_ROWS else 0


def _reduced(given: _Given, is_mean: bool, mode: int = 0) -> Tensor:
    """The reduced loss, where no gradients are wanted."""
    _, _, target, _, weight, ignore_index, label_smoothing = given
    if not _rows_at_once(given.input, given.classes, 4):
        loss, *_ = _forward(given, mode=mode)
        return total_of_rows(loss, target, weight, ignore_index, is_mean)
    with torch._C._DisableAutocast():
        logits = _logits(given, slice(None), mode)
        settings = (ignore_index, label_smoothing, -1, mode)
        if weight is None:
            loss_of = torch.ops.tk.cross_entropy_mean if is_mean else torch.ops.tk.cross_entropy_sum
            return loss_of(logits, target, *settings)
        loss, of_class = torch.ops.tk.cross_entropy_weighted(logits, target, weight.float(), *settings)
        return loss.sum() / of_class.sum() if is_mean else loss.sum()


def _loss_and_gradients(given: _Given, is_mean: bool, needs: Sequence[bool], mode: int = 0) -> tuple[Tensor, ...]:
    """The loss and its gradients, in blocks of rows: more than one of float32 alone. Gradients of float16 are
    float32."""
    input, target = given.input, given.target
    gradients = _empty_gradients(input, given.linear_weight, needs, _dtype_until_multiplied(input))
    if input.dtype == torch.float16:
        return _loss_and_gradients_of_float16(gradients, given, is_mean, needs, mode)
    given = given.in_float32()
    rows = input.shape[0]
    n = _rows_at_once(input, given.classes) or max(1, rows)
    is_one = given.weight is None and n >= rows
    factor = None if is_one else _of_each_row(target, given.weight, given.ignore_index, is_mean)
    losses = []
    with torch._C._DisableAutocast():
        for start in range(0, max(1, rows), n):
            block = given
            if n < rows:
                block = given._replace(input=input[start : start + n], target=target[start : start + n])
            logits = _logits(block, slice(None), mode)
            loss, g = _loss_and_its_gradient(logits, block, factor, is_mean, mode)
            losses.append(loss)
            del logits  # before the gradient's copy of 16 bits is there
            _put_products(gradients, g, block, needs, start, mode)
            del g
    return losses[0] if factor is None else torch.cat(losses).sum() * factor, *gradients


def _loss_and_gradients_of_float16(
    gradients: tuple[Tensor, ...], given: _Given, is_mean: bool, needs: Sequence[bool], mode: int
) -> tuple[Tensor, ...]:
    """The logits' gradient is that of a sum, whose size is known: a mean's may be small beyond float16."""
    target, settings = given.target, (given.ignore_index, given.label_smoothing, -1, mode)
    with torch._C._DisableAutocast():
        logits = _logits(given, slice(None), mode)
        loss = torch.ops.tk.cross_entropy_sum(logits, target, *settings)
        scale = loss.new_full((), FLOAT16_SCALE)
        g = torch.ops.tk.cross_entropy_sum_backward(scale, logits, target, *settings)
        del logits
        _put_products(gradients, g, given, needs, 0, mode)
        factor = _of_each_row(target, None, given.ignore_index, is_mean)
        # Of no row that counts a mean is nan, as in torch, and its gradient 0.
        torch._foreach_mul_(gradients, torch.where(factor.isinf(), 0, factor / FLOAT16_SCALE))
    return loss * factor, *gradients


def _put_products(
    gradients: tuple[Tensor, ...],
    g: Tensor,
    block: _Given,
    needs: Sequence[bool],
    start: int,
    mode: int,
) -> None:
    """What the gradient of a block's logits comes to. start: its first row; the block of the first row is put where
    those of others are added."""
    x = block.input
    grad_input, grad_weight, grad_bias = gradients
    needs_input, needs_weight, needs_bias = needs
    if needs_bias:
        of_bias = torch.ops.tk.column_sum(g, -1, mode)
        grad_bias.copy_(of_bias) if start == 0 else grad_bias.add_(of_bias)
    g = g.to(x.dtype)
    if needs_weight and start == 0:
        _mm_out(g.t(), x, None, *_settings(mode, grad_weight.dtype), out=grad_weight)
    elif needs_weight:
        _addmm_out(grad_weight, g.t(), x, 1.0, 1.0, *_settings(mode), out=grad_weight)
    if needs_input:
        of_block = grad_input[start : start + x.shape[0]]
        _mm_out(g, block.linear_weight, None, *_settings(mode, of_block.dtype), out=of_block)


def _gradients_of_one_block(
    grad: Tensor, logits: Tensor | None, given: _Given, needs: Sequence[bool], mode: int = 0
) -> tuple[Tensor, ...]:
    """logits: None where the forward has not kept them."""
    gradients = _empty_gradients(given.input, given.linear_weight, needs)
    given = given.in_float32()
    with torch._C._DisableAutocast():
        if logits is None:
            logits = _logits(given, slice(None), mode)
        g = _gradient_of_rows(grad.contiguous(), logits, given, mode)
        del logits
        _put_products(gradients, g, given, needs, 0, mode)
    return gradients


def _loss_and_logits(given: _Given, mode: int = 0) -> tuple[Tensor, Tensor]:
    given = given.in_float32()
    with torch._C._DisableAutocast():
        logits = _logits(given, slice(None), mode)
        return _loss_of_rows(logits, given, mode), logits


def _loss_and_its_gradient(
    logits: Tensor, given: _Given, factor: Tensor | None, is_mean: bool, mode: int
) -> tuple[Tensor, Tensor]:
    """The loss of all rows, reduced, and its gradient; with a factor the loss of each row, and the gradient of their
    sum times it."""
    target, ops = given.target, torch.ops.tk
    if factor is None:
        settings = (given.ignore_index, given.label_smoothing, -1, mode)
        one = torch.ones((), dtype=torch.float32, device=logits.device)
        if is_mean:
            loss = ops.cross_entropy_mean(logits, target, *settings)
            return loss, ops.cross_entropy_mean_backward(one, logits, target, *settings)
        loss = ops.cross_entropy_sum(logits, target, *settings)
        return loss, ops.cross_entropy_sum_backward(one, logits, target, *settings)
    grad = factor.expand(target.shape).contiguous()
    return _loss_of_rows(logits, given, mode), _gradient_of_rows(grad, logits, given, mode)


def _loss_of_rows(logits: Tensor, given: _Given, mode: int) -> Tensor:
    _, _, target, _, weight, *numbers = given
    if weight is None:
        return torch.ops.tk.cross_entropy_rows(logits, target, *numbers, -1, mode)
    loss, _ = torch.ops.tk.cross_entropy_weighted(logits, target, weight, *numbers, -1, mode)
    return loss


def _gradient_of_rows(grad: Tensor, logits: Tensor, given: _Given, mode: int) -> Tensor:
    """The gradient of the logits, by that of each row's loss, as _loss_of_rows has it."""
    _, _, target, _, weight, *numbers = given
    if weight is None:
        return torch.ops.tk.cross_entropy_rows_backward(grad, logits, target, *numbers, -1, mode)
    # The classes' weights do not depend on the logits: that of each row is given grad too, which counts for nothing.
    g, _ = torch.ops.tk.cross_entropy_weighted_backward(grad, grad, logits, target, weight, *numbers, -1, mode)
    return g


def _of_each_row(target: Tensor, weight: Tensor | None, ignore_index: int, is_mean: bool) -> Tensor:
    """What the reduction multiplies the loss of each row by."""
    if not is_mean:
        return torch.ones((), dtype=torch.float32, device=target.device)
    return _count(target, weight, ignore_index).reciprocal()


def _count(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """The number of rows that count, by their classes' weights."""
    counts = target != ignore_index
    if weight is None:
        return counts.sum()
    return torch.where(counts, weight.float()[torch.where(counts, target, 0)], 0.0).sum()


def total_of_rows(loss: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, is_mean: bool) -> Tensor:
    return loss.sum() / _count(target, weight, ignore_index) if is_mean else loss.sum()


# --- Shapes ---


def _empty_gradients(
    input: Tensor, linear_weight: Tensor, needs: Sequence[bool], dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    """Memory for the gradients of input, linear_weight and linear_bias; without elements where none is needed. dtype:
    None for that of input."""
    sizes = (input.shape, linear_weight.shape, linear_weight.shape[:1])
    needed = (size if is_needed else (0,) for size, is_needed in zip(sizes, needs, strict=True))
    return tuple(input.new_empty(size, dtype=dtype) for size in needed)


def _dtype_until_multiplied(input: Tensor) -> torch.dtype:
    """The dtype of gradients that the forward leaves."""
    return torch.float32 if input.dtype == torch.float16 else input.dtype


def _has_small_gradients(input: Tensor, linear_weight: Tensor) -> bool:
    numbers = input.numel() + linear_weight.numel() + linear_weight.shape[0]
    return numbers * _dtype_until_multiplied(input).itemsize <= SAVED_BYTES


def _fake(input: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return tuple(input.new_empty(input.shape[:1], dtype=torch.float32) for _ in range(3))


def _fake_backward(grad: Tensor, base: Tensor, log_sum: Tensor, *args: Any) -> tuple[Tensor, ...]:
    input, linear_weight, *_, needs = args[:8]
    return _empty_gradients(input, linear_weight, needs)


def _fake_reduced(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return input.new_empty((), dtype=torch.float32)


def _fake_at_once(input: Tensor, *args: Any) -> tuple[Tensor, ...]:
    linear_weight, *_, needs = args[:8]
    return _fake_reduced(input), *_empty_gradients(input, linear_weight, needs, _dtype_until_multiplied(input))


def _fake_with_logits(input: Tensor, linear_weight: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    loss = input.new_empty(input.shape[:1], dtype=torch.float32)
    return loss, loss.new_empty(input.shape[0], linear_weight.shape[0])


def _fake_from_logits(grad: Tensor, logits: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return _fake_backward(grad, grad, grad, *args)


# --- Gradients ---


class _Formula(_SingleLevelFunction):
    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> tuple[Tensor, ...]:
        loss, base, log_sum = _register.below_formula(linear_cross_entropy, keyset, *args)
        ctx.save_for_backward(base, log_sum, *args[:5])
        *ctx.numbers, _, ctx.mode = args[5:]
        ctx.mark_non_differentiable(base, log_sum)
        return loss, base, log_sum

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[1:]
        needs = [needed[0], needed[1], needed[3]]
        found = _backward(grad, *ctx.saved_tensors, *ctx.numbers, needs, ctx.mode)
        return _given_back(found, needs)


class _FormulaWithLogits(_SingleLevelFunction):
    """All logits are saved: a backward computes them no more."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> tuple[Tensor, ...]:
        *given, _, mode = args
        loss, logits = _register.below_autograd(_with_logits, keyset, *given, mode)
        ctx.save_for_backward(logits, *args[:5])
        *ctx.numbers, _, ctx.mode = args[5:]
        unread = torch.zeros_like(loss), torch.zeros_like(loss)
        ctx.mark_non_differentiable(*unread)
        return loss, *unread

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Any, ...]:
        logits, *given = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]
        settings = (*ctx.numbers, [needed[0], needed[1], needed[3]], ctx.mode)
        if torch.is_grad_enabled() or _is_batched(grad):
            unread = torch.zeros_like(given[2], dtype=torch.float32)  # by one block
            found = _backward(grad, unread, unread, *given, *settings)
        else:
            found = _register.below_autograd(_from_logits, None, grad, logits, *given, *settings)
        return _given_back(found, settings[2])


class _FormulaAtOnce(_SingleLevelFunction):
    """The gradients are there from the forward on. Where they are small, they stay, and a backward multiplies them into
    new ones. Else the first backward multiplies them in place and gives them away, so that they are not twice in
    memory. Another one computes them again as the forward did: it launches no kernel that has not run by then, and so
    can be recorded into a CUDA graph. One whose own graph is wanted takes the other op, whose graph says that there is
    no such gradient."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> Tensor:
        *given, mode = args
        needed = ctx.needs_input_grad[1:]
        ctx.needs = [needed[0], needed[1], needed[3]]
        loss, *found = _register.below_autograd(_at_once, keyset, *given, ctx.needs, mode)
        ctx.stay = _has_small_gradients(*args[:2])
        ctx.save_for_backward(*args[:5], *(found if ctx.stay else ()))
        ctx.found = None if ctx.stay else found  # not saved: nothing else has them, and the backward writes to them
        *ctx.numbers, ctx.is_mean, ctx.mode = args[5:]
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        given, saved = ctx.saved_tensors[:5], ctx.saved_tensors[5:]  # versions are held against those of the forward
        found, ctx.found = ctx.found, None
        if torch.is_grad_enabled():
            found = _with_own_graph(grad, given, ctx)
        elif ctx.stay:
            found = [_multiplied(g, grad, given[0].dtype) for g in saved]
        else:
            if found is None:
                args = (*given, *ctx.numbers, ctx.is_mean, ctx.needs, ctx.mode)
                _, *found = _register.below_autograd(_at_once, None, *args)
            if _is_batched(grad):  # a batch of products has no room in g
                found = [_multiplied(g, grad, g.dtype) for g in found]
            else:
                for g in found:
                    g.mul_(_factor_of(g, grad))
        return _given_back(found, ctx.needs)


def _given_back(found: Sequence[Tensor], needs: Sequence[bool]) -> tuple[Any, ...]:
    """Gradients for the arguments of a formula, of which the first is a keyset."""
    of_input, of_weight, of_bias = (g if is_needed else None for g, is_needed in zip(found, needs, strict=True))
    return None, of_input, of_weight, None, of_bias, *(None,) * 5


def _factor_of(g: Tensor, grad: Tensor) -> Tensor:
    """The factor of a gradient. It has a dimension: without one it would be rounded to the dtype of g."""
    return grad.reshape((1,) * g.dim())


def _multiplied(g: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor:
    if _is_batched(grad):
        return (g * _factor_of(g, grad)).to(dtype)
    return torch.mul(g, _factor_of(g, grad), out=torch.empty_like(g, dtype=dtype))


def _is_batched(x: Tensor) -> bool:
    """Whether torch.vmap batches x, or the older one that ``is_grads_batched`` has."""
    return torch._C._functorch.is_batchedtensor(x) or torch._C._functorch.is_legacy_batchedtensor(x)


def _with_own_graph(grad: Tensor, given: Sequence[Any], ctx: Any) -> tuple[Tensor, ...]:
    *_, target, _, weight = given
    with torch.no_grad():
        _, base, log_sum = linear_cross_entropy(*given, *ctx.numbers, -1, ctx.mode)
        factor = _of_each_row(target, weight, ctx.numbers[0], ctx.is_mean)
    return _backward((grad * factor).expand(target.shape), base, log_sum, *given, *ctx.numbers, ctx.needs, ctx.mode)


def _reduced_at_autograd(keyset: Any, *args: Any, **kwargs: Any) -> Any:
    args = _register.with_defaults(reduced, args, kwargs)
    if _register.has_tangent(args):
        _refuse_forward_mode()
    if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*args)):
        return _register.below_autograd(reduced, keyset, *args)
    input, linear_weight, target, _, weight, *_, is_mean, mode = args
    is_taken = _is_plain(input, linear_weight) and _rows_at_once(input, linear_weight.shape[0]) > 0
    if is_taken and input.dtype == torch.float16:
        is_taken = weight is None and _has_small_gradients(input, linear_weight)
    if is_taken:
        return _FormulaAtOnce.apply(keyset, *args)  # type: ignore[attr-defined]
    loss, *_ = linear_cross_entropy(*args[:-2], -1, mode)
    return total_of_rows(loss, target, weight, args[5], is_mean)


def _is_plain(input: Tensor, linear_weight: Tensor) -> bool:
    """Whether the forward may do more than it is asked for. A symbolic size would be held to a bound by a guard."""
    sizes = (*input.shape, *linear_weight.shape)
    is_outermost = not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0
    return is_outermost and all(type(n) is int for n in sizes)


def _formula_of_rows(input: Tensor, linear_weight: Tensor, *args: Any) -> Any:
    rows, classes = input.shape[0], linear_weight.shape[0]
    has_room = args[-2] < 0 and _is_plain(input, linear_weight) and _rows_at_once(input, classes) >= rows
    return _FormulaWithLogits if has_room and 4 * rows * classes <= SAVED_BYTES else _Formula


class _FormulaOfGradients(_SingleLevelFunction):
    """They have no gradient of their own, and say so when one is asked for: torch.func.grad asks for a graph of them in
    any case."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> tuple[Tensor, ...]:
        return _register.below_formula(_backward, keyset, *args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("tk.linear_cross_entropy has no gradient of its gradient (create_graph=True)")


def _at_autograd(op: Any, formula_of: Callable[..., Any]) -> Any:
    """formula_of: the formula of a call, by its arguments."""

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        args = _register.with_defaults(op, args, kwargs)
        if _register.has_tangent(args):
            _refuse_forward_mode()
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            if forward_ad._current_level >= 0:  # a transform outside of this one, whose tangents would be lost
                _refuse_forward_mode()
            with _register.single_level():
                return formula_of(*args).apply(keyset, *args)
        return _register.below_autograd(op, keyset, *args)

    return kernel


def _refuse_forward_mode() -> None:
    raise NotImplementedError("tk.linear_cross_entropy has no formula for forward-mode automatic differentiation")


# --- vmap ---


def _vmap(op: Any, info: Any, in_dims: Any, *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """A loop: a batch of rows is one call without it, and a batch of weights has nothing to share."""
    dims = (*in_dims, *(None,) * (len(args) - len(in_dims)))
    calls = one_by_one(op, info, dims, *args)
    results = [torch.stack(column) for column in zip(*calls, strict=True)]
    return tuple(results), (0,) * len(results)


def _vmap_reduced(info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
    dims = (*in_dims, *(None,) * (len(args) - len(in_dims)))
    return torch.stack(list(one_by_one(reduced, info, dims, *args))), 0


def _register_kernel(name: str, kernel: Callable[..., Any], allocate: Callable[..., Any], before: int = 0) -> None:
    """before: see ``_of_given``; what begins with gradients has indices that a forward has checked."""
    _register.register_fake(name, allocate, _library)
    _library.impl(name, _of_given(kernel, before, checks=before == 0), "CPU")
    _library.impl(name, _of_given(kernel, before), "CUDA")


_register_kernel("linear_cross_entropy", _forward, _fake)
_register_kernel("linear_cross_entropy_backward", _gradients, _fake_backward, before=3)
_register_kernel("linear_cross_entropy_reduced", _reduced, _fake_reduced)
_register_kernel("linear_cross_entropy_at_once", _loss_and_gradients, _fake_at_once)
_register_kernel("linear_cross_entropy_with_logits", _loss_and_logits, _fake_with_logits)
_register_kernel("linear_cross_entropy_from_logits", _gradients_of_one_block, _fake_from_logits, before=2)
for _op, _kernel, _rule in (
    (linear_cross_entropy, _at_autograd(linear_cross_entropy, _formula_of_rows), partial(_vmap, linear_cross_entropy)),
    (_backward, _at_autograd(_backward, lambda *_: _FormulaOfGradients), partial(_vmap, _backward)),
    (reduced, _reduced_at_autograd, _vmap_reduced),
):
    _name = _op._schema.name.removeprefix("tk::")
    _library.impl(_name, _kernel, "Autograd", with_keyset=True)
    torch.library.register_vmap(f"tk::{_name}", _rule, lib=_library)
