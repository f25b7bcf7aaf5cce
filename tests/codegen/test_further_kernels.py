"""Searches, inline assembly, frexp and small fp8 results compile for a GPU; what they refuse."""

from __future__ import annotations

import pytest
import torch
from test_generated_compile import compile_all
from torch._higher_order_ops import inline_asm_elementwise

from tk import errors
from tk.codegen.errors import TraceError
from tk.codegen.family import generate
from tk.generated import interpret, op


def built(fn, **texts):
    return generate(fn, op(**texts)(fn).signature, "f")


def fma(x, y):
    found = inline_asm_elementwise(
        x, y, y, asm_str="fma.rn.f32 $0, $1, $2, $3;", constraints="=f,f,f,f", dtype=torch.float32
    )
    return found + 1


def packed(x):
    """Two 16-bit numbers in a register."""
    asm = "abs.bf16x2 $0, $1;"
    return inline_asm_elementwise(x, asm_str=asm, constraints="=r,r", dtype=torch.bfloat16, pack=2)


CASES = {
    "bucketize": (lambda x, b: torch.bucketize(x, b, right=True), {"x": "bf16[M, N]", "b": "bf16[K]"}),
    "rows": (lambda r, x: torch.searchsorted(r, x), {"r": "fp32[..., K]", "x": "fp32[..., N]"}),
    "sixteen": (lambda x, b: torch.bucketize(x, b), {"x": "i32[M, N]", "b": "i32[16]"}),
    "frexp": (lambda x: torch.frexp(x), {"x": "fp64[M, N]"}),
    "fma": (fma, {"x": "fp32[M, N]", "y": "fp32[N]"}),
    "packed": (packed, {"x": "bf16[M, N]"}),
    "fp8_rows": (lambda x: x.amax(-1).to(torch.float8_e4m3fn), {"x": "fp32[M, N]"}),
    "fp8_columns": (lambda x: x.amax(0).to(torch.float8_e5m2), {"x": "bf16[M, N]"}),
    "fp8_total": (lambda x: x.float().sum().to(torch.float8_e4m3fn), {"x": "fp8e4m3fn[M, N]"}),
}


@pytest.mark.parametrize("name", list(CASES))
def test_compiles(name: str) -> None:
    fn, texts = CASES[name]
    assert compile_all(built(fn, **texts)) >= 1


def test_assembly_has_operands_in_the_tensors_dtypes() -> None:
    (kernel,) = built(packed, x="bf16[M, N]").graphs[0].kernels
    (asm,) = (v for v in kernel.values if v.op == "asm")
    assert asm.dtype == "bf16" and kernel.value(asm.args[0]).dtype == "bf16"


def test_the_cpu_has_no_ptx() -> None:
    nodes = built(fma, x="fp32[M, N]", y="fp32[N]").graphs[0].trace.recorded
    with pytest.raises(errors.UnsupportedError, match="inline PTX, which the CPU cannot run"):
        interpret.evaluate(nodes, {"x": torch.ones(2, 3), "y": torch.ones(3)}, "fma")


def test_a_sorter_is_refused() -> None:
    with pytest.raises(TraceError, match="gather the sequence by it first"):
        built(lambda r, x, s: torch.searchsorted(r, x, sorter=s), r="fp32[M, K]", x="fp32[M, N]", s="i64[M, K]")
