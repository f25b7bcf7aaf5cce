"""tk.gather, tk.scatter_add, tk.index_add and tk.index_put against torch's, of drawn shapes, layouts and dtypes."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import seeds
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

import tk

SEED = seeds.seed("TK_INDEXING_SEED")
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2, torch.float16: 4e-3}


class Room:
    """What a call's arguments are drawn in."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def shape(self, low: int = 0, high: int = 5, least: int = 1) -> list[int]:
        return [self.rng.choice((least, 1, 2, 3, 5)) for _ in range(self.rng.randint(low, high))]

    def tensor(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        """In any order of dimensions, with or without gaps, or with the same elements over and over."""
        order = list(range(len(shape)))
        self.rng.shuffle(order)
        sizes = [shape[d] for d in order]
        step = self.rng.choice((1, 1, 2)) if shape else 1
        sizes[-1:] = [s * step for s in sizes[-1:]]
        x = torch.randn(sizes, generator=self.generator, dtype=torch.float64) * 40
        x = (
            (x > 0)
            if dtype == torch.bool
            else x.to(torch.int64).to(dtype)
            if not dtype.is_floating_point
            else x.to(dtype)
        )
        x = x[..., ::step] if shape else x
        x = x.permute([order.index(d) for d in range(len(shape))])
        if shape and self.rng.random() < 0.15:
            x = x.narrow(0, 0, min(1, shape[0])).expand(shape)
        return x

    def index(self, shape: list[int], size: int, low: int = 0) -> Tensor:
        dtype = self.rng.choice((torch.int64, torch.int64, torch.int32))
        return torch.randint(low, max(size, low + 1), shape, generator=self.generator).to(dtype)

    def dim(self, shape: list[int]) -> int:
        n = max(len(shape), 1)
        return self.rng.randint(-n, n - 1)


def along(room: Room, shape: list[int], dim: int, n: int) -> list[int]:
    """An index's shape: n along dim, and elsewhere no larger."""
    if not shape:
        return room.rng.choice(([], [n]))
    found = [room.rng.choice((s, s, s, max(s - 1, 0))) for s in shape]
    found[dim] = n
    return found


def gather(room: Room, dtype: torch.dtype) -> tuple[Any, ...]:
    shape = room.shape()
    dim = room.dim(shape)
    size = shape[dim] if shape else 1
    n = room.rng.choice((0, 1, 4, 7)) if size else 0
    return room.tensor(shape, dtype), dim, room.index(along(room, shape, dim, n), size)


def scatter_add(room: Room, dtype: torch.dtype) -> tuple[Any, ...]:
    x, dim, index = gather(room, dtype)
    more = [s + room.rng.choice((0, 0, 0, 2)) for s in index.shape]
    return x, dim, index, room.tensor(more, dtype)


def index_add(room: Room, dtype: torch.dtype) -> tuple[Any, ...]:
    shape = room.shape()
    dim = room.dim(shape)
    n = room.rng.choice((0, 1, 4, 7)) if shape and shape[dim] else 1
    n = n if shape else 1
    source = [*shape]
    if shape:
        source[dim] = n
    return room.tensor(shape, dtype), dim, room.index([n], shape[dim] if shape else 1), room.tensor(source, dtype)


def index_put(room: Room, dtype: torch.dtype, accumulate: bool) -> tuple[Any, ...]:
    shape = room.shape(1)
    x = room.tensor(shape, dtype)
    at = room.shape(0, 3)
    indices: list[Tensor | None] = []
    d = 0
    while d < len(shape):
        kind = room.rng.choice(("index", "index", "none", "mask", "stop"))
        if kind == "stop" and any(t is not None for t in indices):
            break
        if kind == "mask" and not any(t is not None for t in indices):
            width = room.rng.randint(1, len(shape) - d)
            mask = torch.rand(shape[d : d + width], generator=room.generator) > 0.4
            indices.append(mask)
            at = [int(mask.sum())]
            d += width
        elif kind == "none" and (d + 1 < len(shape) or any(t is not None for t in indices)):
            indices.append(None)
            d += 1
        else:
            smaller = [room.rng.choice((s, s, 1)) if s else s for s in at][room.rng.choice((0, 0, len(at))) :]
            indices.append(room.index(smaller, shape[d], -shape[d]))
            d += 1
    region = list(torch.ops.aten.index(x, indices).shape)
    values = [room.rng.choice((s, s, s, 1)) for s in region][room.rng.choice((0, 0, 0, len(region))) :]
    return x, tuple(indices), room.tensor(values, dtype), accumulate


DRAWS: dict[str, Callable[[Room, torch.dtype], tuple[Any, ...]]] = {
    "gather": gather,
    "scatter_add": scatter_add,
    "index_add": index_add,
    "index_put": lambda room, dtype: index_put(room, dtype, False),
    "index_put_accumulate": lambda room, dtype: index_put(room, dtype, True),
}
TORCHS: dict[str, Callable[..., Tensor]] = {
    "gather": torch.gather, "scatter_add": torch.scatter_add, "index_add": torch.index_add,
    "index_put": torch.ops.aten.index_put, "index_put_accumulate": torch.ops.aten.index_put,
}  # fmt: skip


def ours(name: str) -> Callable[..., Tensor]:
    return getattr(tk, name.removesuffix("_accumulate"))


def expected(name: str, args: tuple[Any, ...]) -> Tensor:
    """Sums of floats in float64; of several values for one place the last, which torch leaves open."""
    if name == "index_put":
        return last_put(*args)
    dtype = args[0].dtype
    wide = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    return TORCHS[name](*wide).to(dtype)


def last_put(x: Tensor, indices: tuple[Tensor | None, ...], values: Tensor, _: bool) -> Tensor:
    places = torch.ops.aten.index(torch.arange(x.numel()).view(x.shape), indices)
    last = {place: i for i, place in enumerate(places.flatten().tolist())}
    found = x.clone(memory_format=torch.contiguous_format)
    found.view(-1)[list(last)] = values.expand(places.shape).reshape(-1)[list(last.values())]
    return found


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_drawn_calls(dtype: torch.dtype, name: str) -> None:
    for seed in range(SEED, SEED + 60):
        args = DRAWS[name](Room(seed), dtype)
        before = [a.clone() for a in args if isinstance(a, Tensor)]
        found, wanted = ours(name)(*args), expected(name, args)
        tolerance = 0 if name in ("gather", "index_put") else TOLERANCE.get(dtype, 0)
        assert_close(found, wanted, rtol=tolerance, atol=tolerance * 40, msg=lambda m, s=seed, a=args: f"{s} {a}: {m}")
        for kept, now in zip(before, (a for a in args if isinstance(a, Tensor)), strict=True):
            assert torch.equal(kept, now), f"seed {seed}: an argument was written"


@pytest.mark.parametrize("name", DRAWS)
def test_gradients_of_drawn_calls(name: str) -> None:
    for seed in range(SEED, SEED + 60):
        room = Room(seed)
        args = DRAWS[name](room, torch.float64)
        found = []
        for function in (ours(name), TORCHS[name]):
            given = [
                a.detach().requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args
            ]
            if name == "scatter_add" and function is torch.scatter_add:  # whose gradient has no source that is larger
                given[3] = given[3][tuple(map(slice, given[2].shape))] if given[2].dim() == given[3].dim() else given[3]
            result = function(*given)
            weights = torch.linspace(-1, 2, result.numel(), dtype=torch.float64).reshape(result.shape)
            sources = [g for g in given if isinstance(g, Tensor) and g.requires_grad]
            found.append(torch.autograd.grad(result, sources, weights, allow_unused=True))
        for mine, theirs in zip(*found, strict=True):
            if mine is not None and theirs is not None and mine.shape != theirs.shape:
                mine = mine[tuple(map(slice, theirs.shape))]
            assert_close(
                0 if mine is None else mine, 0 if theirs is None else theirs, msg=lambda m, s=seed: f"{s}: {m}"
            )


def test_signatures_are_torchs() -> None:
    x, i = torch.zeros(3, 4), torch.tensor([[0, 1, 2, 0]])
    assert_close(tk.gather(input=x, dim=0, index=i, sparse_grad=False), torch.gather(x, 0, i))
    assert_close(tk.scatter_add(input=x, dim=0, index=i, src=x), torch.scatter_add(x, 0, i, x))
    assert_close(tk.index_add(input=x, dim=0, index=i[0], source=torch.ones(4, 4), alpha=2),
                 torch.index_add(x, 0, i[0], torch.ones(4, 4), alpha=2))  # fmt: skip
    assert_close(tk.index_put(input=x, indices=[i[0]], values=x[0], accumulate=True),
                 torch.index_put(x, [i[0]], x[0], accumulate=True))  # fmt: skip


@pytest.mark.parametrize("alpha", [2, 1.5, True, 0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_alpha(dtype: torch.dtype, alpha: float) -> None:
    room = Room(3)
    x, source, index = room.tensor([3, 4], dtype), room.tensor([5, 4], dtype), torch.tensor([0, 2, 2, 0, 1])
    wide = (t.double() if dtype.is_floating_point else t for t in (x, source))
    x_wide, source_wide = wide
    wanted = torch.index_add(x_wide, 0, index, source_wide, alpha=alpha).to(dtype)
    tolerance = TOLERANCE.get(dtype, 0)
    assert_close(tk.index_add(x, 0, index, source, alpha=alpha), wanted, rtol=tolerance, atol=tolerance * 40)


def test_sums_of_16_bits_are_rounded_once() -> None:
    x, index, ones = torch.full((1,), 256.0).bfloat16(), torch.zeros(300, dtype=torch.int64), torch.ones(300).bfloat16()
    for found in (tk.scatter_add(x, 0, index, ones), tk.index_add(x[:, None], 0, index, ones[:, None])[0],
                  tk.index_put(x, (index,), ones, True)):  # fmt: skip
        assert found.item() == 556  # one after the other in 16 bits they leave 256


def test_integers_wrap_around() -> None:
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        most = torch.full((2,), torch.iinfo(dtype).max, dtype=dtype)
        found = tk.scatter_add(most, 0, torch.tensor([0, 1, 1]), torch.ones(3, dtype=dtype))
        assert torch.equal(found, most + torch.tensor([1, 2], dtype=dtype))


def test_every_value_for_a_place_has_its_gradient() -> None:
    """As in torch; the last of them stays, whatever the mode."""
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    for x in (torch.zeros(3, 2, requires_grad=True), torch.zeros(3, 2, 1, requires_grad=True)):
        given = values.reshape(2, *x.shape[1:])
        found = tk.index_put(x, (torch.tensor([1, 1]),), given)
        assert torch.equal(found[1].flatten(), values[1])
        of_x, of_values = torch.autograd.grad(found.sum(), (x, values))
        assert torch.equal(of_x.flatten(1)[:, 0], torch.tensor([1.0, 0.0, 1.0])) and (of_values == 1).all()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_scatter_add_with_an_empty_index_of_any_shape(device: str) -> None:
    x, src = (torch.randn(size, 4, device=device, requires_grad=True) for size in (6, 8))
    for shape in ((0, 6), (8, 0), (7, 0), (0, 0), (0,), (0, 9, 2)):
        index = torch.zeros(shape, dtype=torch.int64, device=device)
        for dim in (0, 1):
            found = tk.scatter_add(x, dim, index, src)
            assert_close(found, torch.scatter_add(x.detach(), dim, index, src.detach()), check_stride=True)
            of_x, of_src = torch.autograd.grad(found.sum(), (x, src))
            assert_close(of_x, torch.ones_like(x))
            assert_close(of_src, torch.zeros_like(src))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_gather_with_an_empty_index_of_any_shape(device: str) -> None:
    for size in ((6, 4), (4, 6), (0, 3), (5,), ()):
        x = torch.randn(size, device=device, requires_grad=True)
        for shape in ((0, 6), (8, 0), (5, 0), (0, 0), (0,), (0, 9, 2)):
            index = torch.zeros(shape, dtype=torch.int64, device=device)
            for dim in range(x.dim()):
                found = tk.gather(x, dim, index)
                assert_close(found, torch.empty(shape, device=device), check_stride=True)
                assert_close(torch.autograd.grad(found.sum(), x)[0], torch.zeros_like(x))


def test_scatter_add_has_a_gradient_where_index_is_smaller_than_src() -> None:
    """Which torch's formula has not."""
    src = torch.ones(3, 4, requires_grad=True)
    found = tk.scatter_add(torch.zeros(3, 4), 1, torch.zeros(2, 2, dtype=torch.int64), src)
    (grad,) = torch.autograd.grad(found.sum(), src)
    assert torch.equal(grad, torch.tensor([[1.0, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]))


@pytest.mark.parametrize("name", DRAWS)
def test_derivatives_of_derivatives(name: str) -> None:
    """Of the squares, so that there are any; forward mode too."""
    for seed in range(SEED, SEED + 4):
        args = DRAWS[name](Room(seed), torch.float64)
        places = [i for i, a in enumerate(args) if isinstance(a, Tensor) and a.is_floating_point()]

        def squares(*given: Tensor, args: Any = args, places: Any = places) -> Tensor:
            own = list(args)
            for i, x in zip(places, given, strict=True):
                own[i] = x.square()
            return ours(name)(*own)

        # gradcheck takes no strides of 0, which even a tensor without elements may have.
        given = [args[i].detach().clone(memory_format=torch.contiguous_format).requires_grad_() for i in places]
        if name == "index_put":  # of several values for one place, which gradchecks would see, one stays
            region = torch.ops.aten.index(torch.arange(args[0].numel()).view(args[0].shape), args[1])
            if region.unique().numel() < region.numel():
                continue
        assert torch.autograd.gradcheck(squares, given, check_forward_ad=True, atol=1e-4)
        assert torch.autograd.gradgradcheck(squares, given, atol=1e-4)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", DRAWS)
def test_one_graph(name: str, dynamic: bool) -> None:
    function = ours(name)
    compiled = torch.compile(lambda *args: function(*args), fullgraph=True, dynamic=dynamic, backend="aot_eager")
    count = 0
    for seed in range(SEED, SEED + 10):
        args = DRAWS[name](Room(seed), torch.float32)
        if any(isinstance(t, Tensor) and t.dtype == torch.bool for a in args if isinstance(a, tuple) for t in a):
            continue  # how many places a mask has is not known in a graph
        torch._dynamo.reset()
        found, wanted = compiled(*args), function(*args)
        assert found.stride() == wanted.stride() and torch.equal(found, wanted)
        count += 1
    assert count > 1


def test_fakes() -> None:
    x, i = torch.empty(3, 4, 5, device="meta"), torch.zeros(2, 4, 5, dtype=torch.int64, device="meta")
    assert tk.gather(x, 0, i).shape == (2, 4, 5)
    assert tk.scatter_add(x, 1, i, x[:2]).shape == x.shape
    assert tk.index_add(x, 1, i[0, :, 0], x).shape == x.shape
    assert tk.index_put(x, (None, i[0]), x[:1, :1, :1]).shape == x.shape


# --- What is refused ---

X, AT, J = torch.randn(3, 4), torch.zeros(3, 2, dtype=torch.int64), torch.tensor([0, 2])
WRONG: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "input": (TypeError, "gather: input must be a Tensor, is list", lambda: tk.gather([1.0], 0, J)),
    "index": (TypeError, "scatter_add: index must be a Tensor, is int", lambda: tk.scatter_add(X, 0, 1, X)),
    "src": (TypeError, "scatter_add: src must be a Tensor, is float", lambda: tk.scatter_add(X, 0, AT, 1.0)),
    "dim": (IndexError, "gather: dim is 2, must be -2 to 1", lambda: tk.gather(X, 2, AT)),
    "dim of 0-d": (IndexError, "index_add: dim is 1, must be -1 to 0", lambda: tk.index_add(X[0, 0], 1, J[0], X[0, 0])),
    "bool dim": (TypeError, "gather: dim must be an int, is True", lambda: tk.gather(X, True, AT)),
    "float index": (tk.UnsupportedError, "gather: index is torch.float32, must be int64", lambda: tk.gather(X, 0, X)),
    "short index": (
        tk.UnsupportedError, "index_add: index is torch.int16, must be", lambda: tk.index_add(X, 0, J.short(), X[:2]),
    ),
    "dimensions": (ValueError, r"gather: index must have as many dimensions as input, 2", lambda: tk.gather(X, 0, J)),
    "size": (ValueError, r"index must be no larger than input of \[3, 4\] apart from dim 0",
             lambda: tk.gather(X, 0, AT.new_zeros(2, 5))),
    "src size": (ValueError, r"index must be no larger than src of \[2, 2\], is \[3, 2\]",
                 lambda: tk.scatter_add(X, 0, AT, X[:2, :2])),
    "src dimensions": (ValueError, "as many dimensions as src, 1", lambda: tk.scatter_add(X, 0, AT, X[0])),
    "src dtype": (RuntimeError, "dtype", lambda: tk.scatter_add(X, 0, AT, X.double())),
    "matrix of indices": (IndexError, r"index_add: index must be \[N\] or 0-d", lambda: tk.index_add(X, 0, AT, X)),
    "source": (ValueError, r"index_add: source must be \[2, 4\] .* is \[3, 4\]", lambda: tk.index_add(X, 0, J, X)),
    "source of 0-d": (ValueError, r"source must be \[\]", lambda: tk.index_add(X[0, 0], 0, J, X[0, :2])),
    "alpha": (TypeError, "index_add: alpha must be a number, is 'a'", lambda: tk.index_add(X, 0, J, X[:2], alpha="a")),
    "sparse_grad": (TypeError, "sparse_grad must be a bool", lambda: tk.gather(X, 0, AT, sparse_grad=1)),
    "indices": (TypeError, "indices must be a tuple of Tensors, is Tensor", lambda: tk.index_put(X, J, X[:2])),
    "a number in indices": (TypeError, r"indices\[1\] must be a Tensor, is int", lambda: tk.index_put(X, (J, 0), X[0])),
    "indices of floats": (IndexError, r"indices\[0\] is torch.float32, must", lambda: tk.index_put(X, (X,), X)),
    "too many indices": (IndexError, "for 3 dimensions, input has 2", lambda: tk.index_put(X, (J, J, J), X[0, 0])),
    "no indices": (ValueError, "must have a Tensor", lambda: tk.index_put(X, (None,), X)),
    "broadcast": (IndexError, r"are \[2\], \[3\]", lambda: tk.index_put(X, (J, AT[:, 0]), X[0, 0])),
    "mask": (IndexError, r"indices\[1\] is a mask of \[3\]", lambda: tk.index_put(X, (J, X[:, 0] > 0), X[0, 0])),
    "values": (ValueError, r"values must be broadcast to \[2, 4\].* is \[5\]",
               lambda: tk.index_put(X, (J,), torch.ones(5))),
    "values that are none": (TypeError, "values must be a Tensor, is float", lambda: tk.index_put(X, (J,), 1.0)),
    "values' dtype": (RuntimeError, "dtype", lambda: tk.index_put(X, (J,), X[:2].double())),
    "accumulate": (TypeError, "accumulate must be a bool, is 1", lambda: tk.index_put(X, (J,), X[:2], 1)),
    "out of bounds": (IndexError, "indices are out of bounds", lambda: tk.index_put(X, (J - 4,), X[:2])),
    "out of bounds, added": (IndexError, "out of bounds", lambda: tk.index_put(X, (J, J + 2), X[0, :2], True)),
    "out of the first's bounds": (IndexError, "out of bounds", lambda: tk.index_put(X, (J + 2, J), X[0, :2])),
    "out of nothing": (IndexError, "none is there", lambda: tk.index_put(X[:0], (J,), X[:2])),
    "place of dim": (RuntimeError, "out of bounds", lambda: tk.gather(X, 0, AT - 1)),
    "place to add at": (RuntimeError, "out of bounds", lambda: tk.scatter_add(X, 0, AT + 3, X)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    error, message, call = WRONG[name]
    with pytest.raises(error, match=message):
        call()


def test_two_devices() -> None:
    far = X.to("meta")
    for call in (
        lambda: tk.gather(X, 0, AT.to("meta")), lambda: tk.scatter_add(X, 0, AT, far),
        lambda: tk.index_add(X, 0, J, far[:2]), lambda: tk.index_put(X, (J,), far[:2]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="must be on one device"):
            call()


def on_cuda(call: Callable[[Callable[..., Tensor]], Any]) -> Any:
    """With a maker of tensors that are not there: nothing is launched."""
    with FakeTensorMode():
        return call(lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device="cuda"))


def test_on_cuda_what_no_kernel_takes_is_refused() -> None:
    with pytest.raises(tk.UnsupportedError, match="gather: input is complex64; on cuda it takes bfloat16"):
        on_cuda(lambda t: tk.gather(t(2, dtype=torch.complex64), 0, t(2, dtype=torch.int64)))
    with pytest.raises(tk.UnsupportedError, match=r"index_put: input is float32, values is bfloat16; .*one dtype"):
        on_cuda(lambda t: tk.index_put(t(2), (t(2, dtype=torch.int64),), t(2, dtype=torch.bfloat16)))
    with tk.config.strict(), pytest.raises(tk.UnsupportedError, match="sparse_grad: no kernel has it"):
        on_cuda(lambda t: tk.gather(t(2), 0, t(2, dtype=torch.int64), sparse_grad=True))
    with tk.config.strict(), pytest.raises(tk.UnsupportedError, match="a mask without dimensions: no kernel has it"):
        on_cuda(lambda t: tk.index_put(t(2), (t(dtype=torch.bool),), t(2)))


def test_indices_and_numbers_of_another_device_are_moved_as_in_torch() -> None:
    def call(t: Callable[..., Tensor]) -> Tensor:
        return tk.index_put(t(3, 4), (torch.tensor([0, 2]),), torch.tensor(1.0))

    assert on_cuda(call).device.type == "cuda"


def test_autocast_takes_the_wider_dtype_as_atens() -> None:
    def call(t: Callable[..., Tensor]) -> list[Tensor]:
        index = t(2, dtype=torch.int64)
        torch.set_autocast_enabled("cuda", True)  # as torch.autocast, without the device
        try:
            return [tk.scatter_add(t(3), 0, index, t(2, dtype=torch.bfloat16)),
                    tk.index_put(t(3, dtype=torch.bfloat16), (index,), t(2)),
                    tk.scatter_add(t(3, dtype=torch.bfloat16), 0, index, t(2, dtype=torch.bfloat16))]  # fmt: skip
        finally:
            torch.set_autocast_enabled("cuda", False)

    assert [found.dtype for found in on_cuda(call)] == [torch.float32, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64])
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_values_for_a_quantized_tensor_are_float32(dtype: torch.dtype) -> None:
    """ATen's kernel reads whatever is there as float32, past the end of 16-bit values too."""
    x = torch.quantize_per_tensor(torch.zeros(3, 4), 0.5, 0, torch.qint8)
    places, values = (torch.tensor([0, 2]),), torch.full((2, 4), 1.5)
    assert tk.index_put(x, places, values).dequantize()[0].tolist() == [1.5] * 4
    with pytest.raises(TypeError, match=f"values is {dtype}, must be torch.float32"):
        tk.index_put(x, places, values.to(dtype))


def test_the_last_of_several_elements_stays_whatever_threads_put_them() -> None:
    """ATen's threads each put a part of many elements, so that any of several for one place may stay."""
    torch.manual_seed(0)
    x, index, values = torch.zeros(3, 50), torch.randint(-50, 50, (200_000,)), torch.rand(3, 200_000)
    wrapped = torch.where(index < 0, index + 50, index)
    last = torch.full((50,), -1).scatter_reduce(0, wrapped, torch.arange(200_000), "amax")
    assert torch.equal(tk.index_put(x, (None, index), values), values[:, last])
    rows = tk.index_put(x, (None, index), values[:, :, None].expand(3, 200_000, 1)[..., 0])
    assert torch.equal(rows, values[:, last])
    pairs = tk.index_put(x.reshape(3, 5, 10), (None, wrapped // 10, wrapped % 10), values)
    assert torch.equal(pairs.reshape(3, 50), values[:, last])
    whole = tk.index_put(x.t(), (index,), values.t())
    assert torch.equal(whole.t(), values[:, last])
