"""Pooling, padding and what else is read at neighbouring places, in words that have gradients.

ATen has a kernel for each of them, and another for its gradient, with atomics. In words the elements at one place of
all windows are a strided view, and one of these is read after the other: so is the gradient.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import decomposition_table
from torch.utils._pytree import tree_map

from tk.codegen.tracing.combine import associative_scan
from tk.codegen.tracing.numbers import opmath

MOST_UNROLLED = 256  # elements of a window


def _each(x: Any, n: int) -> list[int]:
    found = [x] * n if isinstance(x, int) else list(x)
    return found * n if len(found) == 1 else found


# --- Padding ---


def pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    if mode != "constant":
        return _padded_by_itself(input, pad, mode)
    result = input
    for n in range(len(pad) // 2):
        dim = input.dim() - 1 - n
        before, after = pad[2 * n], pad[2 * n + 1]
        inside = result.narrow(dim, max(-before, 0), result.shape[dim] - max(-before, 0) - max(-after, 0))
        parts = [_filled(result, dim, before, value), inside, _filled(result, dim, after, value)]
        result = torch.cat([p for p in parts if p is not None], dim) if before > 0 or after > 0 else inside
    return result


def _filled(like: Tensor, dim: int, size: int, value: float | None) -> Tensor | None:
    shape = [*like.shape[:dim], size, *like.shape[dim + 1 :]]
    return like.new_full(shape, 0 if value is None else value) if size > 0 else None


def _padded_by_itself(x: Tensor, pad: Sequence[int], mode: str) -> Tensor:
    if mode not in ("reflect", "replicate", "circular"):
        raise NotImplementedError(f"padding by {mode!r}: there are 'constant', 'reflect', 'replicate' and 'circular'")
    if not all(isinstance(p, int) for p in pad):
        raise NotImplementedError(f"padding by {mode!r} as far as a number given at run time; write it as a number")
    for n in range(len(pad) // 2):
        dim, before, after = x.dim() - 1 - n, pad[2 * n], pad[2 * n + 1]
        front = _copies(x, dim, max(before, 0), mode, True)
        back = _copies(x, dim, max(after, 0), mode, False)
        inside = x.narrow(dim, max(-before, 0), x.shape[dim] - max(-before, 0) - max(-after, 0))
        parts = [p for p in (front, inside, back) if p is not None]
        x = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return x


def _copies(x: Tensor, dim: int, count: int, mode: str, is_front: bool) -> Tensor | None:
    """What stands before or behind the elements themselves."""
    if count == 0:
        return None
    n = x.shape[dim]
    if mode == "replicate":
        shape = list(x.shape)
        shape[dim] = count
        return x.narrow(dim, 0 if is_front else n - 1, 1).expand(shape)
    if mode == "circular":
        return x.narrow(dim, n - count if is_front else 0, count)
    return x.narrow(dim, 1 if is_front else n - 1 - count, count).flip(dim)


# --- Windows ---


class _Windows:
    """Those of the last `n` dimensions. extra: places behind the padding, where the size of the result is rounded
    up."""

    def __init__(self, x: Tensor, n: int, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool):
        self.n, self.kernel, self.padding = n, _each(kernel, n), _each(padding, n)
        self.stride = self.kernel if stride is None or stride == [] or stride == () else _each(stride, n)
        self.dilation, self.ceil_mode = _each(dilation, n), ceil_mode
        self.sizes = list(x.shape[-n:])
        for k, s, p, d in zip(self.kernel, self.stride, self.padding, self.dilation, strict=True):
            if min(k, s, d) < 1:
                raise ValueError(f"a window of {k} elements, stride {s} and dilation {d}: all must be at least 1")
            if not 0 <= 2 * p <= (k - 1) * d + 1:
                raise ValueError(f"padding {p} of windows of {k} elements: it may be half a window at most")
        if math.prod(self.kernel) > MOST_UNROLLED:
            raise NotImplementedError(
                f"windows of {math.prod(self.kernel)} elements; there may be {MOST_UNROLLED}: where they do not "
                "overlap, reshape the tensor and reduce it"
            )

    def places(self) -> Iterator[tuple[int, ...]]:
        return itertools.product(*map(range, self.kernel))

    def of(self, x: Tensor, fill: float) -> Callable[[tuple[int, ...]], Tensor]:
        """The elements at one place of all windows."""
        extra = [s - 1 if self.ceil_mode else 0 for s in self.stride]
        around = [p for p, e in zip(reversed(self.padding), reversed(extra), strict=True) for p in (p, p + e)]
        view = pad(x, around, value=fill) if any(around) else x
        first = view.dim() - self.n
        counts = [self._count(d, view.shape[first + d]) for d in range(self.n)]

        def at(place: tuple[int, ...]) -> Tensor:
            found = view
            for d, (p, count) in enumerate(zip(place, counts, strict=True)):
                start, step = p * self.dilation[d], self.stride[d]
                found = torch.ops.aten.slice(found, first + d, start, start + (count - 1) * step + 1, step)
            return found

        return at

    def _count(self, d: int, size: Any) -> Any:
        """How many windows there are in a padded dimension."""
        reach = (self.kernel[d] - 1) * self.dilation[d] + 1
        count = (size - reach) // self.stride[d] + 1
        if self.ceil_mode and reach < self.padding[d] + self.stride[d]:  # a last window may begin behind the padding
            most = -(-(self.sizes[d] + self.padding[d]) // self.stride[d])
            count = torch.sym_min(count, most)
        return count

    def starts(self, d: int, count: Any, like: Tensor) -> Tensor:
        """The places where the windows begin, negative in the padding; shaped to be broadcast."""
        found = torch.arange(count, device=like.device) * self.stride[d] - self.padding[d]
        return found.reshape([-1] + [1] * (self.n - 1 - d))


def _avg_pool(x: Tensor, n: int, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False,
              count_include_pad: bool = True, divisor_override: int | None = None) -> Tensor:  # fmt: skip
    windows = _Windows(x, n, kernel_size, stride, padding, 1, ceil_mode)
    wide = opmath(x)
    at = windows.of(wide, 0)
    total = sum((at(place) for place in windows.places()), start=torch.zeros((), dtype=wide.dtype, device=x.device))
    count: Any = divisor_override or math.prod(windows.kernel)
    if not divisor_override and (ceil_mode or (any(windows.padding) and not count_include_pad)):
        count = torch.ones((), dtype=torch.int64, device=x.device)
        for d in range(n):
            begin = windows.starts(d, total.shape[total.dim() - n + d], x)
            p = windows.padding[d] if count_include_pad else 0
            end = (begin + windows.kernel[d]).clamp(max=windows.sizes[d] + p)
            count = count * (end - (begin if count_include_pad else begin.clamp(min=0)))
    return (total / count).to(x.dtype)


def _max_pool(x: Tensor, n: int, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
              ceil_mode: bool = False, return_indices: bool = False) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The first of equal ones, and the last NaN, as ATen takes them."""
    windows = _Windows(x, n, kernel_size, stride, padding, dilation, ceil_mode)
    least = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    at = windows.of(x, least)
    best = at((0,) * n)
    shape = best.shape[best.dim() - n :]
    starts = [windows.starts(d, shape[d], x) for d in range(n)]
    inside = [torch.where(s < 0, s + -(s // w) * w, s) for s, w in zip(starts, windows.dilation, strict=True)]
    index = _flat(inside, windows.sizes) if return_indices else best
    index = index.expand(best.shape)
    for place in itertools.islice(windows.places(), 1, None):
        value = at(place)
        is_larger = value > best
        if x.is_floating_point():
            is_larger = is_larger | torch.isnan(value)
        if return_indices:
            own = [s + p * w for s, p, w in zip(starts, place, windows.dilation, strict=True)]
            index = torch.where(is_larger, _flat(own, windows.sizes), index)
        best = torch.where(is_larger, value, best)
    return best, index


def _flat(places: Sequence[Tensor], sizes: Sequence[Any]) -> Tensor:
    found = places[0]
    for place, size in zip(places[1:], sizes[1:], strict=True):
        found = found * size + place
    return found


def _of_dims(n: int, pool: Callable[..., Any]) -> Callable[..., Any]:
    def word(input: Tensor, *args: Any, **named: Any) -> Any:
        return pool(input, n, *args, **named)

    return word


def _values(n: int) -> Callable[..., Tensor]:
    def word(input: Tensor, *args: Any, return_indices: bool = False, **named: Any) -> Any:
        found = _max_pool(input, n, *args, **{**named, "return_indices": return_indices})
        return found if return_indices else found[0]

    return word


def _with_indices(n: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def word(input: Tensor, *args: Any, return_indices: bool = True, **named: Any) -> tuple[Tensor, Tensor]:
        return _max_pool(input, n, *args, **{**named, "return_indices": True})

    return word


# --- Adaptive pooling: windows that follow from the size of the result ---


def _adaptive(n: int, pool: Callable[..., Any], over_all: Callable[..., Any], otherwise: Any) -> Callable[..., Any]:
    """Over everything, or in equal windows; where they are not equal, as torch takes it apart itself. The results are
    of one kind."""

    def word(input: Tensor, output_size: Any) -> Any:
        given = list(input.shape[-n:])
        wanted = [size if o is None else o for o, size in zip(_each_or_none(output_size, n), given, strict=True)]
        if all(o == 1 for o in wanted):
            return over_all(input, n)
        if not all(isinstance(x, int) for x in (*given, *wanted)):
            raise NotImplementedError(
                f"adaptive pooling to {wanted} of sizes known when it is called; declare them as numbers"
            )
        steps = [size // o for size, o in zip(given, wanted, strict=True)]
        if all(o * s == size for o, s, size in zip(wanted, steps, given, strict=True)):
            return pool(input, n, steps)
        if n > 2:
            raise NotImplementedError(f"adaptive pooling of {given} to {wanted}: in three dimensions windows are equal")
        if n == 1:
            found = tree_map(lambda x: x.squeeze(-2), decomposition_table[otherwise](input.unsqueeze(-2), [1, *wanted]))
        else:
            found = decomposition_table[otherwise](input, wanted)
        return found

    return word


def _adaptive_max(n: int) -> Callable[..., Any]:
    both = _adaptive(n, _max_pool_indexed, _max_over_all, torch.ops.aten.adaptive_max_pool2d.default)

    def word(input: Tensor, output_size: Any, return_indices: bool = False) -> Any:
        found = both(input, output_size)
        return tuple(found) if return_indices else found[0]

    return word


def _max_pool_indexed(x: Tensor, n: int, kernel: Any) -> tuple[Tensor, Tensor]:
    return _max_pool(x, n, kernel, return_indices=True)


def _max_over_all(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
    values, indices = x.flatten(-n).max(-1)
    ones = [1] * n
    return values.reshape([*x.shape[:-n], *ones]), indices.reshape([*x.shape[:-n], *ones])


def _indexed(word: Callable[..., Any]) -> Callable[..., Any]:
    return lambda input, output_size, return_indices=True: word(input, output_size, True)


_UNEQUAL = torch.ops.aten._adaptive_avg_pool2d.default


def _each_or_none(x: Any, n: int) -> list[Any]:
    return [x] * n if x is None or isinstance(x, int) else list(x) * (n if len(x) == 1 else 1)


def _mean(x: Tensor, n: int) -> Tensor:
    return x.mean(list(range(-n, 0)), keepdim=True)


# --- Of all, by place ---


def take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    if dim is None:
        return input.reshape(-1).gather(0, indices.reshape(-1))
    dim %= input.dim()
    shape = [i if x == 1 else x for x, i in zip(input.shape, indices.shape, strict=True)]
    of_input = [x if d == dim else s for d, (x, s) in enumerate(zip(input.shape, shape, strict=True))]
    of_indices = [i if d == dim else s for d, (i, s) in enumerate(zip(indices.shape, shape, strict=True))]
    return input.expand(of_input).gather(dim, indices.expand(of_indices))


def grid_sample(
    input: Tensor, grid: Tensor, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool | None = None
) -> Tensor:
    from torch._decomp.decompositions import grid_sampler_2d

    modes, paddings = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")
    if input.dim() != 4 or mode not in modes or padding_mode not in paddings:
        raise NotImplementedError(
            f"grid_sample of an input of {input.dim()} dimensions, mode={mode!r} and padding_mode={padding_mode!r}: an "
            f"input has 4, a mode is one of {', '.join(modes)}, a padding_mode one of {', '.join(paddings)}"
        )
    return grid_sampler_2d(input, grid, modes.index(mode), paddings.index(padding_mode), bool(align_corners))


class _Cumprod(torch.autograd.Function):
    """ATen's own gradient asks whether any element is 0. This one divides by none: the gradients of the products behind
    an element are added up from the last, each times the next element, which is a scan."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        y = torch.cumprod(x, dim)
        ctx.save_for_backward(x, y)
        ctx.dim = dim
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, y), dim, grad = ctx.saved_tensors, ctx.dim, grads[0]
        if x.dim() == 0:
            return grad, None
        n = x.shape[dim]
        one = torch.ones_like(x.narrow(dim, 0, 1))
        following = torch.cat([x.narrow(dim, 1, n - 1), one], dim)
        before = torch.cat([one, y.narrow(dim, 0, n - 1)], dim)
        _, total = associative_scan(_later_first, (following, grad), dim, reverse=True)
        return before * total, None


def _later_first(later: Sequence[Tensor], own: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return later[0] * own[0], own[1] + own[0] * later[1]


def cumprod(input: Tensor, dim: int, *, dtype: Any = None, out: Any = None) -> Tensor:
    x = opmath(input if dtype is None else input.to(dtype))
    return _Cumprod.apply(x, dim % max(x.dim(), 1)).to(dtype or input.dtype)


def trace(input: Tensor) -> Tensor:
    return input.diagonal().sum()


def diag(input: Tensor, diagonal: int = 0) -> Tensor:
    return input.diagonal(diagonal) if input.dim() == 2 else torch.diag_embed(input, diagonal)


ALWAYS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    F.pad: pad, torch.constant_pad_nd: pad,
    F.avg_pool1d: _of_dims(1, _avg_pool), F.avg_pool2d: _of_dims(2, _avg_pool), F.avg_pool3d: _of_dims(3, _avg_pool),
    F.max_pool1d: _values(1), F.max_pool2d: _values(2), F.max_pool3d: _values(3),
    torch.max_pool1d: _values(1), torch.max_pool2d: _values(2), torch.max_pool3d: _values(3),
    F.max_pool1d_with_indices: _with_indices(1), F.max_pool2d_with_indices: _with_indices(2),
    F.max_pool3d_with_indices: _with_indices(3),
    F.adaptive_avg_pool1d: _adaptive(1, _avg_pool, _mean, _UNEQUAL), torch.adaptive_avg_pool1d: _adaptive(1, _avg_pool,
    _mean, _UNEQUAL), F.adaptive_avg_pool2d: _adaptive(2, _avg_pool, _mean, _UNEQUAL),
    F.adaptive_avg_pool3d: _adaptive(3, _avg_pool, _mean, _UNEQUAL),
    F.adaptive_max_pool1d: _adaptive_max(1), F.adaptive_max_pool1d_with_indices: _indexed(_adaptive_max(1)),
    F.adaptive_max_pool2d: _adaptive_max(2), F.adaptive_max_pool2d_with_indices: _indexed(_adaptive_max(2)),
    F.adaptive_max_pool3d: _adaptive_max(3), F.adaptive_max_pool3d_with_indices: _indexed(_adaptive_max(3)),
    torch.take_along_dim: take_along_dim, Tensor.take_along_dim: take_along_dim, F.grid_sample: grid_sample,
    torch.trace: trace, Tensor.trace: trace, torch.diag: diag, Tensor.diag: diag,
}  # fmt: skip

# Only where a gradient is asked for.
DIFFERENTIATED: Mapping[Callable[..., Any], Callable[..., Any]] = {torch.cumprod: cumprod, Tensor.cumprod: cumprod}
