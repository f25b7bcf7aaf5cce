"""What a kernel file declares, as frozen records: an op, and the kernels that can run it.

An :class:`Op` names its arguments, the values worked out once per problem, and the *bucket* a problem falls into. A
:class:`Kernel` spans a grid of points — one value per axis, one config — and says of a point, in :meth:`Kernel.plan`,
what must hold and what is launched. ``tk.aot.grid`` enumerates the points, ``tk.aot.compile`` the distinct launches
among them, ``tk.aot.pack`` writes it all down.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tk.aot.expr import Expr, Tensor, as_expr

# torch's ScalarType numbers and Triton's names. One table for everyone on the build side.
DTYPES: Mapping[str, int] = {
    "u8": 0, "i8": 1, "i16": 2, "i32": 3, "i64": 4, "fp16": 5, "fp32": 6, "fp64": 7, "i1": 11, "bf16": 15,
    "fp8e5": 23, "fp8e4nv": 24,
}  # fmt: skip
REDUCED_FLOATS = ("bf16", "fp16")  # torch's reduced floating-point types
ITEMSIZE: Mapping[str, int] = {
    "u8": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "fp16": 2, "fp32": 4, "fp64": 8, "i1": 1, "bf16": 2,
    "fp8e5": 1, "fp8e4nv": 1,
}  # fmt: skip


# --- Arguments of a launch: one for every parameter of the device function, by name. What belongs together may be a
# NamedTuple of arguments: the function gets it as one parameter, with the same fields. ---


@dataclass(frozen=True)
class Const:
    """A constexpr: part of what is compiled. int, float, bool, str, None, a tl.dtype or another device function."""

    value: Any


@dataclass(frozen=True)
class Pointer:
    """The address of a tensor, `offset` bytes on. `aligned`: a multiple of 16 (a constraint must say so)."""

    tensor: Tensor
    dtype: str
    aligned: bool = True
    offset: Expr | int = 0


@dataclass(frozen=True)
class Int:
    """`divisible`: a multiple of 16, told to the compiler (a constraint must say so)."""

    value: Expr | int
    dtype: str = "i32"
    divisible: bool = False


@dataclass(frozen=True)
class Float:
    """The call's `index`-th float."""

    index: int
    dtype: str = "fp32"


@dataclass(frozen=True)
class TensorMap:
    """A host-made TMA descriptor. Sizes, strides (elements) and block are outermost first; the last stride is 1.

    layout: the text of a Gluon shared-memory layout, "" for plain Triton. nan_fill: what lies outside reads as NaN.
    l2_promotion: bytes, 0, 64, 128 or 256. round_to_tf32: fp32 is rounded to tf32 on its way into shared memory.
    """

    tensor: Tensor
    dtype: str
    sizes: tuple[Expr | int, ...]
    strides: tuple[Expr | int, ...]
    block: tuple[int, ...]
    layout: str = ""
    nan_fill: bool = False
    l2_promotion: int = 128
    offset: Expr | int = 0
    round_to_tf32: bool = False
    im2col: Im2col | None = None


@dataclass(frozen=True)
class Im2col:
    """Makes a TensorMap one of images [N, (D,) (H,) W, C], in im2col mode: a load takes `block` = (pixels, channels)
    of the matrix that a convolution multiplies, one row for each pixel of its result, of one tap.

    Of each spatial dimension, outermost first: a tap of offset 0 reads pixel `lower` first; the last that it reads lies
    `upper` behind the image's last one; `steps` are from one to the next, 1 to 8. What lies outside reads as padding.
    Corners: in [-128, 127] of two spatial dimensions, [-16, 15] of three."""

    lower: tuple[Expr | int, ...]
    upper: tuple[Expr | int, ...]
    steps: tuple[Expr | int, ...]


@dataclass(frozen=True)
class Scratch:
    """The address of the plan's `buffer`-th buffer."""

    buffer: int
    dtype: str
    offset: Expr | int = 0


Arg = Const | Pointer | Int | Float | TensorMap | Scratch
Bundle = tuple[Any, ...]  # a NamedTuple, of arguments or of bundles


def named_fields(bundle: Bundle) -> Iterator[tuple[str, Any]]:
    return zip(bundle._fields, bundle, strict=True)  # type: ignore[attr-defined]


def leaves(name: str, arg: Arg | Bundle) -> Iterator[tuple[str, Arg]]:
    """The argument with its name, or all of a bundle's in their order, as ``bundle.field``."""
    if isinstance(arg, tuple):
        for field_name, inner in named_fields(arg):
            yield from leaves(f"{name}.{field_name}", inner)
    else:
        yield name, arg


