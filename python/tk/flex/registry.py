"""Mods that ``tk build`` is to compile."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tk import _dtypes, errors
from tk._arguments import flag
from tk._dtypes import DTYPES
from tk.flex.mods import MaskMod, ScoreMod
from tk.flex.tracing import trace
from tk.flex.tracing.canonical import Graph
from tk.flex.tracing.trace import Traced
from tk.generated import files, refusals

__all__ = ["Registered", "register", "registered"]

_DTYPES = {name: DTYPES[name] for name in ("bf16", "fp16", "fp32")}
MAX_HEAD = 512


@dataclass(frozen=True)
class Registered:
    """What :func:`register` announced. file: the one that it belongs to."""

    name: str
    traced: Traced
    head_dims: tuple[int | tuple[int, int], ...]
    dtypes: tuple[torch.dtype, ...]
    backward: bool
    decode: bool
    file: str


_registered: list[Registered] = []


def register(
    name: str,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    *,
    head_dims: Sequence[int | tuple[int, int]] = (64, 128),
    dtypes: Sequence[torch.dtype | str] = (torch.bfloat16,),
    backward: bool = True,
    decode: bool = True,
) -> None:
    """Announces a pair of mods, which ``tk build`` on this file then compiles. It compiles nothing itself.

    Args:
        name: in tables and messages.
        score_mod, mask_mod: as for tk.flex_attention; the mask_mod of its block_mask. What they capture here says only
            of which kind it is: numbers, and tensors of a dtype and rank. A tensor of no dimensions on the CPU is a
            number; device="meta" says one that is on the GPU.
        head_dims: sizes of a head, or pairs of those of query and value; at most 512.
        dtypes: of query, key and value: torch.bfloat16, "bfloat16" or "bf16".
        backward: gradients too. decode: kernels for few queries too.

    Raises:
        ValueError, TypeError: an argument that is none of these, another pair under this name, or the same pair
            a second time in a file, with other settings.
        tk.UnsupportedError: a mod that no kernel can have, or of which none has the gradient; with its line.
    """
    try:
        _check(name, head_dims, dtypes)
        flag("flex.register", "backward", backward)
        flag("flex.register", "decode", decode)
        traced = trace.pair(score_mod, mask_mod).traced
        for fn, kind, graph in ((score_mod, "score_mod", traced.score), (mask_mod, "mask_mod", traced.mask)):
            if graph is not None:
                check_ops(graph, backward, f"{trace.described(fn, kind)}: ")
    except (errors.UnsupportedError, TypeError, ValueError) as error:
        return refusals.refuse(error)
    for known in _registered:
        if known.name == name and known.traced.fingerprint != traced.fingerprint:
            taken = f"tk.flex.register: {name!r} is the name of another pair of mods, in {known.file}"
            return refusals.refuse(ValueError(taken))
    taken_dtypes = tuple(DTYPES[str(_dtypes.named(d))] for d in dtypes)
    made = Registered(name, traced, tuple(head_dims), taken_dtypes, backward, decode,
                      files.declaring())  # fmt: skip
    if made in _registered:
        return
    for known in _registered:
        if (known.file, known.traced.fingerprint) == (made.file, made.traced.fingerprint):
            same = f"{name!r} computes what {known.name!r} does" if name != known.name else f"{name!r} is there already"
            return refusals.refuse(ValueError(
                f"tk.flex.register: {same}, and equal mods are one pair: register it once, with all of its head_dims "
                "and dtypes, and with backward and decode where any call needs them"
            ))  # fmt: skip
    _registered.append(made)


def _check(name: str, head_dims: Sequence[int | tuple[int, int]], dtypes: Sequence[torch.dtype | str]) -> None:
    if not isinstance(name, str) or not name:
        raise TypeError(f"tk.flex.register: name must be a string, is {name!r}")
    for argument, value in (("head_dims", head_dims), ("dtypes", dtypes)):
        if not isinstance(value, list | tuple):
            raise TypeError(f"tk.flex.register: {argument} must be a list or a tuple, is {value!r}")
        if not value:
            raise ValueError(f"tk.flex.register: {argument} is empty: nothing would be compiled")
    for head in head_dims:
        sizes = head if isinstance(head, tuple) else (head, head)
        if len(sizes) != 2 or any(type(size) is not int or not 0 < size <= MAX_HEAD for size in sizes):
            raise ValueError(
                f"tk.flex.register: {head!r} in head_dims; a head's size is 1 to {MAX_HEAD}, or a tuple of query's and "
                "value's: head_dims=(64, (192, 128))"
            )
    for dtype in dtypes:
        if _dtypes.named(dtype) not in _DTYPES:
            raise ValueError(f"tk.flex.register: {dtype} in dtypes; there are {_dtypes.there_are(_DTYPES)}"
                             f"{_dtypes.hint(dtype, _DTYPES)}")  # fmt: skip


def registered(file: str | None = None) -> list[Registered]:
    """What was announced, by one file or all."""
    return [r for r in _registered if file is None or files.is_same(r.file, file)]


def check_ops(graph: Graph, backward: bool, where: str = "") -> None:
    """Raises tk.UnsupportedError for an op that no kernel can have. It takes the build extra to know."""
    _import_bisector()
    try:
        from tk.flex.codegen import lowering
    except ModuleNotFoundError:
        return
    try:
        lowering.check(graph, backward)
    except errors.UnsupportedError as error:
        raise errors.UnsupportedError(f"{where}{error}") from error


def _import_bisector() -> None:
    """torch's tracer imports this module, which makes the folder of inductor's cache as it is imported, where none is
    named: to declare mods makes no folders."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    if "torch._inductor.compiler_bisector" in sys.modules or name in os.environ:
        return
    os.environ[name] = tempfile.gettempdir()  # which is there
    try:
        importlib.import_module("torch._inductor.compiler_bisector")
    finally:
        del os.environ[name]
