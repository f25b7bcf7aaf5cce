"""What kernels for Hopper (sm_90a, in Gluon) are made of: parts that a kernel puts together, and may exchange.

    cluster.py           layouts of a thread-block cluster
    dependent_launch.py  programmatic dependent launch
    pipeline.py          the ring of stages and its barriers; the order barrier of ping-pong consumers
    tma_load.py          operands that TMA loads: what a producer warp puts into a stage
    tile_scheduler.py    which tile, and which blocks of K of it, comes next: persistent, or stream-K
    wgmma.py             what a consumer warp group multiplies: the mainloop's instructions
    epilogue.py          from the accumulator to memory: bias and activation, sub-tiles, TMA stores
    scales.py            the same of float8 operands, which have scales
    warp_roles.py        the producer's and the consumer's loop, which call these
    product.py           the assembly: barriers, producers and consumers around the parts that a kernel has chosen
    arguments.py         bundles of a launch's arguments, and the constants of a tile
    plans.py             host side: TMA descriptors, how many clusters a GPU holds, what wgmma takes, stream-K's shares

A part is an aggregate: run-time values with the constants that they were compiled for, and methods. Whoever calls a
method does not ask which part it is, so another operand (gathered, dequantised), another mainloop (scaled, from
registers), another scheduler (grouped) or another epilogue is another aggregate with the same methods.

All of them compute D = A B^T with A [M, K] and B [N, K], each stored either way round, fp32 accumulators. wgmma has 64
rows of A at least. Where the product at hand has few rows, or an odd number of them, its operands trade places
(swap-AB): A is then its b^T, B its a, and D its transposed result.
"""
