"""Which of the core's ops int4_mm launches on a GPU: tensors on the CPU stand for some on a described one."""

from __future__ import annotations

import pytest
import torch

import tk
from tk import _library, capi
from tk.config import MODE_BITS
from tk.heuristics import problem as _problem

CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


@pytest.fixture(scope="session")
def h100() -> int:
    return capi.describe_device(132, 90, 232448, 50 << 20)


def launched(device: int, rows: int, config: int = -1, mode: int = 0) -> list[str]:
    """Nothing is carried out."""
    names: list[str] = []
    callback = _problem._Callback(lambda call, _: names.append(_library.core().tk_op_name(call.contents.op).decode()))
    a, b = torch.zeros(rows, 128).bfloat16(), tk.pack_int4(torch.zeros(128, 64, dtype=torch.uint8))
    scales = torch.ones(1, 64).bfloat16()
    _library.ops().tk_ops_capture_device(device)
    _problem._capture()(callback, None)
    try:
        torch.ops.tk.int4_mm.default.redispatch(CUDA, a, b, scales, None, 128, None, 0, None, -1, config, mode)
    finally:
        _problem._capture()(_problem._Callback(), None)
        _library.ops().tk_ops_capture_device(-1)
    return names


def test_from_65_rows_on_the_weight_is_unpacked_once(h100: int) -> None:
    for rows in (1, 33, 64):
        assert launched(h100, rows) == ["int4_mm"], rows
    for rows in (65, 200, 4096):
        assert launched(h100, rows) == ["int4_dequantize", "mm"], rows


def test_a_config_is_one_of_the_fused_kernels_and_rows_decide_nothing_where_they_may_not(h100: int) -> None:
    assert launched(h100, 4096, config=0) == ["int4_mm"]
    assert launched(h100, 4096, mode=MODE_BITS["batch_invariant"]) == ["int4_mm"]
