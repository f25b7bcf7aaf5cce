"""The machine's own measurements (``tk tune``), handed to the engine when a GPU is first used."""

from __future__ import annotations

import logging

from tk import errors

_log = logging.getLogger("tk")

is_loaded = False


def load() -> None:
    """Pins every problem that the user's tuning file holds. A file that cannot be used is reported, not fatal."""
    global is_loaded
    is_loaded = True
    from tk import tune

    try:
        count = tune.load_user_pins()
    except (OSError, ValueError, errors.Error) as error:  # a bad cache file must not keep a program from running
        _log.warning("the machine's own tuning is not used: %s", error)
    else:
        _log.debug("%s measured choices of this machine", count)