@dataclass(frozen=True)
class Buffer:
    """Memory that a plan needs beyond its tensors. `zeroed`: counters that are 0 before the first launch and that every
    launch leaves at 0; kept for each stream. Otherwise uninitialised and for this call alone."""

    bytes: Expr | int
    alignment: int = 256
    zeroed: bool = False


@dataclass(frozen=True)
class Launch:
    """One kernel launch: a device function with all its arguments. What decides the cubin is `fn`, the kinds and
    dtypes of `args`, and the options; the rest is the recipe.

    max_spill_bytes: a variant of which more than this goes through memory for want of registers is not built where
    another takes its calls."""

    fn: Any
    args: Mapping[str, Arg | Bundle]
    grid: tuple[Expr | int, Expr | int, Expr | int]
    num_warps: int = 4
    num_stages: int = 3
    num_ctas: int = 1
    maxnreg: int | None = None
    cooperative: bool = False
    when: Expr | int = 1
    dependent: Expr | int = 0  # programmatic dependent launch: the kernel waits before it reads
    max_spill_bytes: int = 1024
    options: Mapping[str, Any] = field(default_factory=dict)  # of Triton's backend, beyond the above

    def leaves(self) -> Iterator[tuple[str, Arg]]:
        """Every argument, in the order of the device function's parameters."""
        for name in self.fn.arg_names:
            yield from leaves(name, self.args[name])


@dataclass(frozen=True)
class Constraint:
    """`holds` may read the op's locals. `message` completes "this variant needs …"."""

    holds: Expr
    message: str


def require(holds: Expr | bool, message: str) -> Constraint:
    return Constraint(as_expr(holds), message)


