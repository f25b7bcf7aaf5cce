"""A mod of a user's from its file to a call: compiled for sm_90 by ``tk build``, loaded, and chosen for on a described
GPU; fakes have the kernels' strides."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tk
from tk import capi
from tk.flex import ops, own_ops
from tk.flex.tracing import trace
from tk.heuristics.problem import describe
from tk.ops.flex import OPTIONAL, Request

from .test_generated_launch import CUDA, Kernel, standing_for

pytest.importorskip("triton")

SOURCE = """
import torch

import tk


def every_third(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & ((q_idx - kv_idx) % 3 == 0)


def window_of_77(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 77)


for mask_mod in (every_third, window_of_77):
    tk.flex.register(mask_mod.__name__, mask_mod=mask_mod, head_dims=(64,), dtypes=(torch.float16,), backward=False)
"""
EVERYWHERE = 1 << 29


def every_third(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return (q_idx >= kv_idx) & ((q_idx - kv_idx) % 3 == 0)


def window_of_77(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 77)


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


def _request(heads: tuple[int, int], dtype: torch.dtype, mask: Any = every_third) -> Request:
    q, k, v = (torch.zeros(1, 2, 8, size, dtype=dtype) for size in (heads[0], *heads))
    text = trace.pair(None, mask).traced.text
    return Request(q, k, v, text, [], [], [], *[None] * len(OPTIONAL), 0.125, 1 << 30, 1 << 30)


@pytest.mark.parametrize(("heads", "dtype", "said"), [
    ((64, 64), torch.float32, "for float16 with head sizes up to 64, and the call is of float32 with head size 64"),
    ((64, 64), torch.bfloat16, "the call is of bfloat16 with head size 64"),
    ((96, 96), torch.float16, "for float16 with head sizes up to 64, and the call is of float16 with head size 96"),
    ((64, 128), torch.float16, "float16 with head size 64 of query and 128 of value"),
    ((128, 64), torch.bfloat16, "bfloat16 with head size 128 of query and 64 of value"),
])  # fmt: skip
def test_what_a_pack_lacks_is_said_with_the_code_that_builds_it(
    name: str, heads: tuple[int, int], dtype: torch.dtype, said: str, tmp_path: Path
) -> None:
    request, traced = _request(heads, dtype), trace.pair(None, every_third).traced
    error = RuntimeError("[tk:VariantNotFound] none of the 2 variants can run")
    with pytest.raises(tk.VariantNotFoundError) as lack:
        own_ops.build_missing(error, traced, request)
    message = str(lack.value)
    assert message.startswith("tk.flex_attention: the loaded packs have these mods") and said in message
    assert "tk build mods.py -o mods.tkpack" in message and "strides" not in message
    file = tmp_path / "mods.py"
    file.write_text(message[message.index("import operator") :])
    runpy.run_path(str(file))
    (found,) = tk.flex.registered(str(file))
    size = heads[0] if heads[0] == heads[1] else heads
    assert (found.head_dims, found.dtypes) == ((size,), (dtype,)) and own_ops.op_name(found.traced) == name


@pytest.mark.parametrize(("head", "dtype"), [(64, torch.bfloat16), (128, torch.float16), (64, torch.float16)])
def test_where_a_pair_has_no_such_kernels_a_more_general_one_serves(name: str, head: int, dtype: torch.dtype) -> None:
    """A user's window of 77, for fp16 and 64: the wheel's window of any size has the rest."""
    request = _request((head, head), dtype, window_of_77)
    own = own_ops.op_name(trace.parse(request.pair))
    with standing_for(capi.describe_device(132, 90, 232448, 50 << 20)):
        for _ in range(2):
            described = describe(ops.on_cuda, request)
            assert described is not None
            assert (described.problem.op == own) == (head == 64 and dtype == torch.float16)


def test_what_a_pack_has_is_not_said_to_be_missing(name: str) -> None:
    """A call that it has kernels for fails as it does: here for want of a device."""
    traced, request = trace.pair(None, every_third).traced, _request((64, 64), torch.float16)
    other = RuntimeError("[tk:VariantNotFound] none of the 2 variants can run")
    with pytest.raises(RuntimeError, match="none of the 2 variants"):
        own_ops.build_missing(other, traced, request)


def test_mods_without_their_gradient_are_said_to_be(name: str) -> None:
    request = _request((64, 64), torch.float16)
    out, lse = torch.zeros(1, 2, 8, 64).half(), torch.zeros(1, 2, 8)
    with pytest.raises(
        tk.VariantNotFoundError, match=f"these mods without their gradient .{name}_backward.: they were"
    ):
        ops.on_cuda_backward(out, lse, out, lse, request, False)


def test_heads_that_no_kernel_has_are_refused(name: str) -> None:
    traced, error = trace.pair(None, every_third).traced, RuntimeError("[tk:VariantNotFound] none of the 2 variants")
    with pytest.raises(tk.UnsupportedError, match="head sizes go up to 512 on CUDA, and are 520"):
        own_ops.build_missing(error, traced, _request((520, 520), torch.float16))


def test_a_call_of_a_dtype_that_no_pack_has_says_so(name: str) -> None:
    with (
        standing_for(capi.describe_device(132, 90, 232448, 50 << 20)),
        pytest.raises(
            tk.VariantNotFoundError, match="for float16 with head sizes up to 64, and the call is of float32"
        ),
    ):
        describe(ops.on_cuda, _request((64, 64), torch.float32))


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
