"""From a launch to an image: what it must fit, what its key depends on, what the compiler makes of it."""

from __future__ import annotations

import importlib.util
import linecache
import struct
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import triton
import triton.language as tl
from triton.experimental import gluon

import unit_kernels
from tk.aot.compile import Source, Target, compile_source, compiler_version, constant_text, source_digest, source_of
from tk.aot.errors import CompileError
from tk.aot.grid import enumerate_grid
from tk.aot.spec import Const, Float, Im2col, Int, Launch, Pointer, Scratch, TensorMap
from unit_kernels import KERNELS, OP, X

SM80, SM90 = Target(80), Target(90)


def plan(kernel_name: str, arch: int = 90, **axes):
    grid = enumerate_grid(unit_kernels.FAMILY, arch)
    return next(
        v.plan for v in grid.variants
        if v.kernel.name == kernel_name and all(v.point.axes[a] == value for a, value in axes.items())
    )  # fmt: skip


def changed(launch: Launch, **args) -> Launch:
    return replace(launch, args={**launch.args, **args})


# --- Sources ---


class Vectors(NamedTuple):
    x: Any
    y: Any
    out: Any


class Scaling(NamedTuple):
    alpha: Any
    COMBINE: Any


@dataclass(frozen=True)
class Tile:
    THREADS: int

    @property
    def BLOCK(self) -> int:
        return 2 * self.THREADS


@triton.jit
def scale_add_of_bundles(vectors, n, scaling, TILE: tl.constexpr):
    """As unit_kernels.scale_add."""
    at = tl.program_id(0) * TILE.BLOCK + tl.arange(0, TILE.BLOCK)
    inside = at < n
    z = scaling.COMBINE(tl.load(vectors.x + at, mask=inside), scaling.alpha) + tl.load(vectors.y + at, mask=inside)
    tl.store(vectors.out + at, z, mask=inside)


@gluon.jit
def copy_of_bundle(maps):
    """As unit_kernels.copy_gluon."""
    unit_kernels.copy_gluon(maps.x, maps.out)


class Maps(NamedTuple):
    x: Any
    out: Any