@dataclass(frozen=True)
class Plan:
    """All that a point does. `locals` follow the op's: number them from ``len(op.locals)``.

    constraints: the one predicate, see tk.aot.expr. cost: predicted time, picoseconds. serves: for each selector axis
    of the op the values for which this plan may run. general: a fallback for what nothing better takes."""

    constraints: tuple[Constraint, ...]
    serves: Mapping[str, tuple[int, ...]]
    launches: tuple[Launch, ...]
    cost: Expr
    locals: tuple[Expr, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    general: bool = False
    deterministic: bool = True
    terms: Mapping[str, Expr] = field(default_factory=dict)  # what `cost` is a weighted sum of, to fit the weights
    droppable: bool = False  # left out where a launch spills more than it may: another plan serves what this one would


@dataclass(frozen=True)
class Config:
    """A named setting of a kernel: tile sizes, stages, warps, schedule. The name is public; its number is assigned when
    the op's configs are put together."""

    name: str
    params: Mapping[str, int | str | bool]

    def __getattr__(self, key: str) -> Any:
        # Not self.params: while an instance is copied or unpickled it has no fields yet.
        try:
            return vars(self)["params"][key]
        except KeyError:
            raise AttributeError(f"config {vars(self).get('name')} has no {key}") from None


@dataclass(frozen=True)
class Point:
    """One point of a kernel's grid."""

    arch: int
    axes: Mapping[str, Any]
    config: Config

    def __getattr__(self, key: str) -> Any:
        try:
            return vars(self)["axes"][key]
        except KeyError:
            raise AttributeError(f"no axis {key}") from None


@dataclass(frozen=True)
class Selector:
    """An axis of the op's bucket key: `value` is computed for a problem and is one of range(`size`)."""

    value: Expr
    size: int


@dataclass(frozen=True)
class Param:
    """An argument of a generated op's schema.

    kind: "tensor", "optional_tensor" (that, or None: absent in the core), "tensors" (a list), "float", "int" or "bool".
    Of a tensor: leading: any dimensions may come before the declared ones, the same for all tensors of the op that have
    them; rank: how many are declared; mutated: written in place; in_order: the leading ones are seen in their order,
    whatever their strides. default: of a number, what a call that leaves it out means; an optional tensor is None."""

    name: str
    kind: str
    leading: bool = False
    rank: int = 0
    mutated: bool = False
    in_order: bool = False
    default: float | int | bool | None = None

    @property
    def is_tensor(self) -> bool:
        return self.kind in ("tensor", "optional_tensor", "tensors")

    @property
    def default_text(self) -> str:
        """The default as a schema spells it; "" where there is none."""
        return "None" if self.kind == "optional_tensor" else "" if self.default is None else repr(self.default)


@dataclass(frozen=True)
class Output:
    """How to allocate an output of a generated op: a dense tensor. Sizes and strides may read declared sizes, dtypes
    and numbers of the inputs. leading: the index of the tensor whose leading dimensions come first, in their order in
    memory; sizes and strides then describe what follows."""

    dtype: Expr | int
    sizes: tuple[Expr | int, ...]
    strides: tuple[Expr | int, ...]
    leading: int | None = None


@dataclass(frozen=True)
class Op:
    """tensors: inputs, then outputs. locals: evaluated in order; ``op.local("M")`` reads one. dims: the names of the
    locals (at most 4) that make up a problem's size, the key of a measured choice. checks: what must hold of the
    arguments, whatever the kernel: the first that fails is a ValueError "tk.<op>: <message>".

    A generated op has params: its tensors are those of the params in order and then an output for each of outputs, its
    ints the int and bool params, its floats the float params. A tensor with leading dimensions has three of them in
    front of the declared ones, [L0, L1, L2, *declared] (docs/packs.md). schema follows from params and outputs; it is
    "" for an op that a library registers. meta: JSON for Python alone."""

    name: str
    tensors: tuple[Tensor, ...]
    ints: tuple[str, ...]
    floats: tuple[str, ...]
    locals: Mapping[str, Expr]
    selectors: Mapping[str, Selector]
    dims: tuple[str, ...]
    outputs: tuple[Output, ...] = ()
    params: tuple[Param, ...] = ()
    checks: tuple[Constraint, ...] = ()
    meta: str = ""

    @property
    def schema(self) -> str:
        return schema_of(self) if self.params else ""

    @property
    def backward(self) -> Mapping[str, Any]:
        """What meta says of the op's gradients; empty when it has none."""
        return (json.loads(self.meta or "{}").get("backward") or {}) if self.params else {}

    def local(self, name: str) -> Expr:
        return Expr("local", list(self.locals).index(name))

    def int(self, name: str) -> Expr:
        return Expr("int", self.ints.index(name))

    def float(self, name: str, dtype: str = "fp32") -> Float:
        return Float(self.floats.index(name), dtype)


def schema_of(op: Op) -> str:
    """``scaled_gelu(Tensor x, Tensor bias, float alpha, int config=-1, int mode=0) -> Tensor``. Of an op that writes in
    place the last argument is called mode_bits: torch passes its arguments by name, to functions with a ``mode``."""
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    types = {"float": "float", "int": "SymInt", "bool": "bool", "optional_tensor": "Tensor?"}
    arguments = []
    for p in op.params:
        written = f"({next(letters)}!)" if p.mutated else ""
        default = f"={p.default_text}" if p.default_text else ""
        is_list = "[]" if p.kind == "tensors" else ""
        arguments.append(f"{types.get(p.kind, 'Tensor')}{written}{is_list} {p.name}{default}")
    count = len(op.outputs) - op.backward.get("extra_outputs", 0)
    takes_lists = any(p.kind == "tensors" for p in op.params)
    kinds = ["Tensor[]" if takes_lists and o.leading is not None else "Tensor" for o in op.outputs[:count]]
    results = kinds[0] if count == 1 else f"({', '.join(kinds)})"
    mode = "mode_bits" if any(p.mutated for p in op.params) else "mode"
    return f"{op.name}({', '.join([*arguments, 'int config=-1', f'int {mode}=0'])}) -> {results}"


@dataclass(frozen=True)
class Kernel:
    """axes: what is varied, name -> values. configs: for each architecture. plan: what a point does; None where the
    combination makes no sense at all (a constraint that folds to false says the same, with a reason).

    Of a config's points that fit a problem the first is taken: list the values of an axis that ask for more first."""

    name: str
    op: Op
    axes: Mapping[str, Sequence[Any]]
    configs: Mapping[int, tuple[Config, ...]]
    plan: Callable[[Point], Plan | None]


def _everything(kernel: Kernel, point: Point) -> bool:
    return True


@dataclass(frozen=True)
class Family:
    """What a kernel file exports as FAMILY. tuned: the stem of kernels/tuned/sm*/<tuned>.json, measured choices.

    sample: whether a point belongs to the sample that tests compile. On a kernel's newest architecture it must touch
    every axis; on the oldest of several only the first is compiled. portable: whether it is also kept as PTX, for GPUs
    that no cubin is for; a few settings that do everywhere, since nobody measured there.
    sampled: False for one of many families alike, of which the sample has others."""

    op: Op
    kernels: tuple[Kernel, ...]
    sample: Callable[[Kernel, Point], bool]
    tuned: str = ""
    portable: Callable[[Kernel, Point], bool] = _everything
    sampled: bool = True
