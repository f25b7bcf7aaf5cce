"""Thread-block clusters. To the compiler a cluster's blocks have one tile, with the cluster in its layout: shapes and
positions are the cluster's."""

from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.constexpr_function
def cluster_bases(blocks, dim, rank):
    """Of a layout (`cga_layout`) in which the cluster's blocks lie one after the other along `dim`."""
    return [[b if d == dim else 0 for d in range(rank)] for b in (1, 2, 4, 8) if b < blocks]


@gluon.constexpr_function
def shared_barrier_layout(blocks):
    """Of a barrier that the cluster has but once."""
    return mbarrier.MBarrierLayout([[0] for b in (1, 2, 4, 8) if b < blocks])