def bundled(launch: Launch) -> Launch:
    """The same with its arguments in bundles."""
    a = launch.args
    if launch.fn is unit_kernels.copy_gluon:
        return replace(launch, fn=copy_of_bundle, args={"maps": Maps(a["x"], a["out"])})
    args = {
        "vectors": Vectors(a["x"], a["y"], a["out"]),
        "scaling": Scaling(a["alpha"], a["COMBINE"]),
        "n": a["n"],
        "TILE": Const(Tile(a["BLOCK"].value // 2)),
    }
    return replace(launch, fn=scale_add_of_bundles, args=args)


def test_a_bundle_is_one_parameter_of_several_arguments():
    p = plan("scale_add", even=True, dtype="fp32")
    source = source_of(p, bundled(p.launches[0]), SM80)
    assert source.signature == {
        "vectors": Vectors("*fp32", "*fp32", "*fp32"), "n": "i32", "scaling": Scaling("fp32", "constexpr"),
        "TILE": "constexpr",
    }  # fmt: skip
    assert source.constants == {"scaling.COMBINE": unit_kernels._scaled, "TILE": Tile(128)}
    assert source.aligned == {"vectors.x", "vectors.y", "vectors.out", "n"}


def test_what_is_bundled_is_compiled_as_if_it_were_not():
    for name in ("scale_add", "copy_gluon"):
        p = plan(name, dtype="fp16")
        flat, one = p.launches[0], bundled(p.launches[0])
        images = [instructions(compile_source(source_of(p, launch, SM90)).image) for launch in (flat, one)]
        assert images[0] == images[1], name


def instructions(cubin: bytes) -> bytes:
    """Of the only function in an image: its section .text.NAME."""
    table, size, count, names = (
        struct.unpack_from(f, cubin, at)[0] for f, at in (("<Q", 40), ("<H", 58), ("<H", 60), ("<H", 62))
    )
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    start = sections[names][4]
    (found,) = [s for s in sections if cubin[start + s[0] :].startswith(b".text.")]
    return cubin[found[4] : found[4] + found[5]]


def test_the_class_of_a_constant_is_in_the_key(tmp_path):
    """A kernel reads its properties."""

    def text(factor: int, threads: int) -> str:
        (tmp_path / "tile.py").write_text(TILE.format(factor=factor))
        linecache.checkcache()
        spec = importlib.util.spec_from_file_location("tile", tmp_path / "tile.py")
        module = sys.modules["tile"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return constant_text(module.Tile(threads))

    assert text(2, 64) == text(2, 64)
    assert len({text(2, 64), text(2, 128), text(40, 64)}) == 3


TILE = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Tile:
    THREADS: int

    @property
    def BLOCK(self):
        return {factor} * self.THREADS
"""


def test_signature_follows_the_parameters():
    p = plan("scale_add", even=True, dtype="fp32")
    source = source_of(p, p.launches[0], SM80)
    assert list(source.signature.items()) == [
        ("x", "*fp32"), ("y", "*fp32"), ("out", "*fp32"), ("n", "i32"), ("alpha", "fp32"), ("BLOCK", "constexpr"),
        ("COMBINE", "constexpr"),
    ]  # fmt: skip
    assert source.constants == {"BLOCK": 256, "COMBINE": unit_kernels._scaled}
    assert source.aligned == {"x", "y", "out", "n"}
    general = plan("scale_add", even=False, dtype="fp32")
    assert source_of(general, general.launches[0], SM80).aligned == frozenset()


def test_scratch_is_aligned_where_its_offset_is():
    p = plan("reduce", dtype="fp32")
    partial, add = p.launches
    assert "parts" in source_of(p, partial, SM90).aligned
    assert source_of(p, add, SM90).aligned == {"counters"}, "4 bytes on is no multiple of 16"
    further = changed(add, parts=Scratch(0, "fp32", offset=OP.local("n") * 64 + 32))
    assert "parts" in source_of(p, further, SM90).aligned


def test_tensor_maps_carry_block_and_layout():
    p = plan("copy_gluon", dtype="fp16")
    x = source_of(p, p.launches[0], SM90).signature["x"]
    assert x.startswith("tensordesc<fp16[64, 32],NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16")
    p = plan("copy_triton", dtype="fp16")
    assert source_of(p, p.launches[0], SM90).signature["x"] == "tensordesc<fp16[64, 32]>"


MAP = TensorMap(X, "fp32", (4, 4), (4, 1), (64, 32))
IMAGES = TensorMap(X, "fp32", (2, 8, 8, 32), (2048, 256, 32, 1), (64, 32), im2col=Im2col((0, 0), (0, 0), (1, 1)))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"z": Const(1), "w": Const(2)}, "the launch has no parameter z, w; it takes x, y, out, n, alpha, BLOCK"),
        ({"n": None}, "the launch lacks n; it takes"),
        ({"n": None, "m": Const(1)}, "the launch lacks n and has no parameter m; it takes"),
        ({"BLOCK": Int(256)}, "BLOCK is a constexpr, give it a Const"),
        ({"x": Pointer(X, "f32")}, "x: 'f32' is no dtype; there are u8, i8"),
        ({"n": Int(4, "fp32")}, "n: a number of dtype fp32 cannot be passed as Int"),
        ({"alpha": Float(0, "i32")}, "alpha: a number of dtype i32 cannot be passed as Float"),
        ({"alpha": Float(0, "fp8e5")}, "alpha: a number of dtype fp8e5 cannot be passed as Float"),
        ({"x": replace(MAP, sizes=(4,))}, r"x: a tensor map has 1 to 5 dimensions.*here are 1, 2 and 2"),
        ({"x": replace(MAP, strides=(4, X.stride(1)))}, "x: the last stride of a tensor map is 1"),
        ({"x": replace(MAP, strides=(4, 2))}, "x: the last stride of a tensor map is 1"),
        ({"x": replace(IMAGES, strides=(2048, 256, 32, 2))}, "x: the last stride of a tensor map is 1"),
        ({"x": replace(IMAGES, sizes=(64, 32))}, "x: an im2col tensor map has 3 to 5 sizes.*here are 2, 4 and 2, 2, 2"),
        ({"x": replace(IMAGES, im2col=Im2col((0,), (0, 0), (1, 1)))}, "two fewer; here are 4, 4 and 1, 2, 2"),
        (
            {"x": replace(IMAGES, block=(64,))},
            r"the block of an im2col tensor map is \(pixels, channels\), not \(64,\)",
        ),
    ],
)
def test_a_launch_that_does_not_fit_is_refused(args, message):
    p = plan("scale_add", even=True, dtype="fp32")
    launch = changed(p.launches[0], **args)
    launch = replace(launch, args={k: v for k, v in launch.args.items() if v is not None})
    with pytest.raises(CompileError, match=message):
        source_of(p, launch, SM90)


def test_no_tensor_maps_before_sm_90():
    p = plan("copy_triton", dtype="fp32")
    with pytest.raises(CompileError, match="no tensor maps before sm_90, and this is sm80"):
        source_of(p, p.launches[0], SM80)


def test_misspelt_options_are_refused():
    p = plan("scale_add", even=True, dtype="fp32")
    with pytest.raises(CompileError, match="scale_add: the compiler has no option num_warp, stages"):
        source_of(p, replace(p.launches[0], options={"stages": 3, "num_warp": 4}), SM90)


def test_a_plain_function_is_refused():
    p = plan("scale_add", even=True, dtype="fp32")
    with pytest.raises(CompileError, match=r"is not a function of triton.jit or gluon.jit"):
        source_of(p, replace(p.launches[0], fn=len), SM90)


def test_an_interpreted_function_is_refused():
    p = plan("scale_add", even=True, dtype="fp32")
    interpreted = type("InterpretedFunction", (), {})()
    with pytest.raises(CompileError, match="unset TRITON_INTERPRET"):
        source_of(p, replace(p.launches[0], fn=interpreted), SM90)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("80", Target(80)),
        ("sm_90", Target(90)),
        ("sm100", Target(100)),
        ("ptx80", Target(80, ptx=True)),
        ("100f", Target(100, family=True)),
        ("sm_120f", Target(120, family=True)),
    ],
)
def test_target_names(text, target):
    assert Target.parse(text) == target
    assert Target.parse(target.name) == target


@pytest.mark.parametrize("text", ["", "hopper", "9.0", "ptx", "ptx_80", "90f", "ptx100f", "100a", "f"])
def test_unknown_targets(text):
    with pytest.raises(ValueError, match="names no architecture"):
        Target.parse(text)


# --- Keys ---

MODULE = """
import triton
import triton.language as tl

STEP = tl.constexpr({step})
DEFAULT = {default}
{gap}
@triton.jit
def unrelated(x):
    return x + {unrelated}

@triton.jit
def deepest(x, n: tl.constexpr = DEFAULT):
    return x * {factor} + n

@triton.jit
def helper(x):
    return deepest(x) + STEP

@triton.jit
def recursive(x, n: tl.constexpr):
    if n == 0:
        return x
    else:
        return recursive(x, n - 1) + 1

@triton.jit
def kernel(x, BLOCK: tl.constexpr):
    at = x + tl.arange(0, BLOCK)
    tl.store(at, recursive(helper(tl.load(at)), 2))
"""
USUAL = dict(step=1, gap="", unrelated=1, factor=2, default=0)


def made(n):
    """A kernel that captures a number."""
    N = tl.constexpr(n)

    @triton.jit
    def closure(x):
        tl.store(x, N)

    return closure


def load(folder: Path, **changes):
    path = folder / "edited.py"
    path.write_text(MODULE.format(**{**USUAL, **changes}))
    linecache.checkcache()
    spec = importlib.util.spec_from_file_location("edited", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["edited"] = module
    sys.dont_write_bytecode, kept = True, sys.dont_write_bytecode
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = kept
    return module


def source(module, **changes) -> Source:
    usual = dict(
        fn=module.kernel, signature={"x": "*fp32", "BLOCK": "constexpr"}, constants={"BLOCK": 128},
        aligned=frozenset({"x"}), options={"num_warps": 4, "enable_fp_fusion": True}, target=SM80,
    )  # fmt: skip
    return Source(**{**usual, **changes})


def test_what_changes_the_key(tmp_path):
    keys = {"usual": source(load(tmp_path)).key}
    for change in (dict(factor=3), dict(step=2), dict(default=1)):
        keys[str(change)] = source(load(tmp_path, **change)).key
    module = load(tmp_path)
    for change in (
        dict(constants={"BLOCK": 256}),
        dict(constants={"BLOCK": 128.0}),
        dict(constants={"BLOCK": module.helper}),
        dict(constants={"BLOCK": module.deepest}),
        dict(signature={"x": "*fp16", "BLOCK": "constexpr"}),
        dict(signature={"BLOCK": "constexpr", "x": "*fp32"}),
        dict(aligned=frozenset()),
        dict(options={"num_warps": 8, "enable_fp_fusion": True}),
        dict(target=Target(80, ptx=True)),
        dict(target=SM90),
        dict(fn=module.helper),
    ):
        keys[str(change)] = source(module, **change).key
    assert len(set(keys.values())) == len(keys)


def test_what_does_not_change_the_key(tmp_path):
    key = source(load(tmp_path)).key
    for change in (dict(unrelated=7), dict(gap="\n\n# A comment.\n"), {}):
        assert source(load(tmp_path, **change)).key == key


def test_what_a_closure_captures_is_in_the_key():
    assert source_digest(made(1)) == source_digest(made(1)) != source_digest(made(2))


def test_the_compilers_version_is_in_the_key(tmp_path, monkeypatch):
    key = source(load(tmp_path)).key
    monkeypatch.setattr("tk.aot.compile.compiler_version", lambda arch: "triton 4, ptxas 14")
    assert source(load(tmp_path)).key != key


def test_the_environment_is_in_the_key(tmp_path, monkeypatch):
    key = source(load(tmp_path)).key
    monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
    assert source(load(tmp_path)).key != key


def test_lines_and_folders_do_not_reach_the_image(tmp_path):
    """Which is why neither is in the key."""
    (tmp_path / "other").mkdir()
    here = compile_source(source(load(tmp_path)))
    elsewhere = compile_source(source(load(tmp_path / "other", gap="\n# Lower.\n\n")))
    assert here.hash == elsewhere.hash
    assert b"edited.py" not in here.image


def test_digests_are_remembered(tmp_path, monkeypatch):
    module = load(tmp_path)
    digest = source_digest(module.kernel)
    monkeypatch.setattr("tk.aot.compile._Dependencies", None)
    assert source_digest(module.kernel) == digest


def test_constants_that_have_no_text_are_refused():
    with pytest.raises(CompileError, match="of type object cannot be a constant"):
        constant_text(object())


def test_equal_numbers_of_different_types_are_different_constants():
    assert len({constant_text(v) for v in (1, 1.0, True, "1", (1,), None)}) == 6


# --- Images ---


def test_the_compilers_version_is_told():
    assert compiler_version(80).startswith("triton 3.")
    assert ", ptxas 1" in compiler_version(90)


def test_a_compile_error_has_the_compilers_words(tmp_path):
    wrong = source(load(tmp_path), constants={"BLOCK": 100})
    with pytest.raises(CompileError, match="power of 2"):
        compile_source(wrong)


def test_what_ptxas_would_take_minutes_for_is_refused(tmp_path, monkeypatch):
    """By its length, not by the time: the same file gives the same pack on every machine."""
    monkeypatch.setattr("tk.aot.compile.MOST_PTX_LINES", 10)
    with pytest.raises(CompileError, match=r"^\d+ lines of PTX, .* at most 10$"):
        compile_source(source(load(tmp_path)))


def artifacts(built, target: str) -> dict[str, list]:
    found: dict[str, list] = {}
    work = built[target].work
    for key, artifact in work.done.items():
        found.setdefault(work.sources[key].fn.__name__, []).append(artifact)
    return found


@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100"])
def test_cubins(built, target):
    found = artifacts(built, target)
    assert set(found) >= {"partial_sums", "add_sums"}
    assert ("copy_gluon" in found) == (target != "sm80")
    for name, group in found.items():
        for artifact in group:
            assert artifact.image[:4] == b"\x7fELF"
            assert int.from_bytes(artifact.image[18:20], "little") == 190, "the machine is CUDA"
            assert artifact.entry == name
            assert artifact.entry.encode() in artifact.image
            assert artifact.threads == (64 if name == "add_sums" else 128)
            assert artifact.size == len(artifact.image)
            assert 1 <= artifact.registers <= 255
            assert artifact.spill_bytes == 0


def test_ptx_is_text_that_older_drivers_know(built):
    for group in artifacts(built, "ptx80").values():
        for artifact in group:
            text = artifact.image.decode()
            assert ".version 8.0" in text
            assert ".target sm_80" in text
            assert f".entry {artifact.entry}(" in text


@pytest.mark.parametrize("target", ["sm90", "sm100"])
def test_device_made_tensor_maps_need_scratch(built, target):
    for artifact in artifacts(built, target)["copy_device_tma"]:
        assert artifact.global_scratch >= 256, "two descriptors of 128 bytes"
        assert artifact.global_scratch_alignment == 128
        assert artifact.tensor_maps == ()


@pytest.mark.parametrize("target", ["sm90", "sm100"])
@pytest.mark.parametrize("function", ["copy_tma", "copy_gluon"])
def test_host_made_tensor_maps_are_described(built, target, function):
    for artifact in artifacts(built, target)[function]:
        assert len(artifact.tensor_maps) == 2
        for meta in artifact.tensor_maps:
            assert list(meta["block_size"]) == [64, 32]
            assert meta["elem_size"] in (2, 4)
        assert artifact.shared > 64 * 32 * 2


def test_every_kernel_of_the_family_was_compiled(built):
    names = {k.name for k in KERNELS}
    assert {built["sm90"].pack.string(v.kernel) for v in built["sm90"].pack.variants} == names
