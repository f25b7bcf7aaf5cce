"""A user's functions that draw, write at indices and search: built, loaded, and run in every variant.

Built here where Triton is; TK_TEST_PACKS names a folder with indexed_ops.tkpack and debug.tkpack built elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tk
from tk.generated import interpret, register
from tk.generated.problem import Call

from .device import DEVICE, build
from .op_cases import candidates

FILE = Path(__file__).with_name("indexed_ops.py")
pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="about kernels")


def pack(folder: Path, *options: str) -> Path:
    name = "debug.tkpack" if options else "indexed_ops.tkpack"
    if given := os.environ.get("TK_TEST_PACKS"):
        return Path(given) / name
    pytest.importorskip("triton")
    return build(FILE, folder / name, *options)


@pytest.fixture(scope="module", autouse=True)
def _loaded(tmp_path_factory: pytest.TempPathFactory) -> None:
    tk.load_pack(pack(tmp_path_factory.mktemp("packs")))


def on_cpu(name: str, *args: object) -> list[torch.Tensor]:
    moved = [a.cpu().clone() if isinstance(a, torch.Tensor) else a for a in args]
    found = getattr(torch.ops.tk, name)(*moved)
    return [found] if isinstance(found, torch.Tensor) else list(found or ()) or [moved[0]]


def by_every_config(name: str, *args: object, mode: int = 0) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Results of each config that takes the call; of an op that writes in place its first argument."""
    op = register.find(name)
    assert op is not None
    numbers = sorted({c.config for c in candidates(op, list(args))})
    assert numbers, "nothing fits"
    for number in numbers:
        copies = [a.clone(memory_format=torch.preserve_format) if isinstance(a, torch.Tensor) else a for a in args]
        found = getattr(torch.ops.tk, name)(*copies, number, mode)
        yield number, [found] if isinstance(found, torch.Tensor) else list(found or ()) or [copies[0]]


SEED = torch.tensor(0x1234567812345678)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(33, 64), (3, 5, 7), (2, 128, 256)])
@pytest.mark.parametrize("offset", [0, 5, 2**40])
def test_the_same_numbers_in_every_config(shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> None:
    x = torch.randn(shape, device=DEVICE).to(dtype)
    expected = on_cpu("gpu_dropped", x, 0.25, SEED, offset)
    layouts = [x, x.transpose(0, 1).contiguous().transpose(0, 1), torch.stack([x, x], -1)[..., 0]]
    for given in layouts:
        for number, (y, noise) in by_every_config("gpu_dropped", given, 0.25, SEED.to(DEVICE), offset):
            assert torch.equal(noise.cpu(), expected[1]), number
            assert torch.equal(y.cpu() == 0, expected[0] == 0), number


def test_the_backward_drops_the_same() -> None:
    x = torch.randn(64, 96, device=DEVICE, requires_grad=True)
    y, _ = torch.ops.tk.gpu_dropped(x, 0.5, SEED.to(DEVICE), 0)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad == 0, y == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_at_indices(dtype: torch.dtype) -> None:
    x = torch.randn(50, 128, device=DEVICE).to(dtype)
    at, y = torch.randint(0, 50, (3000, 128), device=DEVICE), torch.randn(3000, 128, device=DEVICE).to(dtype)
    exact = x.double().scatter_add(0, at, y.double())
    for number, (found,) in by_every_config("gpu_scatter_add", x, at, y):
        torch.testing.assert_close(found.double(), exact, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=2e-4,
                                   msg=lambda m, n=number: f"{n}: {m}")  # fmt: skip


def test_deterministic_sums() -> None:
    """Twice, and in another order: the same bits."""
    x = torch.zeros(7, 64, device=DEVICE)
    at = torch.randint(0, 7, (20_000, 1), device=DEVICE).expand(-1, 64).contiguous()
    y = torch.randn(20_000, 64, device=DEVICE) * 10.0 ** torch.randint(-8, 8, (20_000, 1), device=DEVICE)
    order = torch.randperm(20_000, device=DEVICE)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [torch.ops.tk.gpu_scatter_add(x, a, b) for a, b in ((at, y), (at, y), (at[order], y[order]))]
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])
    exact = torch.zeros(7, 64, device=DEVICE, dtype=torch.float64).scatter_add(0, at, y.double())
    torch.testing.assert_close(runs[0].double(), exact, rtol=1e-6, atol=0)


