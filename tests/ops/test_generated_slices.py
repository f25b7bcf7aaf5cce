"""Ops whose results have as many columns as slices leave: on the CPU, for torch.compile, and as fake tensors. The sizes
are Min, Max and quotients of those of the call."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import tk
from tk.codegen.family import generate
from tk.codegen.tracing.slices import size_symbol
from tk.generated import op

from . import generated_ops

CUT: dict[str, Callable[[Tensor], Tensor]] = {
    "two to five": lambda x: x[:, 2:5] + 1,
    "the last three": lambda x: x[:, -3:] * 2,
    "the last two by size": lambda x: x[:, x.shape[1] - 2 :] * 2,
    "before the last by size": lambda x: x[:, x.shape[1] - 4 : x.shape[1] - 1] * 2,
    "the last half": lambda x: x[:, -(x.shape[1] // 2) :] * 2,
    "by the other size": lambda x: x[:, x.shape[0] - 3 : x.shape[0] + 1] + 1,
    "in steps": lambda x: x[:, x.shape[1] // 2 - 1 :: 2] + 1,
    "rows of four": lambda x: x.reshape(-1, 4) * 2,
}
_numbers = itertools.count()


@pytest.fixture(scope="module", params=CUT)
def loaded(request: Any, tmp_path_factory: Any) -> tuple[Callable[[Tensor], Tensor], Callable[..., Tensor]]:
    fn = CUT[request.param]

    def whole(x):
        return fn(x)

    name = f"cut{next(_numbers)}"
    made = generate(whole, op(x="fp32[M, N]")(whole).signature, name)
    path: Path = tmp_path_factory.mktemp("packs") / f"{name}.tkpack"
    tk.load_pack(generated_ops.write(path, replace(made.op, selectors={})))
    return fn, getattr(torch.ops.tk, name)


def shapes(fn: Callable[[Tensor], Tensor]) -> list[tuple[int, int]]:
    found = []
    for shape in itertools.product(range(5), (0, 1, 2, 3, 4, 8)):
        try:
            fn(torch.empty(shape))
            found.append(shape)
        except RuntimeError:
            pass
    return found


def test_at_every_size(loaded: Any) -> None:
    fn, mine = loaded
    served = shapes(fn)
    assert len(served) > 5
    for shape in served:
        x = torch.randn(shape)
        assert torch.equal(mine(x), fn(x)), shape


def test_fake_tensors(loaded: Any) -> None:
    fn, mine = loaded
    for shape in shapes(fn):
        expected = fn(torch.empty(shape))
        for device in ("cpu", "cuda"):
            with FakeTensorMode():
                found = mine(torch.empty(shape, device=device))
            assert (found.shape, found.dtype, found.device.type) == (expected.shape, expected.dtype, device), shape


def test_symbolic_sizes(loaded: Any) -> None:
    """The size of a result is an expression of the call's, which holds of other sizes than those of the trace."""
    fn, mine = loaded
    env = ShapeEnv(duck_shape=False)
    sizes = [size_symbol(env, name, hint) for name, hint in (("m", 12), ("n", 16))]
    with FakeTensorMode(shape_env=env):
        y = mine(torch.empty([size for size, _ in sizes]))
    assert any(isinstance(s, torch.SymInt) for s in y.shape)
    for shape in ((3, 4), (5, 8), (7, 12), (4, 20)):
        given = dict(zip((symbol for _, symbol in sizes), shape, strict=True))
        found = [int(s.node.expr.xreplace(given)) if isinstance(s, torch.SymInt) else s for s in y.shape]
        assert found == list(fn(torch.empty(shape)).shape), shape


def test_compiled_once(loaded: Any) -> None:
    fn, mine = loaded
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: mine(x) + 1, fullgraph=True, dynamic=True, backend=counter)
    for shape in ((12, 16), (3, 8), (5, 4), (7, 12)):
        x = torch.randn(shape)
        torch.testing.assert_close(compiled(x), fn(x) + 1)
    assert counter.frame_count == 1
    torch._dynamo.reset()
