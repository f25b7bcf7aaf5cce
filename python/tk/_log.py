"""The ``tk`` logger, and TK_LOG."""

from __future__ import annotations

import logging
import os

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
