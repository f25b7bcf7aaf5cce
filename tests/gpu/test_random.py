"""2,688 random products against fp64: dtypes, orders, strides, alignments, epilogues, sizes."""

import random

import pytest
import torch

from benchmarks import accuracy

from .cases import KINDS, Kind, check, draw

CASES = 64  # of one test
CHUNKS = 7


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_random_products(kind: Kind, chunk: int) -> None:
    torch.manual_seed(chunk)
    rng = random.Random(f"{kind} {chunk}")
    wrong = []
    ours = torchs = 0.0
    for _ in range(CASES):
        case = draw(rng, kind)
        outcome = check(case, rng)
        if outcome.problem:
            wrong.append(f"{case}: {outcome.problem}")
        elif outcome.verdict.slack > 0:
            # In units of what a sum may lose, so that no case outweighs the others.
            ours += outcome.verdict.ours.mean / outcome.verdict.slack
            torchs += outcome.verdict.torch.mean / outcome.verdict.slack
    assert not wrong, f"{len(wrong)} of {CASES} wrong:\n" + "\n".join(wrong[:8])
    if kind.rounds_coarsely:
        assert ours <= accuracy.MEAN_FACTOR * torchs
