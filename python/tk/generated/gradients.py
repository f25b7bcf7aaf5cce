"""Gradients of the package's own generated ops that are no generated ops themselves: the gradient is
the op itself (rope, dropout), a scatter (embedding), or of a few ATen ops (var_mean)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tk import errors

Formula = tuple[Callable[..., None], Callable[..., Any]]  # what it keeps of a call, and the gradients


def _keep_tables(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, _, ctx.mode = inputs
    for table, value in (("cos", cos), ("sin", sin)):
        if value.requires_grad:
            raise errors.UnsupportedError(f"tk.rope: {table} requires a gradient, which rope has for x only; detach it")
    ctx.save_for_backward(cos, sin)


def _rotate_back(name: str) -> Callable[..., Any]:
    def backward(ctx: Any, grad: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return getattr(torch.ops.tk, name)(grad, cos, -sin, -1, ctx.mode), None, None, None, None

    return backward


def _keep_index(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, index, ctx.padding_idx, _, ctx.mode = inputs
    ctx.n_rows = weight.shape[0]
    ctx.save_for_backward(index)


def _scatter(ctx: Any, grad: Tensor) -> Any:
    (index,) = ctx.saved_tensors
    if grad.dtype == torch.float32 and grad.device.type == "cuda":
        like = grad.new_empty(()).expand(ctx.n_rows, grad.shape[-1])  # for its shape
        found = torch.ops.tk.embedding_backward(grad, index.long(), like, ctx.padding_idx, -1, ctx.mode)
    else:
        found = torch.ops.aten.embedding_dense_backward(grad, index, ctx.n_rows, ctx.padding_idx, False)
    return found, None, None, None, None


def _keep_seed(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *_, seed, ctx.p, ctx.offset, _, ctx.mode = inputs
    ctx.save_for_backward(seed)


def _drop_again(ctx: Any, grad: Tensor) -> Any:
    """The same elements: no mask was kept."""
    (seed,) = ctx.saved_tensors
    return torch.ops.tk.dropout(grad, seed, ctx.p, ctx.offset, -1, ctx.mode), None, None, None, None, None


def _drop_again_and_add(ctx: Any, grad: Tensor) -> Any:
    found, *rest = _drop_again(ctx, grad)
    return found, grad, *rest


def _keep_mean(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1])


def _of_variance(ctx: Any, grad_var: Tensor, grad_mean: Tensor) -> Any:
    x, mean = ctx.saved_tensors
    n = x.shape[-1]
    centred = x.float() - mean.float().unsqueeze(-1)
    found = 2 * grad_var.float().unsqueeze(-1) * centred / (n - 1) + grad_mean.float().unsqueeze(-1) / n
    return found.to(x.dtype), None, None


def _keep_places(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.shape, ctx.n_inputs = inputs[0].shape, len(inputs)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _to_places(ctx: Any, grad: Tensor, _: Any) -> Any:
    """Of values that were picked along the last dimension: added where they came from."""
    (index,) = ctx.saved_tensors
    found = torch.zeros(ctx.shape, dtype=grad.dtype, device=grad.device).scatter_add(-1, index, grad)
    return (found, *[None] * (ctx.n_inputs - 1))


def _keep_scan(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _of_products(ctx: Any, grad: Tensor) -> Any:
    x, output = ctx.saved_tensors
    return torch.ops.aten.cumprod_backward(grad, x, x.dim() - 1, output), None, None


def _of_log_sums(ctx: Any, grad: Tensor) -> Any:
    """grad · exp(x - output) summed from the end, as logarithms of its positive and of its negative part."""
    x, output = (t.float() for t in ctx.saved_tensors)
    size, none = grad.float().abs().log(), -torch.inf
    parts = [torch.where(chosen, size, none) - output for chosen in (grad > 0, grad < 0)]
    positive, negative = ((part.flip(-1).logcumsumexp(-1).flip(-1) + x).exp() for part in parts)
    return (positive - negative).to(grad.dtype), None, None


FORMULAS: Mapping[str, Formula] = {
    "dropout": (_keep_seed, _drop_again),
    "dropout_add": (_keep_seed, _drop_again_and_add),
    "cummax": (_keep_places, _to_places),
    "cummin": (_keep_places, _to_places),
    "cumprod": (_keep_scan, _of_products),
    "logcumsumexp": (_keep_scan, _of_log_sums),
    "sort": (_keep_places, _to_places),
    "topk": (_keep_places, _to_places),
    "embedding": (_keep_index, _scatter),
    "row_var_mean": (_keep_mean, _of_variance),
    "rope": (_keep_tables, _rotate_back("rope")),
    "rope_interleaved": (_keep_tables, _rotate_back("rope_interleaved")),
}