def test_extremes_and_the_last() -> None:
    x, y = torch.randn(9, 40, device=DEVICE), torch.randn(200, 40, device=DEVICE)
    y[3, :5] = float("nan")
    at = torch.randint(0, 9, (200, 40), device=DEVICE)
    expected = [x.scatter_reduce(0, at, y, k) for k in ("amax", "amin")]
    last = x.cpu().scatter(0, at.cpu(), y.cpu())
    for number, found in by_every_config("gpu_extremes", x, at, y):
        for a, e in zip(found, expected, strict=False):
            torch.testing.assert_close(a, e, rtol=0, atol=0, equal_nan=True, msg=str(number))
    torch.use_deterministic_algorithms(True)
    try:
        found = torch.ops.tk.gpu_extremes(x, at, y)[2]
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(found.cpu(), last, rtol=0, atol=0, equal_nan=True)


def test_in_place() -> None:
    x, y = torch.randn(9, 40, device=DEVICE), torch.randn(200, 40, device=DEVICE)
    at = torch.randint(0, 9, (200,), device=DEVICE)
    expected = x.double().index_add(0, at, y.double())
    for number, (found,) in by_every_config("gpu_add_in_place", x, at, y):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4, msg=str(number))


@pytest.mark.parametrize(("n", "k"), [(64, 1000), (33, 1), (7, 0)])
def test_searches(n: int, k: int) -> None:
    x = torch.randn(17, n, device=DEVICE)
    x[0, :3] = torch.tensor([float("nan"), float("inf"), 1e-42])
    rows, one = torch.randn(17, k, device=DEVICE).sort().values, torch.randn(k, device=DEVICE).sort().values
    mantissa, exponent = torch.frexp(x.cpu())
    for number, found in by_every_config("gpu_searches", x, rows, one):
        assert torch.equal(found[0], torch.searchsorted(rows, x)), number
        assert torch.equal(found[1], torch.bucketize(x, one, right=True)), number
        torch.testing.assert_close(found[2].cpu(), mantissa, rtol=0, atol=0, equal_nan=True)
        finite = mantissa.isfinite()
        assert torch.equal(found[3].cpu()[finite], exponent[finite]), number


def test_ptx() -> None:
    if register.find("gpu_ptx") is None:
        pytest.skip(f"torch {torch.__version__} has no inline PTX")
    x = torch.randn(17, 64, device=DEVICE)
    for _, (found,) in by_every_config("gpu_ptx", x):
        torch.testing.assert_close(found, torch.exp2(x) * 2)


# --- The package's own ---


def test_rand_is_the_same_everywhere() -> None:
    for shape in ((1000, 64), (33, 7), (5,)):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            found = tk.rand(shape, seed=5, offset=8, dtype=dtype, device=DEVICE)
            assert torch.equal(found.cpu(), tk.rand(shape, seed=5, offset=8, dtype=dtype))
        assert torch.equal(
            tk.randint(-9, 2**50, shape, seed=5, device=DEVICE).cpu(), tk.randint(-9, 2**50, shape, seed=5)
        )
        torch.testing.assert_close(tk.randn(shape, seed=5, device=DEVICE).cpu(), tk.randn(shape, seed=5))


def test_a_replayed_graph_draws_anew() -> None:
    x = torch.ones(4096, device=DEVICE)
    torch.manual_seed(3)
    tk.dropout(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = tk.dropout(x)
    found = []
    for _ in range(2):
        graph.replay()
        found.append(y.clone())
    assert not torch.equal(*found)
    torch.manual_seed(7)
    first = tk.dropout(x)
    torch.manual_seed(7)
    assert torch.equal(first, tk.dropout(x))


@pytest.mark.parametrize("name", ["bucketize", "searchsorted", "embedding_backward", "fill_uniform"])
def test_the_cpu_agrees(name: str) -> None:
    from tk.generated import inputs

    op = register.find(name)
    assert op is not None
    example = inputs.of_shape(op, (40, 64), "fp32")
    args = example.arguments(DEVICE)
    call = Call(op, [*args, -1, 0])
    expected = interpret.aten(call)
    actual = getattr(torch.ops.tk, name)(*args)
    actual = args[0] if actual is None else actual
    torch.testing.assert_close(actual, expected[0].reshape(actual.shape))
