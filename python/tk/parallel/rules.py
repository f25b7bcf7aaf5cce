"""Sharding rules: along which dimensions of its arguments an op may be sharded, and what its results are then.

A rule is for one dimension of a device mesh, as torch's ``register_sharding`` takes them. It stands as the places of
what is sharded, of the arguments and of the results:

- a dimension, counted from the last if it is negative; "..." for any one of the leading dimensions;
- "sum", "max", "min": each GPU has a partial result (or argument);
- None: each GPU has all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from tk.generated.signature import Place

Rule: TypeAlias = tuple[Sequence[Place], Sequence[Place]]


# --- As torch has them ---


def placements(places: Iterable[tuple[Place, int]], leading: int | None) -> list[Placement]:
    """places: with the number of the tensor's dimensions. leading: the dimension that "..." stands for."""
    return [_placement(place, ndim, leading) for place, ndim in places]


def _placement(place: Place, ndim: int, leading: int | None) -> Placement:
    if place is None:
        return Replicate()
    if place == "...":
        assert leading is not None
        return Shard(leading)
    return Partial(place) if isinstance(place, str) else Shard(place if place >= 0 else ndim + place)


# --- Of ops that are written by hand ---


def of_dims(text: str, shapes: Mapping[str, Sequence[int] | None], is_linear: bool) -> Iterator[Rule]:
    """What an einsum-like text says of a call.

    "mk,kn->mn": a letter for each dimension of the arguments, in their order, and of the result. A letter that stands
    in the result is sharded in both. One that stands in several arguments alone is summed over; then the results are
    partial, and so is a bias, where nothing is made of the sums. ``...`` are any leading dimensions, and ``_`` is one
    that is never sharded. An argument of another number of dimensions, or of size 1 where its letter has more, is the
    same on every GPU. One of which the text says nothing is broadcast against the result.

    shapes: of the tensor arguments by name, None for those that are not given. is_linear: nothing follows the sums.
    """
    inputs, _, result = text.partition("->")
    given = inputs.split(",")
    named = {name: (given[i] if i < len(given) else "") or None for i, name in enumerate(shapes)}
    leading = _leading(named, shapes)
    result = result.replace("...", leading)
    named = {name: None if letters is None else letters.replace("...", leading) for name, letters in named.items()}
    sizes: dict[str, int] = {}
    for name, letters in named.items():
        if (shape := shapes[name]) is not None and letters is not None and len(shape) == len(letters):
            for letter, size in zip(letters, shape, strict=True):
                sizes[letter] = max(sizes.get(letter, 1), size)
    for letter in sizes.keys() - {"_"}:
        if letter in result:
            at = [_place(letter, sizes[letter], result if named[x] is None else named[x], s) for x, s in shapes.items()]
            yield at, [result.index(letter)]
        elif is_linear and sum(letter in letters for letters in named.values() if letters) > 1:
            at = ["sum" if x == "bias" else _place(letter, sizes[letter], letters, shapes[x])
                  for x, letters in named.items()]  # fmt: skip
            yield at, ["sum"]


def _leading(named: Mapping[str, str | None], shapes: Mapping[str, Sequence[int] | None]) -> str:
    """A character for each leading dimension."""
    for name, letters in named.items():
        if letters and letters.startswith("...") and (shape := shapes[name]) is not None:
            return "0123456789"[: len(shape) - len(letters.removeprefix("..."))]
    return ""


def _place(letter: str, size: int, letters: str | None, shape: Sequence[int] | None) -> Place:
    """letters: of the tensor's last dimensions, or of all that it is broadcast to."""
    if shape is None or letters is None or letter not in letters:
        return None
    place = letters.index(letter) - len(letters)
    return place if -place <= len(shape) <= len(letters) and shape[place] == size else None
