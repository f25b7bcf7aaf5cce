"""What a launch hands to a product's parts: bundles of arguments, and the constants of a tile."""

from dataclasses import dataclass
from typing import Any, NamedTuple


class Maps(NamedTuple):
    """Tensor maps: of A and B what a producer loads at a time, of the result a sub-tile."""

    a: Any
    b: Any
    out: Any


class Partials(NamedTuple):
    """What ``Fixup`` needs of tiles that are cut along K; None of both where none is."""

    workspace: Any
    counters: Any


class Schedule(NamedTuple):
    """whole: tiles that are not cut. share: how many k blocks of the others a program takes. group: rows of tiles that
    are walked together."""

    whole: Any
    share: Any
    group: Any


@dataclass(frozen=True)
class Tile:
    """BLOCK_M x BLOCK_N of D, of which a ring of STAGES stages brings BLOCK_K of K at a time. BLOCK_M is the cluster's.
    EXTRA_N: as many of the BLOCK_N columns are an instruction of their own, where BLOCK_N is no power of two.

    COOPERATIVE: consumer warp groups that share a tile. PINGPONG: two consumers take turns instead, with a tile each.
    SUBTILE_N: columns that go out at a time, through the next of EPILOGUE_STAGES buffers."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    STAGES: int
    COOPERATIVE: int
    PINGPONG: bool
    SUBTILE_N: int
    EPILOGUE_STAGES: int = 2
    EXTRA_N: int = 0
    CONSUMER_REGS: int = 232
    PRODUCER_REGS: int = 24

    @property
    def ROWS(self) -> int:
        """Of a consumer."""
        return self.BLOCK_M // self.COOPERATIVE

    @property
    def MAIN_N(self) -> int:
        return self.BLOCK_N - self.EXTRA_N

    @property
    def CONSUMERS(self) -> int:
        return 2 if self.PINGPONG else self.COOPERATIVE


@dataclass(frozen=True)
class ClusterTile:
    """A tile of D that a cluster of BLOCKS sums together, each block of it another part of K."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    STAGES: int
    BLOCKS: int
