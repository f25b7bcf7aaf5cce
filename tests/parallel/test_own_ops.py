"""A user's ops on DTensors: their rules come with the pack."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import Ranks, World
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor

import tk

SOURCE = """
import tk

@tk.op(x="fp32[..., N]", scale="fp32[N]")
def own_energy(x, scale):
    return 0.5 * (x * x * scale).sum(-1)

@tk.op(x="fp32[M, N]", average="fp32[M, N]", weight="fp32[M]")
def own_update(x, average, weight):
    average.mul_(0.5).add_(x * weight[:, None])
"""


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.py").write_text(SOURCE)
    found = folder / "own.tkpack"
    command = [
        sys.executable,
        "-m",
        "tk",
        "build",
        str(folder / "own.py"),
        "--arch",
        "90",
        "--sample",
        "-o",
        str(found),
    ]
    subprocess.run(command, env={**os.environ, "TK_NO_LIBRARY": "1"}, check=True, capture_output=True)
    return found


def summed(rank: int, world: World, pack: Path) -> None:
    tk.load_pack(pack)
    torch.manual_seed(0)
    x, scale = torch.randn(4, 6), torch.rand(6)
    expected = torch.ops.tk.own_energy(x, scale)
    for of_x, of_scale, placement in ((0, None, Shard(0)), (1, 0, Partial())):
        given = (distribute_tensor(t, world.mesh(), [Replicate() if d is None else Shard(d)])
                 for t, d in ((x, of_x), (scale, of_scale)))  # fmt: skip
        found = torch.ops.tk.own_energy(*given)
        assert found.placements == (placement,)
        torch.testing.assert_close(found.full_tensor(), expected)


def test_rules_come_from_the_pack(ranks: Ranks, pack: Path) -> None:
    ranks(2, summed, pack)


def written(rank: int, world: World, pack: Path, placements: list[Placement]) -> str:
    """What is said; "" where the tensor that is written is right."""
    tk.load_pack(pack)
    torch.manual_seed(0)
    whole = torch.randn(4, 6), torch.randn(4, 6), torch.rand(4)
    given = [distribute_tensor(t, world.mesh(), [p]) for t, p in zip(whole, placements, strict=True)]
    torch.ops.tk.own_update(*whole)
    try:
        torch.ops.tk.own_update(*given)
    except (tk.UnsupportedError, RuntimeError) as error:
        return str(error)
    torch.testing.assert_close(given[1].full_tensor(), whole[1])
    return ""


@pytest.mark.parametrize(
    ("placements", "said"),
    [
        ([Shard(0), Shard(0), Shard(0)], ""),
        ([Shard(1), Shard(1), Replicate()], ""),
        ([Replicate(), Shard(0), Replicate()], ""),
        ([Shard(0), Replicate(), Shard(0)], ""),
        ([Shard(0), Partial(), Shard(0)], "tk.own_update: average, which it writes, is [Partial(sum)]"),
    ],
    ids=str,
)
def test_a_tensor_that_is_written_is_never_a_copy(
    ranks: Ranks, pack: Path, placements: list[Placement], said: str
) -> None:
    """The others are redistributed to where it lies."""
    assert all(said in found and bool(found) == bool(said) for found in ranks(2, written, pack, placements))
