"""The device that a used model is on, and which tensors are taken there.

Everything is decided from what a tensor says of itself, so that torch.compile and torch.export trace through a stand-in
and keep the branch that is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tk.dropin.speed import Rule, Speed
from tk.generated.problem import memory_order
from tk.parallel import is_distributed

if TYPE_CHECKING:
    from tk.dropin.decisions import Root
    from tk.dropin.measured import Table
    from tk.dropin.sample import Recording

__all__ = ["DTYPES", "Target", "broadcasts", "dtype_name", "is_in_order", "is_plain", "needs_gradient"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Target:
    """The place of a model when it is used, and what is known of calls there.
    device_type: "cpu" or "cuda"; for the CPU tensors on meta are taken as well, where `tk.check` lists a model's calls.
    arch: "cpu", "sm_90", … only_faster: leave to torch what no measurement says is as fast; on the CPU, where tk
    computes with ATen, nothing was measured, and all is served. rules: what was measured on this architecture of one
    function, by the kind of call; None where all of its calls are served. measured: what was measured on this machine,
    call by call, or measures it now; it goes before the rules. is_beneath: the calls are those of ATen's ops, below
    autograd and modes, which then have no part in whether tk takes them. takes_distributed: whether the function takes
    DTensors, for which rules go by the sizes of the whole tensors: what is measured may differ from rank to rank, and
    then their collectives would.
    """

    device_type: str
    arch: str
    only_faster: bool
    rules: Mapping[str, Rule] | None = None
    measured: Table | Recording | None = None
    is_beneath: bool = False
    takes_distributed: bool = True
    root: Root | None = None

    def of(self, speed: Speed) -> Target:
        """The target for calls of the function that has this speed."""
        return replace(self, rules=None if self.serves_all else speed.rules.get(self.arch, {}))

    def of_all(self) -> Target:
        """The target for all calls of a function, whether fast or not."""
        return replace(self, rules=None)

    def measured_of(self, op: str) -> Table | Recording | None:
        """None where nothing was measured of an op."""
        return self.measured if self.measured is not None and self.measured.knows(op) else None

    def site(self, ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
        """`ours`, which decides for each call whether it does the same as `theirs`; while a sample runs, with both
        measured."""
        return ours if self.measured is None else self.measured.site(ours, theirs)

    @property
    def serves_all(self) -> bool:
        return self.arch == "cpu" or not self.only_faster

    @property
    def serves_training(self) -> bool:
        """Whether any call that needs a gradient is served; else a predicate need not look at such a call."""
        return self.rules is None or any(rule.training for rule in self.rules.values())

    def takes(self, first: Any, *others: Any, optional: tuple[Any, ...] = ()) -> bool:
        """Plain tensors of this device and of one dtype that there are kernels for, or DTensors of such; under autocast
        of several dtypes. Nothing where a mode wants to see torch's function."""
        is_whole = is_plain(first)
        if not is_whole and not (self.takes_distributed and is_distributed(first)):
            return False
        if torch._C._len_torch_function_stack() and not self.is_beneath and _is_intercepted():
            return False
        device, dtype = first.device, first.dtype
        if device.type != self.device_type and not (self.device_type == "cpu" and device.type == "meta"):
            return False
        if dtype not in DTYPES:
            return False
        for t in optional:
            if t is not None:
                others = (*others, t)
        for t in others:
            if not (is_plain(t) if is_whole else is_distributed(t)) or t.device != device or t.dtype not in DTYPES:
                return False
            if t.dtype is not dtype and not torch.is_autocast_enabled(self.device_type):
                return False
        return self.is_beneath or forward_ad._current_level < 0  # there are no formulas for forward mode

    def is_fast(self, kind: str, size: Any, *tensors: Tensor | None) -> bool:
        """Whether a rule says so for a call of this kind with these operands."""
        if self.rules is None:
            return True
        rule = self.rules.get(kind)
        return rule is not None and rule.holds(needs_gradient(*tensors), size)

    def product_dtype(self, x: Tensor) -> torch.dtype:
        """What a product is computed in."""
        if torch.is_autocast_enabled(self.device_type):
            return torch.get_autocast_dtype(self.device_type)
        return x.dtype


def _is_intercepted() -> bool:
    """Whether the user has a TorchFunctionMode on, which would see an op of tk where it waits for a function of torch.
    A default device is one as well, and changes nothing for tensors that there are."""
    if torch.compiler.is_exporting():
        return False  # which traces with modes of its own
    modes = (torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack()))
    return any(type(mode) is not DeviceContext for mode in modes)


def is_plain(t: Any) -> bool:
    """A strided tensor, and no subclass (DTensor, quantised, …) that would have to know tk's ops. A collective's result
    is one: any op waits for it and then has a plain tensor."""
    cls = type(t)
    if cls is not Tensor and cls is not Parameter:
        if not isinstance(t, Tensor):
            return False
        if is_traceable_wrapper_subclass(t) and cls.__name__ != "AsyncCollectiveTensor":
            return False
    return t.layout is torch.strided and not t.is_nested


def needs_gradient(*tensors: Any) -> bool:
    """What is no tensor, and for torch to refuse, needs none."""
    if torch.is_grad_enabled():
        for t in tensors:
            if getattr(t, "requires_grad", False):
                return True
    return False


def is_in_order(x: Tensor, row: int = 1) -> bool:
    """Whether the dimensions before a row's, its last `row`, lie in memory in their order. tk's results of rows follow
    that order; torch's are contiguous, and a model may count on it (``.view``)."""
    n = x.dim() - row
    return x.is_contiguous() or memory_order(x, n) == list(range(n))


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16", say."""
    return str(dtype).removeprefix("torch.")


def broadcasts(t: Tensor, shape: tuple[int, ...]) -> bool:
    if t.dim() > len(shape):
        return False
    return all(m == 1 or m == n for m, n in zip(reversed(t.shape), reversed(shape), strict=False))
