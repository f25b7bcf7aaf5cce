"""Which line of the function asked for a node, and what is refused of it at once, with that line."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode

from tk import _log
from tk.codegen import unsupported
from tk.codegen.errors import TraceError, needs_a_number, where
from tk.codegen.tracing import constants, effects, reads
from tk.codegen.tracing.arguments import DTYPE_NAMES, Arguments
from tk.codegen.tracing.replaced import replacement

aten = torch.ops.aten

_TK = Path(__file__).parents[2]


class Lines(TorchFunctionMode):
    """Remembers, for every node that is traced, the line of the user's file that asked for it, and which nodes are
    constants to a gradient: what the function detaches, and what it computes where gradients are off."""

    def __init__(self, fn: Callable[..., Any], arguments: Arguments | None = None):
        super().__init__()
        self.fn, self.arguments = fn, arguments
        self.file = fn.__code__.co_filename
        self.line: int | None = None
        self.of: dict[str, int] = {}
        self.failed: Callable[..., Any] | None = None  # the function of torch's that raised
        self.constant: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.line = self._find() or self.line
        mode = get_proxy_mode()
        graph = mode.tracer.graph if mode else None
        last = graph._root.prev if graph is not None else None
        if self.arguments and (asked_of := reads.of_tensor(func, args, sys._getframe(1))) is not None:
            raise TraceError(f"{where(self.fn, self.line)}: it asks {asked_of}")
        if self.arguments and func in _ROW_BY_ROW:
            self._refuse_uncounted_rows(*args, **(kwargs or {}))
        if self.arguments and func in _SPLITS:
            self._refuse_uncounted_pieces(*args, **(kwargs or {}))
        if self.arguments and func in _NARROWS:
            self._ask_for_length(*args, **(kwargs or {}))
        if self.arguments and (constant := constants.made(func, args, kwargs or {})) is not None:
            result = constant
        else:
            kwargs = kwargs or {}
            captured: list[tuple[torch.Tensor, torch.Tensor]] = []
            if self.arguments:
                (args, kwargs), captured = constants.lifted((args, kwargs))
            asked, func = func, replacement(func, (*args, *kwargs.values()))
            try:
                with reads.unwatched(args, kwargs):
                    result = func(*args, **kwargs)
            except Exception:
                self.failed = self.failed or asked
                raise
            for x, stand_in in captured:
                if stand_in._version:
                    raise effects.changed(self.fn, x, self.line)
        self._refuse_dtypes(result)
        self._refuse_fixed_sizes()
        if graph is not None and last is not None:
            made = [node.name for node in nodes_after(graph, last)]
            if self.line is not None:
                self.of.update(dict.fromkeys(made, self.line))
            if func in _DETACHING or not torch.is_grad_enabled():
                self.constant.update(made)
        return result

    def _refuse_dtypes(self, result: Any) -> None:
        """What no kernel has, complex numbers above all."""
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor) and x.dtype not in DTYPE_NAMES:
                raise TraceError(
                    f"{where(self.fn, self.line)}: a tensor of {str(x.dtype).removeprefix('torch.')}, a dtype that no "
                    f"kernel has; there are {', '.join(str(d).removeprefix('torch.') for d in DTYPE_NAMES)}"
                )

    def _refuse_uncounted_rows(self, x: torch.Tensor, dim: int = 0) -> None:
        """Refuses at once: torch would make as many rows as the size is while it traces."""
        assert self.arguments is not None
        size = x.shape[dim] if -x.dim() <= dim < x.dim() else 1
        if isinstance(size, torch.SymInt):
            raise TraceError(needs_a_number(self.fn, self.line, size.node.expr.xreplace(self.arguments.symbols)))

    def _refuse_uncounted_pieces(self, x: torch.Tensor, length: Any, dim: int = 0, **_: Any) -> None:
        """Refuses at once: torch would make thousands of pieces. Pieces of no elements are as many as torch likes."""
        assert self.arguments is not None
        size = x.shape[dim] if -x.dim() <= dim < x.dim() else 1
        if isinstance(length, int) and isinstance(size, torch.SymInt):
            size = size.node.expr.xreplace(self.arguments.symbols)
            raise TraceError(
                f"{where(self.fn, self.line)}: split of a dimension of size {size} into pieces of {length}: how many "
                f"there are depends on {size}, and an op has as many results whatever the sizes. Declare the size as a "
                "number, or use chunk, which counts the pieces"
            )
        if isinstance(length, torch.SymInt):
            self.arguments.asked.append((length.node.expr, 1, "split into pieces of so many"))

    def _ask_for_length(self, x: torch.Tensor, dim: int, start: Any, length: Any) -> None:
        assert self.arguments is not None
        if isinstance(length, torch.SymInt):
            self.arguments.asked.append((length.node.expr, 0, "the length of a narrow"))

    def _refuse_fixed_sizes(self) -> None:
        """Refuses at once: a loop over as many rows as a size stands for would take minutes to trace."""
        if self.arguments is None:
            return
        for symbol, named in self.arguments.symbols.items():
            hint = self.arguments.hints.get(named, -1)
            if self.arguments.env.replacements.get(symbol) == hint:
                raise TraceError(needs_a_number(self.fn, self.line, named))

    def _find(self) -> int | None:
        frame: types.FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename == self.file:
                return frame.f_lineno
            frame = frame.f_back
        return None


_DETACHING = (torch.Tensor.detach, torch.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]
_SPLITS = (torch.split, torch.Tensor.split, torch.functional.split, torch.unsafe_split, torch.Tensor.unsafe_split)
_NARROWS = (torch.narrow, torch.Tensor.narrow, torch.narrow_copy, torch.Tensor.narrow_copy)
_ROW_BY_ROW = (torch.Tensor.__iter__, torch.Tensor.unbind, torch.unbind)


def nodes_after(graph: fx.Graph, last: fx.Node) -> Iterator[fx.Node]:
    node = last.next
    while node is not graph._root:
        yield node
        node = node.next


def tag_lines(graph: fx.GraphModule, lines: Lines) -> None:
    for node in graph.graph.nodes:
        if node.name in lines.of:
            node.meta["line"] = lines.of[node.name]


def refuse_items(recorded: fx.GraphModule, fn: Callable[..., Any]) -> None:
    """A kernel has numbers of the call alone."""
    for node in recorded.graph.nodes:
        if node.target is aten._local_scalar_dense.default:
            raise TraceError(
                f"{where(fn, node.meta.get('line'))}: a number made of a tensor's contents (item, float, int); leave "
                "it a tensor of no dimensions"
            )


class OpFailed(Exception):
    """An op of a graph could not be taken apart; the cause says why."""

    def __init__(self, node: fx.Node):
        super().__init__(str(node))
        self.node = node


@contextmanager
def explaining(
    fn: Callable[..., Any], lines: Lines, arguments: Arguments, own_error: Callable[[], Exception | None]
) -> Iterator[None]:
    """An exception of the function or of torch's, with the line of the function, and without what torch logs of it.
    own_error: what torch raises of the function outside of a trace. Where it raises nothing, what it says here is of
    its tracer, and no reader of the function could use it."""
    try:
        with _log.without_errors_of_fakes():
            yield
    except TraceError as error:
        if type(error) is not TraceError or lines.file in str(error):
            raise
        line = _line_of(error, lines.file) or lines.line
        raise TraceError(f"{where(fn, line)}: {_in_letters(str(error), arguments)}") from None
    except OpFailed as error:
        message = _explained(error.__cause__, arguments, own_error, error.node.target)
        raise TraceError(f"{where(fn, error.node.meta.get('line'))}: {message}") from error
    except Exception as error:
        line = _line_of(error, lines.file) or lines.line
        message = _explained(error, arguments, own_error, lines.failed)
        raise TraceError(f"{where(fn, line)}: {message}") from error


def _explained(
    error: BaseException | None, arguments: Arguments, own_error: Callable[[], Exception | None], func: Any
) -> str:
    """func: what was called, of torch's functions or of ATen's ops; None: none of them."""
    said = _first_line(error)
    if isinstance(error, GuardOnDataDependentSymNode) or "data-dependent" in said or "data dependent" in said:
        return (
            "control flow that depends on the contents of a tensor or on a number given at run time. Write it with "
            "torch.where, or make the number a bool parameter"
        )
    if "convert all Tensors to FakeTensors" in said:
        return "a tensor that is not among the function's parameters: an op reads what it is given; make it one"
    if any(words in said for words in _OF_DEVICES):
        return (
            "a tensor made on the default device beside the arguments, which may be on another: make it on theirs, as "
            "torch.arange(n, device=x.device) does"
        )
    if error is not None and _is_of_tk(error):
        return said
    if own := own_error():
        eagerly = _first_line(own)
        return _in_letters(said, arguments) if _is_alike(said, eagerly) else eagerly
    return unsupported.of_function(func, getattr(error, "func", None))


_OF_DEVICES = ("two different devices", "is not on the expected device", "to be on the same device")


def _is_of_tk(error: BaseException) -> bool:
    """Whether what stands for a function of torch's raised it, for the user to read."""
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    return tb is not None and Path(tb.tb_frame.f_code.co_filename).is_relative_to(_TK)


def _first_line(error: BaseException | None) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _in_letters(text: str, arguments: Arguments) -> str:
    for symbol, named in arguments.symbols.items():
        text = re.sub(rf"\b{symbol}\b", str(named), text)
    return text


def _is_alike(a: str, b: str) -> bool:
    """Whether two messages differ in sizes alone."""
    return _without_sizes(a) == _without_sizes(b)


def _without_sizes(text: str) -> str:
    return re.sub(r"\b([su]\d+|\d+)(\*([su]\d+|\d+))*\b", "#", text).rstrip(").")


def _line_of(error: BaseException, file: str) -> int | None:
    found, tb = None, error.__traceback__
    while tb is not None:
        if tb.tb_frame.f_code.co_filename == file:
            found = tb.tb_lineno
        tb = tb.tb_next
    return found
