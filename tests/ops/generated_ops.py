"""Generated ops that need no compiler: declared by hand as a generator would, with recorded graphs, and packed with an
image that is no cubin. What is tested is all that happens before a launch, and everything on the CPU."""

from __future__ import annotations

import hashlib
import itertools
import json
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tk.aot.assemble import Compiled, add_op
from tk.aot.cache import Artifact
from tk.aot.compile import Target
from tk.aot.expr import ceil_div, const, int_arg, tensors
from tk.aot.grid import enumerate_grid
from tk.aot.pack import PackWriter
from tk.aot.spec import Config, Family, Int, Kernel, Launch, Op, Output, Param, Plan, Pointer, require

FP32, FP64, I64, BF16 = 6, 7, 4, 15
IMAGE = b"not a cubin, but whole"
_numbers = itertools.count()


class Function:
    """What a launch needs to know of a device function."""

    def __init__(self, *arg_names: str):
        self.__name__ = "kernel"
        self.arg_names = arg_names


def fresh(op: Op) -> Op:
    """Under a name that nothing else has: what torch has registered stays."""
    return replace(op, name=f"{op.name}_{next(_numbers)}")


def write(path: Path, *ops: Op, arch: int = 90) -> Path:
    writer = PackWriter(arch, flags=0, compiler="triton 0.0, ptxas 0.0")
    for op in ops:
        grid = enumerate_grid(Family(op, (_kernel(op, arch),), lambda kernel, point: True), arch)
        compiled = [Compiled(v, (_artifact(),)) for v in grid.variants]
        add_op(writer, grid, compiled, Target(arch), {})
    path.write_bytes(writer.finish())
    return path


def _artifact() -> Artifact:
    return Artifact("entry", 128, 0, 1, 0, 1, 0, 1, (), 16, 0, 1.0, len(IMAGE), hashlib.sha256(IMAGE).hexdigest(),
                    zlib.compress(IMAGE, 9))  # fmt: skip


def _kernel(op: Op, arch: int) -> Kernel:
    """One that takes every tensor's address, in two variants: flat (all elements one after the other) and general."""

    def plan(point: Any) -> Plan:
        args: dict[str, Any] = {t.name: Pointer(t, "fp32", aligned=False) for t in op.tensors}
        args["n"] = Int(op.tensors[0].size(2))
        flat = require(op.tensors[0].stride(2) == 1, "x flat") if point.config.name == "flat" else None
        return Plan(
            constraints=(flat,) if flat else (),
            serves={},
            launches=(Launch(Function(*args), args, grid=(ceil_div(op.tensors[0].size(2), 128), 1, 1)),),
            cost=const(1000 if flat else 2000),
        )

    configs = (Config("flat", {}), Config("general", {}))
    return Kernel(f"{op.name}_kernel", op, {}, {arch: configs}, plan)


# --- Recorded graphs ---


def node(name: str, op: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"name": name, "op": op, "args": list(args), "kwargs": kwargs}


def ref(name: str) -> dict[str, str]:
    return {"ref": name}


def graph(inputs: Sequence[str], nodes: Sequence[dict[str, Any]], outputs: Sequence[str], **dtypes: str) -> Any:
    given = [node(name, "input", name) for name in inputs]
    return {"dtypes": dtypes, "nodes": [*given, *nodes, node("output", "output", [ref(o) for o in outputs])]}


def meta(signature: dict[str, Any], *graphs: Any, backward: Any = None, differentiable: bool = False) -> str:
    said = {"doc": "", "signature": signature, "graphs": list(graphs), "backward": backward}
    return json.dumps(said | {"differentiable": differentiable})


# --- The ops ---

X, OUT = tensors("x", "out")


def _is(t: Any, *dtypes: int) -> Any:
    return require(sum((t.dtype == d for d in dtypes[1:]), t.dtype == dtypes[0]) != 0, f"{t.name} of another dtype")


