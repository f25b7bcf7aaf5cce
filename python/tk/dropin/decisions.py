"""Calls that are decided once. What decides whether tk serves a call takes some microseconds of Python, as long as a
small call of torch's; so the answer is remembered, by all that it follows from."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping
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
    """How many calls were counted in this thread. served: since whoever looks at it began. ever: in all. new: that were
    decided for the first time."""

    served = 0
    ever = 0
    new = 0


_tally = _Tally()
_NONE: frozenset[object] = frozenset()


class _Here(threading.local):
    """What one thread does with a model. is_running: its forward, which no CUDA graph records. is_left: all of that as
    it is written. idle: the modules that run so. served: of those that asked, whether tk served anything."""

    is_running = False
    is_left = False
    idle = _NONE
    served: dict[object, bool] | None = None


class Root:
    """A used model as a whole. Where nothing was new in a forward, the next ones of the same kind of input go by it. If
    nothing was served, the model runs as it is written: its modules then ask nothing, but whether that is so. Else,
    without gradients, those modules run so that served nothing. For the kinds of input that are `slower`, as texts, all
    do: whatever tk gains in single calls, the model was measured to lose in between."""

    def __init__(self, slower: Iterable[str] = ()) -> None:
        self.here = _Here()
        self.was_left_in_training = False
        self.slower = frozenset(slower)

    def may_decide(self) -> bool:
        """Whether a kind of call that is new may be decided. What is checkpointed runs again in the backward pass, no
        more within the model's forward; if that ran as it is written, then so does this."""
        return not self.was_left_in_training or self.here.is_running or not torch.is_grad_enabled()

    def is_captured(self) -> bool:
        """Asked once for a whole forward: a graph that begins within it is left to torch."""
        return not self.here.is_running and is_captured()


def remembered(decide: Decide, state: State, root: Root | None = None) -> Callable[..., bool]:
    """Whether tk serves a call; decide is asked once for each kind of call. root: of the model that makes it."""
    kinds: dict[Any, tuple[bool, bool]] = {}

    def is_recorded() -> bool:
        return is_captured() if root is None else root.is_captured()

    def takes(*args: Any, **kwargs: Any) -> bool:
        if torch.compiler.is_compiling():
            return decide(True, args, kwargs)
        if torch._C._get_tracing_state():
            return False  # torch.jit.trace records every question about sizes, and the program is for one answer
        kind = kind_of(args, kwargs, state())
        if kind is None:
            count()  # nothing follows from it for a later call
            return decide(is_recorded(), args, kwargs)
        both = kinds.get(kind)
        if both is None:
            if root is not None and not root.may_decide():
                return False
            if len(kinds) >= _MOST_KINDS:
                kinds.clear()
            _tally.new += 1
            both = kinds[kind] = decide(False, args, kwargs), decide(True, args, kwargs)
        eagerly, captured = both
        is_served = eagerly if eagerly == captured or not is_recorded() else captured
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

    Only the first argument is looked at, and how many there are, which is quick. Without gradients that holds for some
    calls. With them the first call decides for good: what is checkpointed must decide alike when it runs again.
    """
    left: dict[Any, int] = {}  # by the input, how many more calls run as written
    left_for_good: dict[Any, bool] = {}  # with gradients
    here, site = root.here, object()

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return ours(self, *args, **kwargs)
        if here.is_left or site in here.idle or torch._C._get_tracing_state():
            return theirs(self, *args, **kwargs)
        x = args[0] if args else next(iter(kwargs.values()), None)
        if type(x) is not Tensor or x.is_nested:
            return ours(self, *args, **kwargs)
        kind: Any = (x.shape, x.dtype, len(args), torch._C._is_any_autocast_enabled())
        if has_gradient := torch.is_grad_enabled():
            kind = (*kind, x.requires_grad)
            is_left = left_for_good.get(kind, False) and not root.is_captured()
        elif is_left := left.get(kind, 0) > 0 and not root.is_captured():
            left[kind] -= 1
        if is_left:
            if here.served is not None:
                here.served.setdefault(site, False)
            return theirs(self, *args, **kwargs)
        outside, _tally.served = _tally.served, 0
        try:
            result = ours(self, *args, **kwargs)
            is_served = _tally.served > 0
            if len(left) + len(left_for_good) < _MOST_KINDS and not root.is_captured():
                if has_gradient:
                    left_for_good.setdefault(kind, not is_served)
                elif not is_served:
                    left[kind] = _ASKED_AGAIN
            if here.served is not None:
                here.served[site] = is_served or here.served.get(site, False)
        finally:
            _tally.served = outside
        return result

    return _as(ours, forward)


def asking(ours: Callable[..., Any], root: Root) -> Any:
    """The forward of a model that is ``root``: ours, in which all modules, or those that served nothing, run as they
    are written where nothing of the same kind of input was new the last time."""
    # By the kind of input, how many more calls run so (below 0: all), and which modules; None for all of them.
    left: dict[Any, tuple[int, frozenset[object] | None]] = {}
    here = root.here

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() or here.is_running or is_captured():
            return ours(self, *args, **kwargs)
        kind = input_kind(self.training, args, kwargs)
        known = left.get(kind)
        if known is None:
            known = _FOR_GOOD if root.slower and str(kind) in root.slower else 0, None
            if len(left) < _MOST_KINDS:
                left[kind] = known
            root.was_left_in_training |= bool(known[0]) and torch.is_grad_enabled()
        more, idle = known
        before = _tally.ever, _tally.new
        here.is_running = True
        if more:
            here.is_left, here.idle = idle is None, idle or _NONE
        else:
            here.served = {}
        try:
            result = ours(self, *args, **kwargs)
            if more:
                left[kind] = more - 1, idle
            elif kind in left and _tally.new == before[1]:
                left[kind] = _next(_tally.ever > before[0], here.served or {})
                root.was_left_in_training |= left[kind][0] != 0 and torch.is_grad_enabled()
        finally:
            here.is_running = here.is_left = False
            here.idle, here.served = _NONE, None
        return result

    return _as(ours, forward)


def _next(is_served: bool, served: Mapping[object, bool]) -> tuple[int, frozenset[object] | None]:
    """How the next forwards of a kind run, by what was served in this one."""
    if not is_served:
        return _ASKED_AGAIN, None
    if torch.is_grad_enabled():
        return 0, None  # what is checkpointed would not know when it runs again
    return _ASKED_AGAIN, frozenset(site for site, was_served in served.items() if not was_served)


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
