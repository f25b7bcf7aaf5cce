"""Tensors as they are drawn: their sizes, and how their elements lie in memory.

A layout is a class of how programs come to have such a tensor. A ``Strided`` is plain numbers: it can be written down,
read back, and made on any device, meta too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

# Their shares of all draws. "offset" is contiguous, but begins off a 16-byte boundary; "expanded" has a dimension of
# which all elements are one; "every other" has step 2 along the last dimension.
LAYOUTS = {
    "contiguous": 5, "slice": 3, "transposed": 3, "permuted": 3, "odd pitch": 2, "every other": 1, "expanded": 1,
    "offset": 1,
}  # fmt: skip
OF_SEVERAL_DIMENSIONS = ("slice", "transposed", "permuted", "odd pitch", "expanded")

# Sizes that dimensions of models have: channels, heads, positions, classes, images.
OF_MODELS = (
    3, 4, 7, 8, 12, 14, 16, 28, 32, 40, 56, 64, 80, 96, 112, 128, 197, 224, 256, 320, 384, 512, 577, 640, 768, 1000,
    1024, 1280, 1536, 2048, 2560, 2880, 3072, 4096, 5120, 6144, 7168, 8192, 11008, 14336, 28672, 32000, 50257, 128256,
)  # fmt: skip


@dataclass(frozen=True)
class Strided:
    """strides and offset: in elements. dtype: by torch's name. values: "normal"; "near one", for products; "positive";
    "below N", indices; "sorted", along the last dimension; "steps", of an optimizer."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    dtype: str = "float32"
    values: str = "normal"
    requires_grad: bool = False

    @property
    def extent(self) -> int:
        """Elements of the memory that it lies in."""
        if 0 in self.shape:
            return self.offset
        return self.offset + 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def bytes(self) -> int:
        """Those of the elements that there are, each once."""
        elements = math.prod(n for n, s in zip(self.shape, self.strides, strict=True) if s)
        return elements * self.torch_dtype.itemsize

    def make(self, device: str) -> Tensor:
        """Of torch's generator. What lies between the elements is as any of them."""
        if device == "meta":
            memory = torch.empty(self.extent, dtype=self.torch_dtype, device=device)
        else:
            memory = self._memory(device)
        x = memory.as_strided(self.shape, self.strides, self.offset)
        if self.values == "sorted" and device != "meta":
            x.copy_(x.sort(-1).values)
        return x.requires_grad_(self.requires_grad)

    def _memory(self, device: str) -> Tensor:
        dtype, n = self.torch_dtype, self.extent
        if self.values.startswith("below "):
            return torch.randint(int(self.values.removeprefix("below ")), (n,), dtype=dtype, device=device)
        if self.values == "steps":
            return torch.full((n,), 3, dtype=dtype, device=device)
        if dtype == torch.bool:
            return torch.rand(n, device=device) < 0.5
        if not dtype.is_floating_point:
            return torch.randint(0 if dtype == torch.uint8 else -100, 100, (n,), dtype=dtype, device=device)
        memory = torch.randn(n, dtype=dtype, device=device)
        if self.values == "near one":  # a product of all of them is then about e
            return memory.div_(math.sqrt(n)).add_(1)
        if self.values == "positive":
            return memory.abs_()
        # Of mean 1/8, so that no sum is near zero by chance, where all that is compared is rounding. In float16 a sum
        # of many would not be finite.
        return memory if dtype == torch.float16 else memory.add_(0.125)

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape)) or "scalar"
        at = f"+{self.offset}" if self.offset else ""
        return f"{self.dtype}[{sizes}]({','.join(map(str, self.strides))}){at}"


def dense(shape: Sequence[int], order: Sequence[int] | None = None, pitch: int | None = None) -> tuple[int, ...]:
    """Strides. order: the dimensions from the slowest to the fastest. pitch: of the fastest one's rows."""
    order = range(len(shape)) if order is None else order
    strides, step = [0] * len(shape), 1
    for place, d in enumerate(reversed(order)):
        strides[d] = step
        step *= max(1, pitch if pitch is not None and place == 0 else shape[d])
    return tuple(strides)


def drawn_layout(rng: Random, dims: int, is_written: bool = False) -> str:
    """One that a tensor of so many dimensions can have. is_written: no two elements may be one."""
    found = {name: w for name, w in LAYOUTS.items() if dims > 1 or name not in OF_SEVERAL_DIMENSIONS}
    if is_written:
        found.pop("expanded", None)
    return rng.choices(list(found), list(found.values()))[0]


def placed(rng: Random, shape: Sequence[int], layout: str) -> tuple[tuple[int, ...], int]:
    """Strides and offset of a tensor of a layout; contiguous where its dimensions are too few for that."""
    n = len(shape)
    if n == 0 or (n == 1 and layout in OF_SEVERAL_DIMENSIONS):
        return dense(shape), 0
    last = shape[-1]
    if layout == "slice":  # a part of rows that hold two or three, as chunk and split give them
        parts = rng.choice((2, 2, 3))
        return dense(shape, pitch=parts * last), rng.randrange(parts) * last
    if layout == "transposed":
        a, b = (n - 2, n - 1) if rng.random() < 0.7 else rng.sample(range(n), 2)
        order = list(range(n))
        order[a], order[b] = order[b], order[a]
        return dense(shape, order), 0
    if layout == "permuted":
        order = list(range(n))
        if n > 3 and rng.random() < 0.4:
            order = [0, *order[2:], 1]  # channels last
        else:
            rng.shuffle(order)
        return dense(shape, order), 0
    if layout == "odd pitch":
        return dense(shape, pitch=last + 2 * rng.randint(0, 8) + 1 + last % 2), rng.randint(0, 1)
    if layout == "every other":
        return tuple(2 * s for s in dense(shape)), rng.randint(0, 1)
    if layout == "expanded":
        at = rng.randrange(n)
        one = [1 if d == at else size for d, size in enumerate(shape)]
        return tuple(0 if d == at else s for d, s in enumerate(dense(one))), 0
    return dense(shape), rng.randint(1, 7) if layout == "offset" else 0


def log_uniform(rng: Random, low: int, high: int) -> int:
    return max(low, min(high, round(math.exp(rng.uniform(math.log(low), math.log(high))))))


def sizes(rng: Random, dims: int, elements: int) -> tuple[int, ...]:
    """So many dimensions, of about so many elements: sizes of models, or any, odd ones too."""
    shape, left = [1] * dims, elements
    places = list(range(dims))
    rng.shuffle(places)
    of_models = rng.random() < 0.5
    for i, d in enumerate(places):
        if i == dims - 1:
            shape[d] = max(1, left)
            continue
        fitting = [n for n in OF_MODELS if n <= left] if of_models else []
        shape[d] = rng.choice(fitting) if fitting else log_uniform(rng, 1, max(1, min(4096, left)))
        left //= shape[d]
    return tuple(shape)
