"""What the C++ kernel of a generated op makes of a call: the problem that the core sees, and the outputs. Tensors on
the CPU stand for some on a described GPU; nothing is launched.

The model below is the contract of docs/packs.md ("Generated ops") in a few lines of Python.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import tk
from tk import _library, capi, errors
from tk.aot.expr import tensors
from tk.aot.spec import Op, Output, Param
from tk.heuristics.problem import Described, describe

from .generated_ops import ADD_, ROWS, SCALED_GELU, SHIFTED, TWICE, meta

Load = Callable[[Op], Op]
CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


@contextmanager
def standing_for(device: int) -> Iterator[None]:
    _library.ops().tk_ops_capture_device(device)
    try:
        yield
    finally:
        _library.ops().tk_ops_capture_device(-1)


@pytest.fixture(scope="session")
def h100() -> int:
    return capi.describe_device(132, 90, 232448, 50 << 20)


class Kernel:
    """The CUDA kernel of an op, called with tensors on the CPU."""

    def __init__(self, name: str, device: int):
        self.op = getattr(torch.ops.tk, name).default
        self.device = device
        self.returned: Any = None

    def __call__(self, *args: Any) -> Described | None:
        def run() -> None:
            self.returned = self.op.redispatch(CUDA, *args)

        with standing_for(self.device):
            return describe(run)


def problem(kernel: Kernel, *args: Any) -> capi.Problem:
    described = kernel(*args)
    assert described is not None
    return described.problem


def layout(t: capi.Matrix | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    assert t is not None
    return t.sizes, t.strides


# --- What is passed on ---


def test_arguments_arrive_in_order(load: Load, h100: int) -> None:
    op = load(ROWS)
    x = torch.randn(5, 8)
    described = Kernel(op.name, h100)(x, 3, False, 1, 4)
    assert described is not None
    p = described.problem
    assert (p.op, p.ints, p.floats, p.mode, p.device, described.config) == (op.name, (3, 0), (), 4, h100, 1)
    assert [t.dtype for t in p.tensors if t] == [torch.float32, torch.float32, torch.int64]
    assert [layout(t) for t in p.tensors] == [((5, 8), (8, 1)), ((5,), (1,)), ((5,), (1,))]


def test_addresses_are_those_of_the_tensors(load: Load, h100: int) -> None:
    kernel = Kernel(load(SCALED_GELU).name, h100)
    x, bias = torch.randn(4, 9)[1:], torch.randn(11)[2:]
    p = problem(kernel, x, bias, 0.25)
    assert [t.address for t in p.tensors if t] == [x.data_ptr(), bias.data_ptr(), kernel.returned.data_ptr()]
    assert p.floats == (0.25,)


def test_a_tensor_that_is_left_out_is_absent(load: Load, h100: int) -> None:
    kernel = Kernel(load(SHIFTED).name, h100)
    x, bias = torch.randn(4, 9), torch.randn(9)
    p = problem(kernel, x, None, 0.25)
    assert p.tensors[1] is None and p.floats == (0.25,)
    assert [layout(t) for t in (p.tensors[0], p.tensors[2])] == [((1, 1, 4, 9), (0, 0, 9, 1))] * 2
    assert layout(problem(kernel, x, bias, 0.25).tensors[1]) == ((9,), (1,))
    assert problem(kernel, x).tensors[1] is None, "what was remembered of the other call is another's"


def test_where_dimensions_are_copied_it_stays_absent(load: Load, h100: int) -> None:
    kernel = Kernel(load(SHIFTED).name, h100)
    x = torch.randn(2, 3, 4, 5, 6, 16)[:, :2, :3, :4, :5, ::2]
    p = problem(kernel, x, None)
    assert p.tensors[1] is None and layout(p.tensors[0])[0] == (1, 1, 2 * 2 * 3 * 4 * 5, 8)


def test_what_is_refused_beside_a_tensor_that_is_left_out(load: Load, h100: int) -> None:
    kernel = Kernel(load(SHIFTED).name, h100)
    x = torch.randn(2, 9)
    with pytest.raises(ValueError, match=r"x of another dtype; x is float64\[2, 9\], bias is None$"):
        kernel(x.double(), None)
    with pytest.raises(ValueError, match=r"N of x and bias must be equal; x is float32\[2, 9\], bias is float32\[8\]$"):
        kernel(x, torch.randn(8))
    with pytest.raises(ValueError, match=r"bias must have 1 dimension, is \[1, 9\]"):
        kernel(x, torch.randn(1, 9))


def test_deterministic_mode_is_asked_for(load: Load, h100: int) -> None:
    kernel = Kernel(load(TWICE).name, h100)
    torch.use_deterministic_algorithms(True)
    try:
        assert problem(kernel, torch.randn(4)).mode == tk.config.MODE_BITS["deterministic"]
    finally:
        torch.use_deterministic_algorithms(False)


def test_results_of_what_is_only_described_are_zeros(h100: int) -> None:
    """Functions look the places up that a kernel would have written: tk.sort of integers, tk.max, tk.cummax."""
    for name, x in (("cummax", torch.arange(60).reshape(6, 10)), ("row_argmax", torch.randn(6, 10))):
        kernel = Kernel(name, h100)
        for _ in range(20):
            used = [torch.full((n,), 2**62) for n in (60, 6)]
            del used  # memory that is allocated next
            problem(kernel, *((x,) if name == "cummax" else (x, 1.0)))
            assert all((y == 0).all() for y in tree_leaves(kernel.returned))


def test_a_choice_is_explained(load: Load, h100: int, monkeypatch: pytest.MonkeyPatch) -> None:
    op = load(TWICE)
    kernel = Kernel(op.name, h100)
    monkeypatch.setattr(tk.inspect, "_wrapper", lambda name: lambda *args: kernel.op.redispatch(CUDA, *args))  # type: ignore[attr-defined]
    with standing_for(h100):
        flat = tk.explain(op.name, torch.randn(3, 4))
        sliced = tk.explain(op.name, torch.randn(3, 8)[:, ::2])
    assert flat.choice is not None and flat.choice.config_name == "flat"
    assert sliced.choice is not None and sliced.choice.config_name == "general"
    assert [c.failed_constraint for c in sliced.candidates] == [None, "x flat"]


# --- Outputs ---


def test_nothing_is_launched_for_no_elements(load: Load, h100: int) -> None:
    kernel = Kernel(load(TWICE).name, h100)
    assert kernel(torch.randn(3, 0)) is None
    assert kernel.returned.shape == (3, 0)
    assert Kernel(load(ADD_).name, h100)(torch.randn(0, 4), torch.randn(0, 4), 1.0) is None


def test_a_reduction_over_no_elements_is_launched(load: Load, h100: int) -> None:
    x, out = tensors("x", "out")
    total = Op("total", (x, out), (), (), {}, {}, (), (Output(x.dtype, (), ()),), (Param("x", "tensor", leading=True),),
               meta=meta({}))  # fmt: skip
    p = problem(Kernel(load(total).name, h100), torch.randn(3, 0, 2))
    assert [layout(t) for t in p.tensors] == [((1, 1, 0), (0, 0, 0)), ((), ())]


@pytest.mark.parametrize("seed", range(20))
def test_cpu_and_cuda_outputs_lie_alike(load: Load, h100: int, seed: int) -> None:
    """The two implementations, in Python and in C++, of one rule."""
    chosen = random.Random(seed)
    twice, gelu = Kernel(load(TWICE).name, h100), Kernel(load(SCALED_GELU).name, h100)
    for _ in range(20):
        x = random_view(chosen, [chosen.choice((0, 1, 2, 3, 3)) for _ in range(chosen.randrange(6))])
        twice(x)
        assert twice.returned.stride() == twice.op(x).stride(), (x.shape, x.stride())
        if x.dim():
            gelu(x, torch.randn(x.shape[-1]), 1.0)
            assert gelu.returned.stride() == gelu.op(x, torch.randn(x.shape[-1]), 1.0).stride()


# --- The canonical problem ---


def random_view(chosen: random.Random, sizes: Sequence[int]) -> Tensor:
    """Permuted, sliced, expanded, offset."""
    order = list(range(len(sizes)))
    if chosen.random() < 0.5:
        chosen.shuffle(order)
    wider = [sizes[d] * (2 if chosen.random() < 0.2 else 1) for d in order]
    base = torch.randn([*wider, 1] if chosen.random() < 0.9 else [*wider, 2])[..., 0]
    x = base.permute([order.index(d) for d in range(len(sizes))])
    for d, size in enumerate(sizes):
        x = x.narrow(d, 0, size) if chosen.random() < 0.5 else x.narrow(d, x.shape[d] - size, size)
        if size > 1 and chosen.random() < 0.15:
            x = x.narrow(d, 0, 1).expand(*(size if i == d else -1 for i in range(len(sizes))))
    return x


def contract(views: Sequence[tuple[Tensor, int]]) -> list[list[tuple[int, int]]] | None:
    """(size, stride) of each dimension of tensors with leading dimensions, `rank` of each declared; None where the
    leading ones do not join into three."""
    leading = [list(zip(x.shape, x.stride(), strict=True))[: x.dim() - rank] for x, rank in views]
    declared = [[(n, 0 if n == 1 else s) for n, s in zip(x.shape, x.stride(), strict=True)][x.dim() - rank :]
                for x, rank in views]  # fmt: skip
    columns = [column for column in zip(*leading, strict=True) if column[0][0] != 1]
    if any(column[0][0] == 0 for column in columns):
        return [[(1, 0), (1, 0), (0, 0), *rest] for rest in declared]
    in_order = [i for i in range(len(views)) if all(column[i][1] != 0 for column in columns)]
    if in_order:
        columns.sort(key=lambda column: -column[in_order[0]][1])
    joined: list[Any] = []
    for column in columns:
        if joined and all(outer[1] == n * s for outer, (n, s) in zip(joined[-1], column, strict=True)):
            joined[-1] = tuple((outer[0] * n, s) for outer, (n, s) in zip(joined[-1], column, strict=True))
        else:
            joined.append(column)
    if len(joined) > 3:
        return None
    padding = [(1, 0)] * (3 - len(joined))
    return [[*padding, *(column[i] for column in joined), *rest] for i, rest in enumerate(declared)]


def declare(ranks: Sequence[int], mutated: int | None = None) -> Op:
    """An op of tensors of these declared ranks, all with leading dimensions, and an output like the first."""
    names = [f"x{i}" for i in range(len(ranks))]
    ts = tensors(*names, "out")
    sizes = tuple(ts[0].size(3 + d) for d in range(ranks[0]))
    strides = tuple(1 if d == ranks[0] - 1 else ts[0].size(4) for d in range(ranks[0]))
    params = tuple(Param(n, "tensor", True, r, mutated=i == mutated)
                   for i, (n, r) in enumerate(zip(names, ranks, strict=True)))  # fmt: skip
    return Op(
        "random", ts, (), (), {}, {}, (), (Output(ts[0].dtype, sizes, strides, leading=0),), params, meta=meta({})
    )


@pytest.mark.parametrize("ranks", [(0,), (1,), (2,), (0, 0), (1, 2), (0, 1, 2)], ids=str)
def test_random_views_are_seen_as_the_contract_says(load: Load, h100: int, ranks: tuple[int, ...]) -> None:
    chosen = random.Random(str(ranks))
    kernel = Kernel(load(declare(ranks)).name, h100)
    seen = {"joined": 0, "copied": 0, "nothing": 0}
    for _ in range(300):
        front = [chosen.choice((1, 2, 3)) for _ in range(chosen.randrange(6))]
        if chosen.random() < 0.05:
            front.append(0)
        views = [random_view(chosen, [*front, *(chosen.choice((1, 2, 4)) for _ in range(rank))]) for rank in ranks]
        described = kernel(*views)
        if 0 in front:
            seen["nothing"] += 1
            assert described is None
            continue
        assert described is not None
        got = [list(zip(*layout(t), strict=True)) for t in described.problem.tensors]
        everything = [*zip(views, ranks, strict=True), (kernel.returned, ranks[0])]
        expected = contract(everything)
        if expected is not None:
            seen["joined"] += 1
            assert got == expected, [(x.shape, x.stride()) for x, _ in everything]
            assert [t.address for t in described.problem.tensors if t] == [x.data_ptr() for x, _ in everything]
        else:
            seen["copied"] += 1
            assert all(dims[:2] == [(1, 0), (1, 0)] for dims in got), "after copying, one leading dimension does"
            assert {dims[2][0] for dims in got} == {torch.Size(front).numel()}
    assert seen["joined"] > 100 and seen["nothing"] > 0
    assert seen["copied"] > 0 or len(ranks) == 1


def test_what_is_copied_holds_the_same_elements(load: Load, h100: int) -> None:
    """Four dimensions that do not join: the core sees a dense copy of x, read here while the call is described."""
    op = load(declare((0, 0)))
    x = torch.arange(2 * 3 * 2 * 3, dtype=torch.float32).view(2, 3, 2, 3)
    y = x.clone().permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    kernel = Kernel(op.name, h100)
    found: list[list[float]] = []

    def read(pointer: Any, _: Any) -> None:
        call = pointer.contents
        for t in (call.tensors[0], call.tensors[1]):
            assert list(t.sizes[:3]) == [1, 1, 36] and t.strides[2] == 1
            found.append(list((ctypes.c_float * 36).from_address(t.data)))

    callback = ctypes.CFUNCTYPE(None, ctypes.POINTER(capi._Call), ctypes.c_void_p)(read)
    with standing_for(h100):
        _library.ops().tk_ops_capture(callback, None)
        try:
            kernel.op.redispatch(CUDA, x, y)
        finally:
            _library.ops().tk_ops_capture(None, None)
    assert found[0] == x.flatten().tolist(), "x decides the order"
    assert found[1] == y.flatten().tolist(), "y is copied into it"


def test_what_is_written_is_copied_back(load: Load, h100: int) -> None:
    """The kernel, played by the callback, writes ones where it sees x1."""
    op = load(declare((0, 0), mutated=1))
    x = torch.zeros(2, 3, 2, 3)
    y = torch.zeros(3, 2, 3, 2).permute(3, 2, 1, 0)
    kernel = Kernel(op.name, h100)

    def write(pointer: Any, _: Any) -> None:
        for t in (pointer.contents.tensors[1], pointer.contents.tensors[2]):
            (ctypes.c_float * 36).from_address(t.data)[:] = list(map(float, range(36)))

    callback = ctypes.CFUNCTYPE(None, ctypes.POINTER(capi._Call), ctypes.c_void_p)(write)
    with standing_for(h100):
        _library.ops().tk_ops_capture(callback, None)
        try:
            out = kernel.op.redispatch(CUDA, x, y)
        finally:
            _library.ops().tk_ops_capture(None, None)
    assert y.flatten().tolist() == out.flatten().tolist() == list(range(36))


def test_twelve_dimensions(load: Load, h100: int) -> None:
    kernel = Kernel(load(TWICE).name, h100)
    p = problem(kernel, torch.randn((2,) * 12))
    assert [layout(t) for t in p.tensors] == [((1, 1, 4096), (0, 0, 1))] * 2
    assert kernel.returned.shape == (2,) * 12


# --- What is refused ---


def refused(match: str, kernel: Kernel, *args: Any) -> None:
    """In the same words as on the CPU."""
    for call in (kernel, kernel.op):
        with pytest.raises(ValueError, match=match):
            call(*args)


def test_wrong_arguments_are_refused(load: Load, h100: int) -> None:
    kernel = Kernel(load(SCALED_GELU).name, h100)
    x, bias = torch.randn(2, 8), torch.randn(8)
    name = kernel.op._schema.name.removeprefix("tk::")
    sizes = r"x is float32\[2, 8\], bias is float32\[7\]"
    refused(rf"^tk\.{name}: N of x and bias must be equal; {sizes}$", kernel, x, bias[:7], 1.0)
    refused("x and bias must have one dtype", kernel, x, bias.double(), 1.0)
    refused(r"x must have 1 or more dimension, is \[\]", kernel, x[0, 0], bias, 1.0)
    refused(r"bias must have 1 dimension, is \[2, 8\]", kernel, x, x, 1.0)
    refused("config is -2", kernel, x, bias, 1.0, -2)
    refused("mode is 16", kernel, x, bias, 1.0, -1, 16)
    refused("n must be 1 to the number of columns", Kernel(load(ROWS).name, h100), torch.randn(2, 4), 0)
    add = Kernel(load(ADD_).name, h100)
    refused(r"x and y must be the same, are \[2, 3\] and \[3\]", add, torch.randn(2, 3, 4), torch.randn(3, 4), 1.0)
    base = torch.randn(9)
    refused("elements of x, which is written, share memory", add, base[:4].expand(3, 4), torch.randn(3, 4), 1.0)
    refused("x, which is written, overlaps y in memory", add, base[:8], base[1:], 1.0)
    refused("x, which is written, overlaps y in memory", add, base, base, 1.0)


def test_a_gpu_without_kernels(load: Load) -> None:
    op = load(TWICE)
    turing = capi.describe_device(40, 75, 65536, 6 << 20)
    with pytest.raises(RuntimeError) as caught:
        Kernel(op.name, turing)(torch.randn(3))
    error = errors.typed(caught.value)
    assert isinstance(error, tk.UnsupportedError)
    assert "no kernels for this GPU (sm_75)" in str(error) and "sm_90" in str(error) and "tk build" in str(error)


def test_a_problem_without_a_kernel(load: Load, h100: int) -> None:
    """capi.choose does what the launch would."""
    op = load(replace(TWICE, name="choosy"))
    described = Kernel(op.name, h100)(torch.randn(3, 8)[:, ::2])
    assert described is not None
    with pytest.raises(ValueError, match="x flat"):
        capi.choose(described.problem, 0)


def test_tensors_on_the_cpu_are_not_launched(load: Load) -> None:
    op = load(TWICE)
    with pytest.raises(RuntimeError, match="its kernels are for CUDA tensors, these are on cpu"):
        getattr(torch.ops.tk, op.name).default.redispatch(CUDA, torch.randn(3))
