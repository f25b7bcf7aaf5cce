"""The op behind ``tk.linear_cross_entropy``: the cross entropy of ``input @ linear_weight.T + linear_bias``, of whose
logits no more than a block is in memory at a time.

A block is all rows by some classes, in float32. So each block of the weight's gradient is one product over all rows,
which is rounded once. With blocks of rows it would be a sum over them, and would need a second one in float32. The
backward computes the logits again, which is one product of four. It then serves any gradient of each row's loss, and
nothing of the size of the weight waits between forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.library import Library

from tk.ops import _register
from tk.ops.product import one_by_one

__all__ = ["linear_cross_entropy"]

BLOCK_BYTES = 96 << 20  # of logits, and of their gradient beside them
SLICE_BYTES = 64 << 20  # of a product that is added to the gradient of input
LEAST_CLASSES = 128  # of a block, however many rows there are: a kernel's tile of columns

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

# The loss of each row, and two numbers whose sum is the logsumexp of its logits.
linear_cross_entropy = torch.ops.tk.linear_cross_entropy.default
_backward = torch.ops.tk.linear_cross_entropy_backward.default  # (of input, linear_weight and linear_bias)
_mm, _mm_out = _register.overloads("mm")


# --- Kernels ---


def _forward_on_cpu(input: Tensor, linear_weight: Tensor, target: Tensor, *args: Any) -> tuple[Tensor, ...]:
    ignore_index, classes = args[2], linear_weight.shape[0]
    if (wrong := target[~_is_right(target, classes, ignore_index)]).numel():
        raise IndexError(f"tk.linear_cross_entropy: target is {wrong[0].item()}, must be 0 to {classes - 1}")
    return _forward(input, linear_weight, target, *args)


def _forward(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    config: int = -1,
    mode: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, classes = input.shape[0], linear_weight.shape[0]
    if target.is_cuda:  # the host does not wait: a wrong one ends the process's context, as in ATen
        torch._assert_async(_is_right(target, classes, ignore_index).all())
    log_sum = input.new_full((rows,), -torch.inf, dtype=torch.float32)
    base, picked, spread = (torch.zeros_like(log_sum) for _ in range(3))
    with torch._C._DisableAutocast():
        for block in _blocks(rows, classes, 4):
            logits = _logits(input, linear_weight, linear_bias, block, mode)
            at, is_there = _places(target, block)
            picked = torch.where(is_there, logits.gather(1, at.unsqueeze(1)).squeeze(1), picked)
            if label_smoothing:
                spread = spread + _weighted_sum(logits, weight, block, mode)
            if input.dtype == torch.float32:
                base, log_sum = _rebased(logits, base, log_sum, block, mode)
            log_sum = torch.logaddexp(log_sum, torch.ops.tk.logsumexp(logits, config, mode))
            del logits  # before the next block is there
    log_sum = torch.where(log_sum.isinf(), torch.nan, log_sum)  # as ATen's of an infinite logit
    of_class, share, total = _factors(target, weight, ignore_index, label_smoothing, classes)
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
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    needs: Sequence[bool],
    mode: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    classes = linear_weight.shape[0]
    needs_input, needs_weight, needs_bias = needs
    grad_input = input.new_zeros(input.shape if needs_input else 0, dtype=torch.float32)
    grad_weight = linear_weight.new_empty(linear_weight.shape if needs_weight else 0)
    grad_bias = linear_weight.new_empty(classes if needs_bias else 0)
    of_class, share, total = _factors(target, weight, ignore_index, label_smoothing, classes)
    grad = torch.where(target == ignore_index, 0.0, grad)
    of_softmax, of_target, of_all = grad * (of_class + share * total), grad * of_class, grad * share
    with torch._C._DisableAutocast():
        for block in _blocks(input.shape[0], classes, 4 + input.itemsize):
            g = _logits(input, linear_weight, linear_bias, block, mode)
            if input.dtype == torch.float32:
                g.sub_(base.unsqueeze(1))
            g.sub_(log_sum.unsqueeze(1)).exp_().mul_(of_softmax.unsqueeze(1))
            at, is_there = _places(target, block)
            here = torch.where(is_there, of_target, 0.0).unsqueeze(1)
            g.scatter_(1, at.unsqueeze(1), g.gather(1, at.unsqueeze(1)) - here)
            if label_smoothing:
                g.sub_(of_all.unsqueeze(1) if weight is None else torch.outer(of_all, weight[block].float()))
            if needs_bias:
                grad_bias[block] = torch.ops.tk.column_sum(g, -1, mode)
            g = g.to(input.dtype)
            if needs_weight:
                _mm_out(g.t(), input, None, *_settings(mode), out=grad_weight[block])
            if needs_input:
                _add_product(grad_input, g, linear_weight[block], mode)
            del g
    return grad_input.to(input.dtype), grad_weight, grad_bias


def _add_product(total: Tensor, g: Tensor, weight: Tensor, mode: int) -> None:
    """total += g @ weight, a slice of rows at a time: addmm would add to what has its operands' dtype alone."""
    n = max(1, SLICE_BYTES // (4 * max(1, weight.shape[1])))
    for of_total, of_g in zip(total.split(n), g.split(n), strict=True):
        of_total.add_(_mm(of_g, weight, None, *_settings(mode, torch.float32)))


def _settings(mode: int, out_dtype: torch.dtype | None = None) -> tuple[Any, ...]:
    """Of a product without an activation, in torch's precision and the config that is expected to be fastest."""
    return 0, out_dtype, -1, -1, mode


def _blocks(rows: int, classes: int, size: int) -> Iterator[slice]:
    """Of classes. size: bytes that a logit takes."""
    n = BLOCK_BYTES // (size * max(1, rows)) // LEAST_CLASSES * LEAST_CLASSES
    n = max(n, LEAST_CLASSES)
    return (slice(start, min(start + n, classes)) for start in range(0, classes, n))


def _logits(input: Tensor, weight: Tensor, bias: Tensor | None, block: slice, mode: int) -> Tensor:
    of_block = None if bias is None else bias[block]
    return _mm(input, weight[block].t(), of_block, *_settings(mode, torch.float32))


def _places(target: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """Where the targets are in a block, and which are."""
    is_there = (target >= block.start) & (target < block.stop)
    return torch.where(is_there, target - block.start, 0), is_there


def _weighted_sum(logits: Tensor, weight: Tensor | None, block: slice, mode: int) -> Tensor:
    if weight is None:
        return torch.ops.tk.row_sum(logits, -1, mode)
    ieee = (0, None, 0, -1, mode)
    return _mm(logits, weight[block].float().unsqueeze(1), None, *ieee).squeeze(1)


def _factors(
    target: Tensor, weight: Tensor | None, ignore_index: int, label_smoothing: float, classes: int
) -> tuple[Tensor, float, Tensor | int]:
    """Of a row's loss, (of (lse - logits[target]), of what smoothing adds, of lse in that): smoothing adds a share of
    sum(weight · (lse - logits))."""
    share = label_smoothing / classes
    if weight is None:
        return torch.full_like(target, 1 - label_smoothing, dtype=torch.float32), share, classes
    weight = weight.float()
    at = torch.where((target >= 0) & (target < classes), target, 0)
    return (1 - label_smoothing) * weight[at], share, weight.sum()


def _is_right(target: Tensor, classes: int, ignore_index: int) -> Tensor:
    return ((target >= 0) & (target < classes)) | (target == ignore_index)


# --- Shapes ---


def _fake(input: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return tuple(input.new_empty(input.shape[:1], dtype=torch.float32) for _ in range(3))


def _fake_backward(
    grad: Tensor,
    base: Tensor,
    log_sum: Tensor,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    needs: Sequence[bool],
    *settings: int,
) -> tuple[Tensor, ...]:
    sizes = (input.shape, linear_weight.shape, linear_weight.shape[:1])
    return tuple(input.new_empty(size if is_needed else (0,)) for size, is_needed in zip(sizes, needs, strict=True))


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
        of_input, of_weight, of_bias = (g if is_needed else None for g, is_needed in zip(found, needs, strict=True))
        return None, of_input, of_weight, None, of_bias, *(None,) * 5


class _FormulaOfGradients(_SingleLevelFunction):
    """They have no gradient of their own, and say so when one is asked for: torch.func.grad asks for a graph of them in
    any case."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> tuple[Tensor, ...]:
        return _register.below_formula(_backward, keyset, *args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("tk.linear_cross_entropy has no gradient of its gradient (create_graph=True)")


def _at_autograd(op: Any, formula: Any) -> Any:
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        args = _register.with_defaults(op, args, kwargs)
        if _register.has_tangent(args):
            _refuse_forward_mode()
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            if forward_ad._current_level >= 0:  # a transform outside of this one, whose tangents would be lost
                _refuse_forward_mode()
            with _register.single_level():
                return formula.apply(keyset, *args)
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


for _op, _kernel, _on_cpu, _allocate, _with_graph in (
    (linear_cross_entropy, _forward, _forward_on_cpu, _fake, _Formula),
    (_backward, _gradients, _gradients, _fake_backward, _FormulaOfGradients),
):
    _name = _op._schema.name.removeprefix("tk::")
    _register.register_fake(_name, _allocate, _library)
    _library.impl(_name, _on_cpu, "CPU")
    _library.impl(_name, _kernel, "CUDA")
    _library.impl(_name, _at_autograd(_op, _with_graph), "Autograd", with_keyset=True)
    torch.library.register_vmap(f"tk::{_name}", partial(_vmap, _op), lib=_library)
