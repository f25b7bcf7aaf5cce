"""Whether results are as torch has them: against eager torch, and against the same in fp64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

# --- What torch says ---


def results_of(fn: Callable[..., Any], args: Sequence[Any]) -> list[Tensor]:
    found, _ = tree_flatten(fn(*(a.clone() if isinstance(a, Tensor) else a for a in args)))
    return [x for x in found if x is not None]


def widened(args: Sequence[Any]) -> list[Any]:
    return [_wide(a) for a in args]


aten = torch.ops.aten
# Autograd's formulas of clamp, maximum, amax and their like compare by these.
COMPARISONS = (aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge)


class _Widening(TorchDispatchMode):
    """Everything in fp64, also behind a conversion to fewer bits, which rounds once. Without it, what is made of such a
    conversion would be rounded at every step as eager torch does it, and no nearer to the exact result than that.

    rounds: whether a conversion rounds at all. One to the dtype that a value has already does nothing in eager torch,
    which rounded the value before, and nothing in a kernel, which did not; in fp64 it looks like any other.
    compared: the dtype to which values are rounded before they are compared, as a kernel does it; None leaves them."""

    def __init__(self, rounds: bool, compared: torch.dtype | None = None) -> None:
        super().__init__()
        self.rounds, self.compared = rounds, compared

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.compared is not None and func.overloadpacket in COMPARISONS:
            args = tree_map(self._rounded, args)
        found = func(*args, **(kwargs or {}))
        is_conversion = func is torch.ops.aten._to_copy.default and args[0].is_floating_point()
        if is_conversion and not self.rounds and found.is_floating_point():
            return args[0].double().clone()
        return tree_map(_wide, found)

    def _rounded(self, x: Any) -> Any:
        return x.to(self.compared).double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _wide(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def gradients_of(fn: Callable[..., Any], args: Sequence[Any], grads: Sequence[Tensor]) -> list[Tensor]:
    """Those of the floating-point arguments, as autograd has them."""
    own = [a.detach().clone().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    results = [r for r in tree_flatten(fn(*own))[0] if r is not None and r.is_floating_point()]
    sources = [a for a in own if isinstance(a, Tensor) and a.is_floating_point()]
    pairs = [(r, g.to(r.dtype)) for r, g in zip(results, grads, strict=True) if r.requires_grad]
    if not pairs:
        return [torch.zeros_like(s) for s in sources]
    found = torch.autograd.grad([r for r, _ in pairs], sources, [g for _, g in pairs], allow_unused=True)
    return [torch.zeros_like(s) if g is None else g for s, g in zip(sources, found, strict=True)]


class Expected:
    """like: eager torch's own. exact: what it is in fp64, by `compute` of widened arguments.

    wide: the arguments in fp64. narrowest: the least precise dtype of the arguments themselves."""

    def __init__(
        self,
        like: Sequence[Tensor],
        compute: Callable[[Sequence[Any]], Sequence[Tensor]],
        wide: Sequence[Any],
        narrowest: torch.dtype,
    ) -> None:
        self.like, self._compute, self._wide, self._narrowest = like, compute, wide, narrowest
        with _Widening(rounds=True):
            self.exact = compute(wide)

    @property
    def others(self) -> Iterator[Sequence[Tensor]]:
        """What is as right as `exact`, each computed when it is reached: few results are held against it."""
        yield self._unrounded
        yield self._compared

    @cached_property
    def _unrounded(self) -> Sequence[Tensor]:
        """As exact, where no conversion rounds."""
        with _Widening(rounds=False):
            return self._compute(self._wide)

    @cached_property
    def _compared(self) -> Sequence[Tensor]:
        """As exact, where what is compared is rounded. A value next to a bound has a gradient on one side of it only,
        and eager torch, which rounds at every step, may be on the other side."""
        with _Widening(rounds=True, compared=self._narrowest):
            return self._compute(self._wide)

    def settled(self, n: int, found: Tensor) -> Tensor:
        """A result without what nothing settles: where arguments that differ by a millionth of fp32's precision give
        another value in fp64, as the sign of a difference of equal numbers. There it is torch's own."""
        like, exact = self.like[n], self.exact[n].cpu()
        if found.shape != like.shape or not found.is_floating_point():
            return found
        generator = torch.Generator().manual_seed(0)
        moved = torch.zeros_like(exact, dtype=torch.bool)
        for _ in range(DISTURBED):
            with _Widening(rounds=False):
                other = self._compute([_disturbed(x, generator) for x in self._wide])[n].cpu()
            moved |= ~torch.isclose(other, exact, rtol=1e-3, atol=1e-6, equal_nan=True)
        return torch.where(moved, like.cpu(), found.cpu())


