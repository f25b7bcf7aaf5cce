"""Cross entropy of logits whose classes are sharded over the ranks of a mesh. No rank gathers the logits.

Of each row, a rank has the largest of its own logits, the sum of their exponentials, and the target's logit if the
target is among its classes. One all_reduce takes the first of these, another the others. A small one before them checks
that the ranks have parts of one tensor. What follows is local: the loss, and in the backward the softmax of the shard.
``tk.cross_entropy`` comes here with a DTensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from tk import errors
from tk.functional._call import WIDE_FLOATS, Config, classes_last, one_device
from tk.functional.reductions import amax, logsumexp, sum

__all__ = ["cross_entropy"]

BLOCK_BYTES = 96 << 20  # of a shard's logits, in the dtype that they are worked out in


def cross_entropy(
    input: DTensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    config: Config = None,
) -> DTensor:
    """``tk.cross_entropy``, which checks reduction, ignore_index and label_smoothing, of sharded classes.

    Worked out in float32 (float64 of float64). Beside the result, a rank takes a block of at most 96 MiB (more where
    one row has more), and in the backward the gradient of its shard.

    Args:
        input: ``[C]``, ``[N, C]`` or ``[N, C, ...]``, of a dtype of FLOATS or float64. Its classes are sharded over one
            dimension of the mesh, evenly or as ``torch.chunk`` divides them. Over each other one it is ``Shard`` of
            another dimension, or ``Replicate``.
        target: int64 or uint8, the indices of the classes, counted over all shards; the shape of input without C. A
            DTensor in any placement; where it is not sharded as the rows of input, it is redistributed. A plain tensor
            is this rank's part: the rows that its part of input has.
        config: of the kernels that reduce the rows of a shard.

    Returns:
        A DTensor of the dtype of input, ``Replicate`` over the mesh dimension of the classes. Of reduction "none", it
        is sharded as the rows are; "sum" and "mean" are ``Partial`` where rows are sharded. The mean is over the rows
        of all ranks that count.

    Raises:
        ValueError: shapes that do not go together, another mesh or device, a target of another dtype; shards that are
        not of one tensor. IndexError: a target that is no class. The last two are errors on each rank of the mesh
        dimension of the classes; on CUDA they end the process's CUDA context. NotImplementedError: a gradient of the
        gradient. tk.UnsupportedError: weight, probabilities, no classes, other dtypes and placements.
    """
    if weight is not None:
        raise _unsupported("weight is not taken where classes are sharded, must be None")
    if isinstance(target, Tensor) and target.is_floating_point():
        raise _unsupported("target holds probabilities, must hold indices where classes are sharded")
    if input.dtype not in WIDE_FLOATS:
        raise _unsupported(f"input is {input.dtype}, must be bfloat16, float16, float32 or float64")
    shards = _shards(input)
    at = _local_target(input, target, shards)
    return _Loss.apply(input, at, shards, _Numbers(ignore_index, reduction, float(label_smoothing), config))


# --- What is refused ---


class _Shards(NamedTuple):
    """This rank's part of input: where it lies."""

    mesh: DeviceMesh
    classes: int  # the dimension of input
    over: int  # the mesh dimension that it is sharded over
    total: int  # classes of all ranks
    start: int  # the first of this rank's
    size: int  # as many as this rank has where all ranks have parts of one tensor
    over_rows: tuple[int, ...]  # the mesh dimensions that rows are sharded over
    of_rows: tuple[Placement, ...]  # of the loss of each row


class _Numbers(NamedTuple):
    ignore_index: int
    reduction: str
    label_smoothing: float
    config: Config


