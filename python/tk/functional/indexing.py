"""What is taken, added or put at indices. Along the last dimension, or along the last but one: a call's own dimension
is moved there, which copies nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tk import errors, parallel
from tk._arguments import flag, number
from tk.functional._call import (
    FLOATS,
    INTEGERS,
    NUMBERS,
    Config,
    as_int64,
    check_plain,
    check_tensor,
    is_strict,
    needs,
    one_device,
    only_aten_has,
    product,
    run,
    taken,
    wrap,
)
from tk.functional._integers import signed
from tk.generated.problem import inverse

__all__ = ["gather", "index_add", "index_put", "scatter_add"]


@needs("gather", "gather_columns", "scatter_add", "scatter_add_columns")
def gather(input: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False, config: Config = None) -> Tensor:
    """The elements along ``dim`` at the places that index has, as ``torch.gather``.

    Args:
        input: any shape; a float, an integer or bool.
        index: int64 or int32, of as many dimensions, and along all but ``dim`` no larger than input; one that is empty
            may have any shape. On CUDA an index that is no place of ``dim`` ends the kernel, and with it the process's
            CUDA context, as ATen's assertion does.
        sparse_grad: by ATen, but for strict mode on CUDA.

    Returns:
        The shape of index. The gradient of input is :func:`scatter_add`'s sum into zeros.

    Raises:
        ValueError: index has other dimensions, or is larger than input. IndexError: a ``dim`` that is none.
            RuntimeError: on the CPU ATen's, of an index that is no place. tk.UnsupportedError: an index that is neither
            int64 nor int32.
    """
    is_taken = taken("gather", NUMBERS, input=input)
    _check_index("gather", "index", index)
    dim = wrap("gather", input, dim)
    if flag("gather", "sparse_grad", sparse_grad):
        only_aten_has("gather", input, "sparse_grad")
    is_empty = not index.numel()
    if not is_empty:
        _check_fits("gather", "input", input, "index", index, dim)
    if not is_taken or sparse_grad:
        one_device("gather", input=input, index=index)
        return torch.gather(input, dim, index, sparse_grad=sparse_grad)
    if is_empty:  # of any shape
        one_device("gather", input=input, index=index)
        return input.reshape(-1).narrow(0, 0, 0).reshape(index.shape).clone()
    x, at = _at_least_one(signed(input)), _at_least_one(as_int64(index))
    x = _narrowed(x, at.shape, but=dim)
    if dim == x.dim() - 1:
        found = run("gather", x, at, config=config)
    else:
        found = run("gather_columns", _to_columns(x, dim), _to_columns(at, dim), config=config).movedim(-2, dim)
    found = _unsigned(found, input.dtype)
    return found if index.dim() else found.reshape(())


@needs("scatter_add", "scatter_add_columns", "gather", "gather_columns")
def scatter_add(input: Tensor, dim: int, index: Tensor, src: Tensor, *, config: Config = None) -> Tensor:
    """input with each element of src added along ``dim`` at the place that index has for it, as ``torch.scatter_add``.
    Of 16-bit floats the sums are in float32 and rounded once. Kernels for sm_90 add up to two elements a place, on
    average, in the dtype itself, as torch does. Integers wrap around, and a bool is whether any is set.

    Sums of floats are atomic, in any order, or in deterministic mode without regard to order; of float64 they have no
    deterministic kernel, and are refused there.

    Args:
        input: any shape; a float, an integer or bool.
        index: int64 or int32, of as many dimensions, along all but ``dim`` no larger than input; else as of
            :func:`gather`.
        src: of input's dtype and as many dimensions, nowhere smaller than index. What lies beyond index is not read.

    Returns:
        The shape of input.

    Raises:
        ValueError: index is larger than src. Other errors as of :func:`gather`.
    """
    check_tensor("scatter_add", "src", src)
    input, src = _widest(input, src)
    is_taken = taken("scatter_add", NUMBERS, input=input, src=src)
    _check_index("scatter_add", "index", index)
    dim = wrap("scatter_add", input, dim)
    if index.numel():
        _check_fits("scatter_add", "input", input, "index", index, dim)
        _check_fits("scatter_add", "src", src, "index", index)
    one_device("scatter_add", input=input, index=index, src=src)
    if not is_taken:
        return torch.scatter_add(input, dim, index, src)
    if not index.numel():  # of any shape
        return input + src.reshape(-1)[:0].sum() if src.requires_grad else input.clone()
    x, at, source = _at_least_one(input), _at_least_one(as_int64(index)), _at_least_one(src)
    part = _narrowed(x, at.shape, but=dim)
    source = _narrowed(source, at.shape)
    found = _sums(lambda x, source: _scattered(x, dim, at, source, config), part, source)
    return _put_back(x, found).reshape(input.shape)


@needs("index_add", "scatter_add", "gather")
def index_add(
    input: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1, config: Config = None
) -> Tensor:
    """input with ``alpha`` times each slice of source added along ``dim`` at the place that index has for it, as
    ``torch.index_add``. Sums as of :func:`scatter_add`.

    Args:
        index: ``[N]`` or 0-d, int64 or int32; else as of :func:`gather`.
        source: of input's dtype and, but for N along ``dim``, its shape. An ``alpha`` other than 1 multiplies it first.

    Returns:
        The shape of input.

    Raises:
        ValueError: source has another shape. Other errors as of :func:`gather`.
    """
    check_tensor("index_add", "source", source)
    is_taken = taken("index_add", NUMBERS, input=input, source=source)
    _check_index("index_add", "index", index)
    dim = wrap("index_add", input, dim)
    alpha = number("index_add", "alpha", alpha)
    if index.dim() > 1:
        raise IndexError(f"tk.index_add: index must be [N] or 0-d, is {list(index.shape)}")
    wanted = [*input.shape]
    if input.dim():
        wanted[dim] = index.numel()
    if list(source.shape) != wanted or (input.dim() == 0 and index.numel() != 1):
        raise ValueError(
            f"tk.index_add: source must be {wanted} for input of {list(input.shape)}, index of {list(index.shape)} and "
            f"dim {dim}, is {list(source.shape)}"
        )
    one_device("index_add", input=input, index=index, source=source)
    if not is_taken:
        return torch.index_add(input, dim, index, source, alpha=alpha)
    if alpha != 1:
        source = source & bool(alpha) if source.dtype == torch.bool else source * _as_kind(alpha, source)
    x, at, source = _at_least_one(input), _at_least_one(as_int64(index)), _at_least_one(source)
    found = _sums(lambda x, source: _added(x, dim, at, source, config), x, source)
    return found.reshape(input.shape)


@needs("put", "put_rows", "flat_index", *index_add.ops)  # type: ignore[attr-defined]
def index_put(
    input: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
    *,
    config: Config = None,
) -> Tensor:
    """input with values at the places of indices, as ``torch.index_put``: ``x[i, j] = values`` in a copy of x.

    Args:
        input: any shape; a float, an integer or bool.
        indices: for each of the first dimensions a tensor, which are broadcast together, or None for all of the
            dimension: int64 or int32, below 0 from the end, or a mask (bool, uint8) of one or more dimensions, whose
            places the host counts, and waits for, unless values are the same for all of them. On the CPU one that is
            out of bounds is an IndexError; else as of :func:`gather`.
            Those of 0-d masks are ATen's, but for strict mode on CUDA.
        values: of input's dtype; broadcast to the shape of ``input[indices]``.
        accumulate: values are added, as of :func:`scatter_add`. Else of several for one place the last one stays, in
            any mode. A single place, and values that are the same for all, have no order: they are by ATen, but for
            strict mode on CUDA.

    Returns:
        The shape of input.

    Raises:
        ValueError: values do not broadcast to the places. Other errors as of :func:`gather`.
    """
    function = "index_put"
    check_tensor(function, "values", values)
    if isinstance(input, Tensor) and values.dim() == 0:
        values = _moved(function, "values", values, input)
    input, values = _widest(input, values)
    is_taken = taken(function, NUMBERS, input=input, values=values)
    given = _indices(input, indices)
    flag(function, "accumulate", accumulate)
    is_plain = not any(t is not None and t.dim() == 0 and t.dtype == torch.bool for t in given)
    if not is_plain:
        only_aten_has(function, input, "a mask without dimensions")
    one_device(function, input=input, values=values)
    if not is_taken or not is_plain:
        if input.is_quantized and values.dtype not in (torch.float32, input.dtype):  # ATen's kernel reads float32
            raise TypeError(f"tk.index_put: values is {values.dtype}, must be torch.float32 where input is quantized")
        return torch.ops.aten.index_put(input, given, values, accumulate)
    if (found := _masked(input, given, values, accumulate)) is not None:
        return found
    return _placed(input, _without_masks(input, given), values, accumulate, config)


# --- Checks ---


def _check_index(function: str, name: str, index: Any) -> None:
    check_plain(function, name, index)
    if index.dtype not in (torch.int64, torch.int32) and index.numel():  # as in torch, of none any will do
        raise errors.UnsupportedError(f"tk.{function}: {name} is {index.dtype}, must be int64 or int32")


def _moved(function: str, name: str, x: Tensor, input: Tensor) -> Tensor:
    """Moves a tensor to input's device, as in torch; of one on meta there is nothing to move."""
    if x.is_meta:
        one_device(function, input=input, **{name: x})
    return x if x.device == input.device else x.to(input.device)


