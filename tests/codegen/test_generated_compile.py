"""What is printed compiles for a GPU: the interpreter takes more than the compiler does."""

from __future__ import annotations

import ops
import pointwise
import pytest

from tk.aot.compile import Target, compile_source, source_of
from tk.codegen import along
from tk.codegen.family import Generated, generate
from tk.codegen.tile import ALIGNED, LAYOUTS, ROWS, STRIDED
from tk.generated import op
from tk.generated.declare import Declared

SM90 = Target(90)
# Each op's kernel for one dtype of each kind; the whole list takes minutes.
NAMES = ("pow", "floor_divide", "remainder", "bitwise_left_shift", "signbit", "to_uint8", "to_fp8e4", "to_fp8e5",
         "through_fp8", "special", "lgamma", "round", "copysign", "pow_int", "div_floor",
         "bits_of_bf16", "logical_not", "nextafter_bits", "scalar_pow", "clamp")  # fmt: skip
QUICK = [c for c in pointwise.CASES if c.name in NAMES]


def compile_all(generated: Generated, layouts=LAYOUTS, first_setting: bool = True) -> int:
    count = 0
    for graph in generated.graphs:
        for layout in layouts:
            for way in ("whole", "split"):
                plans = (generated.plan(graph, layout, s, way) for s in generated.settings(way))
                plans = [p for p in plans if p is not None]
                for plan in plans[:1] if first_setting else plans:
                    for launch in {(one.fn, one.num_warps): one for one in plan.launches}.values():
                        artifact = compile_source(source_of(plan, launch, SM90))
                        assert artifact.spill_bytes <= launch.max_spill_bytes or not layout.merged
                        count += 1
    return count


@pytest.mark.drawn
@pytest.mark.parametrize("name", [n for n, x in vars(ops).items() if isinstance(x, Declared)])
def test_ops(name: str) -> None:
    declared = getattr(ops, name)
    generated = generate(declared.fn, declared.signature, name)
    only = Generated(name, generated.signature, generated.graphs[:1])
    # A sorting network takes the compiler ten seconds: in the layout that serves every call.
    is_sorted = any(along.sorts(kernel) for kernel in only.graphs[0].kernels)
    assert compile_all(only, [STRIDED]) >= 1 if is_sorted else compile_all(only) >= 3


@pytest.mark.parametrize("case", QUICK, ids=lambda c: c.name)
def test_pointwise(case: pointwise.Case) -> None:
    names = case.fn.__code__.co_varnames[: case.arity]
    for dtype in {case.dtypes[0], case.dtypes[-1]}:
        declared = op(**dict.fromkeys(names, f"{dtype}[32]"))(case.fn)
        assert compile_all(generate(case.fn, declared.signature, "f"), [ALIGNED]) == 1


@pytest.mark.drawn
@pytest.mark.parametrize("name", ["running_extremes", "running_logsumexp", "backward_cumsum"])
def test_every_setting_of_a_scan(name: str) -> None:
    """A loop with a carry, and programs that look back, too."""
    declared = getattr(ops, name)
    generated = generate(declared.fn, declared.signature, name)
    assert any(s.spread for s in generated.settings()) == (name != "running_extremes")
    only = Generated(name, generated.signature, generated.graphs[:1])
    assert compile_all(only, [ROWS], first_setting=False) >= 3


def test_every_setting_of_a_norm() -> None:
    generated = generate(ops.add_rms_norm.fn, ops.add_rms_norm.signature, "add_rms_norm")
    only = Generated("add_rms_norm", ops.add_rms_norm.signature, generated.graphs[:1])
    assert compile_all(only, [ALIGNED, ROWS], first_setting=False) >= 16
