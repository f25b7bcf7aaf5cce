"""What no pack has is built when that is asked for, for a described GPU; nothing is written when it is not."""

from __future__ import annotations

import logging
import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tk
from tk import capi, missing
from tk.b2b import function
from tk.codegen import source
from tk.dropin import measured
from tk.flex import own_ops
from tk.flex.source import source_of
from tk.flex.tracing import trace
from tk.ops import b2b
from tk.tune import pins

from .test_attention_build import arguments
from .test_generated_launch import Kernel

pytest.importorskip("triton")


@tk.op(x="T[...]", T=("fp32",))
def built_when_called(x):
    return x * 2 + 1


def every_fifth(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return (q_idx >= kv_idx) & ((q_idx - kv_idx) % 5 == 0)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of packs; what was compiled is found where it always is."""
    monkeypatch.delenv("TK_BUILD_MISSING", raising=False)
    monkeypatch.setattr(missing, "directory", lambda: tmp_path / "packs")
    return tmp_path / "packs"


@pytest.fixture(scope="module")
def h100() -> int:
    return capi.describe_device(132, 90, 232448, 50 << 20)


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TK_BUILD_MISSING", raising=False)
    assert not tk.config.builds_missing()
    with tk.config.build_missing():
        assert tk.config.builds_missing()
        with tk.config.build_missing(False):
            assert not tk.config.builds_missing()
    monkeypatch.setenv("TK_BUILD_MISSING", "1")
    assert tk.config.builds_missing()
    monkeypatch.setenv("TK_BUILD_MISSING", "0")
    assert not tk.config.builds_missing()


def test_every_file_of_the_user_is_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="A GPU", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    for cache, folder in (("", "/somewhere/tk"), ("/elsewhere", "/elsewhere")):
        monkeypatch.setenv("TK_CACHE_DIR", cache)
        files = [missing.directory(), measured.path_of(torch.device("cpu")), pins.user_file(), source.folder()]
        assert {path.parent for path in files} == {Path(folder)}


@pytest.mark.parametrize(
    ("arch", "built"), [(80, "80"), (86, "80"), (89, "80"), (90, "90"), (100, "ptx80"), (120, "ptx80")]
)
def test_the_architecture_that_is_built(arch: int, built: str) -> None:
    assert missing.target(arch) == built


def test_older_gpus_are_refused() -> None:
    with pytest.raises(tk.UnsupportedError, match="sm_75"):
        missing.target(75)


def test_a_pair_of_mods_is_built_once_and_loaded(cache: Path, h100: int, caplog: pytest.LogCaptureFixture) -> None:
    traced = trace.pair(None, every_fifth).traced
    more = ("head_dims=(64,)", "dtypes=(torch.float16,)", "backward=False", "decode=False")
    name, source = own_ops.op_name(traced), source_of(traced, *more)
    with caplog.at_level(logging.INFO, "tk.missing"), ThreadPoolExecutor(2) as pool:  # two that want the same
        paths = list(pool.map(lambda _: missing.build(name, source, 90), range(2)))
    assert paths[0] == paths[1] and paths[0].parent == cache
    assert len([r for r in caplog.records if r.name == "tk.missing"]) == 1
    assert {p.suffix for p in cache.iterdir()} == {".tkpack", ".lock"}
    missing.load(name, source, h100)
    described = Kernel(name, h100)(*arguments(4, 4, 256, 256, 64), 1, 0, -1, 0)
    assert described is not None
    assert capi.choose(described.problem).pack_path == str(paths[0])


def shifted(by: float, power: int):  # type: ignore[no-untyped-def]
    return lambda x: torch.sigmoid(x - by) * x**power


def test_a_function_between_products_is_built_and_loaded(cache: Path, h100: int) -> None:
    traced, _ = function.traced_function(shifted(-0.5, 2), "test")
    name = function.op_name(traced)
    with pytest.raises(tk.VariantNotFoundError, match=r"or let tk do so, with tk\.config\.build_missing"):
        b2b._own(traced.text, torch.bfloat16, h100)
    with tk.config.build_missing():
        own = b2b._own(traced.text, torch.bfloat16, h100)
    assert own is getattr(torch.ops.tk, name).default
    assert b2b._own(traced.text, torch.bfloat16, h100) is own  # no longer missing
    assert _chosen(name, torch.bfloat16, h100).parent == cache
    with pytest.raises(ValueError, match="a must be of dtype bf16") as refused:
        _chosen(name, torch.float16, h100)
    with tk.config.build_missing():
        assert missing.is_for(refused.value)
        b2b._build(traced.text, torch.float16, h100)
    assert {_chosen(name, dtype, h100) for dtype in (torch.bfloat16, torch.float16)} == set(cache.glob("*.tkpack"))


def _chosen(name: str, dtype: torch.dtype, device: int) -> Path:
    """The pack that serves a call."""
    a, b, c = (torch.zeros(s, dtype=dtype) for s in ((512, 64), (64, 1024), (1024, 64)))
    described = Kernel(name, device)(a, b, c, -0.5, 0, 2, -1, 0)
    assert described is not None
    return Path(capi.choose(described.problem).pack_path)


@pytest.mark.parametrize("f", [lambda x: x, shifted(1.0, 3), lambda x: torch.where(x > -0.5, x, 0.25 * x)])
def test_the_source_of_a_function_between_products(f, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    traced, _ = function.traced_function(f, "test")
    (tmp_path / "f.py").write_text(function.source_of(traced, torch.float16))
    runpy.run_path(str(tmp_path / "f.py"))
    (found,) = function.registered(str(tmp_path / "f.py"))
    assert found.traced.fingerprint == traced.fingerprint
    assert found.dtypes == (torch.float16,)


def test_a_declared_function_is_built_with_its_file(cache: Path, h100: int, tmp_path: Path) -> None:
    file = tmp_path / "ops_of_a_user.py"
    file.write_text('import tk\n\n\n@tk.op(x="T[...]", T=("fp32",))\ndef user_built(x):\n    return x * 2 + 1\n')
    declared = runpy.run_path(str(file))["user_built"]
    missing.load_declared(declared, h100)
    torch.testing.assert_close(torch.ops.tk.user_built(torch.ones(3)), torch.full((3,), 3.0))
    assert len(list(cache.glob("user_built_*.sm90.tkpack"))) == 1


def test_a_build_that_fails_is_said_and_not_tried_again(cache: Path) -> None:
    source = 'import tk\n\n\n@tk.op(x="T[N]", T=("fp32",))\ndef never(x):\n    return x if x.sum() > 0 else -x\n'
    with pytest.raises(tk.VariantNotFoundError, match="control flow"):
        missing.build("never", source, 90)
    with pytest.raises(tk.VariantNotFoundError, match="failed before"):
        missing.build("never", source, 90)
    assert not list(cache.glob("*.tkpack"))


def test_a_call_asks_for_its_own_head_size_and_dtype(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    traced = trace.pair(None, every_fifth).traced
    asked: list[tuple[str, str, int]] = []
    monkeypatch.setattr(missing, "load", lambda *args: asked.append(args))
    device = SimpleNamespace(index=3)
    query, value = (SimpleNamespace(shape=(1, 2, 8, n), dtype=torch.bfloat16, device=device) for n in (96, 64))
    error = RuntimeError("[tk:VariantNotFound] no kernel")
    with tk.config.build_missing():
        own_ops.build_missing(error, traced, SimpleNamespace(query=query, value=value))
    ((name, source, index),) = asked
    assert name == own_ops.op_name(traced) and index == 3
    (tmp_path / "mods.py").write_text(source)
    runpy.run_path(str(tmp_path / "mods.py"))
    (found,) = tk.flex.registered(str(tmp_path / "mods.py"))
    assert (found.head_dims, found.dtypes, found.traced.fingerprint) == (
        ((96, 64),),
        (torch.bfloat16,),
        traced.fingerprint,
    )


def test_without_the_switch_nothing_is_built(cache: Path) -> None:
    traced = trace.pair(None, lambda b, h, q, k: (q - k) % 23 == 7).traced  # which nothing builds
    x = SimpleNamespace(shape=(1, 2, 8, 64), dtype=torch.bfloat16)
    request = SimpleNamespace(query=x, value=x, tensors=[], floats=[], ints=[])
    with pytest.raises(tk.VariantNotFoundError, match="no loaded pack has kernels for these mods"):
        own_ops.build_missing(RuntimeError("[tk:VariantNotFound] no kernel"), traced, request)
    torch.testing.assert_close(built_when_called(torch.ones(2)), torch.full((2,), 3.0))
    assert not cache.exists()
    with tk.config.build_missing():  # on the CPU nothing is missing
        built_when_called(torch.ones(2))
        with pytest.raises(RuntimeError, match="another matter"):
            own_ops.build_missing(RuntimeError("another matter"), traced, SimpleNamespace())
    assert not cache.exists()