def _at_least_one(x: Tensor) -> Tensor:
    """Dimension."""
    return x if x.dim() else x.reshape(1)


def _check_fits(function: str, name: str, x: Tensor, index_name: str, index: Tensor, but: int = -1) -> None:
    """That the index has x's dimensions, and is nowhere larger, dimension `but` aside."""
    rank, index_rank = x.dim(), index.dim()
    if rank != index_rank and (rank or 1) != (index_rank or 1):
        raise ValueError(
            f"tk.{function}: {index_name} must have as many dimensions as {name}, {x.dim()} of {list(x.shape)}, is "
            f"{list(index.shape)}"
        )
    if index_rank == 0 or rank == 0:
        is_larger = but < 0 and index.numel() > x.numel()
    else:
        is_larger = False
        for d, (size, most) in enumerate(zip(index.shape, x.shape, strict=True)):
            if d != but and size > most:
                is_larger = True
                break
    if is_larger:
        aside = f" apart from dim {but}" if but >= 0 else ""
        raise ValueError(
            f"tk.{function}: {index_name} must be no larger than {name} of {list(x.shape)}{aside}, is "
            f"{list(index.shape)}"
        )


def _widest(x: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the wider of their dtypes, as under CUDA's autocast; else as they are."""
    both = (x, source)
    if not all(isinstance(t, Tensor) and t.device.type == "cuda" and t.dtype in FLOATS for t in both):
        return both
    if torch.float32 in (x.dtype, source.dtype) and torch.is_autocast_enabled("cuda"):
        return x.float(), source.float()
    return both


def _unsigned(x: Tensor, dtype: torch.dtype) -> Tensor:
    """:func:`signed` undone. A view in another dtype has no gradient."""
    return x if x.dtype == dtype else x.view(dtype)


# --- Along one dimension ---


def _narrowed(x: Tensor, shape: Sequence[int], but: int = -1) -> Tensor:
    """What of x lies within the shape along every dimension but one."""
    for d, (size, given) in enumerate(zip(shape, x.shape, strict=True)):
        if d != but and given != size:
            x = x.narrow(d, 0, size)
    return x


def _put_back(x: Tensor, part: Tensor) -> Tensor:
    """x with what :func:`_narrowed` took replaced; the part itself where that was all."""
    cut = [d for d in range(x.dim()) if x.shape[d] != part.shape[d]]
    for i in reversed(range(len(cut))):
        around = x
        for d in cut[:i]:
            around = around.narrow(d, 0, part.shape[d])
        part = torch.slice_scatter(around, part, cut[i], 0, part.shape[cut[i]])
    return part


def _to_columns(x: Tensor, dim: int) -> Tensor:
    return x if dim == x.dim() - 2 else x.movedim(dim, -2)


def _scattered(x: Tensor, dim: int, at: Tensor, source: Tensor, config: Config) -> Tensor:
    """scatter_add of floats, or of int64."""
    if dim == x.dim() - 1:
        return run("scatter_add", x, at, source, config=config)
    columns = (_to_columns(t, dim) for t in (x, at, source))
    return run("scatter_add_columns", *columns, config=config).movedim(-2, dim)


def _added(x: Tensor, dim: int, at: Tensor, source: Tensor, config: Config) -> Tensor:
    """index_add of floats, or of int64; at: [N]."""
    if dim == x.dim() - 1:
        return run("scatter_add", x, at.expand(source.shape), source, config=config)
    return run("index_add", _to_columns(x, dim), at, _to_columns(source, dim), config=config).movedim(-2, dim)


def _sums(add: Any, x: Tensor, source: Tensor) -> Tensor:
    """Integers are added up in int64, of which the last bits are those of a shorter sum; on the CPU 16-bit floats in
    float32, as kernels do themselves."""
    if x.dtype in INTEGERS and x.dtype != torch.int64:
        return add(x.long(), source.long()).to(x.dtype)
    if x.dtype in (torch.bfloat16, torch.float16) and x.device.type == "cpu":
        return add(x.float(), source.float()).to(x.dtype)
    return add(x, source)


def _as_kind(alpha: float, x: Tensor) -> float:
    return alpha if x.is_floating_point() else int(alpha)


# --- Along several dimensions ---


def _indices(x: Tensor, indices: Any) -> list[Tensor | None]:
    """One for each dimension or mask, checked, and where x is."""
    function = "index_put"
    if not isinstance(indices, list | tuple):
        raise TypeError(f"tk.{function}: indices must be a tuple of Tensors, is {type(indices).__name__}")
    found: list[Tensor | None] = []
    n_dims = 0
    for i, index in enumerate(indices):
        name = f"indices[{i}]"
        if index is None:
            found.append(None)
            n_dims += 1
            continue
        check_tensor(function, name, index)
        if index.dtype not in (torch.int64, torch.int32, torch.bool, torch.uint8):
            raise IndexError(f"tk.{function}: {name} is {index.dtype}, must be int64, int32, bool or uint8")
        is_mask = index.dtype in (torch.bool, torch.uint8)
        if is_mask and list(index.shape) != list(x.shape[n_dims : n_dims + index.dim()]):
            raise IndexError(
                f"tk.{function}: {name} is a mask of {list(index.shape)} and must have the sizes of input, "
                f"{list(x.shape)}, from dimension {n_dims} on"
            )
        n_dims += index.dim() if is_mask else 1
        index = _moved(function, name, index, x)
        found.append(index.bool() if is_mask else index)
    if n_dims > x.dim():
        raise IndexError(f"tk.{function}: indices are for {n_dims} dimensions, input has {x.dim()}")
    if all(index is None for index in found):
        raise ValueError(f"tk.{function}: indices are {list(indices)}, must have a Tensor")
    return found


def _masked(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool) -> Tensor | None:
    """index_put by one mask, of values that are the same for all places in it, so that it need not be counted: ATen's
    where. None for all else."""
    masks = [(d, mask) for d, mask in enumerate(indices) if mask is not None]
    d, mask = masks[0]
    if len(masks) > 1 or mask.dtype != torch.bool:
        return None
    behind = x.dim() - d - mask.dim()
    if values.dim() > d + 1 + behind or (values.dim() > behind and values.shape[-1 - behind] != 1):
        return None
    if values.dim() > behind:
        before = values.dim() - 1 - behind
        values = values.reshape([*values.shape[:before], *[1] * mask.dim(), *values.shape[before + 1 :]])
    try:
        values = values.expand(x.shape)
    except RuntimeError:
        raise ValueError(
            f"tk.index_put: values must be broadcast to input[indices], are {list(values.shape)} for input of "
            f"{list(x.shape)} and a mask of {list(mask.shape)}"
        ) from None
    found = (x | values if x.dtype == torch.bool else x + values) if accumulate else values
    return torch.where(mask.reshape([*mask.shape, *[1] * behind]), found, x)


def _without_masks(x: Tensor, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """A mask as the places where it is set, an index for each of its dimensions; for all of x's dimensions."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype == torch.bool:
            found += index.nonzero(as_tuple=True)
        else:
            found.append(index)
    return found + [None] * (x.dim() - len(found))


def _placed(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool, config: Config) -> Tensor:
    """The dimensions with indices are made one, in front of which stand those that torch has there in the result of
    indexing, and behind which, as one, all others."""
    given = [d for d, index in enumerate(indices) if index is not None]
    shape = _broadcast([index for index in indices if index is not None])
    first = given[0] if given == list(range(given[0], given[-1] + 1)) else 0
    before = [d for d in range(first) if d not in given]
    after = [d for d in range(first, x.dim()) if d not in given]
    leading, behind = [x.shape[d] for d in before], [x.shape[d] for d in after]
    n, k = product(shape), product([x.shape[d] for d in given])
    if n and not k:
        raise IndexError(
            f"tk.index_put: indices have {n} places in dimensions {given} of {list(x.shape)}: none is there"
        )
    try:
        source = values.expand([*leading, *shape, *behind])
    except RuntimeError:
        raise ValueError(
            f"tk.index_put: values must be broadcast to {[*leading, *shape, *behind]}, which is the shape of "
            f"input[indices], is {list(values.shape)}"
        ) from None
    order = [*before, *given, *after]
    moved = x.permute(order)
    columns = [product(behind)] if after else []
    rows, source = moved.reshape([*leading, k, *columns]), source.reshape([*leading, n, *columns])
    try:
        if not accumulate and config is None and _has_no_order(x, source, len(leading)):
            return torch.ops.aten.index_put(x, indices, values)
        found = _at_rows(rows, _flat(x, indices, shape, accumulate, config), source, bool(after), accumulate, config)
    except (IndexError, RuntimeError) as error:
        if "out of bounds" not in str(error):
            raise
        raise IndexError(f"tk.index_put: indices are out of bounds for input of {list(x.shape)}: {error}") from None
    return found.reshape(moved.shape).permute(inverse(order))


def _broadcast(indices: Sequence[Tensor]) -> torch.Size:
    try:
        return torch.broadcast_shapes(*(index.shape for index in indices))
    except RuntimeError:
        raise IndexError(
            "tk.index_put: indices must be broadcast together, are "
            f"{', '.join(str(list(index.shape)) for index in indices)}"
        ) from None


def _has_no_order(x: Tensor, source: Tensor, dim: int) -> bool:
    """Whether ATen may put the source, whose elements along `dim` have a place each: one alone, or equal ones."""
    n, step = source.shape[dim], source.stride(dim)  # of a graph, neither may be a number
    is_one = (type(n) is int and n == 1) or (type(step) is int and step == 0)
    return is_one and not parallel.is_distributed(x) and (x.device.type == "cpu" or not is_strict())


def _flat(x: Tensor, indices: Sequence[Tensor | None], shape: torch.Size, from_start: bool, config: Config) -> Tensor:
    """[N]: the places in the dimensions that have an index, as one; out of bounds where one of them is. A single index
    is as it was given, below 0 too, but with from_start."""
    given = [(x.shape[d], as_int64(index).expand(shape)) for d, index in enumerate(indices) if index is not None]
    if from_start and len(given) == 1:
        given.insert(0, (1, parallel.full(x, (), 0, torch.int64).expand(shape)))
    rows, found = given[0]
    for size, index in given[1:]:
        found = run("flat_index", found, index, rows, size, config=config)
        rows = rows * size
    return found.reshape(-1)


def _at_rows(x: Tensor, at: Tensor, source: Tensor, has_columns: bool, accumulate: bool, config: Config) -> Tensor:
    """x: [..., K] or [..., K, B], source: [..., N] or [..., N, B], at: [N]."""
    dim = x.dim() - 1 - has_columns
    if accumulate or source.shape[dim] == 0:  # a source of none has a gradient too
        return _sums(lambda x, source: _added(x, dim, at, source, config), x, source)
    op = "put_rows" if has_columns else "put"
    return _unsigned(run(op, signed(x), at, signed(source), config=config), x.dtype)
