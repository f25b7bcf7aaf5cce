"""OpInfo's samples of products, convolutions and attention: none is refused, and the results are torch's in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

import tk

from .device import DEVICE

pytest.importorskip("expecttest", reason="torch's samples need it: pip install -r requirements/test.txt")
from torch_samples import op_db

OPS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "mm": (tk.mm, torch.mm),
    "bmm": (tk.bmm, torch.bmm),
    "addmm": (tk.addmm, torch.addmm),
    "baddbmm": (tk.baddbmm, torch.baddbmm),
    "nn.functional.linear": (tk.linear, F.linear),
    "nn.functional.conv1d": (tk.conv1d, F.conv1d),
    "nn.functional.conv2d": (tk.conv2d, F.conv2d),
    "nn.functional.conv3d": (tk.conv3d, F.conv3d),
    "nn.functional.scaled_dot_product_attention": (tk.sdpa, F.scaled_dot_product_attention),
}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_samples(name: str, dtype: torch.dtype) -> None:
    ours, torchs = OPS[name]
    infos = [o for o in op_db if o.name == name]
    compared = 0
    for s in (s for info in infos for s in info.sample_inputs(DEVICE, dtype)):
        if s.kwargs.get("dropout_p"):  # random
            continue
        args = s.input, *s.args
        wide_args, wide_kwargs = tree_map_only(Tensor, _wide, (args, s.kwargs))
        expected = torchs(*wide_args, **wide_kwargs)
        with torch.backends.cudnn.flags(allow_tf32=False):  # convolutions of float32 follow this switch
            found = ours(*args, **s.kwargs)
        assert found.dtype == dtype and found.shape == expected.shape, (found.shape, expected.shape)
        bound = TOLERANCE[dtype] * max(1.0, float(expected.abs().max()) if expected.numel() else 0.0)
        torch.testing.assert_close(found.double().cpu(), expected, rtol=0, atol=bound, equal_nan=True)
        compared += 1
    assert compared >= (1 if name == "bmm" else 2), name  # of bmm torch has one


def _wide(x: Any) -> Tensor:
    x = x.detach().cpu()
    return x.double() if x.is_floating_point() else x
