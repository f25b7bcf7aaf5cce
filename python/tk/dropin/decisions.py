"""Calls that are decided once. What decides whether tk serves a call takes some microseconds of Python, as long as a
small call of torch's; so the answer is remembered, by all that it follows from."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from tk.dropin.target import dtype_name

__all__ = [
    "Decide", "Remember", "Root", "State", "asking", "autocast_dtype", "count", "input_kind", "is_captured", "kind_of",
    "remembered", "skipping",
]  # fmt: skip

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Decide = Callable[[bool, Args, Kwargs], bool]  # in a CUDA graph or not, of these arguments: whether tk serves them
State = Callable[[], Hashable]  # what else of the process they depend on; None for what is not remembered
Remember = Callable[[Decide], Callable[..., bool]]  # `remembered`, for the calls of one function

_MOST_KINDS = 4096  # of calls that are remembered
_ASKED_AGAIN, _FOR_GOOD = 64, -1  # calls of a module, or a model, after which it is looked at anew

_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, torch.Size})


class _Tally(threading.local):
    """How many calls were counted in this thread. served: since whoever looks at it began. ever: in all, with those
    that were decided for the first time."""

    served = 0
    ever = 0


_tally = _Tally()


class _Here(threading.local):
    """What one thread does with a model. is_running: its forward. is_left: that as it is written."""

    is_running = False
    is_left = False


class Root:
    """A used model as a whole. Where nothing of its forward was served, and nothing was new, the next forwards of the
    same kind of input run as they are written: its modules then ask nothing, but whether that is so. So do those of the
    kinds that are `slower`, as texts: whatever tk gains in single calls, the model was measured to lose in between."""

    def __init__(self, slower: Iterable[str] = ()) -> None:
        self.here = _Here()
        self.was_left_in_training = False
        self.slower = frozenset(slower)

    def may_decide(self) -> bool:
        """Whether a kind of call that is new may be decided. What is checkpointed runs again in the backward pass, no
        more within the model's forward; if that ran as it is written, then so does this."""
        return not self.was_left_in_training or self.here.is_running or not torch.is_grad_enabled()


def remembered(decide: Decide, state: State, root: Root | None = None) -> Callable[..., bool]:
    """Whether tk serves a call; decide is asked once for each kind of call. root: of the model that makes it."""
    kinds: dict[Any, tuple[bool, bool]] = {}

    def takes(*args: Any, **kwargs: Any) -> bool:
        if torch.compiler.is_compiling():
            return decide(True, args, kwargs)
        if torch._C._get_tracing_state():
            return False  # torch.jit.trace records every question about sizes, and the program is for one answer
        kind = kind_of(args, kwargs, state())
        if kind is None:
            count()  # nothing follows from it for a later call
            return decide(is_captured(), args, kwargs)
        both = kinds.get(kind)
        if both is None:
            if root is not None and not root.may_decide():
                return False
            if len(kinds) >= _MOST_KINDS:
                kinds.clear()
            _tally.ever += 1
            both = kinds[kind] = decide(False, args, kwargs), decide(True, args, kwargs)
        eagerly, captured = both
        is_served = eagerly if eagerly == captured or not is_captured() else captured
        if is_served:
            count()
        return is_served

    return takes


def count() -> None:
    """A call that tk served, or of which a later one may be decided otherwise."""
    _tally.served += 1
    _tally.ever += 1


def kind_of(args: Args, kwargs: Kwargs, state: Hashable) -> tuple[Any, ...] | None:
    """What a decision follows from. None for a call with other arguments than plain tensors and values, or where a mode
    or forward-mode differentiation looks on."""
    if state is None or forward_ad._current_level >= 0 or torch._C._len_torch_function_stack():
        return None
    given = args if not kwargs else (*args, *kwargs, *kwargs.values())
    found: list[Any] = [torch.is_grad_enabled(), autocast_dtype(given), state]
    for x in given:
        cls = type(x)
        if cls is Tensor or cls is Parameter:
            if x.layout is not torch.strided or x.is_nested:
                return None
            found += (x.shape, x.stride(), x.dtype, x.device, x.requires_grad)
        elif cls in _PLAIN:
            found.append(x)
        elif (cls is tuple or cls is list) and all(type(n) is int for n in x):
            found.append(tuple(x))
        else:
            return None
    return tuple(found)


