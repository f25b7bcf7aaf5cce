"""A mod of a user's from its file to a call: compiled for sm_90 by ``tk build``, loaded, and chosen for on a described
GPU; fakes have the kernels' strides."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial

import pytest
import torch

import tk
from tk import capi
from tk.flex import own_ops
from tk.flex.tracing import trace
from tk.heuristics.problem import describe

from .test_generated_launch import CUDA, Kernel, standing_for

pytest.importorskip("triton")

SOURCE = """
import torch

import tk


def every_third(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & ((q_idx - kv_idx) % 3 == 0)


tk.flex.register("every_third", mask_mod=every_third, head_dims=(64,), dtypes=(torch.float16,), backward=False)
"""
EVERYWHERE = 1 << 29


def every_third(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return (q_idx >= kv_idx) & ((q_idx - kv_idx) % 3 == 0)


@pytest.fixture(scope="module")
def name(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The op's, once it is there."""
    folder = tmp_path_factory.mktemp("mods")
    (folder / "my_mods.py").write_text(SOURCE)
    command = [sys.executable, "-m", "tk", "build", "my_mods.py", "-o", "mods.tkpack", "--arch", "90"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    tk.load_pack(folder / "mods.tkpack")
    return f"flex_{trace.pair(None, every_third).fingerprint[:16]}"


def arguments(heads: int, kv_heads: int, rows: int, keys: int, size: int, device: str = "cpu") -> list[object]:
    shapes = ((heads, rows), (kv_heads, keys), (kv_heads, keys))
    q, k, v = (torch.zeros(2, n, h, size, dtype=torch.float16, device=device).transpose(1, 2) for h, n in shapes)
    absent = [torch.empty([0] * r, dtype=torch.int32, device=device) for r in (3, 4, 3, 4, 3, 4, 3, 4, 1, 2, 1)]
    return [q, k, v, *absent, 0.125, 128, 128, EVERYWHERE, EVERYWHERE, 0, 0]


@pytest.mark.parametrize(
    ("shape", "kernel"),
    [
        ((16, 4, 1, 8192, 64), "decode"),
        ((16, 4, 1024, 1024, 64), "hopper"),
        ((4, 4, 100, 100, 48), "forward"),
        ((4, 4, 100, 100, 13), "forward"),
    ],
)
def test_the_kernel_that_suits_is_chosen(name: str, shape: tuple[int, ...], kernel: str) -> None:
    call = Kernel(name, capi.describe_device(132, 90, 232448, 50 << 20))
    described = call(*arguments(*shape), 1, 0, 0, -1, 0)
    assert described is not None
    assert capi.choose(described.problem).kernel_name == f"{name}_{kernel}"


def test_a_negative_scale_is_not_for_hopper_s_kernel(name: str) -> None:
    call = Kernel(name, capi.describe_device(132, 90, 232448, 50 << 20))
    described = call(*arguments(16, 4, 1024, 1024, 64), 1, 1, 0, -1, 0)
    assert described is not None
    assert capi.choose(described.problem).kernel_name == f"{name}_forward"


def test_fakes_are_as_kernels_allocate(name: str) -> None:
    """As the query lies, heads inside of rows."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    call = Kernel(name, capi.describe_device(132, 90, 232448, 50 << 20))
    call(*arguments(16, 4, 128, 256, 64), 1, 0, 0, -1, 0)
    out, lse = call.returned
    with FakeTensorMode():
        args = arguments(16, 4, 128, 256, 64, "cuda")
        own = getattr(torch.ops.tk, name)(*args)
        public = torch.ops.tk.flex_attention(*args[:3], "", [], [], [], *[None] * 11, 0.125, 128, 128)
    for fake in (own, public):
        assert (
            (fake[0].shape, fake[0].stride()) == (out.shape, out.stride()) == ((2, 16, 128, 64), (131072, 64, 1024, 1))
        )
        assert fake[1].shape == lse.shape


def test_largest_scores_are_behind_the_log_sum_exps(name: str) -> None:
    call = Kernel(name, capi.describe_device(132, 90, 232448, 50 << 20))
    call(*arguments(16, 4, 128, 256, 64), 1, 0, 1, -1, 0)
    assert call.returned[1].shape == (2, 16, 256)


def test_a_query_of_a_wrong_dtype_is_refused(name: str) -> None:
    q, k, v, *others = arguments(4, 4, 16, 16, 64)
    call = Kernel(name, capi.describe_device(132, 90, 232448, 50 << 20))
    with pytest.raises(ValueError, match="query must be of dtype fp16"):
        call(q.float(), k.float(), v.float(), *others, 1, 0, 0, -1, 0)  # type: ignore[union-attr]


def test_a_tile_that_kernel_options_name(name: str) -> None:
    device = capi.describe_device(132, 90, 232448, 50 << 20)
    call = Kernel(name, device)
    given = (*arguments(4, 4, 100, 100, 48), 1, 0, 0)
    described = call(*given, -1, 0)
    assert described is not None
    fitting = [row for row in capi.candidates(described.problem) if row.fits]
    op = partial(call.op.redispatch, CUDA)
    for row in fitting:
        (rows, cols) = re.findall(r"(\d+)x(\d+)", row.config_name)[0]
        with standing_for(device):
            number = own_ops.config_with(f"BLOCK_M={rows} BLOCK_N={cols}", op, given)
        assert number in [r.config for r in fitting if f"{rows}x{cols}_" in r.config_name]
        found = call(*given, number, 0)
        assert found is not None and found.config == number
    with (
        standing_for(device),
        pytest.raises(tk.UnsupportedError, match=f"has BLOCK_M=512; there are, .*{fitting[0].config_name}"),
    ):
        own_ops.config_with("BLOCK_M=512", op, given)

    def within() -> None:  # what describes a call may be described
        op(*given, own_ops.config_with("BLOCK_N=32", op, given))

    with standing_for(device):
        assert describe(within) is not None
