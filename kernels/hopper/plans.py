"""The host's side: TMA descriptors, how many clusters a GPU holds, and what wgmma takes."""

from dataclasses import replace

from triton.experimental.gluon.language import NVMMASharedLayout

from tk.aot.expr import Expr, Tensor, device, select
from tk.aot.spec import ITEMSIZE, Config, TensorMap
from tk.kernels.gemm.problem import Batch


def tensor_map(t: Tensor, dtype: str, contiguous: int, block: tuple[int, int], along: int = 0, blocks: int = 1,
               multicast: int = 1, round_to_tf32: bool = True) -> TensorMap:  # fmt: skip
    """A TMA view of a matrix, `contiguous` its dimension of stride 1. block: what one thread block has of it, in the
    matrix's own order. In a cluster, `blocks` of them stand side by side along dimension `along`, or `multicast` of
    them have the same. round_to_tf32: of fp32 operands."""
    order = (1 - contiguous, contiguous)
    rows, cols = (block[d] for d in order)
    across = [blocks if d == along else 1 for d in order]
    bases = [[b * (n > 1) for n in across] for b in (1, 2, 4, 8) if b < multicast * blocks]
    size = ITEMSIZE[dtype]
    layout = NVMMASharedLayout(min(128, size * cols), 8 * size, 2, cga_layout=bases)
    return TensorMap(
        t,
        dtype,
        tuple(t.size(d) for d in order),
        (t.stride(order[0]), 1),
        (rows * across[0], cols * across[1]),
        layout=repr(layout),
        round_to_tf32=dtype == "fp32" and round_to_tf32,  # wgmma itself would cut off what tf32 has no room for
    )


def batch_tensor_map(t: Batch, dtype: str, contiguous: int, block: tuple[int, int], is_shared: bool = False,
                     round_to_tf32: bool = True) -> TensorMap:  # fmt: skip
    """A TMA view of a batch of matrices, as ``tensor_map``'s of one. is_shared: all of a batch may be one matrix, with
    a stride of 0 that no tensor map has: then the view is of a batch of one, and the kernel counts in steps of 0."""
    one = tensor_map(t, dtype, contiguous, block, round_to_tf32=round_to_tf32)
    layout = NVMMASharedLayout(min(128, ITEMSIZE[dtype] * one.block[1]), 8 * ITEMSIZE[dtype], 3)
    is_one = (t.batch_stride == 0) if is_shared else (t.batch == 1)
    # The stride of a dimension of size 1 is never used, but the driver wants one.
    return replace(
        one,
        sizes=(select(is_one, 1, t.batch), *one.sizes),
        strides=(select(is_one, 16, t.batch_stride), *one.strides),
        block=(1, *one.block),
        layout=repr(layout),
    )


def resident_clusters(blocks: int, occupancy: int = 1) -> Expr:
    """How many clusters run at a time, with `occupancy` blocks on a multiprocessor. Two blocks always find a pair of
    multiprocessors; groups of four leave some over in every part of the GPU."""
    usable = device.sm_count if blocks <= 2 else device.sm_count * 9 // 10
    return usable * occupancy // blocks


def suits_wgmma(itemsize: int, precision: str, b_k_major: bool) -> bool:
    """wgmma reads 16-bit operands either way round; of tf32 ones B must lie along K, A can come through registers."""
    return itemsize == 2 or (itemsize == 4 and precision == "tf32" and b_k_major)


def config(block_m: int, block_n: int, num_stages: int, subtile_n: int, subtile_n_fp32: int, pingpong: bool = True,
           kinds: str = "plain") -> Config:  # fmt: skip
    """A producer and two consumers, which take turns or share a tile. kinds: the epilogues that it is compiled with;
    fp32: for a result of float32 too, with any epilogue."""
    params = dict(block_m=block_m, block_n=block_n, block_k=64, num_stages=num_stages, subtile_n=subtile_n,
                  subtile_n_fp32=subtile_n_fp32, pingpong=pingpong, cooperative=1 if pingpong else 2,
                  kinds=kinds)  # fmt: skip
    return Config(f"{block_m}x{block_n}x64_s{num_stages}_{'pingpong' if pingpong else 'coop'}", params)
