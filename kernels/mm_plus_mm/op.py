"""The op `mm_plus_mm` of the core: out = activation(alpha * (a @ b + c @ d) + beta * bias)."""

from dataclasses import replace

from tk.aot.expr import ceil_div, const, int_arg, maximum, select, tensors
from tk.aot.spec import Config, Op
from tk.kernels.gemm.problem import Gemm, gemm_locals, gemm_selectors
from tk.kernels.gemm.tiles import Tiles, tiles_of

A, B, C, D, BIAS, OUT = tensors("a", "b", "c", "d", "bias", "out")
_INTS = ("activation", "precision")
_FIRST, _SECOND = (gemm_locals(a, b, OUT) for a, b in ((A, B), (C, D)))
_STRIDED = 4  # of the selector `order`


def _locals():  # type: ignore[no-untyped-def]
    """Of the first product; bytes are those of both, and a pitch is unaligned where one of the two is."""
    both = {name: _FIRST[name] + _SECOND[name] for name in ("k_bytes", "a_bytes", "b_bytes")}
    both |= {name: _FIRST[name] | _SECOND[name] for name in ("a_pitch_unaligned", "b_pitch_unaligned")}
    return _FIRST | both | {
        "pdl": const(0),
        "K2": C.size(1),
        "largest": maximum(_FIRST["largest"], _SECOND["largest"]),
        "c_tma": _SECOND["a_tma"],
        "d_tma": _SECOND["b_tma"],
    }  # fmt: skip


def _selectors():  # type: ignore[no-untyped-def]
    """Two products of one operand order; of two orders they are taken for strided."""
    activation, precision = (int_arg(_INTS.index(name)) for name in _INTS)
    first, second = (gemm_selectors(a, b, BIAS, OUT, activation, precision) for a, b in ((A, B), (C, D)))
    one, other = first["order"].value, second["order"].value
    order = type(first["order"])(select(one == other, one, _STRIDED), first["order"].size)
    return first | {"order": order}


OP = Op(
    name="mm_plus_mm",
    tensors=(A, B, C, D, BIAS, OUT),
    ints=_INTS,
    floats=("alpha", "beta"),
    locals=_locals(),
    selectors=_selectors(),
    dims=("M", "N", "K", "K2"),
)
FIRST = Gemm(OP, A, B, BIAS, OUT)
K2 = OP.local("K2")


class _Second(Gemm):
    """The other product, for the constraints on its operands."""

    @property
    def K(self):  # type: ignore[no-untyped-def]
        return K2


SECOND = _Second(OP, C, D, BIAS, OUT)


def tiles_of_both(config: Config) -> Tiles:
    """A tile of out is one sum over both products."""
    tiles = tiles_of(FIRST, config)
    return replace(tiles, k_blocks=tiles.k_blocks + ceil_div(K2, config.block_k))
