"""``tk bench linear 512x4096 14336x4096``: tk's functions beside torch's on this machine's GPU, for sizes of the
tensors that are given, or else for some that are usual."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from tk import errors, inspect, timing
from tk._dtypes import DTYPES
from tk._names import did_you_mean
from tk._table import table
from tk.cli import _calls
from tk.cli._calls import Call
from tk.cli._given import Shape, argument, read
from tk.cli._judge import host_us
from tk.cli._shown import Usage, check_device, dtype_name, parse
from tk.cli.bench_ops import NO_GPU
from tk.heuristics.problem import describe

HEADER = ("function", "tensors", "tk us", "torch us", "speedup", "GB/s")
MOST_COPIES = 16


def is_meant(arguments: Sequence[str]) -> bool:
    """Whether these arguments of ``tk bench`` name functions of tk."""
    return bool(arguments) and arguments[0] in inspect.functions()


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="tk bench", description=__doc__)
    add = found.add_argument
    add(
        "what",
        nargs="+",
        metavar="FUNCTION|SHAPE|NAME=VALUE",
        help="functions; or one, and its arguments as of explain",
    )
    add("--dtype", type=dtype_name, default="bf16", help="of floating-point tensors (bf16)")
    add("--device", default="cuda", help="cpu times the reference")
    return found


def run(arguments: Sequence[str]) -> int:
    """The exit status: 1 when a call failed."""
    args = parse(parser(), arguments)
    check_device(args.device)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise errors.UnsupportedError(NO_GPU)
    rows, failed = [], 0
    with torch.no_grad():
        for call in wanted(args.what, DTYPES[args.dtype], args.device):
            try:
                if args.device != "cpu" and describe(call.function, *call.args, **call.kwargs) is None:
                    print(f"tk.{call.name} launches no kernel")
                    continue
                rows.append(measure(call))
            except (errors.Error, RuntimeError, ValueError, TypeError) as error:
                failed += 1
                print(f"FAILED tk.{call.name}: {type(error).__name__}: {error}", flush=True)
    if rows:
        print(table(HEADER, rows))
    return int(failed > 0)


def wanted(what: Sequence[str], dtype: torch.dtype, device: str) -> Iterator[Call]:
    """The calls that a command line names. Raises Usage."""
    names = [text for text in what if text in inspect.functions()]
    given = [text for text in what if text not in names]
    for text in given:
        _check(text)
    known = [
        call for call in _calls.calls(device, dtype, "small" if device == "cpu" else "large") if call.name in names
    ]
    if not given:
        yield from known
        return
    if len(names) != 1:
        raise Usage(
            f"{' '.join(given)} would be arguments of {' and '.join(names)}; name one function: "
            f"tk bench {names[0]} {' '.join(given)}"
        )
    found = read(names[0], given, f"tk bench {names[0]}", {}, f"--device {device}" if device != "cuda" else "")
    torch.manual_seed(0)

    def made(x: Shape) -> Tensor:
        tensor = x.tensor(dtype, device)
        return torch.randn_like(tensor) if tensor.is_floating_point() else tensor

    named = tree_map_only(Shape, made, found.keywords)
    yield replace(known[0], args=tuple(map(made, found.shapes)), kwargs=named)


def _check(text: str) -> None:
    """Raises Usage for what is neither a function nor an argument of one."""
    try:
        argument(text)
    except Usage:
        hint = did_you_mean(text, inspect.functions(), 0.6)
        if hint and text.isidentifier():
            raise Usage(f"there is no function {text!r}; {hint}") from None
        raise


def measure(call: Call) -> tuple[object, ...]:
    """A row of the table. torch is not timed where it has no such function, or where it does not take the arguments."""
    tensors = [x for x in tree_leaves((call.args, call.kwargs)) if isinstance(x, Tensor)]
    result = call.function(*call.args, **call.kwargs)
    moved = sum(x.nbytes for x in (*tensors, *tree_leaves(result)) if isinstance(x, Tensor))
    is_cuda = any(x.is_cuda for x in (*tensors, *tree_leaves(result)) if isinstance(x, Tensor))
    ours = _us(call.function, call, moved, is_cuda)
    theirs = None
    if call.torchs is not None:
        try:
            theirs = _us(call.torchs, replace(call, kwargs=_of_torch(call.kwargs)), moved, is_cuda)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            print(f"torch does not take the call of tk.{call.name}: {str(error).splitlines()[0]}")
    sizes = " ".join("x".join(map(str, x.shape)) or "0-d" for x in tensors[:4])
    return call.name, sizes, ours, theirs, theirs and theirs / ours, f"{moved / ours * 1e-3:.0f}"


def _of_torch(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in ("config", "activation", "precision")}


def _us(function: Any, call: Call, moved: int, is_cuda: bool) -> float:
    """Median of one call, in microseconds. On a GPU each takes other copies of the arguments, from memory."""
    if not is_cuda:
        return host_us(lambda: function(*call.args, **call.kwargs))
    copies = timing.copies_to_rotate(moved, most=MOST_COPIES)
    sets = [tree_map_only(Tensor, torch.clone, (call.args, call.kwargs)) for _ in range(copies)]
    captured = timing.capture([lambda s=s: function(*s[0], **s[1]) for s in sets])  # type: ignore[misc]
    return timing.device_times({"call": captured}, warm_ms=2.0)["call"].us
