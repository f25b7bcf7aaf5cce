"""Steps of optimizers over lists of tensors, in place and in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tk import errors
from tk._arguments import flag, number
from tk.functional._call import FLOATS, Config, check_tensor, needs, run
from tk.parallel import is_distributed

__all__ = ["adamw_"]


@needs("adamw", "adamw_mixed")
def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    maximize: bool = False,
    config: Config = None,
) -> None:
    """A step of AdamW, as torch.optim's fused one: writes ``params``, ``exp_avgs`` and ``exp_avg_sqs``, and advances
    ``steps``.

    Of DTensors, as FSDP2 has them, each rank makes the step of its part.

    Args:
        params, grads: any shapes, bfloat16, float16 or float32 (float64 on the CPU); a gradient has its parameter's
            shape and dtype. Tensors of several dtypes or devices are a launch for each.
        exp_avgs, exp_avg_sqs: of the parameter's shape; of its dtype, or float32.
        steps: float32 and 0-d, how many steps came before.

    Raises:
        ValueError: lists of different lengths, shapes that differ, tensors that overlap; of DTensors, placements that
            differ or are partial.
        tk.UnsupportedError: dtypes that no kernel has, on CUDA.
    """
    columns = {"params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, "steps": steps}
    for name, column in columns.items():
        if not isinstance(column, list | tuple):
            raise TypeError(f"tk.adamw_: {name} must be a list of tensors, is a {type(column).__name__}")
        if len(column) != len(params):
            raise ValueError(
                f"tk.adamw_: lists must have one length; params has {len(params)} tensors, {name} {len(column)}"
            )
        if wrong := [x for x in column if not isinstance(x, Tensor)]:
            raise TypeError(f"tk.adamw_: {name} must hold tensors, holds a {type(wrong[0]).__name__}")
        for x in column:
            check_tensor("adamw_", name, x)
    groups: dict[tuple[object, ...], list[tuple[Tensor, ...]]] = {}
    for row in map(_local, zip(*columns.values(), strict=True)):
        groups.setdefault((row[0].device, *(x.dtype for x in row)), []).append(row)
    numbers = (lr, *_pair(betas), eps, weight_decay)
    flag("adamw_", "maximize", maximize)
    with torch.no_grad():
        for rows in groups.values():
            _step([list(column) for column in zip(*rows, strict=True)], numbers, maximize, config)


def _local(row: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What this rank has of a parameter, its gradient and its moments. A step may be plain."""
    if not is_distributed(row[0]):
        return row
    placements = [getattr(x, "placements", None) for x in row[:4]]
    if placements != [placements[0]] * 4 or any(p.is_partial() for p in placements[0]):  # type: ignore[union-attr]
        raise ValueError(
            f"tk.adamw_: a parameter, its gradient and its moments are {placements}; they must be DTensors of the same "
            "placements, and not partial"
        )
    return tuple(x.to_local() if is_distributed(x) else x for x in row)


def _pair(betas: Any) -> tuple[float, float]:
    if not isinstance(betas, list | tuple) or len(betas) != 2:
        raise TypeError(f"tk.adamw_: betas must be a tuple of two numbers, is {betas!r}")
    first, second = betas
    return _beta(first), _beta(second)


def _beta(beta: Any) -> Any:
    return beta if isinstance(beta, Tensor) else number("adamw_", "betas", beta)


def _step(
    columns: list[list[Tensor]], numbers: tuple[float, float, float, float, float], maximize: bool, config: Config
) -> None:
    """A step of tensors of one device and of one dtype in each list."""
    dtype, grad, *moments, step = (column[0].dtype for column in columns)
    op = "adamw" if moments[0] == dtype else "adamw_mixed"
    is_one_of_ours = dtype in FLOATS and grad == dtype and moments[0] == moments[1] and step == torch.float32
    if is_one_of_ours and (op == "adamw" or moments[0] == torch.float32):
        written = [x for i in (0, 2, 3, 4) for x in columns[i]]
        run(op, *columns, *numbers, -1.0 if maximize else 1.0, config=config)
        torch.autograd.graph.increment_version(written)
        return
    if columns[0][0].device.type != "cpu":
        given = ", ".join(str(column[0].dtype).removeprefix("torch.") for column in columns)
        raise errors.UnsupportedError(
            f"tk.adamw_: params, grads, exp_avgs, exp_avg_sqs and steps are {given}; it takes bfloat16, float16 and "
            "float32, gradients of the parameters' dtype, both moments of that or of float32, and steps of float32"
        )
    if not step.is_floating_point:
        raise ValueError(f"tk.adamw_: steps must be of floating point, as torch.optim's are, is {step}")
    for count in columns[4]:
        count += 1
    lr, beta1, beta2, eps, weight_decay = numbers
    rates: dict[str, Any] = dict(lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay)
    p, g, m, v, counts = columns
    torch._fused_adamw_(p, g, m, v, [], counts, **rates, amsgrad=False, maximize=maximize)
