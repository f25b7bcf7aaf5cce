"""A generated op from Triton source to a call: compiled for sm_90 by ``tk build``, loaded, run on the CPU, and chosen
for on a described GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import tk
from tk import capi

from .test_generated_launch import Kernel

pytest.importorskip("triton")

SOURCE = """
import json

import triton
import triton.language as tl

from tk.aot.expr import ceil_div, tensors
from tk.aot.spec import Config, Const, Family, Int, Kernel, Launch, Op, Output, Param, Plan, Pointer, require

X, OUT = tensors("x", "out")
NODES = [
    {"name": "x", "op": "input", "args": ["x"]},
    {"name": "factor", "op": "input", "args": ["factor"]},
    {"name": "y", "op": "aten.mul.Tensor", "args": [{"ref": "x"}, {"ref": "factor"}]},
    {"name": "output", "op": "output", "args": [{"ref": "y"}]},
]
OP = Op(
    name="built_scale",
    tensors=(X, OUT),
    ints=(),
    floats=("factor",),
    locals={"n": X.size(0) * X.size(1) * X.size(2)},
    selectors={},
    dims=("n",),
    outputs=(Output(X.dtype, (), (), leading=0),),
    params=(Param("x", "tensor", leading=True), Param("factor", "float", default=2.0)),
    checks=(require(X.dtype == 6, "x must be float32"),),
    meta=json.dumps({"signature": {"x": "fp32[...]", "factor": "float"},
                     "graphs": [{"dtypes": {}, "nodes": NODES}], "backward": None}),
)


@triton.jit
def flat(x, out, factor, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) * factor, mask=i < n)


@triton.jit
def strided(x, out, factor, n, n1, n2, x0, x1, x2, o0, o1, o2, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a, b, c = i // (n1 * n2), i // n2 % n1, i % n2
    y = tl.load(x + a * x0 + b * x1 + c * x2, mask=i < n) * factor
    tl.store(out + a * o0 + b * o1 + c * o2, y, mask=i < n)


def is_flat(t):
    return (t.size(0) == 1) & (t.size(1) == 1) & ((t.stride(2) == 1) | (t.size(2) == 1))


def plan_flat(point):
    args = dict(x=Pointer(X, "fp32"), out=Pointer(OUT, "fp32"), factor=OP.float("factor"), n=Int(OP.local("n")),
                BLOCK=Const(1024))
    return Plan(
        constraints=(
            require(is_flat(X) & is_flat(OUT), "x and out flat"),
            require((X.alignment >= 16) & (OUT.alignment >= 16), "x and out on 16 bytes"),
            require(OP.local("n") < 2**31, "n < 2**31"),
        ),
        serves={},
        launches=(Launch(flat, args, grid=(ceil_div(OP.local("n"), 1024), 1, 1)),),
        cost=1_000_000 + OP.local("n"),
    )


def plan_strided(point):
    sizes = {"n": OP.local("n"), "n1": X.size(1), "n2": X.size(2)}
    strides = {f"{name}{d}": t.stride(d) for name, t in (("x", X), ("o", OUT)) for d in range(3)}
    args = dict(x=Pointer(X, "fp32", aligned=False), out=Pointer(OUT, "fp32", aligned=False),
                factor=OP.float("factor"), BLOCK=Const(256))
    args |= {name: Int(value, "i64") for name, value in (sizes | strides).items()}
    return Plan(constraints=(), serves={}, general=True, cost=3_000_000 + 4 * OP.local("n"),
                launches=(Launch(strided, args, grid=(ceil_div(OP.local("n"), 256), 1, 1)),))


def kernel(name, plan):
    return Kernel(name, OP, {}, {90: (Config(name, {}),)}, plan)


FAMILY = Family(OP, (kernel("flat", plan_flat), kernel("strided", plan_strided)), lambda kernel, point: True)
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    folder = tmp_path_factory.mktemp("built")
    source, pack = folder / "built.py", folder / "built.tkpack"
    source.write_text(SOURCE)
    command = [sys.executable, "-m", "tk", "build", str(source), "-o", str(pack), "--arch", "90"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    tk.load_pack(pack)
    return Kernel("built_scale", capi.describe_device(132, 90, 232448, 50 << 20))


def chosen(kernel: Kernel, x: torch.Tensor) -> str:
    described = kernel(x, 3.0)
    assert described is not None
    return capi.choose(described.problem).config_name


def test_it_runs_on_the_cpu(kernel: Kernel) -> None:
    x = torch.randn(3, 4, 5).transpose(0, 2)
    assert torch.equal(torch.ops.tk.built_scale(x), x * 2)
    assert torch.equal(torch.ops.tk.built_scale(x, -1.5), x * -1.5)
    with pytest.raises(ValueError, match="x must be float32"):
        torch.ops.tk.built_scale(x.double())


def test_the_class_of_shapes_decides(kernel: Kernel) -> None:
    assert chosen(kernel, torch.randn(3, 4, 5)) == "flat"
    assert chosen(kernel, torch.randn(3, 4, 5).permute(2, 0, 1)) == "flat", "another order, but one after the other"
    assert chosen(kernel, torch.randn(7, 3, 4, 5)[::2]) == "strided"
    assert chosen(kernel, torch.randn(9)[1:]) == "strided", "not on 16 bytes"
    assert chosen(kernel, torch.randn(())) == "flat"


def test_any_number_of_dimensions(kernel: Kernel) -> None:
    """More than three leading dimensions that do not join are copied, and then flat."""
    x = torch.randn(4, 4, 4, 4, 4)[::2, ::2, ::2, ::2]
    assert chosen(kernel, x) == "flat"
    assert torch.equal(torch.ops.tk.built_scale(x, 3.0), x * 3)
