"""Keys of calls without a seed: what a capture draws ahead, and for whom. Captures are made up here: tests/gpu has real
ones."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import tk
from tk.functional import _keys
from tk.functional._keys import COUNT, Place

CPU = torch.device("cpu")
HERE = Place(capture=7, device=0, stream=1, state=(3, 0))


class Captures:
    """Sets where the next draws are; counts the launches that draw keys."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.place: Place | None = HERE
        self.launches = 0
        several = _keys._several

        def counted(device: torch.device) -> list[Tensor]:
            self.launches += 1
            return several(device)

        patch.setattr(_keys, "_place", lambda device: self.place)
        patch.setattr(_keys, "_several", counted)

    def at(self, place: Place | None) -> Tensor:
        self.place = place
        return _keys.draw(CPU)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[Captures]:
    _keys._kept.clear()
    yield Captures(monkeypatch)
    _keys._kept.clear()


def test_one_launch_is_for_many_calls(captures: Captures) -> None:
    keys = [captures.at(HERE) for _ in range(COUNT)]
    assert captures.launches == 1
    keys += [captures.at(HERE) for _ in range(COUNT)]
    assert captures.launches == 2
    assert all(key.shape == () and key.dtype == torch.int64 for key in keys)
    assert len({key.item() for key in keys}) == 2 * COUNT
    first = keys[0].data_ptr()
    assert [key.data_ptr() - first for key in keys[:COUNT]] == [256 * i for i in range(COUNT)]


def test_keys_are_of_all_64_bits(captures: Captures) -> None:
    seen, unseen = 0, 0
    for _ in range(COUNT):
        key = captures.at(HERE).item()
        seen, unseen = seen | key, unseen | ~key
    assert seen == unseen == -1


def test_torchs_seed_fixes_them(captures: Captures) -> None:
    def run(capture: int) -> list[Tensor]:
        torch.manual_seed(5)
        captures.place = HERE._replace(capture=capture)
        x = torch.ones(64)
        return [tk.dropout(x), tk.rand((64,)), tk.randn((64,)), tk.randint(0, 9, (64,)), tk.dropout_add(x, x)]

    first, again = run(1), run(2)
    assert captures.launches == 2
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(*(tk.rand((64,)) for _ in range(2)))


OTHERS = {
    "stream": HERE._replace(stream=2),
    "state": HERE._replace(state=(4, 0)),
    "offset": HERE._replace(state=(3, 4)),
    "device": HERE._replace(device=1),
}


@pytest.mark.parametrize("name", list(OTHERS))
def test_another_place_of_a_capture_has_its_own(captures: Captures, name: str) -> None:
    first, other = captures.at(HERE), captures.at(OTHERS[name])
    again = captures.at(HERE)
    assert captures.launches == 2 and len({key.item() for key in (first, other, again)}) == 3
    assert again.data_ptr() == first.data_ptr() + 256
    assert other.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()


@pytest.mark.parametrize("between", [HERE._replace(capture=8), None], ids=["capture", "eager"])
def test_a_capture_that_is_over_keeps_nothing(captures: Captures, between: Place | None) -> None:
    first = captures.at(HERE)
    captures.at(OTHERS["stream"])
    captures.at(between)
    assert set(_keys._kept) == ({between} if between else set())
    again = captures.at(HERE)
    assert again.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()


def test_eager_calls_draw_as_torch_does(captures: Captures) -> None:
    torch.manual_seed(2)
    keys = [captures.at(None) for _ in range(3)]
    torch.manual_seed(2)
    assert keys == [torch.randint(-(2**63), 2**63 - 1, ()) for _ in range(3)] and captures.launches == 0


def test_inference_mode_draws_for_training(captures: Captures) -> None:
    x = torch.ones(64, requires_grad=True)
    with torch.inference_mode():
        tk.rand((2,))
    y = tk.dropout(x)
    assert captures.launches == 1
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, y.detach())  # the gradient drew again with the key that was saved


