"""Coordinate descent over compiled configs, by a timer that is made up."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pytest

from tk.tune.descent import LEAST_GAIN, Params, descend, neighbours, parameters


def name(p: int, q: int, warps: int, looped: bool = False) -> str:
    return f"{'loop_' if looped else ''}{p}x{q}_w{warps}"


GRID: dict[str, Params] = {
    name(p, q, w, looped): {"p": p, "q": q, "num_warps": w, "looped": looped}
    for p, q, w, looped in itertools.product((1, 2, 4, 8), (256, 512, 1024, 2048), (2, 4, 8, 16), (False, True))
}


def bowl(p: Params) -> float:
    """Least at 2x1024, 4 warps, not looped."""
    away = abs(math.log2(p["p"] / 2)) + abs(math.log2(p["q"] / 1024)) + abs(math.log2(p["num_warps"] / 4))  # type: ignore[operator]
    return 10.0 + away + 3 * bool(p["looped"])


class Timer:
    """asked: the configs of each comparison. Those in `broken` cannot be timed."""

    def __init__(self, us: Callable[[Params], float], params: dict[str, Params], broken: Sequence[str] = ()):
        self.us, self.params, self.broken = us, params, broken
        self.asked: list[list[str]] = []

    def __call__(self, names: Sequence[str]) -> dict[str, float]:
        self.asked.append(list(names))
        return {n: self.us(self.params[n]) for n in names if n not in self.broken}


def test_the_bottom_is_found_by_looking_at_few() -> None:
    for start in (name(8, 256, 16, True), name(1, 2048, 2), name(2, 1024, 4)):
        timer = Timer(bowl, GRID)
        found = descend(start, GRID, timer)
        assert found.config == name(2, 1024, 4) == found.steps[-1]
        assert found.steps[0] == start and len(found.times) < len(GRID) / 4
        assert all(found.times[n] == bowl(GRID[n]) for n in found.times)


def test_every_step_changes_one_parameter_and_gains() -> None:
    found = descend(name(8, 256, 16, True), GRID, Timer(bowl, GRID))
    for before, after in itertools.pairwise(found.steps):
        assert sum(GRID[before][k] != GRID[after][k] for k in GRID[before]) == 1
        assert found.times[after] < found.times[before]


def test_each_config_is_compared_with_where_the_walk_stands_and_once() -> None:
    timer = Timer(bowl, GRID)
    found = descend(name(8, 256, 16, True), GRID, timer)
    new = [n for names in timer.asked for n in names[1:]]
    assert len(new) == len(set(new)) and {names[0] for names in timer.asked} <= set(found.steps)


def test_what_cannot_be_timed_is_walked_around() -> None:
    broken = [name(2, 512, 4), name(2, 2048, 4), name(1, 1024, 4)]
    timer = Timer(bowl, GRID, broken)
    found = descend(name(8, 512, 4), GRID, timer)
    assert found.config == name(2, 1024, 4) and not set(broken) & set(found.times)
    with pytest.raises(ValueError, match="1x256_w2 was chosen and cannot be timed"):
        descend(name(1, 256, 2), GRID, Timer(bowl, GRID, [name(1, 256, 2)]))


def test_noise_moves_nothing() -> None:
    timer = Timer(lambda p: 10.0 if p["p"] == 4 else 10.0 * (1 - LEAST_GAIN / 2), GRID)
    assert descend(name(4, 512, 4), GRID, timer).steps == [name(4, 512, 4)]


def test_a_timer_that_contradicts_itself_comes_to_an_end() -> None:
    clock = itertools.count(1000, -1)
    found = descend(name(4, 512, 4), GRID, Timer(lambda p: float(next(clock)), GRID))
    assert len(found.steps) == len(set(found.steps)) <= len(GRID)


def test_a_config_alone_is_timed() -> None:
    alone = {"only": GRID[name(1, 256, 2)]}
    found = descend("only", alone, Timer(bowl, alone))
    assert (found.config, found.steps, found.times) == ("only", ["only"], {"only": bowl(alone["only"])})


# As they are compiled: no two differ in one parameter alone.
SPARSE: dict[str, Params] = {
    "loop_1x4096_w16": {"p": 1, "q": 4096, "num_warps": 16, "looped": True},
    "32x64_w4": {"p": 32, "q": 64, "num_warps": 4, "looped": False},
    "8x256_w4": {"p": 8, "q": 256, "num_warps": 4, "looped": False},
    "2x1024_w4": {"p": 2, "q": 1024, "num_warps": 4, "looped": False},
    "1x3x1024_w4": {"p": 1, "q": 3072, "num_warps": 4, "looped": False, "segments": 3},
    "1x4096_w8": {"p": 1, "q": 4096, "num_warps": 8, "looped": False},
    "split_1x4096_w8": {"p": 1, "q": 4096, "num_warps": 8, "looped": False, "split": True},
}


def test_neighbours_of_points_that_are_few() -> None:
    """The next values below and above, or any other where there is no order; there the nearest in all else."""
    assert parameters(SPARSE.values()) == ["looped", "split", "num_warps", "p", "q", "segments"]
    assert neighbours("2x1024_w4", "q", SPARSE) == ["8x256_w4", "1x3x1024_w4"]
    assert neighbours("2x1024_w4", "p", SPARSE) == ["1x4096_w8", "8x256_w4"]
    assert neighbours("32x64_w4", "p", SPARSE) == ["8x256_w4"]
    assert neighbours("1x4096_w8", "num_warps", SPARSE) == ["2x1024_w4", "loop_1x4096_w16"]
    assert neighbours("1x4096_w8", "looped", SPARSE) == ["loop_1x4096_w16"]
    assert neighbours("1x4096_w8", "split", SPARSE) == ["split_1x4096_w8"]
    assert neighbours("1x4096_w8", "segments", SPARSE) == ["1x3x1024_w4"]


def test_a_walk_over_points_that_are_few() -> None:
    times = dict(zip(SPARSE, (5.0, 9.0, 7.0, 6.0, 4.0, 8.0, 8.5), strict=True))
    by_id = {id(p): times[n] for n, p in SPARSE.items()}
    found = descend("32x64_w4", SPARSE, Timer(lambda p: by_id[id(p)], SPARSE))
    assert found.config == "1x3x1024_w4"
