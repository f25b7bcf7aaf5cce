"""The op `mm_plus_mm` of the core: out = activation(alpha * (a @ b + c @ d) + beta * bias)."""

from dataclasses import replace

from tk.aot.expr import Expr, ceil_div, const, maximum, select, tensors
from tk.aot.spec import Config, Selector
from tk.kernels.gemm.problem import Gemm, gemm_locals, gemm_op, gemm_selectors
from tk.kernels.gemm.tiles import Tiles, tiles_of

A, B, C, D, BIAS, OUT = tensors("a", "b", "c", "d", "bias", "out")
_FIRST, _SECOND = (gemm_locals(a, b, OUT) for a, b in ((A, B), (C, D)))
_STRIDED = 4  # of the selector `order`


def _locals() -> dict[str, Expr]:
    """The locals of the first product; bytes are those of both, and a pitch is unaligned where one of the two is."""
    both = {name: _FIRST[name] + _SECOND[name] for name in ("k_bytes", "a_bytes", "b_bytes")}
    both |= {name: _FIRST[name] | _SECOND[name] for name in ("a_pitch_unaligned", "b_pitch_unaligned")}
    return _FIRST | both | {
        "pdl": const(0),
        "K2": C.size(1),
        "largest": maximum(_FIRST["largest"], _SECOND["largest"]),
        "c_tma": _SECOND["a_tma"],
        "d_tma": _SECOND["b_tma"],
    }  # fmt: skip


def _selectors() -> dict[str, Selector]:
    """Two products of one operand order; of two orders they are taken for strided."""
    first, second = (gemm_selectors(a, b, BIAS, OUT) for a, b in ((A, B), (C, D)))
    one, other = first["order"].value, second["order"].value
    return first | {"order": Selector(select(one == other, one, _STRIDED), first["order"].size)}


OP = gemm_op("mm_plus_mm", (A, B, C, D, BIAS, OUT), _locals(), _selectors(), ("M", "N", "K", "K2"))
FIRST = Gemm(OP, A, B, BIAS, OUT)
K2 = OP.local("K2")


class _Second(Gemm):
    """The other product, for the constraints on its operands."""

    @property
    def K(self) -> Expr:
        return K2


SECOND = _Second(OP, C, D, BIAS, OUT)


def tiles_of_both(config: Config) -> Tiles:
    """A tile of out is one sum over both products."""
    tiles = tiles_of(FIRST, config)
    return replace(tiles, k_blocks=tiles.k_blocks + ceil_div(K2, config.block_k))
