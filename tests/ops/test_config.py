"""Modes and overrides: what reaches the op."""

import threading

import pytest
import torch

import tk
from tk import config
from tk.heuristics import overrides


def test_modes_nest_and_end() -> None:
    assert config.current().mode == 0
    with config.strict():
        with config.modes(strict=False, batch_invariant=True):
            assert config.current().mode == config.MODE_BITS["batch_invariant"]
        assert config.current().mode == config.MODE_BITS["strict"]
    assert config.current().mode == 0


@pytest.mark.parametrize("name", config.MODE_BITS)
def test_each_mode_by_its_name(name: str) -> None:
    with getattr(config, name)():
        assert config.current().mode == config.MODE_BITS[name]
        with getattr(config, name)(False):
            assert config.current().mode == 0


def test_modes_end_with_an_exception() -> None:
    with pytest.raises(KeyError), config.strict():
        raise KeyError
    assert config.current().mode == 0


def test_modes_belong_to_their_thread() -> None:
    seen = []
    with config.deterministic():
        thread = threading.Thread(target=lambda: seen.append(config.current().mode))
        thread.start()
        thread.join()
    assert seen == [0]


def test_defaults_hold_for_every_thread() -> None:
    config.set_default_modes(batch_invariant=True)
    try:
        seen = []
        thread = threading.Thread(target=lambda: seen.append(config.current().mode))
        thread.start()
        thread.join()
        assert seen == [config.MODE_BITS["batch_invariant"]]
    finally:
        config.set_default_modes(batch_invariant=False)
    assert config.current().mode == 0


def test_the_wrapper_passes_modes_on(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    seen = []
    ops = tk.ops.mm  # type: ignore[attr-defined]
    monkeypatch.setattr(ops, "_mm", lambda *args: seen.append(args))
    a, b = torch.randn(2, 2), torch.randn(2, 2)
    tk.mm(a, b)
    with config.modes(strict=True, static_weights=True):
        tk.mm(a, b)
    assert seen == [(a, b, None), (a, b, None, 0, None, -1, -1, 12)]


class OnGpu:
    """A tensor, as far as the look-up of configs asks."""

    is_cuda = True
    device = torch.device("cuda", 0)


def test_overrides_by_number_and_by_name(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(overrides, "_number_of", lambda op, name: {("mm", "128x64"): 9}[op, name])
    assert overrides.find("mm", OnGpu()) == (0, -1)  # type: ignore[arg-type]
    with config.override("mm", 7):
        assert overrides.find("mm", OnGpu()) == (0, 7)  # type: ignore[arg-type]
        assert overrides.find("conv", OnGpu()) == (0, -1)  # type: ignore[arg-type]
        with config.override("mm", "128x64"), config.strict():
            assert overrides.find("mm", OnGpu()) == (4, 9)  # type: ignore[arg-type]
        with config.override("mm", None):
            assert overrides.find("mm", OnGpu()) == (0, -1)  # type: ignore[arg-type]
        assert overrides.find("mm", torch.empty(1)) == (0, -1)
    assert overrides.find("mm", OnGpu()) == (0, -1)  # type: ignore[arg-type]


def test_the_machines_tuning_is_loaded_when_cuda_is(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    from tk.tune import loading

    queued = []
    monkeypatch.setattr(torch.cuda, "_lazy_call", queued.append)
    monkeypatch.setattr(loading, "load_user_pins", lambda: loads.append("once") or 1)
    loads: list[str] = []
    loading.load_with_cuda()
    assert loads == []
    queued[0]()
    assert loads == ["once"]


def test_a_bad_tuning_file_is_reported_and_not_fatal(monkeypatch, caplog) -> None:  # type: ignore[no-untyped-def]
    from tk.tune import loading

    def fail() -> int:
        raise ValueError("tuned.json is not a tuning file")

    monkeypatch.setattr(loading, "load_user_pins", fail)
    loading.load()
    assert "tuned.json is not a tuning file" in caplog.text
