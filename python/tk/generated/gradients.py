"""Gradients of the package's own generated ops that are no generated ops themselves: the gradient is
the op itself (rope, dropout), a scatter (embedding), or of a few ATen ops (norms, products, variances)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tk import errors, parallel
from tk.config import MODE_BITS
from tk.generated.problem import inverse, memory_order

Formula = tuple[Callable[..., None], Callable[..., Any]]  # what it keeps of a call, and the gradients


def _wide(x: Tensor) -> Tensor:
    """What gradients are worked out in."""
    return x if x.dtype == torch.float64 else x.float()


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


def _keep_index_of(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, index, *_, ctx.mode = inputs
    ctx.shape, ctx.n_inputs = x.shape, len(inputs)
    ctx.save_for_backward(index)


def _keep_gathered(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _keep_index_of(ctx, inputs, output)
    ctx.order = memory_order(inputs[0], inputs[0].dim())


MOST_IN_PLACE = 2  # additions a place, on average


def _scatter_back(name: str, dim: int) -> Callable[..., Any]:
    """The gradient of a gather: each is added where it came from. Few additions are ATen's, in place in the zeros:
    another pass over these takes longer than all additions. Of many the sums are in float32 and rounded once."""

    def backward(ctx: Any, grad: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        if _is_any_order(ctx) and not parallel.is_distributed(grad) and _are_few(index, ctx.shape):
            # One element along `dim` is the only one for its place.
            n = index.shape[dim]
            found = _put_back(ctx, grad, "scatter" if type(n) is int and n == 1 else "scatter_add", dim, index)
        else:
            found = getattr(torch.ops.tk, name)(parallel.full(grad, ctx.shape, 0), index, grad, -1, ctx.mode)
        return (found, *[None] * (ctx.n_inputs - 1))

    return backward


def _is_any_order(ctx: Any) -> bool:
    """Whether neither switch asks for sums that do not depend on the order of their terms."""
    return not ctx.mode & MODE_BITS["deterministic"] and not torch.are_deterministic_algorithms_enabled()


def _are_few(index: Tensor, shape: torch.Size) -> bool:
    """Whether it names each place of the shape a few times at most, on average; not where a graph does not know."""
    n, places = index.numel(), shape.numel()
    return type(n) is int and type(places) is int and n <= MOST_IN_PLACE * places


def _put_back(ctx: Any, grad: Tensor, name: str, dim: int, index: Tensor, make: str = "new_zeros") -> Tensor:
    """The gradient by one of torch's functions, in a tensor that lies as the input does: writes run along memory where
    an outer dimension was made the last."""
    order = ctx.order
    places = getattr(grad, make)([ctx.shape[d] for d in order]).permute(inverse(order))
    # A copy less in place, which a transform may refuse: zeros are of no batch where an index is.
    in_place = "" if torch._C._are_functorch_transforms_active() else "_"
    found: Tensor = getattr(places, name + in_place)(dim, index, grad)
    return found


def _gather_back(name: str) -> Callable[..., Any]:
    """The gradient of what was added at indices, which is that of its place."""

    def backward(ctx: Any, grad: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        of_source = getattr(torch.ops.tk, name)(grad, index, -1, ctx.mode) if ctx.needs_input_grad[3] else None
        return grad, None, of_source, None, None

    return backward


def _select_back(ctx: Any, grad: Tensor) -> Any:
    (index,) = ctx.saved_tensors
    return grad, None, grad.index_select(-2, index), None, None


def _keep_places_written(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _take_back(dim: int) -> Callable[..., Any]:
    """The gradient of values that were put somewhere. As in ATen all values for a place have its gradient, not the last
    alone, which stayed. What was there before has none: a copy and a few zeros, where a choice for each element would
    read a mask besides."""

    def backward(ctx: Any, grad: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        of_x = grad.index_fill(dim, index, 0) if ctx.needs_input_grad[1] else None
        # Not index_select, which counts nothing from the end.
        indices = [None] * (grad.dim() + dim) + [index]
        of_values = torch.ops.aten.index(grad, indices) if ctx.needs_input_grad[3] else None
        return of_x, None, of_values, None, None

    return backward


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
    x, ctx.bessel, ctx.power, *_ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, *output)


def _of_variance(ctx: Any, grad: Tensor | None, grad_mean: Tensor | None) -> Any:
    """The gradient of (bessel · var) ** power, where power is 1 or 0.5. As in ATen a standard deviation of 0 has the
    gradient 0. A mean of no elements has none to give, and a result without a gradient takes no part. What is of x's
    size is in its dtype, as in ATen: a pass more over wider elements would take as long as all of it."""
    x, found, mean = ctx.saved_tensors
    n = _reduced(x, mean)
    slope = shift = None  # of what deviates, and for every element
    if n and grad is not None:
        slope = _wide(grad)
        if ctx.power != 1:
            result = _wide(found)
            slope = (slope / result).masked_fill(result == 0, 0)
        slope = _over((slope * (2 * ctx.bessel * ctx.power / n)).to(x.dtype), x)  # one factor, one kernel
    if n and grad_mean is not None:
        shift = _over((_wide(grad_mean) / n).to(x.dtype), x)
    if slope is None:
        of_x = torch.zeros_like(x) if shift is None else shift.expand_as(x)
    elif shift is None:
        of_x = (x - _over(mean, x)) * slope
    else:
        of_x = torch.addcmul(shift, x - _over(mean, x), slope)
    return of_x, None, None, None, None


def _reduced(x: Tensor, result: Tensor) -> int:
    """How many elements each one of a result is of: of the last dimension, or of all."""
    return x.shape[-1] if result.dim() == x.dim() - 1 else x.numel()


def _over(result: Tensor, x: Tensor) -> Tensor:
    """A result, of the last dimension or of all, so that it is broadcast over what it was of."""
    return result.unsqueeze(-1) if result.dim() == x.dim() - 1 else result


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *_, root, _, _ = inputs
    ctx.squares = root != 1
    ctx.save_for_backward(x, output)


def _of_norm(ctx: Any, grad: Tensor) -> Any:
    """The gradient of a norm. As in ATen a 2-norm of 0 has the gradient 0."""
    x, norm = ctx.saved_tensors
    # As in ATen x is divided, not grad: a gradient divided by a small norm overflows in 16 bits.
    slope = x / _over(norm.masked_fill(norm == 0, torch.inf), x) if ctx.squares else x.sgn()
    return slope * _over(grad, x), None, None, None, None, None


def _keep_shape(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.scale, *_ = inputs
    ctx.shape = x.shape


def _to_all(ctx: Any, grad: Tensor) -> Any:
    is_one = type(ctx.scale) is float and ctx.scale == 1  # of a symbolic one that would be a guard
    scaled = grad if is_one else grad * ctx.scale
    return scaled.expand(ctx.shape), None, None, None


def _to_dim(dim: int, is_mean: bool = False) -> Callable[..., Any]:
    """The gradient of a sum or mean over a dimension: it is the same for all elements, without a copy for each."""

    def backward(ctx: Any, grad: Tensor) -> Any:
        shared = grad / ctx.shape[dim] if is_mean else grad
        return shared.unsqueeze(dim).expand(ctx.shape), None, None

    return backward


def _keep_sizes(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.shape = inputs[0].shape


def _of_product(ctx: Any, grad: Tensor) -> Any:
    """The product of the others, from both ends, so that zeros divide nothing."""
    (x,) = ctx.saved_tensors
    wide = _wide(x)
    ones = torch.ones_like(wide[..., :1])
    before = torch.cat((ones, wide[..., :-1]), -1).cumprod(-1)
    after = torch.cat((ones, wide.flip(-1)[..., :-1]), -1).cumprod(-1).flip(-1)
    return (_wide(grad).unsqueeze(-1) * before * after).to(x.dtype), None, None


def _keep_factors(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _keep_places(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x = inputs[0]
    ctx.shape, ctx.order, ctx.n_inputs = x.shape, memory_order(x, x.dim()), len(inputs)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # of the indices that would be as many zeros, of 8 bytes each
    ctx.save_for_backward(output[1])


def _to_places(name: str, are_all: bool = False) -> Callable[..., Any]:
    """The gradient of values that were picked along the last dimension, or of a single one without a dimension of its
    own: it goes to where they came from. name: of torch's function, which adds where a value may have been picked again
    and again. are_all: each was picked once, so that every place is written."""

    def backward(ctx: Any, grad: Tensor | None, _: Any) -> Any:
        if grad is None:
            return (None,) * ctx.n_inputs
        (index,) = ctx.saved_tensors
        if grad.dim() < len(ctx.shape):
            index, grad = index.unsqueeze(-1), grad.unsqueeze(-1)
        found = _put_back(ctx, grad, name, -1, index, "new_empty" if are_all else "new_zeros")
        return (found, *[None] * (ctx.n_inputs - 1))

    return backward


def _keep_scan(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)


def _of_products(ctx: Any, grad: Tensor) -> Any:
    x, output = ctx.saved_tensors
    return torch.ops.aten.cumprod_backward(grad, x, x.dim() - 1, output), None, None


def _keep_log_sums(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, ctx.mode = inputs
    ctx.save_for_backward(x, *([output] if x.dtype == torch.float32 else []))


def _of_log_sums(ctx: Any, grad: Tensor) -> Any:
    """grad · exp(x - output) summed from the end, as logarithms of its positive and of its negative part. An output of
    16 bits was rounded, and its exponential would be off by as much as that: it is worked out again. A single element
    is its own output."""
    x, *saved = ctx.saved_tensors  # once: a checkpoint makes each tensor again when it is asked for
    length = x.shape[-1]
    if type(length) is int and length == 1:
        return grad + (x - x), None, None  # no number where x is infinite, as exp(x - output)
    x, *saved = (t.float() for t in (x, *saved))

    def summed(x: Tensor) -> Tensor:
        return torch.ops.tk.logcumsumexp(x, -1, ctx.mode)

    (output,) = saved or [summed(x)]
    size = grad.float().abs().log()
    none = torch.finfo(size.dtype).min  # not -inf, of which ATen's own derivatives are wrong
    parts = [torch.where(chosen, size, none) - output for chosen in (grad > 0, grad < 0)]
    positive, negative = ((summed(part.flip(-1)).flip(-1) + x).exp() for part in parts)
    return (positive - negative).to(grad.dtype), None, None


FORMULAS: Mapping[str, Formula] = {
    "dropout": (_keep_seed, _drop_again),
    "dropout_add": (_keep_seed, _drop_again_and_add),
    "cummax": (_keep_places, _to_places("scatter_add")),
    "cummin": (_keep_places, _to_places("scatter_add")),
    "cumprod": (_keep_scan, _of_products),
    "logcumsumexp": (_keep_log_sums, _of_log_sums),
    "sort": (_keep_places, _to_places("scatter", are_all=True)),
    "topk": (_keep_places, _to_places("scatter")),
    "embedding": (_keep_index, _scatter),
    "gather": (_keep_gathered, _scatter_back("scatter_add", -1)),
    "gather_columns": (_keep_gathered, _scatter_back("scatter_add_columns", -2)),
    "index_add": (_keep_index_of, _select_back),
    "put": (_keep_places_written, _take_back(-1)),
    "put_rows": (_keep_places_written, _take_back(-2)),
    "scatter_add": (_keep_index_of, _gather_back("gather")),
    "scatter_add_columns": (_keep_index_of, _gather_back("gather_columns")),
    "column_sum": (_keep_sizes, _to_dim(0)),
    "row_max": (_keep_places, _to_places("scatter")),
    "row_mean": (_keep_sizes, _to_dim(-1, is_mean=True)),
    "row_norm": (_keep_norm, _of_norm),
    "row_prod": (_keep_factors, _of_product),
    "row_sum": (_keep_sizes, _to_dim(-1)),
    "row_var_mean": (_keep_mean, _of_variance),
    "total_norm": (_keep_norm, _of_norm),
    "total_sum": (_keep_shape, _to_all),
    "total_var_mean": (_keep_mean, _of_variance),
    "rope": (_keep_tables, _rotate_back("rope")),
    "rope_interleaved": (_keep_tables, _rotate_back("rope_interleaved")),
}

# Ops of whose recorded graph ATen has the right derivatives: backwards of those above.
BY_GRAPH = frozenset({"embedding_backward"})


def _norm(dim: int | None) -> Callable[..., Any]:
    def in_aten(x: Tensor, low: float, high: float, root: float, *_: Any) -> Tensor:
        return torch.linalg.vector_norm(x, 1 if root == 1 else 2, dim)

    return in_aten


def _var_mean(dim: int | None) -> Callable[..., Any]:
    def in_aten(x: Tensor, bessel: float, power: float, *_: Any) -> tuple[Tensor, Tensor]:
        wide = x.float() if x.dtype != torch.float64 else x
        moments = torch.var_mean if power == 1 else torch.std_mean
        found, mean = moments(wide, dim, correction=0)
        scaled = torch.ops.aten.mul.Scalar(found, bessel**power)  # see tk.generated.interpret.evaluate_node
        return scaled.to(x.dtype), mean.to(x.dtype)

    return in_aten


def _extreme(x: Tensor, sign: float, *_: Any) -> Any:
    return tuple(torch.max(x, -1) if sign > 0 else torch.min(x, -1))


# What forward mode differentiates in place of a recorded graph whose derivative at 0 is not a number, or of whose equal
# elements each has a share where the first has all.
IN_ATEN: Mapping[str, Callable[..., Any]] = {
    "row_max": _extreme,
    "row_norm": _norm(-1),
    "total_norm": _norm(None),
    "row_var_mean": _var_mean(-1),
    "total_var_mean": _var_mean(None),
}
