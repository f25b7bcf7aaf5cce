"""Which runs ``tk verify`` makes, and what it says of one that is wrong: enough to make that very run again."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Asked:
    """only: what is searched for in a run's name, which is its call, kernel and config. repeat: how often each is run,
    in memory whose free parts are NaN; None: once, in memory as it is. seed: of the arguments."""

    only: re.Pattern[str] | None = None
    repeat: int | None = None
    seed: int = 0

    def wants(self, name: str) -> bool:
        return self.only is None or self.only.search(name) is not None

    def prepare(self, device: str) -> None:
        """Prepares a run; it is called before every one."""
        if self.repeat is not None and device != "cpu":
            fill_free_memory(device)


ONCE = Asked()


@dataclass(frozen=True)
class Elements:
    """The elements of a call's result `result`, by number, that are off by more than is allowed. not_finite: how many
    of them are NaN or infinite. index: of the first, or of the worst where no single one is too far off. found, right:
    its values, as text, since JSON has no NaN."""

    result: int
    shape: tuple[int, ...]
    count: int
    not_finite: int
    index: tuple[int, ...]
    found: str
    right: str

    def __str__(self) -> str:
        total = torch.Size(self.shape).numel()
        where = f"result {self.result} {list(self.shape)}: "
        element = f"at {list(self.index)} is {self.found}, where {self.right} is right"
        if not self.count:
            return f"{where}no element is too far off by itself, the worst {element}"
        kinds = f", {self.not_finite} of them NaN or infinite" if self.not_finite else ""
        return f"{where}{self.count} of {total} elements are wrong{kinds}; the first {element}"


def elements(result: int, found: Tensor, exact: Tensor, bound: float) -> Elements | None:
    """None of results without elements. Integers must be equal. What is infinite in both is right."""
    found, exact = found.detach().cpu(), exact.detach().cpu().reshape(found.shape)
    if not found.numel():
        return None
    if not found.is_floating_point():
        deviation, bound = (found != exact.to(found.dtype)).double(), 0.0
    else:
        deviation = (found.double() - exact.double()).abs()
        deviation = torch.where(found.double() == exact.double(), 0.0, deviation)
    wrong = (~(deviation <= bound)).flatten()
    count = int(wrong.sum())
    at = int(wrong.to(torch.uint8).argmax()) if count else int(deviation.flatten().argmax())
    flat = found.flatten()
    not_finite = int((wrong & ~flat.isfinite()).sum()) if found.is_floating_point() else 0
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), found.shape))
    values = (str(x.flatten()[at].item()) for x in (found, exact))
    return Elements(result, tuple(found.shape), count, not_finite, index, *values)


# --- What was given ---


def given(args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> str:
    """All that a call's kernels depend on in its arguments, but for what tensors contain."""
    return ", ".join([*map(_text, args), *(f"{name}={_text(x)}" for name, x in (kwargs or {}).items())])


def _text(x: Any) -> str:
    if isinstance(x, Tensor):
        strides = "" if x.is_contiguous() else f" of strides {list(x.stride())}"
        return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}{strides}"
    if isinstance(x, (list, tuple)) and any(isinstance(y, Tensor) for y in x):
        return f"[{', '.join(map(_text, x))}]"
    return str(x)


# --- Memory ---

_SMALL = 1 << 20  # what torch's allocator takes from its pool of small blocks
_AT_LEAST = [*[_SMALL] * 16, 64 << 20]  # so that there are free blocks of each pool, before a kernel has left some


def fill_free_memory(device: str, snapshot: Iterable[Mapping[str, Any]] | None = None) -> None:
    """Makes NaN of what torch's allocator holds for the current stream and has not given out. An integer there is -1. A
    kernel that reads what nothing has written, or does not write all of its result, then shows it."""
    segments = torch.cuda.memory_snapshot() if snapshot is None else snapshot
    stream = torch.cuda.current_stream().cuda_stream if device != "cpu" else 0
    sizes = free_blocks(segments, stream)
    if sum(sizes) < sum(_AT_LEAST):
        sizes += _AT_LEAST
    # The largest first: each then finds the block that it was read off.
    held = [_nans(size, device) for size in sorted(sizes, reverse=True)]
    held.clear()


def free_blocks(snapshot: Iterable[Mapping[str, Any]], stream: int) -> list[int]:
    """The sizes to ask for, in bytes, for all free memory of a stream to be given out."""
    found: list[int] = []
    for segment in snapshot:
        if segment.get("stream", stream) != stream:
            continue
        most = _SMALL if segment["segment_type"] == "small" else None
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                continue
            size = block["size"]
            while most is not None and size > most:
                found.append(most)
                size -= most
            if size:
                found.append(size)
    return found


def _nans(size: int, device: str) -> Tensor:
    """Bytes all of whose bits are set: NaN of every dtype that has one."""
    return torch.empty(size, dtype=torch.uint8, device=device).fill_(0xFF)