def _shards(input: DTensor) -> _Shards:
    mesh, placements = input.device_mesh, input.placements
    dim = 0 if input.dim() == 1 else 1
    total = input.shape[dim]
    over = [i for i, placement in enumerate(placements) if placement == Shard(dim)]
    others = [p for i, p in enumerate(placements) if i not in over and type(p) not in (Shard, Replicate)]
    if len(over) != 1 or others:
        raise _unsupported(
            f"input is {list(placements)}, must be Shard({dim}), its classes, over one dimension of the mesh, and over "
            "the others Shard of another dimension or Replicate; input.redistribute(placements=...) makes one that is"
        )
    if total == 0:
        raise _unsupported("input has no classes, must have one or more where they are sharded")
    ranks, rank = mesh.size(over[0]), mesh.get_local_rank(over[0])
    most = -(-total // ranks)
    start = min(rank * most, total)
    of_rows: list[Placement] = [
        Shard(p.dim - (p.dim > dim)) if isinstance(p, Shard) and p.dim != dim else Replicate() for p in placements
    ]
    over_rows = tuple(i for i, p in enumerate(of_rows) if isinstance(p, Shard))
    return _Shards(mesh, dim, over[0], total, start, min(most, total - start), over_rows, tuple(of_rows))


def _local_target(input: DTensor, target: Tensor, shards: _Shards) -> Tensor:
    """[rows]: of this rank's rows."""
    if target.dtype not in (torch.int64, torch.uint8):
        raise ValueError(f"tk.cross_entropy: target is {target.dtype}, must be int64 or uint8")
    wanted, of = _without(input.shape, shards.classes), "input without its classes"
    if isinstance(target, DTensor):
        if target.device_mesh != shards.mesh:
            raise ValueError(f"tk.cross_entropy: input is on {shards.mesh}, target on {target.device_mesh}")
        _check_shape(target, wanted, of)
        target = target.redistribute(placements=shards.of_rows).to_local()
    local = input.to_local()
    _check_shape(target, _without(local.shape, shards.classes), "this rank's part of " + of)
    one_device("cross_entropy", input=local, target=target)
    return target.reshape(-1).long()


def _check_shape(target: Tensor, wanted: Sequence[int], of: str) -> None:
    if target.shape != torch.Size(wanted):
        raise ValueError(f"tk.cross_entropy: target must be {list(wanted)}, {of}, is {list(target.shape)}")


def _without(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def _unsupported(what: str) -> errors.UnsupportedError:
    return errors.UnsupportedError(f"tk.cross_entropy: {what}")


# --- Forward and backward ---


class _Loss(Function):
    @staticmethod
    def forward(ctx: Any, input: DTensor, at: Tensor, shards: _Shards, numbers: _Numbers) -> DTensor:
        x = classes_last(input.to_local())
        _check_ranks(x, at, shards, numbers.ignore_index)
        base, log_sum, loss = _of_rows(x, at, shards, numbers)
        count = None
        if numbers.reduction == "none":
            result = loss.reshape(_without(input.to_local().shape, shards.classes))
        else:
            result = sum(loss, config=numbers.config)
        if numbers.reduction == "mean":
            count = (at != numbers.ignore_index).sum()
            for over in shards.over_rows:
                count = _reduced(count, "sum", shards.mesh, over)
            result = result / count
        ctx.save_for_backward(input, at, base, log_sum, count)
        ctx.shards, ctx.numbers = shards, numbers
        shape = _without(input.shape, shards.classes) if numbers.reduction == "none" else ()
        placements = shards.of_rows if numbers.reduction == "none" else _totals(shards)
        return _sharded(result.to(input.dtype), shards.mesh, placements, shape)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Any, ...]:
        return _Gradient.apply(grad, *ctx.saved_tensors, ctx.shards, ctx.numbers), None, None, None


class _Gradient(Function):
    """It has no gradient of its own, and says so when one is asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        grad: DTensor,
        input: DTensor,
        at: Tensor,
        base: Tensor,
        log_sum: Tensor,
        count: Tensor | None,
        shards: _Shards,
        numbers: _Numbers,
    ) -> DTensor:
        # A sum's partial results all have the gradient of their sum.
        of_loss = shards.of_rows if numbers.reduction == "none" else [Replicate()] * shards.mesh.ndim
        g = grad.redistribute(placements=of_loss).to_local().to(base.dtype)
        g = g / count if count is not None else g
        g = torch.where(at == numbers.ignore_index, 0.0, g.reshape(-1))
        local = input.to_local()
        x = classes_last(local)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        at, is_here = _places(at, x, shards)
        smoothing = numbers.label_smoothing
        of_target = torch.where(is_here, g * (1 - smoothing), 0.0).unsqueeze(1)
        for block in _blocks(x):
            # In this order: the largest logit is exact, and a row far from 0 is rounded no more than one near it.
            y = (x[block] - base[block, None]).sub_(log_sum[block, None]).exp_().mul_(g[block, None])
            if smoothing:
                y.sub_(g[block, None] * (smoothing / shards.total))
            out[block] = y.scatter_(1, at[block, None], y.gather(1, at[block, None]) - of_target[block])
        if local.dim() != 2:
            out = out.reshape(local.movedim(shards.classes, -1).shape).movedim(-1, shards.classes).contiguous()
        return _sharded(out, shards.mesh, input.placements, input.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(
            "tk.cross_entropy of sharded classes has no gradient of its gradient (create_graph=True)"
        )


def _of_rows(x: Tensor, at: Tensor, shards: _Shards, numbers: _Numbers) -> tuple[Tensor, Tensor, Tensor]:
    """(the largest logit of each row, the logarithm of the sum of what the others are beside it, the loss)."""
    ignore_index, _, smoothing, config = numbers
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    has_classes = x.shape[1] > 0
    largest = amax(x, 1, config=config).to(dtype) if has_classes else x.new_full(at.shape, -torch.inf, dtype=dtype)
    base = _reduced(largest, "max", shards.mesh, shards.over)
    is_ignored = at == ignore_index
    at, is_here = _places(at, x, shards)
    sums, picked, spread = (torch.zeros_like(base) for _ in range(3))
    for block in _blocks(x):
        y = x[block] - base[block, None]
        sums[block] = logsumexp(y, 1, config=config).exp()
        picked[block] = torch.where(is_here[block], y.gather(1, at[block, None]).squeeze(1), 0.0)
        if smoothing:
            spread[block] = sum(y, 1, config=config)
    parts = torch.stack([sums, picked, spread] if smoothing else [sums, picked])
    sums, picked, *spreads = _reduced(parts, "sum", shards.mesh, shards.over).unbind()
    log_sum = sums.log()
    loss = (1 - smoothing) * (log_sum - picked)
    for spread in spreads:
        loss = loss + smoothing * (log_sum - spread / shards.total)
    return base, log_sum, loss.masked_fill(is_ignored, 0.0)


def _check_ranks(x: Tensor, at: Tensor, shards: _Shards, ignore_index: int) -> None:
    """Raises on each rank for what is wrong on one, so that none waits for another. Of shards that are not of one
    tensor, gloo would abort the process in an all_reduce of their rows: this one has the same few numbers on all."""
    total = shards.total
    is_class = (at == ignore_index) | ((at >= 0) & (at < total))
    alike = torch.tensor([total, x.shape[0], WIDE_FLOATS.index(x.dtype)], device=x.device)
    is_wrong = torch.stack([(~is_class.all()).long(), alike.new_full((), int(x.shape[1] != shards.size))])
    found = _reduced(torch.cat([alike, -alike, is_wrong]), "max", shards.mesh, shards.over)
    most, least, is_wrong = found.split([3, 3, 2])
    is_one = (most + least == 0).all() & (is_wrong[1] == 0)
    if x.is_cuda:  # the host does not wait
        torch._assert_async(is_one)
        torch._assert_async(is_wrong[0] == 0)
        return
    if not is_one:
        raise ValueError(
            f"tk.cross_entropy: the ranks' shards are not of one tensor: this one has {x.shape[0]} rows and "
            f"{x.shape[1]} of {total} classes (expected: {shards.size}), {x.dtype}; DTensor.from_local takes shape and "
            "stride of what is not sharded evenly"
        )
    if is_wrong[0]:
        wrong = at[~is_class]
        what = f"target is {wrong[0].item()}" if wrong.numel() else "target of another rank is no class"
        raise IndexError(f"tk.cross_entropy: {what}, must be 0 to {total - 1}")


def _places(at: Tensor, x: Tensor, shards: _Shards) -> tuple[Tensor, Tensor]:
    """The targets' places among this rank's classes, 0 where they are not there, and whether they are."""
    at = at - shards.start
    is_here = (at >= 0) & (at < x.shape[1])
    return torch.where(is_here, at, 0), is_here


def _blocks(x: Tensor) -> Iterator[slice]:
    """Blocks of rows; none where there is nothing to read."""
    if x.numel():
        n = max(1, BLOCK_BYTES // (max(4, x.itemsize) * x.shape[1]))
        for start in range(0, x.shape[0], n):
            yield slice(start, start + n)


# --- Tensors of several ranks ---


def _reduced(x: Tensor, how: str, mesh: DeviceMesh, over: int) -> Tensor:
    return collectives.wait_tensor(collectives.all_reduce(x, how, (mesh, over)))


def _totals(shards: _Shards) -> tuple[Placement, ...]:
    """The placements of a sum over all rows."""
    return tuple(Partial() if i in shards.over_rows else Replicate() for i in range(shards.mesh.ndim))


def _sharded(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
