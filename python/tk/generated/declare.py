"""``tk.op``: a plain torch function declared as an op. Nothing is compiled, and Triton is not needed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tk import config
from tk.generated import refusals
from tk.generated.signature import Declaration, Signature, SignatureError, parse

__all__ = ["Declared", "op"]


@dataclass(frozen=True, eq=False)
class Declared:
    """A declared op. Calling it calls the plain function, eagerly; under tk.config.build_missing, on CUDA, the op.

    grad: its backward is built too."""

    fn: Callable[..., Any]
    signature: Signature
    grad: bool = False

    def __post_init__(self) -> None:
        # Not functools.update_wrapper, which assigns to the instance.
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            vars(self)[name] = getattr(self.fn, name)
        vars(self)["__wrapped__"] = self.fn

    @property
    def name(self) -> str:
        return self.fn.__name__

    def __reduce__(self) -> str:
        return self.fn.__qualname__  # pickled by its name, as a function is: the function's own leads here

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if config.builds_missing():
            from tk import missing  # it needs torch

            if (op := missing.op(self, args, kwargs)) is not None:
                return op(*args, **kwargs)
        return self.fn(*args, **kwargs)


def op(*functions: Any, grad: bool = False, **texts: Declaration) -> Callable[[Callable[..., Any]], Declared]:
    """Declare a function of tensors and numbers as an op.

        @tk.op(x="T[M, N]", bias="T[N]", alpha="float", T=("bf16", "fp16"))
        def scaled_gelu(x, bias, alpha):
            return torch.nn.functional.gelu(x * alpha + bias)

    Args:
        grad: build the backward as well.
        texts: a keyword for every parameter — ``dtype[sizes]``, ``float``, ``int`` or ``bool`` — and one for every
            dtype variable, which stands for one dtype or a tuple of them: ``"bf16"``, ``"bfloat16"`` or
            ``torch.bfloat16``. Sizes are letters (equal letters are equal sizes), numbers, and ``...`` in front. Every
            dimension that ``...`` stands for must be treated alike: the kernels see them as one. A number may have
            a default, which the op then has too.

    Returns:
        The function, still callable. ``tk build`` on its file compiles it.

    Raises:
        ValueError: the texts cannot be read, or do not fit the function's parameters.
    """

    if functions:
        refusals.refuse(SignatureError(_with_function(functions[0], texts)))
        # Such a declaration is never called: the build ends with the refusals.
        undeclared = functions[0] if inspect.isfunction(functions[0]) else lambda fn: fn
        return undeclared

    def declare(fn: Callable[..., Any]) -> Declared:
        try:
            if not isinstance(grad, bool):
                raise SignatureError(f"grad={grad!r}: it is True or False; a parameter of that name must be renamed")
            return Declared(fn, _signature(fn, texts), grad)
        except SignatureError as error:
            refusals.refuse(SignatureError(f"@tk.op on {_where(fn)}: {error}"))
            return fn  # type: ignore[return-value]  # never called: the build ends with the refusals

    return declare


def _with_function(fn: Any, texts: Mapping[str, Any]) -> str:
    """What to write, where tk.op is given the function itself: without its keywords, or beside them."""
    if not inspect.isfunction(fn):
        return f"tk.op takes keywords alone, such as @tk.op(x='T[M, N]', T=('bf16', 'fp16')); it was given {fn!r}"
    if texts:
        written = ", ".join(f"{name}={text!r}" for name, text in texts.items())
        return f"tk.op({fn.__name__}, {written}): the function comes behind: tk.op({written})({fn.__name__})"
    wanted = ", ".join(f"{name}='fp32[...]'" for name in inspect.signature(fn).parameters)
    return (
        f"@tk.op on {_where(fn)}: it needs a keyword for every parameter, which says what it is: @tk.op({wanted}); "
        "a tensor is 'dtype[sizes]', a number 'float', 'int' or 'bool'"
    )


def _signature(fn: Callable[..., Any], texts: Mapping[str, Declaration]) -> Signature:
    if not inspect.isfunction(fn):
        raise SignatureError(f"a {type(fn).__name__} is no plain function: write a def that calls it")
    if refusals.are_kept() and not fn.__name__.isidentifier():  # a build, whose op would be called so
        raise SignatureError("a lambda has no name that an op could have: write a def")
    refusals.check_once(fn.__module__, fn.__name__, _where(fn))
    params = inspect.signature(fn).parameters.values()
    for p in params:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            raise SignatureError(f"parameter {p} stands for any number of arguments; name each")
    defaults = {p.name: p.default for p in params if p.default is not p.empty}
    return parse(texts, [p.name for p in params], defaults)


def _where(fn: Any) -> str:
    code = getattr(fn, "__code__", None)
    name = getattr(fn, "__name__", repr(fn))
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name
