"""The harness itself: what a test is told of ranks that fail, die and hang, and that the next test has whole ones."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks, RanksError, World
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

SHORT = 3.0  # seconds that a call of this file may take which hangs


def total(rank: int, world: World, number: int) -> Any:
    x = torch.full((2,), float(rank + number), device=world.device)
    dist.all_reduce(x)
    return rank, world.rank, os.getpid(), {"sum": x.requires_grad_()}


def fails(rank: int, world: World, where: list[int], then: str) -> None:
    if rank in where:
        raise ValueError(f"rank {rank} has no result")
    if then == "waits":
        dist.all_reduce(torch.ones(2, device=world.device))


def hangs(rank: int, world: World, where: list[int]) -> int:
    while rank in where:
        time.sleep(0.1)
    return rank


def dies(rank: int, world: World, where: int) -> None:
    if rank == where:
        os._exit(7)
    dist.all_reduce(torch.ones(2, device=world.device))


def meets_nobody(rank: int, world: World) -> str:
    if rank == 0:
        with pytest.raises(RuntimeError) as error:
            dist.all_reduce(torch.ones(2, device=world.device))
        return str(error.value)
    time.sleep(2)
    return ""


def on_a_mesh(rank: int, world: World, what: str) -> Any:
    mesh = world.mesh(2, 2, names=("rows", "classes"))
    assert world.mesh(2, 2, names=("rows", "classes")) is mesh and world.mesh().shape == (4,)
    x: DTensor = distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [Shard(0), Replicate()])
    return {"local": x.to_local(), "full": x.full_tensor(), "whole": x}[what]


@pytest.mark.parametrize("world", [2, 4])
def test_each_rank_returns_and_the_processes_stay(ranks: Ranks, world: int) -> None:
    first, second = ranks(world, total, 1), ranks(world, total, 2)
    assert [(r, w) for r, w, _, _ in first] == [(r, r) for r in range(world)]
    assert [pid for _, _, pid, _ in first] == [pid for _, _, pid, _ in second]
    assert os.getpid() not in {pid for _, _, pid, _ in first}
    of_ranks = world * (world - 1) / 2
    for _, _, _, result in second:
        assert result["sum"].tolist() == [of_ranks + 2 * world] * 2 and not result["sum"].is_cuda


def test_meshes(ranks: Ranks) -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    for rank, local in enumerate(ranks(4, on_a_mesh, "local")):
        assert torch.equal(local, whole.chunk(2)[rank // 2])
    assert all(torch.equal(full, whole) for full in ranks(4, on_a_mesh, "full"))
    with pytest.raises(RanksError, match=r"return x\.to_local\(\) or x\.full_tensor\(\)"):
        ranks(4, on_a_mesh, "whole")


@pytest.mark.parametrize("then", ["returns", "waits"])
def test_a_failure_on_one_rank(ranks: Ranks, then: str) -> None:
    before = [pid for _, _, pid, _ in ranks(2, total, 0)]
    with pytest.raises(RanksError) as error:
        ranks(2, fails, [1], then)
    said = str(error.value)
    assert "rank 1 of 2 failed:\nTraceback" in said and "in fails\n" in said and "rank 1 has no result" in said
    assert "rank 0 of 2 failed" not in said
    assert ("rank 0 of 2 did not come back after another had failed" in said) == (then == "waits")
    assert not set(before) & {pid for _, _, pid, _ in ranks(2, total, 0)}


def test_failures_on_several_ranks(ranks: Ranks) -> None:
    with pytest.raises(RanksError) as error:
        ranks(4, fails, [0, 1, 3], "returns")
    assert [f"rank {i} has no result" in str(error.value) for i in range(4)] == [True, True, False, True]


def test_a_hang_names_the_ranks_and_where_they_are(ranks: Ranks) -> None:
    with pytest.raises(RanksError) as error:
        ranks(4, hangs, [1, 2], timeout=SHORT)
    said = str(error.value)
    assert "test_harness.hangs\nranks 1, 2 of 4 did not come back within 3 s; ranks 0, 3 returned" in said
    assert said.count("in hangs") == 2 and "rank 2 was at\n" in said
    assert ranks(4, hangs, []) == [0, 1, 2, 3]


def test_a_dead_peer(ranks: Ranks) -> None:
    with pytest.raises(RanksError, match="rank 1 of 2 died, exit code 7"):
        ranks(2, dies, 1)
    assert ranks(2, hangs, []) == [0, 1]


def test_a_peer_that_died_between_calls(ranks: Ranks) -> None:
    os.kill(ranks(2, total, 0)[0][2], 9)
    with pytest.raises(RanksError, match="rank 0 of 2 died, exit code -9"):
        ranks(2, hangs, [])
    assert ranks(2, hangs, []) == [0, 1]


def test_a_collective_that_not_all_join(ranks: Ranks) -> None:
    before = [pid for _, _, pid, _ in ranks(2, total, 0)]
    said = ranks(2, meets_nobody, collectives=1.0)
    assert "imed out" in said[0] or "imeout" in said[0], said
    assert before == [pid for _, _, pid, _ in ranks(2, total, 0)]


def test_what_cannot_be_sent_is_an_error_here(ranks: Ranks) -> None:
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        ranks(2, lambda rank, world: rank)
    assert ranks(2, hangs, []) == [0, 1]
