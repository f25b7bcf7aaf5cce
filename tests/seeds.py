"""What a run draws at random follows from TK_SEED, which is fresh unless it is given; pytest's header prints it. Tests
print a seed of their own where they can be repeated alone."""

from __future__ import annotations

import os
import random
import zlib

# In the environment, for the workers and the processes that tests start.
RUN = os.environ.setdefault("TK_SEED", str(random.SystemRandom().randrange(1 << 30)))


def seed(variable: str) -> int:
    """The number that an environment variable gives, or one that follows from the run's."""
    return int(os.environ.get(variable) or zlib.crc32(f"{RUN} {variable}".encode()) >> 2)
