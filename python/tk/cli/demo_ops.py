"""A handful of generated ops for ``tk demo``: what lies between the projections of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import tk
from tk import timing
from tk._table import table
from tk.cli._judge import ErrorRatio, error_ratio, host_us

COLUMNS = 4096
GPU_ROWS = 8192  # 64 MB of bfloat16: more than L2 holds
MOST_COPIES = 8

Function = Callable[..., Tensor]

# name -> (shapes of the arguments, tk's, torch's). None stands for the rows.
OPS: Mapping[str, tuple[Sequence[tuple[int | None, ...]], Function, Function]] = {
    "rms_norm": (
        ((None, COLUMNS), (COLUMNS,)),
        lambda x, weight: tk.rms_norm(x, (x.shape[-1],), weight, 1e-5),
        lambda x, weight: F.rms_norm(x, (x.shape[-1],), weight, 1e-5),
    ),
    "add_rms_norm": (
        ((None, COLUMNS), (None, COLUMNS), (COLUMNS,)),
        lambda x, residual, weight: tk.add_rms_norm(x, residual, weight, 1e-5)[0],
        lambda x, residual, weight: F.rms_norm(x + residual, (x.shape[-1],), weight, 1e-5),
    ),
    "layer_norm": (
        ((None, COLUMNS), (COLUMNS,), (COLUMNS,)),
        lambda x, weight, bias: tk.layer_norm(x, (x.shape[-1],), weight, bias),
        lambda x, weight, bias: F.layer_norm(x, (x.shape[-1],), weight, bias),
    ),
    "softmax": (
        ((None, COLUMNS),),
        lambda x: tk.softmax(x, -1),
        lambda x: F.softmax(x, -1),
    ),
    "swiglu": (
        ((None, COLUMNS), (None, COLUMNS)),
        lambda gate, up: tk.swiglu(gate, up),
        lambda gate, up: F.silu(gate) * up,
    ),
    "gelu": (
        ((None, COLUMNS),),
        lambda x: tk.gelu(x),
        lambda x: F.gelu(x),
    ),
    "sum": (
        ((None, COLUMNS),),
        lambda x: tk.sum(x, 0),
        lambda x: x.sum(0),
    ),
}


@dataclass(frozen=True)
class Row:
    """Times in microseconds of one op. bytes: of arguments and result, each once."""

    name: str
    shape: tuple[int, ...]
    bytes: int
    tk_us: float
    torch_us: float
    error: ErrorRatio

    def cells(self) -> tuple[object, ...]:
        verdict = "ok" if self.error.is_good() else "WRONG"
        shape = "x".join(map(str, self.shape))
        speedup, gbps = self.torch_us / self.tk_us, f"{self.bytes / self.tk_us * 1e-3:.0f}"
        return (self.name, shape, self.tk_us, self.torch_us, speedup, gbps, self.error.mean, self.error.max, verdict)


HEADER = ("generated op", "shape", "tk us", "torch us", "speedup", "tk GB/s", "mean error", "max error", "verdict")


def report(rows: Sequence[Row]) -> str:
    return table(HEADER, (row.cells() for row in rows))


def measure(rows: int, device: torch.device) -> Iterator[Row]:
    """Every op on random bfloat16."""
    generator = torch.Generator(device).manual_seed(0)
    for name, (shapes, ours, torchs) in OPS.items():
        made = [[rows if n is None else n for n in shape] for shape in shapes]
        args = [torch.randn(shape, generator=generator, device=device).bfloat16() for shape in made]
        result = ours(*args)
        error = error_ratio(result, torchs(*args), torchs(*(x.double() for x in args)))
        tk_us, torch_us = _times(args, ours, torchs)
        yield Row(name, tuple(args[0].shape), sum(x.nbytes for x in (*args, result)), tk_us, torch_us, error)


def _times(args: Sequence[Tensor], ours: Function, torchs: Function) -> tuple[float, float]:
    """Side by side. On a GPU each call takes other copies of the arguments, from memory."""
    if not args[0].is_cuda:
        return host_us(lambda: ours(*args)), host_us(lambda: torchs(*args))
    count = timing.copies_to_rotate(sum(x.nbytes for x in args), most=MOST_COPIES)
    sets = [[x.clone() for x in args] for _ in range(count)]
    captures = {
        "tk": timing.capture([lambda a=a: ours(*a) for a in sets]),  # type: ignore[misc]
        "torch": timing.capture([lambda a=a: torchs(*a) for a in sets]),  # type: ignore[misc]
    }
    found = timing.device_times(captures, warm_ms=2.0)
    return found["tk"].us, found["torch"].us