DISTURBED = 16  # times


def _disturbed(x: Any, generator: torch.Generator) -> Any:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return x * (1 + 1e-13 * torch.randn(x.shape, generator=generator, dtype=x.dtype))


def expected_results(fn: Callable[..., Any], args: Sequence[Any]) -> Expected:
    return Expected(results_of(fn, args), lambda wide: results_of(fn, wide), widened(args), narrowest(args))


def expected_gradients(fn: Callable[..., Any], args: Sequence[Any], grads: Sequence[Tensor]) -> Expected:
    of_wide = widened(grads)
    compute = lambda wide: gradients_of(fn, wide, of_wide)  # noqa: E731
    return Expected(gradients_of(fn, args, grads), compute, widened(args), narrowest(args))


def narrowest(args: Sequence[Any]) -> torch.dtype:
    """The least precise of the arguments' dtypes; fp64 where none is a floating-point tensor."""
    found = [a.dtype for a in args if isinstance(a, Tensor) and a.dtype in RELATIVE]
    return max(found, key=RELATIVE.__getitem__, default=torch.float64)


# --- Numbers ---

# In the order of their precision.
RELATIVE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


class _Dtypes(TorchDispatchMode):
    """Notes the dtypes of all that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note(result)
        return result

    def note(self, values: Any) -> None:
        self.seen |= {x.dtype for x in tree_flatten(values)[0] if isinstance(x, Tensor)}


def tolerance(fn: Callable[..., Any], args: Sequence[Any]) -> float:
    """Relative, of whatever is in the function: what is fp64 in the end may have been rounded to less on the way."""
    with _Dtypes() as dtypes:
        fn(*(a.clone() if isinstance(a, Tensor) else a for a in args))
    dtypes.note(args)
    return max((RELATIVE[d] for d in dtypes.seen if d in RELATIVE), default=0.0)


def difference(actual: Tensor, like: Tensor, exact: Tensor, relative: float) -> str:
    """What is wrong; nothing where `actual` is as near to the exact result as torch's own (`like`), or nearly."""
    if actual.shape != like.shape or actual.dtype != like.dtype:
        return f"{actual.dtype} {list(actual.shape)} instead of {like.dtype} {list(like.shape)}"
    actual, like, exact = (x.detach().cpu() for x in (actual, like, exact))
    if not like.dtype.is_floating_point:
        wrong = (actual != like) & (actual != exact)
        return f"{int(wrong.sum())} of {actual.numel()} differ" if bool(wrong.any()) else ""
    # What the dtype cannot hold is infinite in it, also where torch's own went from there to NaN.
    rounded = exact.to(like.dtype).double()
    actual, own, exact = actual.double(), like.double(), exact.double()
    away = torch.where(own.isfinite() & exact.isfinite(), (own - exact).abs(), 0.0)
    slack = 8 * (away.max() if away.numel() else 0.0)
    scale = exact[exact.isfinite()].abs().max() if bool(exact.isfinite().any()) else 1.0
    allowed = relative * (exact.abs() + 0.1 * scale + 0.1) + slack
    near = ((actual - exact).abs() <= allowed) | ((actual - own).abs() <= allowed)
    near |= (actual == exact) | (actual == own) | (actual == rounded) | (actual.isnan() & (exact.isnan() | own.isnan()))
    if bool(near.all()):
        return ""
    at = tuple((~near).nonzero()[0].tolist())
    return (
        f"{int((~near).sum())} of {actual.numel()} differ, first at {list(at)}: {actual[at]:.7g}, exact "
        f"{exact[at]:.7g}, torch {own[at]:.7g}"
    )


def compare(what: str, relative: float, actual: Sequence[Tensor], expected: Expected) -> Iterator[str]:
    """A line for each result that is wrong."""
    if len(actual) != len(expected.like):
        yield f"{what}: {len(actual)} results instead of {len(expected.like)}"
        return
    for n, (found, like, exact) in enumerate(zip(actual, expected.like, expected.exact, strict=True)):
        problem = difference(found, like, exact, relative)
        if not problem or not all(difference(found, like, other[n], relative) for other in expected.others):
            continue
        if problem := difference(expected.settled(n, found), like, exact, relative):
            yield f"{what}: result {n}: {problem}"
