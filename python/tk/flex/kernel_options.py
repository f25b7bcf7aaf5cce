"""torch's kernel_options: what they mean to kernels that are compiled already.

Permissions and promises are taken: ``PRESCALE_QK`` (scores may be less exact), ``ROWS_GUARANTEED_SAFE`` and
``BLOCKS_ARE_CONTIGUOUS`` (of the mask), ``WRITE_DQ`` and ``USE_TMA`` (how a kernel may work), and of ``BACKEND``
"AUTO" and "TRITON". The tile of the forward pass (``BLOCK_M``, ``BLOCK_N``, ``fwd_num_warps``, ``fwd_num_stages``) is
obeyed where a compiled config has it: the fastest one that does; where none has, the call is refused with those that
there are. What asks for another kernel otherwise is refused by name: tiles of the gradients, warps and stages of both
passes at once, other backends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from tk import errors

__all__ = ["check", "has"]

_Problem = tuple[type[Exception], str] | None


def _flag(value: Any) -> _Problem:
    return None if isinstance(value, bool) else (TypeError, "must be True or False")


def _unforced(value: Any) -> _Problem:
    return _flag(value) or (
        (errors.UnsupportedError, "kernels for few queries are chosen by their time; leave it out") if value else None
    )


def _integer(is_right: Callable[[int], bool], what: str) -> Callable[[Any], _Problem]:
    def problem(value: Any) -> _Problem:
        if isinstance(value, bool) or not isinstance(value, int):
            return TypeError, "must be an integer"
        return None if value > 0 and is_right(value) else (ValueError, f"must be {what}")

    return problem


_stages = _integer(lambda n: True, "1 or more")
_warps = _integer(lambda n: n & (n - 1) == 0, "a power of two")
_block = _integer(lambda n: n % 16 == 0, "a multiple of 16")  # Hopper's kernels have 192 rows, too


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
    "USE_TMA": _flag, "FORCE_USE_FLEX_ATTENTION": _unforced, "BACKEND": _backend,
    "num_stages": _stages, "num_warps": _warps, "OUTPUT_LOGSUMEXP": _internal, "OUTPUT_MAX": _internal,
    **dict.fromkeys(("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"), _block),
    **dict.fromkeys(("kpack", "matrix_instr_nonkdim", "waves_per_eu"), _of_amd),
}  # fmt: skip


# As a config's name has them: "hopper_128x64_s3", "decode_16x32_s4_w4_p3".
_OF_CONFIG = {
    "BLOCK_M": re.compile(r"(?:^|_)(\d+)x"), "BLOCK_N": re.compile(r"x(\d+)(?:_|$)"),
    "num_stages": re.compile(r"_s(\d+)(?:_|$)"), "num_warps": re.compile(r"_w(\d+)(?:_|$)"),
}  # fmt: skip
_TILES = ("num_stages", "num_warps", "BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2")


def check(options: Any) -> str:
    """Raises for what is no option, no value of one, or not obeyed: ValueError, TypeError, tk.UnsupportedError. Returns
    what :func:`has` is asked of a config of the forward pass; empty: nothing."""
    if not isinstance(options, Mapping):
        raise TypeError(f"tk.flex_attention: kernel_options must be a dict, is {type(options).__name__}")
    wanted = []
    for name, value in options.items():
        of_forward, plain = str(name).startswith("fwd_"), str(name).removeprefix("fwd_").removeprefix("bwd_")
        known = _OPTIONS.get(plain)
        if known is None:
            raise ValueError(
                f"tk.flex_attention: no kernel_options {name!r} is known; torch has {', '.join(sorted(_OPTIONS))}, "
                "also with fwd_ and bwd_ in front"
            )
        if (problem := known(value)) is not None:
            kind, what = problem
            raise kind(f"tk.flex_attention: kernel_options {name!r} is {value!r}: {what}")
        if plain not in _TILES:
            continue
        if (of_forward and plain in _OF_CONFIG) or name in ("BLOCK_M", "BLOCK_N"):
            wanted.append(f"{plain}={value}")
        else:
            raise errors.UnsupportedError(
                f"tk.flex_attention: kernel_options {name!r} is {value!r}: of the forward pass alone a config is found "
                "by BLOCK_M, BLOCK_N, fwd_num_warps and fwd_num_stages; gradients' are chosen by their time. Leave it "
                "out"
            )
    return " ".join(wanted)


def has(config: str, wanted: str) -> bool:
    """Whether a config, by its name, has all that :func:`check` returned."""
    for part in wanted.split():
        name, _, value = part.partition("=")
        found = _OF_CONFIG[name].search(config)
        if found is None or found[1] != value:
            return False
    return True
