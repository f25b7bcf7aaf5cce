"""What a function is traced with: fake tensors whose sizes are symbols, and symbols for numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch._prims_common import infer_size, is_contiguous_or_false, make_contiguous_strides_for
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tk.codegen.tracing.slices import WAYS, Slices, letter, size_symbol
from tk.generated.signature import DTYPES, NumberSpec, Signature, TensorSpec

LEADING = "leading"
_PRIMES = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

aten = torch.ops.aten


def number(name: str, kind: str) -> sympy.Symbol:
    return sympy.Symbol(name, integer=True) if kind == "int" else sympy.Symbol(name, real=True)


class Arguments:
    """Fake tensors with a symbol for each letter, and a symbol for each float and int. more: sizes of what is no
    argument. slices: what those of the trace have. order: the letters, each of which stands for a larger size than
    those before it; as they are declared, if it is left out. asked: (size, the least that it may be, whose condition
    that is), of functions of torch's that were called. n_asked: of the guards those that the function itself asked for,
    as it was called, while the others come of taking it apart."""

    def __init__(
        self,
        signature: Signature,
        dtypes: Mapping[str, str],
        more: Sequence[str] = (),
        slices: Slices | None = None,
        order: Sequence[str] = (),
    ):
        self.env = ShapeEnv(duck_shape=False)
        self.n_asked = 0
        self.asked: list[tuple[sympy.Expr, int, str]] = []
        self.slices = slices or Slices(WAYS[-1])
        self.mode = self._mode()
        self.symbols: dict[sympy.Symbol, sympy.Symbol] = {}
        letters = (*signature.letters, *([LEADING] if has_leading(signature) else []), *more)
        rising = dict.fromkeys((*order, *letters))
        primes = dict(zip(rising, _PRIMES, strict=False))
        self.hints = {letter(name): 1680 * primes[name] for name in letters}
        self.sizes = {name: self._size(name) for name in letters}
        self.names = [n for n in signature.params if n not in signature.flags]
        self.values = [self._value(n, signature.params[n], dtypes, self.sizes) for n in self.names]

    def _size(self, name: str) -> Any:
        size, symbol = size_symbol(self.env, name, self.hints[letter(name)])
        self.symbols[symbol] = letter(name)
        return size

    def _value(self, name: str, spec: Any, dtypes: Mapping[str, str], sizes: Mapping[str, Any]) -> Any:
        if isinstance(spec, TensorSpec):
            assert not spec.is_list, "a function of lists is traced with the tensors of one place"
            shape = [sizes[LEADING] for _ in range(spec.leading)] + spec.shape(sizes)
            with self.mode:
                # A meta tensor: decompositions ask for the device, and the CPU's are not those of a GPU.
                return torch.empty(shape, dtype=DTYPES[dtypes.get(spec.dtype, spec.dtype)], device="meta")
        assert isinstance(spec, NumberSpec)
        with self.env.ignore_fresh_unbacked_symbols():
            is_int = spec.kind == "int"
            value = self.env.create_unbacked_symint() if is_int else self.env.create_unbacked_symfloat()
        self.symbols[value.node.expr] = number(name, spec.kind)
        return value

    def _mode(self) -> FakeTensorMode:
        """Says of a view of what is dense nothing but its sizes, which hold as many elements.

        Torch's own looks for dimensions that can be split and merged, and asks on its way which size is a multiple of
        which other: questions that such a view does not depend on, and whose answers would become checks of the op. And
        it says of a slice what it has where the dimension is as large as it is while torch traces."""
        found = FakeTensorMode(shape_env=self.env)
        theirs = found.dispatch

        def dispatch(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (aten.view.default, aten._unsafe_view.default) and not kwargs and _is_dense(*args):
                x, shape = args[0], infer_size(args[1], args[0].numel())
                if not _is_always_legal(*args):
                    torch._check(math.prod(shape) == x.numel(), lambda: _SHAPE.format(list(shape), x.numel()))
                return x.as_strided(shape, make_contiguous_strides_for(shape))
            if func is aten.slice.Tensor:
                made = self.slices.made(self, *args, **(kwargs or {}))
                if made is not None:
                    return made
            return theirs(func, types, args, kwargs)

        # The instance's own: for a class derived from it torch has no rules of higher-order operators.
        found.dispatch = dispatch  # type: ignore[method-assign]
        return found


_SHAPE = "shape '{}' is invalid for input of size {}"  # as ATen has it


def _is_dense(x: torch.Tensor, shape: Sequence[Any]) -> bool:
    """Whether it can have any sizes instead of its own, of as many elements."""
    return x.dim() > 0 and len(shape) > 0 and is_contiguous_or_false(x)


def _is_always_legal(x: torch.Tensor, shape: Sequence[Any]) -> bool:
    """Whether a dense tensor has as many elements with these sizes, whatever its own are."""
    given = [n for n in shape if not (isinstance(n, int) and n == -1)]
    count, total = (math.prod(n.node.expr if isinstance(n, torch.SymInt) else n for n in s) for s in (given, x.shape))
    inferred = sympy.cancel(total / sympy.sympify(count))
    return inferred == 1 if len(given) == len(shape) else sympy.denom(inferred) == 1


def orders(signature: Signature) -> list[Sequence[str]]:
    """Orders of the letters, from the smallest to the largest: a function may ask that one size is no larger than
    another. Those of indices are small, as they lie within what they index."""
    letters = signature.letters
    indices = {name: t for name, t in signature.tensors.items() if _may_index(t, signature)}
    of_indices = Signature({**indices}, signature.variables).letters
    first = [n for n in letters if n in of_indices]
    found = (tuple(letters), tuple(reversed(letters)), (*first, *(n for n in letters if n not in first)))
    return list(dict.fromkeys(found))


def _may_index(spec: TensorSpec, signature: Signature) -> bool:
    return {"i32", "i64"} >= set(signature.variables.get(spec.dtype, (spec.dtype,)))


def has_leading(signature: Signature) -> bool:
    return any(spec.leading for spec in signature.tensors.values())
