"""The package's own generated ops and their backwards, against autograd in fp64."""

from __future__ import annotations

from functools import cache
from typing import Any

import backwards
import host
import pytest
import torch
from package_ops import WITHOUT_LISTS

from tk.codegen.family import Generated, generate
from tk.generated.signature import DTYPES, TensorSpec

# Numbers that 1e-5 or 3 would make nothing of.
NUMBERS = {"sign": -1.0, "mirror": -1.0, "low": 0.0, "high": float("inf"), "root": 0.5, "bessel": 1.25, "power": 0.5,
           "scale": 0.25, "wanted": 0}  # fmt: skip
TOLERANCE = {"fp32": 3e-5, "bf16": 2e-2, "fp16": 4e-3}


@cache
def generated(name: str) -> Generated:
    d = WITHOUT_LISTS[name]
    return generate(d.fn, d.signature, name, d.grad)


def arguments(name: str, dtype: str, leading: tuple[int, ...], n: int) -> dict[str, Any]:
    """Every size is n, or an even number where the function halves it, or less where there are many; an integer tensor
    holds indices below n."""
    torch.manual_seed(n)
    n += name == "rope_interleaved" and n % 2
    letters = WITHOUT_LISTS[name].signature.letters
    sizes = dict.fromkeys(letters, n) | (dict(zip(letters, (2, 3, 4), strict=False)) if len(letters) > 3 else {})
    found: dict[str, Any] = {}
    for param, spec in WITHOUT_LISTS[name].signature.params.items():
        if not isinstance(spec, TensorSpec):
            found[param] = NUMBERS.get(param, {"float": 1e-5, "bool": n % 2 == 0, "int": 3}[spec.kind])
            continue
        shape = [*(leading if spec.leading else ()), *(sizes.get(s, s) for s in spec.sizes)]
        of = DTYPES.get(spec.dtype) or DTYPES[{"T": dtype, "I": "i64"}[spec.dtype]]
        most = 2 if of == torch.bool else n
        found[param] = torch.randn(shape).to(of) if of.is_floating_point else torch.randint(0, most, shape).to(of)
    return found


def is_float(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def agree(actual: list[torch.Tensor], expected: list[torch.Tensor], dtype: str, what: str) -> None:
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert a.shape == e.shape, f"{what}, result {i}"
        if a.dtype.itemsize == 1:  # the interpreter rounds to fp8 wrongly where that carries into the exponent
            continue
        a, e = a.double(), e.double()
        tolerance = TOLERANCE[dtype] * max(1.0, e.abs().max().item() if e.numel() else 1.0)
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance, msg=lambda m, i=i: f"{what}, result {i}: {m}")


# Called as they are they draw from torch's generator: tests/ops/test_random_numbers.py has them.
RANDOM = ("dropout", "dropout_add", "fill_uniform", "fill_normal", "fill_integers")
SHAPES = [((2, 3), 33), ((), 48)]


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("name", "dtype", "leading", "n"),
    [(name, dtype, *shape)
     for name, d in WITHOUT_LISTS.items() if name not in RANDOM
     for dtype in ("fp32", "bf16") if dtype in d.signature.variables.get("T", ("fp32",))
     for shape in (SHAPES if dtype == "fp32" else SHAPES[:1])],
)  # fmt: skip
def test_forward_and_backward(name: str, dtype: str, leading: tuple[int, ...], n: int) -> None:
    op, d = generated(name), WITHOUT_LISTS[name]
    args = arguments(name, dtype, leading, n)
    wide = {k: v.double().requires_grad_() if is_float(v) else v for k, v in args.items()}
    results = d.fn(**wide)
    results = list(results) if isinstance(results, tuple) else [results]
    count = 0
    for variant, actual in host.run_all(op, *args.values()):
        agree(actual, [r.detach() for r in results], dtype, f"{name} {variant}")
        count += 1
    assert count
    if not d.grad:
        return
    grads = [torch.randn(r.shape).to(DTYPES[dtype]) for r in results]
    sources = [v for v in wide.values() if is_float(v)]
    pairs = [(r, g.double()) for r, g in zip(results, grads, strict=True) if r.requires_grad]
    gradients = torch.autograd.grad([r for r, _ in pairs], sources, [g for _, g in pairs], allow_unused=True)
    # What the function detaches has none, and the op zeros.
    expected = [torch.zeros_like(x) if g is None else g for x, g in zip(sources, gradients, strict=True)]
    assert op.backward is not None
    given = backwards.arguments(grads, [r.to(DTYPES[dtype]) for r in results]) | args
    passed = [given[p] for p in op.backward.signature.params]
    count = 0
    for variant, actual in host.run_all(op.backward, *passed):
        agree(actual, expected, dtype, f"{name}_backward {variant}")
        count += 1
    assert count
