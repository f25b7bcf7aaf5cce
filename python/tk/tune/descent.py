"""Coordinate descent over the configs that were compiled: from where a prediction starts, one parameter at a time.

A config is a point of what its kernel was compiled with: block sizes, warps, looped or not, split or not. Not every
point was compiled, so a step along a parameter goes to the next value that it has, up and down, at the point that is
nearest in all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Params = Mapping[str, int | str | bool]
Times = Mapping[str, float]  # of some configs, in µs

LEAST_GAIN = 0.01  # what a step must win: less is noise
FEW = 8  # configs that no step has reached, and that are timed all the same


@dataclass
class Descent:
    """config: where it ended. steps: the configs that it stood at, the start first. times: of every config measured,
    the last where it was measured several times."""

    config: str
    steps: list[str]
    times: dict[str, float] = field(default_factory=dict)


def descend(start: str, params: Mapping[str, Params], compare: Callable[[Sequence[str]], Times]) -> Descent:
    """The config that no step along any parameter improves, and none of a few that no step reaches.

    Args:
        start: one of `params`.
        params: of every config that may be taken.
        compare: times configs beside each other; one that it leaves out cannot be used. It is asked for a config once,
            and again for the one stood at, so that both are measured at one clock.

    Raises:
        ValueError: the start cannot be timed.
    """
    found = Descent(start, [start])
    looked_at = {start}
    while True:
        before = found.config
        for parameter in parameters(params.values()):
            while new := [n for n in neighbours(found.config, parameter, params) if n not in looked_at]:
                looked_at.update(new)
                if not _step(found, compare([found.config, *new])):
                    break
        if found.config != before:
            continue
        rest = [n for n in params if n not in looked_at]
        looked_at.update(rest)
        if not 0 < len(rest) <= FEW or not _step(found, compare([found.config, *rest])):
            break
    if not found.times:  # there is nothing beside it
        _step(found, compare([start]))
    return found


def _step(found: Descent, times: Times) -> bool:
    """Goes on to the fastest of these, if it gains enough."""
    if found.config not in times:
        raise ValueError(f"config {found.config} was chosen and cannot be timed")
    found.times.update(times)
    fastest = min(times, key=lambda name: times[name])
    if times[fastest] > (1 - LEAST_GAIN) * times[found.config]:
        return False
    found.config = fastest
    found.steps.append(fastest)
    return True


def parameters(configs: Iterable[Params]) -> list[str]:
    """Those in which configs differ; numbers last: whether a row is looped through decides more than a block's size."""
    listed = list(configs)
    names = sorted({name for p in listed for name in p})
    differ = [name for name in names if len({p.get(name, False) for p in listed}) > 1]
    return sorted(differ, key=lambda name: any(_is_number(p.get(name)) for p in listed))


def neighbours(config: str, parameter: str, params: Mapping[str, Params]) -> list[str]:
    """One step along a parameter: of the next value below and of the next above (of any other, where values have no
    order), the config that is nearest in all else."""
    here = params[config]
    value = here.get(parameter, False)
    others = {n: p for n, p in params.items() if p.get(parameter, False) != value}
    if all(_is_number(p.get(parameter)) for p in (here, *others.values())):
        below = [n for n in others if _number(params[n], parameter) < _number(here, parameter)]
        above = [n for n in others if n not in below]
        sides = [_with_extreme(below, parameter, params, max), _with_extreme(above, parameter, params, min)]
    else:
        values = dict.fromkeys(str(p.get(parameter, False)) for p in others.values())
        sides = [[n for n, p in others.items() if str(p.get(parameter, False)) == v] for v in values]
    return [min(side, key=lambda n: _distance(here, params[n], parameter)) for side in sides if side]


def _with_extreme(
    names: Sequence[str], parameter: str, params: Mapping[str, Params], extreme: Callable[[Iterable[float]], float]
) -> list[str]:
    """The configs with the least, or the largest, value."""
    if not names:
        return []
    wanted = extreme(_number(params[n], parameter) for n in names)
    return [n for n in names if _number(params[n], parameter) == wanted]


def _distance(a: Params, b: Params, without: str) -> float:
    """The distance in all parameters but one: doublings of a number, and 8 for anything else that differs."""
    total = 0.0
    for name in (a.keys() | b.keys()) - {without}:
        x, y = a.get(name, False), b.get(name, False)
        if _is_number(x) and _is_number(y) and x > 0 and y > 0:  # type: ignore[operator]
            total += abs(math.log2(x / y))  # type: ignore[operator]
        elif x != y:
            total += 8
    return total


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(params: Params, name: str) -> float:
    value = params[name]
    assert not isinstance(value, str)
    return float(value)
