"""The package's own generated ops and their backwards, against autograd in fp64."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Any

import host
import pytest
import torch

import tk.kernels.generated
from tk.codegen.family import Generated, generate
from tk.generated import Declared
from tk.generated.signature import DTYPES, TensorSpec

TOLERANCE = {"fp32": 3e-5, "bf16": 2e-2, "fp16": 4e-3}


@cache
def declared() -> dict[str, Declared]:
    modules = [m.name for m in pkgutil.iter_modules(tk.kernels.generated.__path__, "tk.kernels.generated.")]
    found = [x for m in modules for x in vars(importlib.import_module(m)).values() if isinstance(x, Declared)]
    return {d.name: d for d in found}


@cache
def generated(name: str) -> Generated:
    d = declared()[name]
    return generate(d.fn, d.signature, name, d.grad)


def arguments(name: str, dtype: str, leading: tuple[int, ...], n: int) -> dict[str, Any]:
    torch.manual_seed(n)
    sizes = dict.fromkeys(declared()[name].signature.letters, n)
    found: dict[str, Any] = {}
    for param, spec in declared()[name].signature.params.items():
        if isinstance(spec, TensorSpec):
            shape = [*(leading if spec.leading else ()), *(sizes[s] for s in spec.sizes)]
            is_index = spec.dtype == "i64"
            found[param] = torch.randint(0, n, shape) if is_index else torch.randn(shape).to(DTYPES[dtype])
        else:
            found[param] = {"float": 1e-5, "bool": n % 2 == 0, "int": 3}[spec.kind]
    return found


def agree(actual: list[torch.Tensor], expected: list[torch.Tensor], dtype: str, what: str) -> None:
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert a.shape == e.shape, f"{what}, result {i}"
        tolerance = TOLERANCE[dtype] * max(1.0, e.double().abs().max().item() if e.numel() else 1.0)
        torch.testing.assert_close(
            a.double(), e.double(), rtol=tolerance, atol=tolerance, msg=lambda m, i=i: f"{what}, result {i}: {m}"
        )


COARSE = ("quantize_fp8_rows",)  # the interpreter rounds to fp8 in its own way
EVEN_ONLY = ("rope",)
SHAPES = [((2, 3), 32), ((5,), 33), ((), 48)]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("leading", "n"), SHAPES)
@pytest.mark.parametrize("name", list(declared()))
def test_forward_and_backward(name: str, leading: tuple[int, ...], n: int, dtype: str) -> None:
    op, d = generated(name), declared()[name]
    args = arguments(name, dtype, leading, n)
    if name in EVEN_ONLY and n % 2:
        pytest.skip("needs an even size")
    is_float = {k: isinstance(v, torch.Tensor) and v.is_floating_point() for k, v in args.items()}
    wide = {k: v.double().requires_grad_() if is_float[k] else v for k, v in args.items()}
    results = d.fn(**wide)
    results = list(results) if isinstance(results, tuple) else [results]
    count = 0
    for variant, actual in host.run_all(op, *args.values()):
        agree(actual, [r.detach() for r in results], "bf16" if name in COARSE else dtype, f"{name} {variant}")
        count += 1
    assert count
    if not d.grad:
        return
    grads = [torch.randn(r.shape).to(DTYPES[dtype]) for r in results]
    sources = [v for k, v in wide.items() if is_float[k]]
    expected = torch.autograd.grad(results, sources, [g.to(r.dtype) for g, r in zip(grads, results, strict=True)],
                                   allow_unused=True, materialize_grads=True)  # fmt: skip
    assert op.backward is not None
    given = {**{f"grad_{i}": g for i, g in enumerate(grads)}, **args}
    passed = [given[p] for p in op.backward.signature.params]
    count = 0
    for variant, actual in host.run_all(op.backward, *passed):
        agree(actual, list(expected), dtype, f"{name}_backward {variant}")
        count += 1
    assert count
