"""Streams and threads: kernels that share counters and scratch must not see each other."""

import threading

import torch

from .cases import KINDS
from .device import DEVICE
from .variants import Bucket, Operands, problems

SIZES = ((4, 512, 8192), (16, 256, 4096), (64, 1024, 4096), (300, 512, 512))


def operands() -> list[Operands]:
    return [p for kind in KINDS[:3] for p in problems(Bucket(kind, "nt", "vector"), SIZES)]


def test_two_streams() -> None:
    work = operands()
    expected = [p.run() for p in work]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    results: list[list[torch.Tensor]] = [[], []]
    torch.cuda.synchronize()
    for _ in range(30):
        for p in work:
            for stream, found in zip(streams, results, strict=True):
                with torch.cuda.stream(stream):
                    found.append(p.run())
    torch.cuda.synchronize()
    for found in results:
        for i, result in enumerate(found):
            assert torch.equal(result, expected[i % len(work)]), work[i % len(work)].label


def test_the_current_stream_is_used() -> None:
    """Work that is queued before on another stream has not happened yet: only the right stream waits for it."""
    a = torch.zeros(64, 4096, device=DEVICE, dtype=torch.bfloat16)
    b = torch.randn(4096, 256, device=DEVICE, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        a.fill_(1)
        result = torch.ops.tk.mm(a, b)
    torch.cuda.synchronize()
    torch.testing.assert_close(result[0].float(), b.float().sum(0), rtol=2e-2, atol=0.5)


def test_sixteen_threads() -> None:
    work = operands()
    expected = [p.run() for p in work]
    torch.cuda.synchronize()
    wrong: list[str] = []
    start = threading.Barrier(16)

    def call(number: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                start.wait()
                for i in range(100):
                    j = (i * 7 + number) % len(work)
                    if not torch.equal(work[j].run(), expected[j]):
                        wrong.append(f"thread {number}: {work[j].label}")
        except Exception as e:  # an exception in a thread would be lost
            wrong.append(f"thread {number}: {type(e).__name__}: {e}")

    threads = [threading.Thread(target=call, args=(n,)) for n in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong, wrong[:8]