_twice = [node("y", "aten.mul.Scalar", ref("x"), 2)]
TWICE = Op(
    name="twice",
    tensors=(X, OUT),
    ints=(),
    floats=(),
    locals={"n": X.size(2)},
    selectors={},
    dims=(),
    outputs=(Output(X.dtype, (), (), leading=0),),
    params=(Param("x", "tensor", leading=True),),
    checks=(_is(X, FP32, FP64, BF16),),
    meta=meta({"x": "T[...]", "T": ["fp32", "fp64", "bf16"]},
              *(graph(["x"], _twice, ["y"], T=t) for t in ("fp32", "fp64", "bf16"))),
)  # fmt: skip

X, BIAS, OUT = tensors("x", "bias", "out")
_scaled = [
    node("s", "aten.mul.Tensor", ref("x"), ref("alpha")),
    node("b", "aten.add.Tensor", ref("s"), ref("bias")),
    node("y", "aten.gelu.default", ref("b"), approximate="tanh"),
]
SCALED_GELU = Op(
    name="scaled_gelu",
    tensors=(X, BIAS, OUT),
    ints=(),
    floats=("alpha",),
    locals={"N": X.size(3)},
    selectors={},
    dims=(),
    outputs=(Output(X.dtype, (X.size(3),), (1,), leading=0),),
    params=(
        Param("x", "tensor", leading=True, rank=1),
        Param("bias", "tensor", rank=1),
        Param("alpha", "float", default=1.5),
    ),
    checks=(
        _is(X, FP32, FP64),
        require(BIAS.dtype == X.dtype, "x and bias must have one dtype, T"),
        require(BIAS.size(0) == X.size(3), "N of x and bias must be equal"),
    ),
    meta=meta({"x": "T[..., N]", "bias": "T[N]", "alpha": "float", "T": ["fp32", "fp64"]},
              *(graph(["x", "bias", "alpha"], _scaled, ["y"], T=t) for t in ("fp32", "fp64"))),
)  # fmt: skip

# shifted(x[..., N], bias[N] or None, alpha) = alpha x + bias, as two graphs
_times = node("s", "aten.mul.Tensor", ref("x"), ref("alpha"))
SHIFTED = replace(
    SCALED_GELU,
    name="shifted",
    params=(
        Param("x", "tensor", leading=True, rank=1),
        Param("bias", "optional_tensor", rank=1),
        Param("alpha", "float", default=1.5),
    ),
    checks=(
        _is(X, FP32),
        require(~BIAS.present | (BIAS.dtype == X.dtype), "x and bias must have one dtype"),
        require(~BIAS.present | (BIAS.size(0) == X.size(3)), "N of x and bias must be equal"),
    ),
    meta=meta({"x": "fp32[..., N]", "bias": "fp32[N]", "alpha": "float"},
              graph(["x", "alpha"], [_times], ["s"]) | {"flags": {"bias": False}},
              graph(["x", "bias", "alpha"], [_times, node("b", "aten.add.Tensor", ref("s"), ref("bias"))], ["b"])
              | {"flags": {"bias": True}}),
)  # fmt: skip

# rows(x[M, N], n: int, keep: bool) -> (sums [M] fp32, argmax [M] i64), over the first n columns of x
X, SUMS, INDEX = tensors("x", "sums", "index")
_rows = [
    node("head", "aten.slice.Tensor", ref("x"), 1, 0, ref("n")),
    node("sums", "aten.sum.dim_IntList", ref("head"), [1], False, dtype={"dtype": "fp32"}),
    node("index", "aten.argmax.default", ref("head"), 1),
]
ROWS = Op(
    name="rows",
    tensors=(X, SUMS, INDEX),
    ints=("n", "keep"),
    floats=(),
    locals={"M": X.size(0)},
    selectors={},
    dims=("M",),
    outputs=(Output(FP32, (X.size(0),), (1,)), Output(I64, (X.size(0),), (1,))),
    params=(Param("x", "tensor", rank=2), Param("n", "int"), Param("keep", "bool", default=True)),
    checks=(
        _is(X, FP32),
        require((int_arg(0) >= 1) & (int_arg(0) <= X.size(1)), "n must be 1 to the number of columns"),
    ),
    meta=meta({"x": "fp32[M, N]", "n": "int", "keep": "bool"},
              graph(["x", "n", "keep"], _rows, ["sums", "index"])),
)  # fmt: skip

