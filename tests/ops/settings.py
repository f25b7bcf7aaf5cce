"""Right calls of what computes nothing but decides what will be: tk.use, tk.load_pack, tk.config, masks and mods.

Each is undone at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tk
from tk import config
from tk.cli._calls import Call
from tk.flex import registry

__all__ = ["Setting", "calls"]


@dataclass(frozen=True)
class Setting(Call):
    """name: behind tk."""

    @property
    def function(self) -> Callable[..., Any]:
        found = functools.reduce(getattr, self.name.split("."), tk)
        return _UNDONE[self.name](found)


def _within(factory: Callable[..., Any]) -> Callable[..., None]:
    @functools.wraps(factory)
    def call(*args: Any, **kwargs: Any) -> None:
        with factory(*args, **kwargs):
            pass

    return call


def _restoring(place: Any, name: str, copied: Callable[[Any], Any]) -> Callable[..., Any]:
    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> None:
            before = copied(getattr(place, name))
            try:
                function(*args, **kwargs)
            finally:
                setattr(place, name, before)

        return call

    return around


def _undone(use: Callable[..., Any]) -> Callable[..., None]:
    @functools.wraps(use)
    def call(*args: Any, **kwargs: Any) -> None:
        use(*args, **kwargs).undo()

    return call


def _without_result(function: Callable[..., Any]) -> Callable[..., None]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)

    return call


_UNDONE: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "use": _undone,
    "load_pack": _without_result,
    **dict.fromkeys(
        [f"config.{name}" for name in ("deterministic", "batch_invariant", "strict", "static_weights")], _within
    ),
    **dict.fromkeys(["config.modes", "config.override", "config.build_missing"], _within),
    "config.set_default_modes": _restoring(config, "_default", lambda state: state),
    "flex.create_block_mask": _without_result,
    "flex.register": _restoring(registry, "_registered", list),
}


def _allows(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx - kv_idx < 5


def _capped(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.tanh(score)


def calls(device: str) -> list[Call]:
    """None moves a tensor; each argument is one that a user gives."""
    modes = {"deterministic": True, "batch_invariant": None, "strict": False, "static_weights": None}
    made = {
        "use": ((torch.nn.Linear(4, 4),), {"only_faster": True}),
        "load_pack": ((str(tk.packs()[0].path),), {}),
        "config.deterministic": ((True,), {}),
        "config.batch_invariant": ((True,), {}),
        "config.strict": ((True,), {}),
        "config.static_weights": ((True,), {}),
        "config.modes": ((), modes),
        "config.set_default_modes": ((), modes),
        "config.build_missing": ((True,), {}),
        "config.override": (("mm", 0), {}),
        "flex.create_block_mask": ((_allows, 1, 2, 200, 300, device, 128), {"separate_full_blocks": True}),
        "flex.register": (
            ("drawn", _capped, _allows),
            {"head_dims": (64, (128, 64)), "dtypes": (torch.bfloat16,), "backward": True, "decode": False},
        ),
    }
    return [Setting(name, args, None, kwargs) for name, (args, kwargs) in made.items()]
