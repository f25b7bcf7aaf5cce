"""torch's kernel_options: what they mean to kernels that are compiled already.

Permissions and promises are taken: ``PRESCALE_QK`` (scores may be less exact), ``ROWS_GUARANTEED_SAFE`` and
``BLOCKS_ARE_CONTIGUOUS`` (of the mask), ``WRITE_DQ`` and ``USE_TMA`` (how a kernel may work), and of ``BACKEND``
"AUTO" and "TRITON". What asks for another kernel than the one that is chosen is refused by name: sizes of tiles,
numbers of warps and stages, other backends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tk import errors

__all__ = ["check"]

_Problem = tuple[type[Exception], str] | None


def _flag(value: Any) -> _Problem:
    return None if isinstance(value, bool) else (TypeError, "must be True or False")


def _unforced(value: Any) -> _Problem:
    return _flag(value) or (
        (errors.UnsupportedError, "kernels for few queries are chosen by their time; leave it out") if value else None
    )


def _size(value: Any) -> _Problem:
    if isinstance(value, bool) or not isinstance(value, int):
        return TypeError, "must be an integer"
    if value <= 0 or value & (value - 1):
        return ValueError, "must be a power of two"
    return errors.UnsupportedError, "kernels are compiled with sizes of their own; leave it out"


def _stages(value: Any) -> _Problem:
    if isinstance(value, bool) or not isinstance(value, int):
        return TypeError, "must be an integer"
    if value < 1:
        return ValueError, "must be 1 or more"
    return errors.UnsupportedError, "kernels are compiled with stages of their own; leave it out"


def _of_amd(value: Any) -> _Problem:
    return errors.UnsupportedError, "it is of AMD's GPUs; leave it out"


def _internal(value: Any) -> _Problem:
    return ValueError, "torch sets it itself; ask by return_lse or return_aux"


_BACKENDS = ("AUTO", "TRITON", "FLASH", "TRITON_DECODE")


def _backend(value: Any) -> _Problem:
    if value not in _BACKENDS:
        return ValueError, f"must be one of {', '.join(_BACKENDS)}"
    if value in ("AUTO", "TRITON"):
        return None
    return errors.UnsupportedError, "takes 'AUTO' and 'TRITON'; kernels for few queries are chosen by their time"


_OPTIONS: Mapping[str, Callable[[Any], _Problem]] = {
    "PRESCALE_QK": _flag, "ROWS_GUARANTEED_SAFE": _flag, "BLOCKS_ARE_CONTIGUOUS": _flag, "WRITE_DQ": _flag,
    "USE_TMA": _flag, "FORCE_USE_FLEX_ATTENTION": _unforced, "BACKEND": _backend, "num_stages": _stages,
    "OUTPUT_LOGSUMEXP": _internal, "OUTPUT_MAX": _internal,
    **dict.fromkeys(("num_warps", "BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"), _size),
    **dict.fromkeys(("kpack", "matrix_instr_nonkdim", "waves_per_eu"), _of_amd),
}  # fmt: skip


def check(options: Any) -> None:
    """Raises for what is no option, no value of one, or not obeyed: ValueError, TypeError, tk.UnsupportedError."""
    if not isinstance(options, Mapping):
        raise TypeError(f"tk.flex_attention: kernel_options must be a dict, is {type(options).__name__}")
    for name, value in options.items():
        known = _OPTIONS.get(str(name).removeprefix("fwd_").removeprefix("bwd_"))
        if known is None:
            raise ValueError(
                f"tk.flex_attention: no kernel_options {name!r} is known; torch has {', '.join(sorted(_OPTIONS))}, "
                "also with fwd_ and bwd_ in front"
            )
        if (problem := known(value)) is not None:
            kind, what = problem
            raise kind(f"tk.flex_attention: kernel_options {name!r} is {value!r}: {what}")
