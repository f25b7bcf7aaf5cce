"""Triton's interpreter, in half the time: what it works out anew with every operation is kept, and what nobody looks at
is left out. Numbers are as before."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Sequence
from typing import Any

import triton.language as tl
from triton.language.core import block_type, constexpr
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

# --- The language is patched once, and stays so: nothing in such a process compiles ---

_PATCHED: set[Any] = set()  # modules of Triton's language that are as the interpreter wants them


@functools.cache
def _languages(fn: Any) -> frozenset[Any]:
    return frozenset(m for m in fn.__globals__.values() if inspect.ismodule(m) and m in (tl, tl.core))


def _patch_lang_once(fn: Any, theirs: Any = interpreter._patch_lang) -> Any:
    if not _languages(fn) <= _PATCHED:
        theirs(fn)
        _PATCHED.update(_languages(fn))
    return interpreter._LangPatchScope()  # which has nothing to restore


interpreter._patch_lang = _patch_lang_once

# --- Types: a few shapes, each made a hundred thousand times ---


@functools.cache
def _as_shape(sizes: tuple[int, ...], theirs: Any = block_type.__init__) -> tuple[Any, int, str]:
    """(shape, elements, the shape's text) of a type of blocks."""
    made = object.__new__(block_type)
    theirs(made, tl.int1, list(sizes))
    return made.shape, made.numel, str(made.shape)


def _block_type(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
    sizes = tuple(s.value if isinstance(s, constexpr) else s for s in shape)
    self.shape, self.numel, text = _as_shape(sizes)
    self.element_ty = element_ty
    self.name = f"<{text}, {element_ty}>"


@functools.cache
def _as_constants(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """(shape, elements) of a tensor."""
    return tl.tuple([constexpr(size) for size in sizes]), constexpr(math.prod(sizes))


def _tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _as_constants(tuple(type.shape.values) if type.is_block() else ())


def _broadcast(self: Any, lhs: Any, rhs: Any, theirs: Any = TritonSemantic.broadcast_impl_value) -> tuple[Any, Any]:
    """Nothing, where the shapes are equal."""
    a, b = lhs.type, rhs.type
    if a.is_block() and b.is_block() and a.shape.values == b.shape.values:
        return lhs, rhs
    return theirs(self, lhs, rhs)


_NUMPY: dict[str, Any] = {}


def _numpy_dtype(dtype: Any, theirs: Any = interpreter._get_np_dtype) -> Any:
    scalar = dtype.scalar
    if scalar.name not in _NUMPY:
        _NUMPY[scalar.name] = theirs(scalar)
    return _NUMPY[scalar.name]


block_type.__init__ = _block_type
tl.tensor.__init__ = _tensor
TritonSemantic.broadcast_impl_value = _broadcast
interpreter._get_np_dtype = _numpy_dtype

# --- Integers are looked at for overflow by an assertion, which runs with `debug` alone ---


def _look_for_overflow(
    self: Any, *operation: Any, theirs: Any = TritonSemantic.binary_op_sanitize_overflow_impl
) -> None:
    if self.builder.options.debug:
        theirs(self, *operation)


TritonSemantic.binary_op_sanitize_overflow_impl = _look_for_overflow
