"""The ``tk`` logger and TK_LOG, and what torch logs."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_FORMAT = "tk %(levelname)s: %(message)s"


def set_up() -> None:
    """Prints the ``tk`` logger from the level that TK_LOG names on; without it logging is left to the program."""
    wanted = os.environ.get("TK_LOG", "").strip()
    if not wanted:
        return
    logger = logging.getLogger("tk")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT))
    logger.addHandler(handler)
    logger.propagate = False
    try:
        logger.setLevel(wanted.upper())
    except ValueError:
        logger.setLevel(logging.WARNING)
        logger.warning("TK_LOG=%s is no level; there are debug, info, warning and error", wanted)


# What torch runs tensors without values by, and works out their sizes by.
_OF_FAKES = (
    "torch._subclasses.fake_tensor",
    "torch.fx.experimental.symbolic_shapes",
    "torch.fx.experimental.sym_node",
    "torch.utils._sympy.interp",
)


@contextmanager
def without_errors_of_fakes() -> Iterator[None]:
    """Keeps torch from logging, in this thread, what ops refuse of tensors without values or of sizes that are symbols,
    with a traceback each. The error itself is raised as ever, and is an answer to whoever asks with such tensors."""
    own = threading.get_ident()

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != own

    loggers = [logging.getLogger(name) for name in _OF_FAKES]
    for logger in loggers:
        logger.addFilter(is_of_others)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_of_others)
