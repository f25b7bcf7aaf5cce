from collections.abc import Iterator

import pytest
from harness import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """``ranks(world, fn, *args)``: what ``fn(rank, world, *args)`` returns on each of so many ranks."""
    pools = Ranks()
    yield pools
    pools.close()
