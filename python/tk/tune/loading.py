"""The machine's own measurements (``tk tune``), handed to the engine once there is a GPU to use them on."""

from __future__ import annotations

import logging

import torch

from tk import errors
from tk.tune.pins import load_user_pins

_log = logging.getLogger("tk")


def load_with_cuda() -> None:
    """Loads them as soon as torch initialises CUDA: every way to call an op finds them, and importing tk does not touch
    the GPU."""
    torch.cuda._lazy_call(load)


def pack_was_loaded() -> None:
    """Loads them again, for the pack's ops, where they were loaded already."""
    if torch.cuda.is_initialized():
        load()


def load() -> None:
    """Pins every problem that the user's tuning files hold. A file that cannot be used is reported, not fatal."""
    try:
        count = load_user_pins()
    except (OSError, ValueError, errors.Error) as error:  # a bad cache file must not keep a program from running
        _log.warning("the machine's own tuning is not used: %s", error)
    else:
        _log.debug("%d measured choices of this machine", count)
