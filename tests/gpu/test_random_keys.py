"""Calls that draw without a seed: in CUDA graphs, whose keys are drawn ahead, and under activation checkpointing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tk
from tk.functional import _keys

from .device import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="about CUDA graphs")

Results = list[Tensor]


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.device]]:
    """One for each launch that draws keys ahead."""
    several, made = _keys._several, []

    def counted(device: torch.device) -> Results:
        made.append(device)
        return several(device)

    monkeypatch.setattr(_keys, "_several", counted)
    yield made
    _keys._kept.clear()


def captured(fn: Callable[[], Results]) -> tuple[torch.cuda.CUDAGraph, Results]:
    side = torch.cuda.Stream()  # of the current device: torch.cuda.graph's own is of the one that it was first used on
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fn()  # loads what is needed
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        found = fn()
    written()
    return graph, found


def written() -> None:
    """A capture begins with a write of the seed on its own stream, which a replay on another does not wait for."""
    torch.cuda.synchronize()


def replayed(graph: torch.cuda.CUDAGraph, found: Results) -> Results:
    graph.replay()
    return [x.clone() for x in found]


def draws(n: int = 4096) -> Results:
    x = torch.ones(n, device=DEVICE)
    return [
        tk.dropout(x), tk.dropout(x), tk.dropout_add(x, x), tk.rand((n,), device=DEVICE), tk.rand((n,), device=DEVICE),
        tk.randn((n,), device=DEVICE), tk.randint(0, 2**40, (n,), device=DEVICE),
    ]  # fmt: skip


def are_equal(a: Results, b: Results) -> list[bool]:
    return [torch.equal(x, y) for x, y in zip(a, b, strict=True)]


def test_replays_draw_anew_and_torchs_seed_fixes_them(launches: list[torch.device]) -> None:
    graph, found = captured(draws)
    assert len(launches) == 1
    torch.manual_seed(3)
    first, second = replayed(graph, found), replayed(graph, found)
    assert not any(are_equal(first, second))
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[3], first[4])
    torch.manual_seed(3)
    assert all(are_equal(replayed(graph, found), first)) and all(are_equal(replayed(graph, found), second))
    assert 0.45 < first[0].count_nonzero() / 4096 < 0.55


def test_more_calls_than_keys(launches: list[torch.device]) -> None:
    n = 2 * _keys.COUNT + 3
    graph, found = captured(lambda: [tk.rand((8,), device=DEVICE) for _ in range(n)])
    assert len(launches) == 3
    rows = torch.cat([torch.stack(replayed(graph, found)) for _ in range(2)])
    assert len(rows.unique(dim=0)) == 2 * n


def test_a_capture_draws_as_the_one_before() -> None:
    outcomes = []
    for _ in range(2):
        graph, found = captured(draws)
        torch.manual_seed(4)
        outcomes.append(replayed(graph, found))
    assert all(are_equal(*outcomes))


def test_two_graphs_of_one_pool_share_nothing(launches: list[torch.device]) -> None:
    first, found = captured(draws)
    second = torch.cuda.CUDAGraph()
    with torch.cuda.graph(second, pool=first.pool()):
        others = draws()
    written()
    assert len(launches) == 2
    torch.manual_seed(5)
    results = [*replayed(first, found), *replayed(second, others)]
    torch.manual_seed(5)
    again = [*replayed(first, found), *replayed(second, others)]
    assert all(are_equal(results, again)) and not any(are_equal(results[:7], results[7:]))


def test_eager_calls_between_do_not_disturb_a_graph() -> None:
    graph, found = captured(draws)
    torch.manual_seed(6)
    expected = replayed(graph, found)
    assert _keys._kept
    draws()
    assert not _keys._kept, "the keys of a capture that is over are let go"
    filler = [torch.full((64, 32), 17, device=DEVICE) for _ in range(100)]
    torch.manual_seed(6)
    assert all(are_equal(replayed(graph, found), expected))
    del filler


def test_gradients_in_a_graph() -> None:
    x = torch.randn(64, 1024, device=DEVICE, requires_grad=True)

    def step() -> Results:
        y = tk.dropout(tk.dropout(x, 0.25), 0.5)
        (grad,) = torch.autograd.grad(y.sum(), x)
        return [y.detach(), grad]

    graph, found = captured(step)
    for _ in range(3):
        y, grad = replayed(graph, found)
        torch.testing.assert_close(y, x.detach() * grad)
        assert 0.3 < grad.count_nonzero() / grad.numel() < 0.45


def test_streams_of_a_capture_have_keys_of_their_own(launches: list[torch.device]) -> None:
    side = torch.cuda.Stream()

    def fork() -> Results:
        here = torch.cuda.current_stream()
        found = [tk.rand((4096,), device=DEVICE)]
        side.wait_stream(here)
        with torch.cuda.stream(side):
            found += [tk.rand((4096,), device=DEVICE) for _ in range(2)]
        found += [tk.rand((4096,), device=DEVICE) for _ in range(2)]
        here.wait_stream(side)
        return found

    graph, found = captured(fork)
    assert len(launches) == 2
    for _ in range(50):
        rows = torch.stack(replayed(graph, found))
        assert len(rows.unique(dim=0)) == 5


def test_a_state_of_the_generator_that_the_graph_knows() -> None:
    """As tensor-parallel training has: what is drawn in one state is the same on all ranks, in the other it is not."""
    default = torch.cuda.default_generators[torch.cuda.current_device()]
    own, other = default.graphsafe_get_state(), default.clone_state()
    other.manual_seed(99)
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(other)
    tk.rand((64,), device=DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        a = tk.rand((64,), device=DEVICE)
        default.graphsafe_set_state(other)
        b = tk.rand((64,), device=DEVICE)
        default.graphsafe_set_state(own)
        c = tk.rand((64,), device=DEVICE)
    written()

    def run(mine: int, others: int) -> list[list[float]]:
        own.manual_seed(mine)
        other.manual_seed(others)
        return [x.tolist() for x in replayed(graph, [a, b, c])]

    (a1, b1, c1), (a2, b2, c2), (a3, b3, c3) = run(1, 5), run(2, 5), run(1, 6)
    assert b1 == b2 != b3 and (a1, c1) == (a3, c3) and a1 != a2 and c1 != c2 and a1 != c1


def test_inductors_graphs() -> None:
    """They account for all memory of theirs: nothing may be kept in it."""
    pytest.importorskip("triton")

    @torch.library.custom_op("tk_tests::noisy", mutates_args=())
    def noisy(x: Tensor) -> Tensor:
        return tk.dropout(x, 0.5) + tk.dropout(x, 0.5)

    noisy.register_fake(torch.empty_like)
    compiled = torch.compile(lambda x: noisy(x) * 2, mode="reduce-overhead")
    x = torch.ones(4096, device=DEVICE)
    found = [compiled(x).clone() for _ in range(5)]
    assert all(y.unique().tolist() == [0, 4, 8] for y in found)
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(found))


def test_checkpointing_draws_again_what_was_drawn() -> None:
    x = torch.ones(64, 1024, device=DEVICE, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        h = torch.nn.functional.dropout(tk.dropout(x, 0.3), 0.2)
        return tk.dropout_add(h, h, 0.5)

    torch.manual_seed(8)
    y = checkpoint(block, x, use_reentrant=False)
    tk.rand((100,), device=DEVICE)
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad, y.detach())
    with torch.random.fork_rng():
        torch.manual_seed(9)
        forked = tk.rand((100,), device=DEVICE)
    torch.manual_seed(8)
    assert torch.equal(block(x), y)
    torch.manual_seed(9)
    assert torch.equal(tk.rand((100,), device=DEVICE), forked)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_gpu_beside_a_capture() -> None:
    here = torch.ones(4096, device="cuda:0")
    with torch.cuda.device(1):
        graph, found = captured(lambda: [tk.rand((4096,), device="cuda:1") for _ in range(3)])
        torch.manual_seed(1)
        first = replayed(graph, found)
    tk.dropout(here)
    torch.manual_seed(1)
    with torch.cuda.device(1):
        assert all(are_equal(replayed(graph, found), first))
    assert len({tuple(x[:4].tolist()) for x in first}) == 3