# add_(x[..., N] in place, y[..., N], alpha)
X, Y = tensors("x", "y")
ADD_ = Op(
    name="add_",
    tensors=(X, Y),
    ints=(),
    floats=("alpha",),
    locals={},
    selectors={},
    dims=(),
    params=(
        Param("x", "tensor", leading=True, rank=1, mutated=True),
        Param("y", "tensor", leading=True, rank=1),
        Param("alpha", "float"),
    ),
    checks=(_is(X, FP32), _is(Y, FP32), require(X.size(3) == Y.size(3), "N of x and y must be equal")),
    meta=meta({"x": "fp32[..., N]", "y": "fp32[..., N]", "alpha": "float"},
              graph(["x", "y", "alpha"],
                    [node("z", "aten.mul.Tensor", ref("y"), ref("alpha")),
                     node("w", "aten.add_.Tensor", ref("x"), ref("z"))],
                    [])),
)  # fmt: skip


def normalized(name: str) -> tuple[Op, Op]:
    """y = x * rstd with rstd = 1 / sqrt(mean(x²) + eps), which is saved; and the op of its gradient."""
    x, y, rstd = tensors("x", "y", "rstd")
    nodes = [
        node("square", "aten.mul.Tensor", ref("x"), ref("x")),
        node("mean", "aten.mean.dim", ref("square"), [-1], True),
        node("shifted", "aten.add.Tensor", ref("mean"), ref("eps")),
        node("r", "aten.rsqrt.default", ref("shifted")),
        node("y", "aten.mul.Tensor", ref("x"), ref("r")),
        node("rstd", "aten.squeeze.dim", ref("r"), -1),
    ]
    forward = Op(
        name=name,
        tensors=(x, y, rstd),
        ints=(),
        floats=("eps",),
        locals={},
        selectors={},
        dims=(),
        outputs=(Output(x.dtype, (x.size(3),), (1,), leading=0), Output(x.dtype, (), (), leading=0)),
        params=(Param("x", "tensor", leading=True, rank=1), Param("eps", "float", default=1e-6)),
        meta=meta({"x": "T[..., N]", "eps": "float", "T": ["fp32", "fp64"]},
                  *(graph(["x", "eps"], nodes, ["y", "rstd"], T=t) for t in ("fp32", "fp64")),
                  backward={"op": f"{name}_backward", "saved_inputs": [0], "saved_outputs": [1], "extra_outputs": 1,
                            "grads": [0]}, differentiable=True),
    )  # fmt: skip
    x, rstd, grad, dx = tensors("x", "result_1", "grad_0", "dx")
    nodes = [
        node("r", "aten.unsqueeze.default", ref("result_1"), -1),
        node("xhat", "aten.mul.Tensor", ref("x"), ref("r")),
        node("g", "aten.mul.Tensor", ref("grad_0"), ref("xhat")),
        node("mean", "aten.mean.dim", ref("g"), [-1], True),
        node("part", "aten.mul.Tensor", ref("xhat"), ref("mean")),
        node("rest", "aten.sub.Tensor", ref("grad_0"), ref("part")),
        node("dx", "aten.mul.Tensor", ref("rest"), ref("r")),
    ]
    backward = Op(
        name=f"{name}_backward",
        tensors=(x, rstd, grad, dx),
        ints=(),
        floats=(),
        locals={},
        selectors={},
        dims=(),
        outputs=(Output(x.dtype, (x.size(3),), (1,), leading=0),),
        params=(
            Param("x", "tensor", leading=True, rank=1),
            Param("result_1", "tensor", leading=True),
            Param("grad_0", "tensor", leading=True, rank=1),
        ),
        checks=(require(grad.size(3) == x.size(3), "N of x and grad must be equal"),),
        meta=meta({"x": "T[..., N]", "result_1": "T[...]", "grad_0": "T[..., N]", "T": ["fp32", "fp64"]},
                  *(graph(["x", "result_1", "grad_0"], nodes, ["dx"], T=t) for t in ("fp32", "fp64")),
                  differentiable=True),
    )  # fmt: skip
    return forward, backward