def test_threads_share_no_key(captures: Captures) -> None:
    found: list[list[Tensor]] = [[] for _ in range(4)]
    threads = [
        threading.Thread(target=lambda i=i: found[i].extend(_keys.draw(CPU) for _ in range(200))) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    keys = [key.item() for part in found for key in part]
    assert len(keys) == len(set(keys)) == 800


def test_compiled_calls_draw_in_their_graph(captures: Captures) -> None:
    compiled = torch.compile(lambda x: tk.dropout(x), fullgraph=True, backend="aot_eager")
    x = torch.ones(256)
    torch.manual_seed(1)
    y = compiled(x)
    torch.manual_seed(1)
    captures.place = None
    assert torch.equal(y, tk.dropout(x)) and captures.launches == 0


# --- What a place takes ---


class Generator:
    """Torch's in a capture: it tells nothing while the current stream is captured."""

    def __init__(self, streams: SimpleNamespace):
        self.streams = streams

    def initial_seed(self) -> int:
        if self.streams.current in self.streams.captured:
            raise RuntimeError("Cannot call CUDAGeneratorImpl::current_seed")
        return 11

    def get_offset(self) -> int:
        return 4


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """torch.cuda with its current stream captured."""
    streams = [SimpleNamespace(cuda_stream=handle) for handle in (100, 101, 102)]
    state = SimpleNamespace(current=streams[0], captured=streams[:1], streams=streams, device=torch.device("cuda", 0))
    for name, value in {
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: state.current in state.captured,
        "current_device": lambda: 0,
        "current_stream": lambda index: state.current,
        "set_stream": lambda stream: setattr(state, "current", stream),
        "default_generators": (Generator(state),),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(_keys, "_streams", lambda index: (streams[0], streams[1]))
    monkeypatch.setattr(_keys.capi, "capture_id", lambda stream: 7 if stream == 100 else 0)
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees", raising=False)
    return state


def test_place(cuda: SimpleNamespace) -> None:
    assert _keys._place(cuda.device) == Place(7, 0, 100, (11, 4))
    assert cuda.current is cuda.streams[0], "the stream is put back"
    assert _keys._place(CPU) is None
    assert _keys._place(torch.device("cuda", 1)) is None, "its stream is in another capture, or in none"


def test_no_place_outside_of_captures(cuda: SimpleNamespace) -> None:
    cuda.current = cuda.streams[2]
    assert _keys._place(cuda.device) is None


def test_no_place_where_the_state_cannot_be_read(cuda: SimpleNamespace) -> None:
    cuda.captured = cuda.streams
    assert _keys._place(cuda.device) is None and cuda.current is cuda.streams[0]


def test_no_place_under_modes_and_transforms(cuda: SimpleNamespace) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    places = []
    with FakeTensorMode():
        places.append(_keys._place(cuda.device))

    def look(x: Tensor) -> Tensor:
        places.append(_keys._place(cuda.device))
        return x

    torch.vmap(look)(torch.ones(2))
    torch.func.grad(lambda x: look(x).sum())(torch.ones(2))
    assert places == [None] * 3


def no_manager(index: int, create_if_none_exists: bool) -> None:
    assert not create_if_none_exists


def no_thread(index: int, create_if_none_exists: bool) -> None:
    raise AssertionError


@pytest.mark.parametrize(("get_manager", "stream", "found"), [
    (no_manager, None, True), (lambda index, create_if_none_exists: SimpleNamespace(stream=1), 2, True),
    (lambda index, create_if_none_exists: SimpleNamespace(stream=1), 1, False), (no_thread, None, False),
    (lambda index: None, None, False), (lambda index, create_if_none_exists: SimpleNamespace(), None, False),
], ids=["no_manager", "another_stream", "recording", "unknown_thread", "another_torch", "no_stream"])  # fmt: skip
def test_inductor_records(
    monkeypatch: pytest.MonkeyPatch, get_manager: object, stream: int | None, found: bool
) -> None:
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", SimpleNamespace(get_manager=get_manager))
    assert _keys._inductor_records(0, stream) is not found  # type: ignore[arg-type]


def test_no_place_in_inductors_graphs(cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = SimpleNamespace(stream=cuda.streams[0])
    trees = SimpleNamespace(get_manager=lambda index, create_if_none_exists: manager)
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    assert _keys._place(cuda.device) is None
    manager.stream = cuda.streams[1]
    assert _keys._place(cuda.device) is not None


def test_inductor_still_tells_what_is_asked() -> None:
    from torch._inductor import cudagraph_trees

    assert cudagraph_trees.get_manager(0, create_if_none_exists=False) is None
    assert "stream" in cudagraph_trees.CUDAGraphTreeManager.__init__.__code__.co_names
