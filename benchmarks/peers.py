"""Ways to have one small product computed: tk's, and what a user of torch has today.

Two products: a @ b, and gelu(a @ b + bias) for what torch.compile fuses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from benchmarks.products import ACTIVATIONS, Product, judge, run_torch

GELU = next(i for i, (name, _) in enumerate(ACTIVATIONS) if name == "gelu")

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Inputs:
    """a [m, k], b [k, n], both row-major, bias [n]."""

    product: Product
    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor

    @staticmethod
    def random(product: Product, device: str) -> Inputs:
        options = {"device": device, "dtype": product.dtype}
        shapes = ((product.m, product.k), (product.k, product.n), (product.n,))
        return Inputs(product, *(torch.randn(shape, **options) for shape in shapes))


@dataclass(frozen=True)
class Way:
    """title: how a program calls it. make: prepares a call of it, imports included. fused: gelu(a @ b + bias) rather
    than a @ b. first_figure: the name of the first call's figure."""

    name: str
    title: str
    make: Callable[[Inputs], Call]
    fused: bool = False
    first_figure: str = ""

    def __post_init__(self) -> None:
        if not self.first_figure:
            object.__setattr__(self, "first_figure", f"first_call_{self.name}")

    @property
    def is_tk(self) -> bool:
        return self.name.split("_")[0] in ("op", "tk")

    @property
    def host_figure(self) -> str:
        return f"host_{self.name}"


class WrongResult(Exception):
    """A way whose time is not worth knowing."""


def prepare(way: Way, inputs: Inputs) -> Call:
    """A call of it that has been called once. Raises what that raises, and WrongResult."""
    call = way.make(inputs)
    check(way, inputs, call())
    return call


def check(way: Way, inputs: Inputs, result: torch.Tensor) -> None:
    """Raises WrongResult where `result` is further from the truth than torch's own."""
    bias, activation = (inputs.bias, GELU) if way.fused else (None, 0)
    p = Product(**vars(inputs.product) | {"bias": way.fused, "activation": activation})
    verdict = judge(p, inputs.a, inputs.b, bias, result, run_torch(inputs.a, inputs.b, bias, activation))
    if not verdict.ok:
        raise WrongResult(f"{way.title}: {verdict}")


def _op(x: Inputs) -> Call:
    import tk  # noqa: F401  registers the op

    return partial(torch.ops.tk.mm, x.a, x.b)


def _tk(x: Inputs) -> Call:
    import tk

    return partial(tk.mm, x.a, x.b)


def _tk_fused(x: Inputs) -> Call:
    import tk

    return partial(tk.mm, x.a, x.b, x.bias, "gelu")


def _op_fused(x: Inputs) -> Call:
    import tk  # noqa: F401  registers the op

    return partial(torch.ops.tk.mm, x.a, x.b, x.bias, GELU)


def _torch(x: Inputs) -> Call:
    return partial(torch.mm, x.a, x.b)


def _torch_fused(x: Inputs) -> Call:
    return partial(run_torch, x.a, x.b, x.bias, GELU)


def _jit(x: Inputs) -> Call:
    from benchmarks import jit

    return partial(jit.matmul, x.a, x.b)


# The same function twice: what is compiled is kept with the code, and a second compilation would be one more to look
# through on every call of the first.
def _gelu_linear(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.gelu(torch.addmm(bias, a, b))


def _autotuned_gelu_linear(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.gelu(torch.addmm(bias, a, b))


def _compiled(x: Inputs) -> Call:
    return partial(torch.compile(_gelu_linear, fullgraph=True, dynamic=False), x.a, x.b, x.bias)


def _autotuned(x: Inputs) -> Call:
    mode = "max-autotune-no-cudagraphs"
    return partial(torch.compile(_autotuned_gelu_linear, fullgraph=True, dynamic=False, mode=mode), x.a, x.b, x.bias)


WAYS = (
    Way("op", "torch.ops.tk.mm", _op),
    Way("tk", "tk.mm", _tk, first_figure="first_call"),
    Way("torch_mm", "torch.mm", _torch),
    Way("jit", "a @triton.jit kernel", _jit),
    Way("op_fused", "torch.ops.tk.mm, bias and gelu", _op_fused, fused=True),
    Way("tk_fused", "tk.mm, bias and gelu", _tk_fused, fused=True),
    Way("torch_fused", "torch.addmm and gelu", _torch_fused, fused=True),
    Way("compile", "torch.compile, bias and gelu", _compiled, fused=True),
    Way("max_autotune", "max-autotune, bias and gelu", _autotuned, fused=True),
)
