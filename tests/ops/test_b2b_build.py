"""A function of a user's from its file to b2b_gemm's kernel: compiled for sm_90 by ``tk build``, loaded, found by its
fingerprint, and chosen for on a described GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import tk
from tk import capi
from tk.b2b import function
from tk.ops import b2b

from .test_generated_launch import Kernel

pytest.importorskip("triton")

SOURCE = """
import torch

import tk


def softened(sharpness):
    return lambda x: torch.tanh(x * sharpness) + x / 8


tk.b2b.register(softened(2.0), dtypes=(torch.bfloat16, torch.float16))
"""


def softened(sharpness: float):  # type: ignore[no-untyped-def]
    return lambda x: torch.tanh(x * sharpness) + x / 8


@pytest.fixture(scope="module")
def name(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The op's, once it is there."""
    folder = tmp_path_factory.mktemp("b2b")
    (folder / "my_f.py").write_text(SOURCE)
    command = [sys.executable, "-m", "tk", "build", "my_f.py", "-o", "f.tkpack", "--arch", "90"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    tk.load_pack(folder / "f.tkpack")
    return function.op_name(function.traced_function(softened(0.5), "test")[0])


def tensors(m: int, n: int, k: int, p: int, transposed: bool = False) -> list[torch.Tensor]:
    shapes = ((m, k), (k, p), (p, n))
    if transposed:
        return [torch.zeros(s[::-1], dtype=torch.bfloat16).t() for s in shapes]
    return [torch.zeros(s, dtype=torch.bfloat16) for s in shapes]


@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize(
    ("size", "config"),
    (
        ((16896, 64, 64, 4096), "128x64_s3_w4"),
        ((16896, 128, 96, 4096), "128x64_s3_w8"),
        ((16896, 256, 256, 4096), "64x32_s2_w8"),
        ((100, 30, 7, 77), "64x32_s2_w4"),
    ),
)
def test_the_kernel_that_suits_is_chosen(name: str, size: tuple[int, ...], config: str, transposed: bool) -> None:
    call = Kernel(name, capi.describe_device(132, 90, 232448, 50 << 20))
    described = call(*tensors(*size, transposed), 0.5, int(transposed), -1, 0)
    assert described is not None
    chosen = capi.choose(described.problem)
    assert (chosen.kernel_name, chosen.config_name) == (name, config)
    assert call.returned.stride() == ((1, size[0]) if transposed else (size[1], 1))


def test_the_package_s_own_kernel_takes_the_activation() -> None:
    call = Kernel("b2b_fused", capi.describe_device(132, 90, 232448, 50 << 20))
    described = call(*tensors(16896, 128, 128, 4096), 0, 4, -1, 0)
    assert described is not None and described.problem.ints == (0, 4)
    assert capi.choose(described.problem).config_name == "128x64_s3_w8"


def test_it_is_found_by_its_fingerprint(name: str) -> None:
    text = function.traced_function(softened(3.0), "test")[0].text
    assert b2b._own(text, torch.bfloat16, 0) is getattr(torch.ops.tk, name).default
    assert b2b._own("", torch.bfloat16, 0) is torch.ops.tk.b2b_fused.default
    other = function.traced_function(lambda x: x * x * 3, "test")[0].text
    with pytest.raises(tk.VariantNotFoundError, match=r"tk build FILE.py -o f.tkpack"):
        b2b._own(other, torch.bfloat16, 0)


def test_what_does_not_fit_is_refused(name: str) -> None:
    call = Kernel(name, capi.describe_device(132, 90, 232448, 50 << 20))
    a, b, c = tensors(16, 16, 16, 16)
    with pytest.raises(ValueError, match="inner sizes of a, b and c differ"):
        call(a, b[:8], c, 0.5, 0, -1, 0)
    with pytest.raises(ValueError, match="must be of dtype bf16 or fp16"):
        call(a.float(), b.float(), c.float(), 0.5, 0, -1, 0)
