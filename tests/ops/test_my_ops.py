"""examples/my_ops.py from its source to torch.ops.tk: built without a GPU, loaded, called on the CPU against the
functions themselves, and looked up for a GPU that is described."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck
from torch.testing import assert_close
from torch.utils._pytree import tree_flatten, tree_map_only

import tk
from tk import capi
from tk.generated import Declared

from .test_generated_launch import Kernel

FILE = Path(__file__).parents[2] / "examples" / "my_ops.py"


def r(*shape: int) -> Tensor:
    return torch.randn(shape)


CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "scaled_tanh": lambda: (r(3, 5), 0.5),
    "squashed": lambda: (r(2, 3, 4).transpose(0, 2), -1.0, 2.0),
    "shifted_bits": lambda: (torch.randint(-99, 99, (4, 3), dtype=torch.int32), 3),
    "smooth_difference": lambda: (r(4, 3), r(4, 3)),
    "masked": lambda: (r(2, 6), r(2, 6) > 0),
    "gate": lambda: (r(16), True),
    "biased_relu": lambda: (r(2, 3, 8).bfloat16(), r(8).bfloat16()),
    "outer_scaled": lambda: (r(4, 6), r(4, 1), r(6)),
    "channel_affine": lambda: (r(2, 3, 4, 5).to(memory_format=torch.channels_last), r(3), r(3)),
    "row_range": lambda: (r(2, 3, 7),),
    "centred": lambda: (r(3, 9)[:, ::2],),
    "unit_rows": lambda: (r(3, 8), r(8), 1e-6),
    "column_spread": lambda: (r(9, 4),),
    "any_not_finite": lambda: (torch.tensor([1.0, float("inf")]),),
    "best": lambda: (r(2, 3, 11), 0.7),
    "neighbours": lambda: (r(2, 5),),
    "mirrored": lambda: (r(3, 4),),
    "looked_up": lambda: (r(5, 4), torch.tensor([[0, 4], [2, 2]])),
    "decayed_": lambda: (r(3, 4), r(3, 4), 0.9),
    "scale_all_": lambda: ([r(3), r(2, 2), r(0)], 2.0),
    "scaled_copies": lambda: ([r(3), r(2, 2).t(), r(0), r()], r(), 2.0),
    "clip_norm_": lambda: ([r(3), r(2, 2).t(), r(5000)], 0.5),
}


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The file, its pack built and loaded."""
    pack = tmp_path_factory.mktemp("my_ops") / "my_ops.tkpack"
    command = [sys.executable, "-m", "tk", "build", str(FILE), "--arch", "90", "--sample", "-o", str(pack)]
    done = subprocess.run(command, env={**os.environ, "TK_NO_LIBRARY": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tk.load_pack(pack)
    spec = importlib.util.spec_from_file_location("my_ops", FILE)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_every_function_is_called(module: ModuleType) -> None:
    assert {name for name, x in vars(module).items() if isinstance(x, Declared)} == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_as_the_function_itself(module: ModuleType, name: str) -> None:
    """Results, and what is written in place."""
    args = CALLS[name]()
    own = tree_map_only(Tensor, torch.clone, args)
    expected = getattr(module, name)(*own)
    found = getattr(torch.ops.tk, name)(*args)
    for a, e in zip(tree_flatten([found, args])[0], tree_flatten([expected, own])[0], strict=True):
        assert_close(a, e)


@pytest.mark.parametrize("name", CALLS)
def test_a_gpu_has_a_kernel_for_it(module: ModuleType, name: str) -> None:
    described = Kernel(name, capi.describe_device(132, 90, 232448, 50 << 20))(*CALLS[name]())
    assert described is not None
    assert capi.choose(described.problem, -1).kernel_name == name


@pytest.mark.parametrize("name", ["scaled_tanh", "unit_rows"])
def test_gradients(module: ModuleType, name: str) -> None:
    args = [x.requires_grad_() if isinstance(x, Tensor) else x for x in CALLS[name]()]
    sources = [x for x in args if isinstance(x, Tensor)]
    found = torch.autograd.grad(getattr(torch.ops.tk, name)(*args).square().sum(), sources)
    for a, e in zip(found, torch.autograd.grad(getattr(module, name)(*args).square().sum(), sources), strict=True):
        assert_close(a, e)


def test_results_of_lists(module: ModuleType) -> None:
    """Their fakes, what is checked of them, and lists without a tensor."""
    xs, scale = [r(3), r(2, 2).t(), r(0)], r()
    opcheck(torch.ops.tk.scaled_copies.default, (xs, scale, 2.0))
    opcheck(torch.ops.tk.clip_norm_.default, (xs[:2], 0.5))
    assert torch.ops.tk.scaled_copies([], scale, 2.0) == []
    with pytest.raises(ValueError, match="grads is an empty list, of which nothing can be reduced"):
        torch.ops.tk.clip_norm_([], 0.5)
    with pytest.raises(ValueError, match=r"scale must have 0 dimensions, is \[2\]"):
        torch.ops.tk.scaled_copies(xs, r(2), 2.0)
    x = r(4)
    with pytest.raises(ValueError, match="overlaps"):
        torch.ops.tk.clip_norm_([x, x[:2]], 0.5)


def test_what_kernels_are_told_of_results_of_lists(module: ModuleType) -> None:
    described = Kernel("clip_norm_", capi.describe_device(132, 90, 232448, 50 << 20))([r(5), r(4097)], 0.5)
    assert described is not None
    found = [t for t in described.problem.tensors if t is not None]
    assert [t.sizes for t in found] == [(2, 3), ()]
