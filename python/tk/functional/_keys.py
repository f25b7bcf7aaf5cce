"""The key of a call that draws and is given no seed: 64 random bits on the call's device, from torch's generator.

Eager calls draw theirs by a launch each. That makes them a function of the generator's state alone: who puts a state
back, as activation checkpointing does, gets the same numbers again. In a captured CUDA graph no state can be put back,
and a launch more for each call would be in every replay: there the keys of many calls are drawn at once.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from tk import capi

__all__ = ["draw"]

COUNT = 64  # keys drawn at once
# 256 bytes: a key lies as a tensor of its own would, so that a call in a graph is the same problem to the core, which
# looks at addresses, as the call that loaded its kernel before.
APART = 32


class Place(NamedTuple):
    """The stream and state that keys are drawn ahead for. Nothing orders a capture's streams but the program, so each
    has its own keys.

    state: seed and offset of torch's generator. A program may exchange its state within a capture for another one that
    the graph knows (``Generator.graphsafe_set_state``): for a model whose ranks share some draws and not others."""

    capture: int
    device: int
    stream: int
    state: tuple[int, int]


# Of one capture; the last key is the next one. Only what is atomic is done to the dict and its lists: threads may share
# a stream.
_kept: dict[Place, list[Tensor]] = {}


def draw(device: torch.device) -> Tensor:
    """[], int64, on the device; no other call gets the same memory."""
    if torch.compiler.is_compiling():  # the graph has a node for it
        return _one(device)
    place = _place(device)
    if place is not None:
        return _next(place, device)
    if _kept:  # their capture is over, or in another thread, which then draws new ones
        _kept.clear()
    return _one(device)


def _one(device: torch.device) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)


def _next(place: Place, device: torch.device) -> Tensor:
    while True:
        try:
            return _kept[place].pop()
        except KeyError:
            for other in list(_kept):
                if other.capture != place.capture:
                    _kept.pop(other, None)
        except IndexError:
            pass  # all are used, perhaps by another thread just now
        _kept[place] = _several(device)


def _several(device: torch.device) -> list[Tensor]:
    """Draws several keys by one launch. They must serve calls outside of inference mode too, whose backward saves
    them."""
    with torch.inference_mode(False):
        keys = torch.empty((COUNT, APART), dtype=torch.int64, device=device)[:, 0]
        keys.random_(-(2**63), 2**63 - 1)
        return list(keys.unbind())[::-1]


# --- Captures ---


def _place(device: torch.device) -> Place | None:
    """None where each key is to be drawn for itself: outside of captures, and where what is drawn is not a plain tensor
    in the capture's memory."""
    if device.type != "cuda" or not torch.cuda.is_initialized() or not torch.cuda.is_current_stream_capturing():
        return None
    index = torch.cuda.current_device()  # another one's stream is in another capture, or in none
    if device.index != index or torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return None
    stream = torch.cuda.current_stream(index)
    if _inductor_records(index, stream):
        return None
    state = _state(index, stream)
    return state and Place(capi.capture_id(stream.cuda_stream), index, stream.cuda_stream, state)


def _state(index: int, stream: torch.cuda.Stream) -> tuple[int, int] | None:
    """Seed and offset of torch's generator as they are outside of the capture, which tell its states apart. They can be
    read only while the current stream is in no capture; None where that cannot be had."""
    generator = torch.cuda.default_generators[index]
    first, second = _streams(index)
    torch.cuda.set_stream(second if first == stream else first)
    try:
        return generator.initial_seed(), generator.get_offset()
    except RuntimeError:  # the program captures that stream too, as torch lends few streams again and again
        return None
    finally:
        torch.cuda.set_stream(stream)


@cache
def _streams(index: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    return torch.cuda.Stream(index), torch.cuda.Stream(index)


def _inductor_records(index: int, stream: torch.cuda.Stream) -> bool:
    """Whether Inductor records a graph, whose memory it accounts for: keys kept for later calls are not in its books.
    All its recordings of a device are on one stream. True where that cannot be told."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False
    try:
        manager = trees.get_manager(index, create_if_none_exists=False)
        return manager is not None and bool(manager.stream == stream)
    except (AssertionError, AttributeError, TypeError):  # a thread that it does not know, or another torch
        return True
