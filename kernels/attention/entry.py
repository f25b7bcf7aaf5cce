"""Prints the kernels of a pair of mods.

The shared functions take captured tensors as one tuple, and the mods as functions. A kernel that can be launched has
flat parameters; so for each pair a small module is printed, with the mods and an entry in front of each function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mods:
    """The printed functions of a pair: texts of `score_mod`, `mask_mod` and `score_grad`, "" where there is none, and
    import lines that they need.

    score_grad(score, b, h, q_idx, kv_idx, captures, grads, grad, keep, Q_AXIS, WITH_CAPTURES) -> gradient of
    score; grads are a scale and the buffers into which it adds those of captured tensors (gradients.py)."""

    score: str = ""
    mask: str = ""
    score_grad: str = ""
    imports: tuple[str, ...] = ()


_NO_SCORE = """@triton.jit
def score_mod(score, b, h, q_idx, kv_idx, captures):
    return score
"""
_NO_MASK = """@triton.jit
def mask_mod(b, h, q_idx, kv_idx, captures):
    return kv_idx >= 0
"""
_NO_GRAD = """@triton.jit
def score_grad(score, b, h, q_idx, kv_idx, captures, grads, grad, keep, Q_AXIS, WITH_CAPTURES):
    return grad
"""


_WHAT = "attention with a pair of mods, printed by tk.kernels.attention.entry"


def entry(name: str, body: Any, mods: Mods, capture_args: Sequence[str], grad_args: Sequence[str] = (),
          decorator: str = "triton.jit", what: str = _WHAT) -> str:  # fmt: skip
    """The module with the kernel `name` in front of `body`. capture_args: its flat parameters in place of `captures`;
    grad_args: in place of `grads`. what: it is, for who reads it; it is part of the module's name, and so of a cubin's
    key."""
    fixed = {
        "captures": _tuple(capture_args),
        "grads": _tuple(grad_args),
        "SCORE_MOD": "score_mod",
        "F": "score_mod",
        "MASK_MOD": "mask_mod",
        "SCORE_GRAD": "score_grad",
        "HAS_SCORE": str(bool(mods.score)),
        "HAS_MASK": str(bool(mods.mask)),
    }
    params, passed = [], []
    for p in body.arg_names:
        if p in fixed:
            passed.append(fixed[p])
            continue
        params.append(f"{p}: tl.constexpr" if p.isupper() and p not in _NUMBERS else p)
        passed.append(p)
    params += [*capture_args, *grad_args]
    gluon = ["from triton.experimental import gluon"] if decorator.startswith("gluon") else []
    head = "\n".join(["import triton", "import triton.language as tl", *gluon, *mods.imports, "",
                      f"from {body.fn.__module__} import {body.fn.__name__} as body"])  # fmt: skip
    texts = [mods.score or _NO_SCORE]
    if "MASK_MOD" in body.arg_names:
        texts.append(mods.mask or _NO_MASK)
    if "SCORE_GRAD" in body.arg_names:
        texts.append(mods.score_grad or _NO_GRAD)
    kernel = f"@{decorator}\ndef {name}({', '.join(params)}):\n    body({', '.join(passed)})\n"
    return f'"""{name}: {what}."""\n\n{head}\n\n\n' + "\n\n".join([*texts, kernel])


# Parameters in capitals that are no constants: sizes, as the field writes them.
_NUMBERS = ("B", "H", "M", "N", "K", "P", "D", "DV")


def _tuple(names: Sequence[str]) -> str:
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"
