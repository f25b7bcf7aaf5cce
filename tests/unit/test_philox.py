"""Philox 4x32-10 against the published test vectors (Random123, kat_vectors)."""

from __future__ import annotations

import torch

from tk.generated import random


def _words(seed: int, counter: int, stream: int) -> list[int]:
    counters = torch.tensor([counter], dtype=torch.int64)
    return [int(w) for w in random.philox(torch.tensor(seed, dtype=torch.int64), counters, stream)]


def test_published_vector() -> None:
    assert _words(0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_words_follow_the_element() -> None:
    all_words = random.bits(torch.tensor(7), 0, 2, (3, 4)).flatten()
    assert torch.equal(random.bits(torch.tensor(7), 5, 2, (7,)), all_words[5:])
    expected = [w - 2**32 if w > 2**31 - 1 else w for n in range(3) for w in _words(7, n, 2)]
    assert all_words.tolist() == expected


def test_seed_and_stream_matter() -> None:
    first = random.bits(torch.tensor(1), 0, 0, (64,))
    for seed, stream in ((2, 0), (1, 1), (1 + (1 << 32), 0)):
        assert (random.bits(torch.tensor(seed), 0, stream, (64,)) != first).sum() > 60


def test_uniformity() -> None:
    x = random.bits(torch.tensor(3), 0, 0, (1 << 16,)).long() & 0xFFFFFFFF
    assert abs(x.double().mean() / 2**32 - 0.5) < 0.01
    for bit in range(32):
        assert abs(((x >> bit) & 1).double().mean() - 0.5) < 0.02
