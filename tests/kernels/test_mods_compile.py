"""What is printed of mods compiles for Hopper, in Triton and in Gluon, whose tensors have layouts.

Small kernels that only call the mods stand for attention's: each takes a fraction of a second."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are Triton's: install torch-tk[build]")

import triton
from mods_to_compile import MASKS, SCORES
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from tk.codegen import source
from tk.flex.codegen import printing
from tk.flex.tracing import trace

_BODY = """
    s = {zeros}
    rows = {rows}
    cols = {cols}
    x = score_mod(s + rows + cols, b, h, rows, cols, ({captures}))
    keep = mask_mod(b, h, rows, cols, ({captures})) & (cols >= 0) & (rows >= 0)
    g = score_grad(x, b, h, rows, cols, ({captures}), (), x, keep, 0, False)
    at = out + rows * 64 + cols
    tl.store(at, {where}(keep, x + g, 0.0))
"""
_LAYOUTS = """    L: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    ROW: tl.constexpr = gl.SliceLayout(1, L)
    COLUMN: tl.constexpr = gl.SliceLayout(0, L)
"""
_GLUON = dict(zeros="gl.zeros([64, 64], gl.float32, L)", rows="gl.arange(0, 64, ROW)[:, None]",
              cols="gl.arange(0, 64, COLUMN)[None, :]", where="gl.where")  # fmt: skip
_TRITON = dict(zeros="tl.zeros([64, 64], tl.float32)", rows="tl.arange(0, 64)[:, None]",
               cols="tl.arange(0, 64)[None, :]", where="tl.where")  # fmt: skip
_NO_SCORE = "@triton.jit\ndef score_mod(score, b, h, q_idx, kv_idx, captures):\n    return score\n"
_NO_MASK = "@triton.jit\ndef mask_mod(b, h, q_idx, kv_idx, captures):\n    return kv_idx >= 0\n"
_NO_GRAD = (
    "@triton.jit\ndef score_grad(score, b, h, q_idx, kv_idx, captures, grads, grad, keep, Q_AXIS: tl.constexpr, "
    "WITH_CAPTURES: tl.constexpr):\n    return grad\n"
)
_POINTERS = {"i1": "*i1", "u8": "*u8"}


def compile_mods(name: str, score_mod: Any, mask_mod: Any, gluon: bool) -> Any:
    traced = trace.pair(score_mod, mask_mod).traced
    mods, captures = printing.mods_of(traced, True), printing.captures_of(traced)
    arguments = [n for c in captures for n in printing.argument_names(c)]
    passed = "".join(f"{n}, " for n in arguments)
    body = (_LAYOUTS if gluon else "") + textwrap.dedent(_BODY).replace("\n", "\n    ").format(
        captures=passed, **(_GLUON if gluon else _TRITON)
    )
    head = "import triton\nimport triton.language as tl\nfrom triton.experimental import gluon\n"
    head += "from triton.experimental.gluon import language as gl\n" + "\n".join(mods.imports)
    texts = [mods.score or _NO_SCORE, mods.mask or _NO_MASK, mods.score_grad or _NO_GRAD]
    decorator = "@gluon.jit" if gluon else "@triton.jit"
    kernel = f"{decorator}\ndef {name}({', '.join(['out', 'b', 'h', *arguments])}):\n{body}\n"
    fn = source.function(name, "\n\n".join([head, *texts, kernel]))
    signature = {"out": "*fp32", "b": "i32", "h": "i32", **_types(captures)}
    made = (GluonASTSource if gluon else ASTSource)(fn, signature, {})
    return triton.compile(made, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def _types(captures: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    for c in captures:
        names = printing.argument_names(c)
        pointer = f"*{'i32' if c.has_two_widths else c.dtype}"
        first = pointer if c.kind == "tensor" else {"int": "i64", "float": "fp32"}[c.kind]
        found |= dict.fromkeys(names, "i64") | {names[0]: first}
    return found


# Triton takes what Gluon takes, and the interpreter's tests run it: a few stand for all.
IN_TRITON = ("where_of_constants", "table", "bools", "casts", "integer_power", "steps")


@pytest.mark.parametrize("name", SCORES)
def test_score_mods_compile_with_their_derivatives(name: str) -> None:
    assert compile_mods(f"score_{name}", SCORES[name], None, True).asm["cubin"]


@pytest.mark.parametrize("names", [list(MASKS)[i::3] for i in range(3)])
def test_mask_mods_compile(names: list[str]) -> None:
    """Several at once."""
    masks = [MASKS[name] for name in names]

    def any_of(b: Any, h: Any, q: Any, k: Any) -> Any:
        found = masks[0](b, h, q, k)
        for mask in masks[1:]:
            found = found ^ mask(b, h, q, k)
        return found

    assert compile_mods("mask", None, any_of, True).asm["cubin"]


@pytest.mark.parametrize("name", IN_TRITON)
def test_mods_compile_in_triton(name: str) -> None:
    assert compile_mods(f"score_{name}", SCORES[name], None, False).asm["cubin"]


def test_a_registered_mod_names_what_kernels_do_not_have() -> None:
    import tk

    with pytest.raises(tk.UnsupportedError, match=r"test_mods_compile.py:\d+: a mod uses prims.zeta"):
        tk.flex.register("zeta", score_mod=lambda s, b, h, q, k: torch.special.zeta(s, s))
    with pytest.raises(tk.UnsupportedError, match="has no gradient"):
        tk.flex.register("steps", score_mod=lambda s, b, h, q, k: torch.heaviside(s, s))
    tk.flex.register("steps", score_mod=lambda s, b, h, q, k: torch.heaviside(s, s), backward=False)