def autocast_dtype(given: Iterable[Any]) -> str:
    """The dtype that autocast computes products of these arguments in; "" without."""
    if not torch._C._is_any_autocast_enabled():
        return ""
    device = next((x.device.type for x in given if isinstance(x, Tensor)), "cpu")
    device = "cpu" if device == "meta" else device  # which has no autocast of its own
    return dtype_name(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else ""


def is_captured() -> bool:
    """Whether a CUDA graph records the call."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def skipping(ours: Callable[..., Any], theirs: Callable[..., Any], root: Root) -> Any:
    """A method of one module: ``ours``, whose calls are decided, or ``theirs``, as it is written, where ours served
    none of the same input before, and no CUDA graph is recorded, or where the whole model runs as it is written.

    With gradients that holds for good, of exactly this input: what is checkpointed must decide alike when it runs
    again. Without, it holds for some calls, and the first argument alone is looked at, which is quicker.
    """
    left: dict[Any, int] = {}  # by the input, how many more calls run as written; below 0: all
    here = root.here

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return ours(self, *args, **kwargs)
        if here.is_left or torch._C._get_tracing_state():
            return theirs(self, *args, **kwargs)
        kind: Any
        if torch.is_grad_enabled():
            kind, first = kind_of(args, kwargs, self.training), _FOR_GOOD
        else:
            x = args[0] if args else next(iter(kwargs.values()), None)
            kind, first = None, _ASKED_AGAIN
            if type(x) is Tensor and not x.is_nested:
                kind = (x.shape, x.dtype, len(args), torch._C._is_any_autocast_enabled())
        if kind is None:
            return ours(self, *args, **kwargs)
        more = left.get(kind, 0)
        if more and not is_captured():
            left[kind] = more - 1
            return theirs(self, *args, **kwargs)
        outside, _tally.served = _tally.served, 0
        try:
            result = ours(self, *args, **kwargs)
            if not _tally.served and len(left) < _MOST_KINDS and not is_captured():
                left[kind] = first
        finally:
            _tally.served = outside
        return result

    return _as(ours, forward)


def asking(ours: Callable[..., Any], root: Root) -> Any:
    """The forward of a model that is ``root``: ours, in which its modules run as they are written where nothing of the
    same kind of input was served, or new, the last time."""
    left: dict[Any, int] = {}  # by the kind of input, how many more calls run as written; below 0: all
    here = root.here

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() or here.is_running or is_captured():
            return ours(self, *args, **kwargs)
        kind = input_kind(self.training, args, kwargs)
        more = left.get(kind)
        if more is None:
            more = _FOR_GOOD if root.slower and str(kind) in root.slower else 0
            if len(left) < _MOST_KINDS:
                left[kind] = more
            root.was_left_in_training |= bool(more) and torch.is_grad_enabled()
        before = _tally.ever
        here.is_running, here.is_left = True, more != 0
        try:
            result = ours(self, *args, **kwargs)
        finally:
            here.is_running = here.is_left = False
        if more:
            left[kind] = more - 1
        elif _tally.ever == before and kind in left:
            left[kind] = _ASKED_AGAIN
            root.was_left_in_training |= torch.is_grad_enabled()
        return result

    return _as(ours, forward)


def input_kind(is_training: bool, args: Args, kwargs: Kwargs) -> tuple[Any, ...]:
    """The kind of a model's input: of its first tensor the shape, and of all others the next powers of two, for a mask
    and a cache grow with every token."""
    kind: list[Any] = [is_training, torch.is_grad_enabled(), torch._C._is_any_autocast_enabled(), *kwargs]
    sizes: Callable[[torch.Size], Any] = tuple
    for x in (*args, *kwargs.values()):
        for t in x if type(x) is tuple or type(x) is list else (x,):
            cls = type(t)
            if (cls is Tensor or cls is Parameter) and not t.is_nested:
                kind += (t.dtype, t.requires_grad, sizes(t.shape))
                sizes = _powers_of_two
            else:  # other tensors may have no sizes, and a size may be a symbol, which has no hash
                kind.append(t if cls in _PLAIN and cls is not torch.Size else cls)
    return tuple(kind)


def _powers_of_two(shape: torch.Size) -> tuple[int, ...]:
    return tuple([int(n).bit_length() for n in shape])


def _as(ours: Callable[..., Any], forward: Any) -> Any:
    """Gives `forward` a code object of its own, by which torch.compile counts graphs, and `ours`' signature, which
    torch.export binds arguments by."""
    forward.__code__ = forward.__code__.replace(co_name=ours.__name__)
    return functools.update_wrapper(forward, ours)
