"""The whole road: records in, packs out; recipes, reproducibility, failures, and what is said on the way."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import triton
import triton.language as tl

import unit_kernels
from tk.aot import pack as fmt
from tk.aot.assemble import TENSOR_MAP_TF32, Compiled, add_op
from tk.aot.cache import Cache
from tk.aot.compile import Target
from tk.aot.compress import SHARE_OF_ZLIB
from tk.aot.errors import BuildError
from tk.aot.expr import Problem, TensorValue, local, tensors
from tk.aot.pack import FLAG_FAMILY, FLAG_PTX, Pack, PackWriter, read_pack
from tk.aot.spec import (
    DTYPES,
    Buffer,
    Config,
    Const,
    Family,
    Float,
    Int,
    Kernel,
    Launch,
    Op,
    Output,
    Param,
    Plan,
    Point,
    Pointer,
    Scratch,
    require,
)
from tk.build.command import pack_paths
from tk.build.packs import (
    FIXED_SECONDS,
    KINDS,
    OP_BYTES,
    VARIANT_BYTES,
    BuildFailed,
    Failure,
    PlannedPack,
    Progress,
    Work,
    build,
    definitions,
    describe_build,
    dry_run,
    duration,
    find_work,
    kind_of,
    leave_out,
    plan_pack,
    predict,
    summary,
)
from tk.cli.build import OLDEST_TRITON, add_arguments, run
from tk.kernels import tuned_tables
from unit_kernels import ALIGNED, FAMILY, KERNELS, OP, OUT, X

SM80, SM90 = Target(80), Target(90)
SCALE_ADD, REDUCE, COPY_TMA, COPY_GLUON, COPY_DEVICE = KERNELS
PROBLEM = Problem(
    (TensorValue((100, 64), (64, 1), 6), None, TensorValue((100, 64), (72, 1), 6)),
    ints=(0,),
    device={"sm_count": 132, "arch": 90, "shared_optin": 232448, "l2_bytes": 50 << 20},
    locals=(6400, 100, 64, 1),
)


def of_kernel(pack: Pack, name: str) -> SimpleNamespace:
    return next(v for v in pack.variants if pack.string(v.kernel) == name)


def parameters(pack: Pack, launch: SimpleNamespace) -> list[tuple]:
    """(kind, width, index, value for PROBLEM) of each."""
    return [
        (a.kind, a.width, a.index, pack.expr(a.value).evaluate(replace(PROBLEM, locals=(*PROBLEM.locals, 4))))
        for a in pack.slice("args", launch.args)
    ]


SCRATCH_PARAMETERS = [(fmt.ARG_GLOBAL_SCRATCH, 0, 0, 0), (fmt.ARG_PROFILE_SCRATCH, 0, 0, 0)]


# --- Recipes ---


def test_parameters_are_in_the_functions_order_without_constants(built):
    pack = built["sm90"].pack
    variant = of_kernel(pack, "scale_add")
    (launch,) = pack.slice("launches", variant.launches)
    assert parameters(pack, launch) == [
        (fmt.ARG_POINTER, 0, 0, 16),
        (fmt.ARG_POINTER, 0, 1, 0),
        (fmt.ARG_POINTER, 0, 2, 0),
        (fmt.ARG_INT, 4, 0, 6400),
        (fmt.ARG_FLOAT, 4, 0, 0),
        *SCRATCH_PARAMETERS,
    ]
    assert pack.string(launch.entry) == "scale_add"
    assert (launch.threads, launch.cluster, launch.flags) == (128, 1, 0)
    assert [pack.expr(g).evaluate(PROBLEM) for g in launch.grid] == [25, 1, 1]
    assert pack.expr(launch.when).evaluate(PROBLEM) == 1


def test_several_launches_with_buffers_between(built):
    pack = built["sm90"].pack
    variant = of_kernel(pack, "reduce")
    assert variant.flags == fmt.VARIANT_NONDETERMINISTIC
    first, second = pack.slice("launches", variant.launches)
    inner = replace(PROBLEM, locals=(*PROBLEM.locals, 4))
    assert [pack.expr(x.value).evaluate(PROBLEM) for x in pack.slice("locals", variant.locals)] == [4]
    assert [
        (b.kind, b.alignment, pack.expr(b.bytes).evaluate(inner)) for b in pack.slice("buffers", variant.buffers)
    ] == [
        (fmt.BUFFER_SCRATCH, 256, 32),
        (fmt.BUFFER_COUNTERS, 16, 4),
    ]
    assert parameters(pack, first) == [
        (fmt.ARG_POINTER, 0, 0, 0), (fmt.ARG_BUFFER, 0, 0, 0), (fmt.ARG_INT, 8, 0, 6400), *SCRATCH_PARAMETERS,
    ]  # fmt: skip
    assert parameters(pack, second) == [
        (fmt.ARG_BUFFER, 0, 0, 16), (fmt.ARG_BUFFER, 0, 1, 0), (fmt.ARG_POINTER, 0, 2, 0), (fmt.ARG_INT, 4, 0, 4),
        *SCRATCH_PARAMETERS,
    ]  # fmt: skip
    assert (first.flags, second.flags) == (0, fmt.LAUNCH_COOPERATIVE)
    assert [pack.expr(launch.dependent).evaluate(PROBLEM) for launch in (first, second)] == [1, 0]
    assert (first.threads, second.threads) == (128, 64)
    assert [pack.expr(second.when).evaluate(replace(inner, locals=(0, 0, 0, 0, n))) for n in (0, 4)] == [0, 1]


@pytest.mark.parametrize("target", ["sm90", "sm100"])
@pytest.mark.parametrize(
    ("kernel", "oob_fill", "l2"), [("copy_triton", [1, 0], [2, 3]), ("copy_gluon", [0, 0], [2, 2])]
)
def test_tensor_maps_follow_the_cubins_metadata(built, target, kernel, oob_fill, l2):
    pack = built[target].pack
    variants = [v for v in pack.variants if pack.string(v.kernel) == kernel]
    assert len(variants) == 2
    for variant, (element_type, element_size) in zip(variants, [(7, 4), (6, 2)], strict=True):  # FLOAT32, FLOAT16
        (launch,) = pack.slice("launches", variant.launches)
        args = parameters(pack, launch)
        assert [a[:2] for a in args] == [
            *[(fmt.ARG_TENSOR_MAP, 0), (fmt.ARG_INT, 4), (fmt.ARG_INT, 4), (fmt.ARG_INT, 8), (fmt.ARG_INT, 8)] * 2,
            (fmt.ARG_GLOBAL_SCRATCH, 0),
            (fmt.ARG_PROFILE_SCRATCH, 0),
        ]
        assert [a[3] for a in args[1:5]] == [100, 64, 64, 1]
        assert [a[3] for a in args[6:10]] == [100, 64, 72, 1]
        maps = [pack.tensor_maps[args[i][2]] for i in (0, 5)]
        assert [m.tensor for m in maps] == [0, 2]
        assert [m.oob_fill for m in maps] == oob_fill
        assert [m.l2_promotion for m in maps] == l2
        for m in maps:
            assert (m.rank, m.element_type, m.element_size, m.box) == (2, element_type, element_size, [64, 32, 0, 0, 0])
            assert m.swizzle == {4: 3, 2: 2}[element_size], "128 bytes and 64 of a row"
            assert [pack.expr(s).evaluate(PROBLEM) for s in m.sizes[:2]] == [100, 64]
        assert [pack.expr(s).evaluate(PROBLEM) for s in maps[1].strides[:2]] == [72, 1]


def test_maps_may_round_to_tf32(built, cache):
    """The one thing that the cubin's metadata does not say."""
    kernel = replace(COPY_TMA, axes={"dtype": ("fp32",), "how": ("triton",)})
    plan_of = kernel.plan

    def rounded(point):
        plan = plan_of(point)
        args = dict(plan.launches[0].args)
        args["x"] = replace(args["x"], round_to_tf32=True)
        return replace(plan, launches=(replace(plan.launches[0], args=args),))

    pack = pack_of([replace(kernel, plan=rounded)], SM90, cache)
    assert [m.element_type for m in pack.tensor_maps] == [TENSOR_MAP_TF32, 7]


def test_device_made_maps_ask_for_scratch(built):
    pack = built["sm90"].pack
    (launch,) = pack.slice("launches", of_kernel(pack, "copy_device").launches)
    assert launch.global_scratch >= 256
    assert launch.global_scratch_alignment == 128
    assert [p[0] for p in parameters(pack, launch)] == [
        fmt.ARG_POINTER, fmt.ARG_POINTER, fmt.ARG_INT, fmt.ARG_INT, fmt.ARG_GLOBAL_SCRATCH, fmt.ARG_PROFILE_SCRATCH,
    ]  # fmt: skip


def test_the_op_and_its_buckets(built):
    pack = built["sm90"].pack
    op = pack.op("unit_test_op")
    assert (op.n_tensors, op.n_ints, op.n_floats, op.n_dims, op.dims) == (3, 1, 1, 2, [1, 2, 0, 0])
    assert pack.expr(op.key).evaluate(replace(PROBLEM, ints=(2,))) == 2
    configs = [(c.number, pack.string(c.name), json.loads(pack.string(c.params))) for c in pack.configs]
    assert configs[:3] == [
        (0, "block256", {"block": 256}),
        (1, "block1024", {"block": 1024}),
        (2, "sum2048", {"block": 2048}),
    ]
    kernels = {
        b.key: {pack.string(pack.variants[c.variant].kernel) for c in pack.slice("candidates", b.candidates)}
        for b in pack.slice("buckets", op.buckets)
    }
    copies = {"copy_triton", "copy_gluon", "copy_device"}
    assert kernels == {0: {"scale_add"}, 1: {"reduce"}, 2: copies, 3: {"scale_add"}, 4: {"reduce"}, 5: copies}


def test_constraints_travel_with_their_messages(built):
    pack = built["sm90"].pack
    messages = [pack.string(c.message) for c in pack.slice("constraints", of_kernel(pack, "scale_add").constraints)]
    assert messages == ["16-byte boundaries", "n a multiple of 16"]
    holds = pack.expr(pack.slice("constraints", of_kernel(pack, "scale_add").constraints)[1].holds)
    assert [holds.evaluate(replace(PROBLEM, locals=(n, 0, 0, 0))) for n in (6400, 6401)] == [1, 0]


def test_general_variants_are_marked(built):
    pack = built["sm90"].pack
    flags = [v.flags for v in pack.variants if pack.string(v.kernel) == "scale_add"]
    assert flags == [0, 0, fmt.VARIANT_GENERAL, fmt.VARIANT_GENERAL, 0, fmt.VARIANT_GENERAL]


def test_variants_with_the_same_launch_share_an_image(cache):
    """Two plans that differ in constraints and cost alone."""
    plan_of = SCALE_ADD.plan

    def indifferent(point):
        return plan_of(SimpleNamespace(config=point.config, dtype=point.dtype, even=False))

    pack = pack_of([replace(SCALE_ADD, plan=indifferent)], SM80, cache)
    assert len(pack.variants) == 6
    assert len(pack.images) == 3


# --- What the core would refuse ---


def pack_of(kernels: list[Kernel], target: Target, cache: Cache, table: dict | None = None) -> Pack:
    """One op of `kernels`, built in this process."""
    planned = plan_pack([Family(OP, tuple(kernels), lambda kernel, point: True)], target, Path("none"))
    work = find_work([planned], cache)
    from tk.aot.compile import compile_source

    for key in work.missing:
        artifact = compile_source(work.sources[key])
        cache.store(key, artifact)
        work.done[key] = artifact
    writer = PackWriter(target.arch, FLAG_PTX * target.ptx, "test")
    (op,) = planned.ops
    compiled = [Compiled(p.variant, tuple(work.done[s.key] for s in p.sources)) for p in op.variants]
    add_op(writer, op.grid, compiled, target, table or {})
    return read_pack(writer.finish())


def reduce_with(**changes) -> Kernel:
    return replace(REDUCE, plan=lambda point: replace(REDUCE.plan(point), **changes))


def launch_with(**args) -> tuple[Launch, ...]:
    first = REDUCE.plan(SimpleNamespace(config=REDUCE.configs[90][0], dtype="fp32")).launches[0]
    return (replace(first, args={**first.args, **args}),)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(constraints=(ALIGNED, require(local(4) > 0, "parts"))),
            "constraint 'parts': local 4 is read, but there are 4",
        ),
        (dict(cost=local(5)), "local 5 is read, but there are 5 at this point"),
        (dict(locals=(local(4),)), "local 4: local 4 is read, but there are 4 at this point"),
        (dict(locals=(local(0),) * 61), "65 locals, there may be 64"),
        (
            dict(launches=launch_with(x=Pointer(replace(X, index=3), "fp32", False))),
            r"partial_sums\(x\): x is tensor 3",
        ),
        (
            dict(launches=launch_with(n=Int(replace(X, index=7).size(0), "i64"))),
            "tensor 7 is read, op unit_test_op has 3",
        ),
        (dict(launches=launch_with(parts=Scratch(2, "fp32", 1))), "parts is buffer 2, the plan has 2"),
        (dict(buffers=(Buffer(8), Buffer(4, alignment=512))), r"alignment is one of \[1, .*, 256\], not 512"),
        (dict(constraints=()), "x is compiled for an aligned x, but no constraint reads x.alignment"),
        (dict(constraints=(require(OUT.alignment >= 16, "out"),)), "no constraint reads x.alignment"),
    ],
)
def test_contradictions_are_refused_by_name(cache, changes, message):
    with pytest.raises(BuildError, match=message):
        pack_of([reduce_with(**changes)], SM90, cache)


def test_floats_must_exist(cache):
    plan_of = SCALE_ADD.plan

    def wrong(point):
        plan = plan_of(point)
        args = {**plan.launches[0].args, "alpha": Float(1)}
        return replace(plan, launches=(replace(plan.launches[0], args=args),))

    with pytest.raises(BuildError, match="float 1, op unit_test_op has 1"):
        pack_of([replace(SCALE_ADD, plan=wrong)], SM80, cache)


# --- Pins ---

PIN = {"key": {"dtype": 0, "way": 0}, "dims": [4096, 64], "config": "block1024"}


def test_pins_name_their_config(cache):
    other = {"key": {"dtype": 0, "way": 0}, "dims": [16, 64], "config": "block256"}
    pack = pack_of([SCALE_ADD], SM80, cache, {"pins": [PIN, other]})
    assert [(p.key, p.dims, p.config) for p in pack.pins] == [(0, [16, 64, 0, 0], 0), (0, [4096, 64, 0, 0], 1)]


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ([{**PIN, "config": "block7"}], "names config block7, which does not exist"),
        ([{**PIN, "key": {"dtype": 0}}], r"needs \['dtype', 'way'\]"),
        ([{**PIN, "dims": [1]}], r"needs \['dtype', 'way'\] and \['rows', 'cols'\]"),
        ([{**PIN, "key": {"dtype": 1, "way": 0}}], "names config block1024 for .* where nothing has it"),
        ([PIN, {**PIN, "config": "block256"}], "two tuned pins"),
    ],
)
def test_wrong_pins_are_refused(cache, pins, message):
    with pytest.raises(BuildError, match=message):
        pack_of([SCALE_ADD], SM80, cache, {"pins": pins})


def test_pins_are_for_the_gpu_that_they_were_measured_on(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "tk.build.packs.load_tuned", lambda stem, arch: {"pins": [PIN]} if (stem, arch) == ("x", 80) else {}
    )
    family = Family(OP, (SCALE_ADD,), lambda kernel, point: True, tuned="x")
    for target, pins in ((SM80, 1), (SM90, 0), (Target(80, ptx=True), 0)):
        pack = plan_pack([family], target, tmp_path / f"{target.name}.tkpack")
        build([pack], cache, jobs=1, out=io.StringIO())
        assert len(read_pack(pack.path).pins) == pins


def test_tuned_tables_are_read_and_checked(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"gpu": "H200", "pins": [PIN]}))
    assert tuned_tables.read(path)["pins"] == [PIN]
    assert tuned_tables.load("no_such_stem", 90) == {}
    for text, message in (("{", "t.json"), ("[]", "not a table"), ('{"pin": []}', r"unknown fields \['pin'\]"),
                          ('{"pins": [{"key": {}}]}', "pin 0 must have exactly")):  # fmt: skip
        path.write_text(text)
        with pytest.raises(BuildError, match=message):
            tuned_tables.read(path)


# --- Building ---


def planned(target: Target, path: Path, **options) -> PlannedPack:
    return plan_pack([FAMILY], target, path, **options)


def test_a_rebuild_is_identical_and_compiles_nothing(built, cache, tmp_path, monkeypatch):
    monkeypatch.setattr("tk.build.packs.run_pool", None)  # nothing is left to compile
    for name, target in (("sm80", SM80), ("sm90", SM90), ("ptx80", Target(80, True))):
        out = io.StringIO()
        build([planned(target, tmp_path / f"{name}.tkpack")], cache, jobs=1, out=out)
        assert (tmp_path / f"{name}.tkpack").read_bytes() == built[name].path.read_bytes()
        n = len(built[name].work.sources)
        assert f"{n} launches, {n} of them in the cache" in out.getvalue()


def test_a_build_from_nothing_is_identical(built, tmp_path):
    """Another cache, another process, another folder, another hash seed: the same bytes."""
    source = Path(unit_kernels.__file__)
    copy = tmp_path / source.name
    copy.write_bytes(source.read_bytes())
    outputs = []
    for seed in ("1", "2"):
        out = tmp_path / f"{seed}.tkpack"
        run_cli(copy, "-o", out, "--arch", "90", "--only", "scale_add|copy_gluon", cache=tmp_path / seed, seed=seed)
        outputs.append(out.read_bytes())
    assert outputs[0] == outputs[1]
    ours = {i.hash for i in built["sm90"].pack.images}
    assert {i.hash for i in read_pack(outputs[0]).images} <= ours


def run_cli(*args: object, cache: Path, seed: str = "0", check: bool = True) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TK_CACHE_DIR": str(cache), "TK_NO_LIBRARY": "1", "PYTHONHASHSEED": seed, "TK_JOBS": "2"}
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, "-m", "tk.build", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert not check or done.returncode == 0, done.stderr
    return done


def test_roots_name_the_packs(built):
    lines = (built["sm80"].path.parent / "roots.inc").read_text().splitlines()
    assert lines == [
        f'{{"{name}.tkpack", "{built[name].pack.index_hash}"}},' for name in ("sm80", "sm90", "sm100", "ptx80")
    ]  # fmt: skip


ACCELERATED = 8  # of an image's ELF flags: it runs on one architecture alone


@pytest.mark.parametrize(
    ("target", "alone"), [(Target(100, family=True), False), (Target(100), True), (Target(120, family=True), False)]
)
def test_cubins_of_a_family_ask_for_nothing_that_it_lacks(target, alone, cache, tmp_path):
    path = tmp_path / f"{target.name}.tkpack"
    build([planned(target, path, only="scale_add|copy_triton")], cache, jobs=2, out=io.StringIO())
    pack = read_pack(path.read_bytes())
    assert (pack.arch, pack.flags) == (target.arch, FLAG_FAMILY * target.family)
    assert pack.variants
    for number in range(len(pack.images)):
        flags = int.from_bytes(pack.image(number)[48:52], "little")
        assert flags >> 8 & 0xFF == target.arch
        assert bool(flags & ACCELERATED) == alone


def test_an_unchanged_pack_keeps_its_time(built, cache):
    path = built["sm80"].path
    os.utime(path, (1, 1))
    build([planned(SM80, path)], cache, jobs=1, out=io.StringIO())
    assert path.stat().st_mtime == 1


def test_only_and_sample_leave_variants_out(cache, tmp_path):
    assert {p.variant.kernel.name for p in planned(SM90, tmp_path, only="copy_").ops[0].variants} == {
        "copy_triton", "copy_gluon", "copy_device",
    }  # fmt: skip
    sample = planned(SM90, tmp_path, sample=True)
    assert len(sample.ops[0].variants) == 9  # of what has newer architectures the first
    assert sample.partial
    assert not planned(SM90, tmp_path).partial


def test_nothing_to_build_is_an_error(cache, tmp_path):
    with pytest.raises(BuildError, match="nothing to build for sm75"):
        build([planned(Target(75), tmp_path / "x")], cache, jobs=1)
    assert not (tmp_path / "x").exists()


def test_progress_is_told(built):
    log = built["sm80"].log
    assert re.search(r"^46 launches\b", log, re.MULTILINE), "one count for all four"
    assert re.search(r"^(\d+)/\1 compiled, 0 s left$", log, re.MULTILINE)
    assert "sm90.tkpack: 14 variants, 16 images" in log


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar():
    out = Terminal()
    progress = Progress(4, out)
    for i in range(4):
        progress.step(f"kernel{i}", failed=i // 3)
    progress.finish()
    frames = out.getvalue().split("\r\x1b[K")
    assert frames[2].startswith(f"[{'=' * 15}{' ' * 15}] 2/4 compiled, ")
    assert frames[2].endswith("s left  kernel1")
    assert "4/4 compiled, 1 FAILED, 0 s left" in frames[4]
    assert frames[5].startswith("4 compiled in ")


@triton.jit
def broken(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), tl.no_such_function(1))


@triton.jit
def at_fault(x):
    return x + tl.no_such_function(x)


@triton.jit
def calling(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), at_fault(1.0))


@triton.jit
def copying(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), 1.0)


@triton.jit
def spilling(x, BLOCK: tl.constexpr):
    """A product whose sums alone are more than the registers of one warp."""
    rows = x + tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    a = tl.load(rows).to(tl.float16)
    tl.store(rows, tl.dot(a, a))


def kernel_of(fn, block: int = 64, **options) -> Kernel:
    def plan_one(point):
        launch = Launch(fn, {"x": Pointer(X, "fp32", False), "BLOCK": Const(block)}, (1, 1, 1), **options)
        return Plan((), {"dtype": (point.dtype,), "way": (0,)}, (launch,), cost=OP.local("n"))

    return Kernel(fn.__name__, OP, {"dtype": (0, 1)}, {80: (Config("only", {}),)}, plan_one)


def test_failures_are_all_listed_by_name_and_nothing_is_written(cache, tmp_path):
    worse = replace(kernel_of(broken, block=32), name="worse", configs={80: (Config("worse", {}),)})
    kernels = (worse, SCALE_ADD, kernel_of(broken))
    pack = plan_pack([Family(OP, kernels, lambda k, p: True)], SM80, tmp_path / "x.tkpack")
    with pytest.raises(BuildFailed) as failed:
        build([pack], cache, jobs=2, out=io.StringIO())
    assert [f.name for f in failed.value.failures] == [
        "broken of broken[dtype=0] only sm_80",
        "broken of worse[dtype=0] worse sm_80",
    ]
    assert "no_such_function" in str(failed.value)
    for failure in failed.value.failures:
        assert "no_such_function" in failure.log.read_text()
    assert not (tmp_path / "x.tkpack").exists()


def test_launches_that_do_not_fit_are_all_listed(tmp_path):
    wrong = reduce_with(launches=launch_with(m=Const(1)))
    with pytest.raises(BuildFailed, match=r"(?s)reduce\[dtype=fp32\].*no parameter m.*reduce\[dtype=fp16\]") as failed:
        plan_pack([Family(OP, (wrong,), lambda k, p: True)], SM80, tmp_path)
    assert len(failed.value.failures) == 2


def test_spills_have_a_bound(cache, tmp_path):
    def work_of(limit: int) -> tuple[PlannedPack, Work]:
        kernel = kernel_of(spilling, num_warps=1, maxnreg=32, max_spill_bytes=limit)
        pack = plan_pack([Family(OP, (kernel,), lambda k, p: True)], SM80, tmp_path / "x.tkpack")
        if find_work([pack], cache).missing:
            build([pack], cache, jobs=1, out=io.StringIO())
        return pack, find_work([pack], cache)

    pack, work = work_of(10**9)
    (artifact,) = work.done.values()
    assert artifact.spill_bytes > 1000
    assert artifact.registers == 32
    assert leave_out([pack], work, io.StringIO(), False) == [pack]
    pack, work = work_of(artifact.spill_bytes)
    assert leave_out([pack], work, io.StringIO(), False) == [pack]
    pack, work = work_of(artifact.spill_bytes - 1)
    words = f"{artifact.spill_bytes} bytes of registers spilled with 32"
    # It is slow, but nothing else takes its calls, and the build says so.
    for any_variant in (False, True):
        out = io.StringIO()
        assert leave_out([pack], work, out, any_variant) == [pack]
        assert "2 variants will be slow; no other takes their calls:\n  spilling[" in out.getvalue()
        assert words in out.getvalue()


def test_what_may_be_left_out_is_where_it_spills(cache, tmp_path):
    """The others stay, and the build says so."""
    spills = kernel_of(spilling, num_warps=1, maxnreg=32, max_spill_bytes=64)
    kernel = replace(spills, plan=lambda point: replace(spills.plan(point), droppable=point.dtype == 1))
    pack = plan_pack([Family(OP, (kernel,), lambda k, p: True)], SM80, tmp_path / "x.tkpack")
    out = io.StringIO()
    build([pack], cache, jobs=1, out=out)
    assert "sm80: 1 variant left out; others take their calls:\n  spilling[dtype=1" in out.getvalue()
    assert "sm80: 1 variant will be slow; no other takes their calls:\n  spilling[dtype=0" in out.getvalue()
    assert len(read_pack(pack.path.read_bytes()).variants) == 1


BROKEN = -1


@pytest.mark.parametrize("droppable", [False, True])
@pytest.mark.parametrize("any_variant", [False, True])
@pytest.mark.parametrize(
    ("spilled", "kept", "slow"),
    [
        ({"a": 0, "b": 65, "c": 5000}, "a", ""),
        ({"a": 65, "b": 64, "c": 64}, "bc", ""),
        ({"a": 5000, "b": 2000, "c": 65}, "c", "c"),
        ({"a": 5000, "b": 65, "c": 65}, "b", "b"),
    ],
)
def test_of_configs_that_take_the_same_calls_those_that_spill_are_left_out(
    spilled: dict[str, int], kept: str, slow: str, any_variant: bool, droppable: bool, tmp_path: Path
) -> None:
    """Where all of them do, the one that spills least stays."""
    if droppable and slow:  # the plan itself says that one of another kernel serves
        kept, slow = "", ""
    out = io.StringIO()
    pack, work = fake_work(spilled, tmp_path, lambda plan: replace(plan, droppable=droppable))
    (left,) = leave_out([pack], work, out, any_variant)
    assert "".join(p.variant.point.config.name for p in left.ops[0].variants) == kept
    assert ("will be slow; no other takes their calls" in out.getvalue()) == bool(slow)
    assert ("1 variant will be slow" in out.getvalue()) == bool(slow)
    assert ("left out; others take their calls" in out.getvalue()) == (len(kept) < 3)


def test_a_config_that_asks_for_more_serves_no_other(tmp_path: Path) -> None:
    def plan(plan: Plan) -> Plan:
        (block,) = [arg.value for name, arg in plan.launches[0].args.items() if name == "BLOCK"]
        return replace(plan, constraints=(require(OUT.alignment >= 16, "out is aligned"),)) if block == 16 else plan

    out = io.StringIO()
    pack, work = fake_work({"a": 0, "b": 5000}, tmp_path, plan)
    assert leave_out([pack], work, out, False) == [pack] and "1 variant will be slow" in out.getvalue()


@pytest.mark.parametrize("spilled", [{"a": BROKEN, "b": 5000}, {"a": BROKEN, "b": 5000, "c": 9000}])
def test_what_is_slow_takes_the_calls_of_what_cannot_be_made(spilled: dict[str, int], tmp_path: Path) -> None:
    out = io.StringIO()
    pack, work = fake_work(spilled, tmp_path, lambda plan: plan)
    (left,) = leave_out([pack], work, out, True)
    assert "".join(p.variant.point.config.name for p in left.ops[0].variants) == "b"
    assert f"{len(spilled) - 1} variant" in out.getvalue() and "1 variant will be slow" in out.getvalue()


def fake_work(spilled: dict[str, int], tmp_path: Path, changed: Callable[[Plan], Plan]) -> tuple[PlannedPack, Work]:
    """A kernel with a config for each name, none of which is compiled: so many bytes are said to have spilled, or that
    it is BROKEN."""
    blocks = {name: 16 << i for i, name in enumerate(spilled)}

    def plan_one(point: Point) -> Plan:
        args = {"x": Pointer(X, "fp32", False), "BLOCK": Const(point.config.block)}
        launch = Launch(copying, args, (1, 1, 1), max_spill_bytes=64)
        return changed(Plan((), {"dtype": (point.dtype,), "way": (0,)}, (launch,), cost=OP.local("n")))

    configs = tuple(Config(name, {"block": block}) for name, block in blocks.items())
    kernel = Kernel("copying", OP, {"dtype": (0,)}, {80: configs}, plan_one)
    pack = plan_pack([Family(OP, (kernel,), lambda k, p: True)], SM80, tmp_path / "x.tkpack")
    work = Work()
    for planned in pack.ops[0].variants:
        (source,), spill_bytes = planned.sources, spilled[planned.variant.point.config.name]
        if spill_bytes == BROKEN:
            work.failed[source.key] = Failure(planned.variant.name, "it does not compile")
        else:
            work.done[source.key] = SimpleNamespace(spill_bytes=spill_bytes, shared=0, registers=32)
    return pack, work


def test_a_users_variant_that_cannot_be_made_is_left_out_where_another_takes_its_calls(cache, tmp_path):
    plan = kernel_of(copying).plan
    fallback = replace(
        kernel_of(copying),
        plan=lambda point: replace(plan(point), general=True),
        configs={80: (Config("fallback", {}),)},
    )
    for fn, why in ((broken, "no_such_function"), (spilling, "registers spilled")):
        options = dict(num_warps=1, maxnreg=32, max_spill_bytes=64) if fn is spilling else {}
        kernels = (kernel_of(fn, **options), fallback)
        pack = plan_pack([Family(OP, kernels, lambda k, p: True)], SM80, tmp_path / "x.tkpack")
        if fn is broken:
            with pytest.raises(BuildFailed, match=why):  # the package's own
                build([pack], cache, jobs=1, out=io.StringIO())
        out = io.StringIO()
        build([pack], cache, jobs=1, out=out, any_variant=True)
        assert "sm80: 2 variants left out; others take their calls" in out.getvalue() and why in out.getvalue()
        written = read_pack(pack.path.read_bytes())
        assert {written.string(v.kernel) for v in written.variants} == {"copying"}


def test_failures_name_the_line_that_is_at_fault(cache, tmp_path):
    """Of a function that others call, whose errors have no words of their own."""
    pack = plan_pack([Family(OP, (kernel_of(calling),), lambda k, p: True)], SM80, tmp_path / "x.tkpack")
    with pytest.raises(BuildFailed) as failed:
        build([pack], cache, jobs=1, out=io.StringIO(), any_variant=True)
    line = next(i for i, x in enumerate(Path(__file__).read_text().splitlines(), 1) if "+ tl.no_such_function" in x)
    for said in ("no_such_function", f"test_build.py:{line}, in at_fault: return x + tl.no_such_function(x)"):
        assert said in str(failed.value), said


def test_shared_memory_has_the_architectures_bound(built, cache):
    pack = planned(SM80, Path("x"))
    work = find_work([pack], cache)
    work.done = {k: replace(a, shared=166_913) for k, a in work.done.items()}
    with pytest.raises(BuildFailed, match="166913 bytes of shared memory, the architecture has 166912"):
        leave_out([pack], work, io.StringIO(), True)


def test_summary_says_what_matters():
    assert summary("Traceback (most recent call last):\n  File x\nValueError: no") == "ValueError: no"
    assert summary("PTXASError: x\n`ptxas` stderr:\nptxas fatal : error 5\nmore") == "ptxas fatal : error 5"
    assert summary("") == "no message"


# --- Saying what would be done ---


def test_dry_run(built, cache, tmp_path):
    out = io.StringIO()
    dry_run([planned(SM90, tmp_path), planned(Target(120), tmp_path)], cache, jobs=2, out=out)
    lines = out.getvalue().splitlines()
    assert lines[0] == "sm90 unit_test_op scale_add: 8 combinations, 2 excluded, 6 variants, 6 launches, 6 cached"
    assert lines[1] == "    2 excluded: fp16 with at most 512 elements a program"
    assert lines[2] == "sm90 unit_test_op reduce: 2 combinations, 0 excluded, 2 variants, 4 launches, 4 cached"
    size = (sum(f.compressed_size for f in built["sm90"].pack.frames) + OP_BYTES + 14 * VARIANT_BYTES) / 1e6
    said = re.fullmatch(r"16 distinct launches, 16 in the cache; predicted (\S+) MB, 0 s with 2 jobs", lines[-1])
    assert said and float(said[1]) == pytest.approx(size, abs=0.02)


def test_a_dry_run_says_what_a_kernel_is_not_for(cache, tmp_path):
    """Nothing was dropped, and no plan failed: the words must not read so."""
    (scale_add, *_) = KERNELS
    kernel = replace(scale_add, plan=lambda point: None)
    pack = plan_pack([replace(FAMILY, kernels=(kernel,))], SM80, tmp_path / "x.tkpack")
    out = io.StringIO()
    dry_run([pack], cache, jobs=1, out=out)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("sm80 unit_test_op scale_add: 8 combinations, 8 excluded, 0 variants")
    assert lines[1] == "    8 excluded: no combination that the kernel is for"
    assert not re.search("drop|plan|fail", out.getvalue())


def test_dry_run_counts_what_is_left_out(cache, tmp_path):
    out = io.StringIO()
    dry_run([planned(SM90, tmp_path, only="even=True.*block256")], cache, jobs=1, out=out)
    assert "8 combinations, 2 excluded, 4 left out, 2 variants, 2 launches" in out.getvalue()


def test_predictions_come_from_what_is_known(built, cache, tmp_path, monkeypatch):
    """The same function's mean; of a function that is new the mean of its kind, which is what else is in the cache."""
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(2)))
    work = find_work([planned(SM90, tmp_path)], cache)
    keys = [k for k, s in work.sources.items() if s.fn is unit_kernels.scale_add]
    known = [work.done[k] for k in keys[1:]]
    work.done = dict(zip(keys[1:], known, strict=True))
    size, seconds = predict(work, jobs=2)
    mean_size = sum(len(a.compressed) for a in known) / len(known)
    mean_seconds = sum(a.seconds for a in known) / len(known)
    in_cache = sum(len(a.compressed) for a in known) + len(work.missing) * mean_size
    assert size == pytest.approx(in_cache * SHARE_OF_ZLIB + OP_BYTES + 14 * VARIANT_BYTES)
    assert seconds == pytest.approx(FIXED_SECONDS + max(mean_seconds, len(work.missing) * mean_seconds / 2))


def test_a_small_build_takes_its_start_and_its_records(built, cache, tmp_path, monkeypatch):
    """Of a few launches on many cores the time is that of the start and of the longest launch, and much of the pack is
    no image."""
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    _, seconds = predict(find_work([planned(SM90, tmp_path)], Cache(tmp_path / "empty")), jobs=64)
    assert seconds == pytest.approx(FIXED_SECONDS + KINDS[-1][1])
    size, seconds = predict(find_work([planned(SM90, tmp_path)], cache), jobs=64)
    assert len(built["sm90"].pack.data) < size < len(built["sm90"].pack.data) + 50_000
    assert seconds == 0.0, "all of it is in the cache"


@pytest.mark.parametrize(
    ("jobs", "cores", "load", "seconds"),
    [(1, 8, 0.0, 8.0), (4, 8, 0.0, 2.0), (8, 2, 0.0, 4.0), (2, 2, 2.0, 8.0), (4, 8, 4.0, 2.0), (99, 8, 0.0, 1.0)],
)
def test_predictions_count_the_cores_and_what_else_runs(cache, tmp_path, monkeypatch, jobs, cores, load, seconds):
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, load, 2 * load))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr("tk.build.packs.KINDS", (("", 1.0, 1),))
    work = find_work([planned(SM90, tmp_path)], Cache(tmp_path / "empty"))
    work.sources = dict(list(work.sources.items())[:8])
    assert len(work.missing) == 8
    assert predict(work, jobs)[1] == pytest.approx(FIXED_SECONDS + seconds)


def test_kinds_are_told_apart_by_their_modules():
    from tk.kernels.attention.decode import attention_decode
    from tk.kernels.attention.hopper_forward import attention_hopper_forward
    from tk.kernels.mm.pointer import mm_pointer

    def kind(fn):
        return kind_of(SimpleNamespace(fn=fn))

    functions = (attention_hopper_forward, attention_decode, mm_pointer, unit_kernels.scale_add)
    assert list(map(kind, functions)) == [name for name, *_ in KINDS]


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.2, "0 s"), (31.0, "31 s"), (110.0, "2 min"), (3600.0, "60 min"), (9000.0, "2.5 h")]
)
def test_durations(seconds, said):
    assert duration(seconds) == said


def test_a_build_begins_with_what_it_does(cache, tmp_path):
    """In ten lines, however many ops there are."""
    out = io.StringIO()
    pack = planned(SM90, tmp_path / "x.tkpack")
    (op,) = pack.ops
    ops = []
    for i in range(9):
        family = replace(op.grid.family, op=replace(op.grid.op, name=f"op{i}"))
        ops.append(replace(op, grid=replace(op.grid, family=family)))
    work = find_work([pack], Cache(tmp_path / "empty"))
    describe_build([replace(pack, ops=tuple(ops))], work, 2, out)
    lines = out.getvalue().splitlines()
    assert lines[:3] == ["9 ops for sm90", "  op0: 14 variants", "  op1: 14 variants"]
    assert lines[5] == "  and 5 more ops: 70 variants"
    launches = f"{len(work.sources)} launches; about "
    guess = " on cores of a current server; slower ones take longer"
    assert re.fullmatch(launches + rf"0\.\d\d MB and \d+ s with 2 jobs{guess}", lines[6])
    assert len(lines) == 7


def test_a_time_that_is_a_guess_says_of_which_machine_it_is(built, cache, tmp_path):
    """What the cache has was compiled on this one."""
    pack = planned(SM90, tmp_path)
    work = find_work([pack], cache)
    work.done.pop(next(iter(work.done)))
    for found, is_guess in ((find_work([pack], Cache(tmp_path / "empty")), True), (work, False)):
        out = io.StringIO()
        describe_build([pack], found, 2, out)
        assert found.missing and ("on cores of a current server" in out.getvalue()) == is_guess
    out = io.StringIO()
    dry_run([pack], Cache(tmp_path / "empty"), jobs=2, out=out)
    assert out.getvalue().endswith(" s with 2 jobs on cores of a current server; slower ones take longer\n")


def test_where_nobody_looks_progress_is_a_line_every_few_seconds(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    out = io.StringIO()
    progress = Progress(100, out)
    for i in range(100):
        now[0] += 1.0
        progress.step(f"kernel{i}", failed=0)
    progress.finish()
    lines = out.getvalue().splitlines()
    assert lines[0] == "6/100 compiled, 94 s left"
    assert lines[-2:] == ["100/100 compiled, 0 s left", "100 compiled in 100 s"]
    assert 15 <= len(lines) <= 20


def test_the_end_of_a_build_names_nothing_that_was_left_out(cache, tmp_path):
    kernel = kernel_of(spilling, num_warps=1, maxnreg=32, max_spill_bytes=64)
    kernel = replace(kernel, plan=lambda point, plan=kernel.plan: replace(plan(point), droppable=point.dtype == 0))
    pack = plan_pack([Family(OP, (kernel,), lambda k, p: True)], SM80, tmp_path / "x.tkpack")
    out = io.StringIO()
    build([pack], cache, jobs=1, out=out, any_variant=True)
    assert "sm80: 1 variant left out; others take their calls: " in out.getvalue()
    assert "dtype=0" not in out.getvalue()
    assert re.search(r"1 launch spills registers, the most \d+ bytes: spilling of spilling\[dtype=1", out.getvalue())


# --- The command ---


def test_where_packs_go():
    sm80, ptx = Target(80), Target(80, True)
    assert pack_paths([sm80, ptx], [], Path("out")) == [Path("out/sm80.tkpack"), Path("out/ptx80.tkpack")]
    assert pack_paths([sm80], [Path("a/my.py")], None) == [Path("my.tkpack")]
    assert pack_paths([sm80], [Path("my.py")], Path("o/x.tkpack")) == [Path("o/x.tkpack")]
    assert pack_paths([sm80, ptx], [Path("my.py")], Path("o/x.tkpack")) == [
        Path("o/x.sm80.tkpack"),
        Path("o/x.ptx80.tkpack"),
    ]
    with pytest.raises(BuildError, match="tk build --all -o FOLDER"):
        pack_paths([sm80], [], None)


def test_the_command_fails_with_a_message(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TK_CACHE_DIR", str(tmp_path))
    (tmp_path / "none.py").write_text("x = 1\n")
    (tmp_path / "bad.py").write_text("import no_such_module\n")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for args, message in (
        ([tmp_path / "none.py"], "none.py declares nothing: no function under @tk.op"),
        ([tmp_path / "none.py"], "what it imports is built from the file that declares it"),
        ([tmp_path / "bad.py"], "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ([tmp_path / "gone.py"], "there is no such file"),
        (["--all"], "say into which folder the package's own packs go: tk build --all -o FOLDER"),
        ([unit_kernels.__file__, unit_kernels.__file__], "unit_kernels.py is named twice; name it once"),
    ):
        assert run(parser.parse_args(list(map(str, args)))) == 1
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("dry_run", [True, False])
def test_arguments_that_choose_nothing_say_what_there_is(dry_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TK_CACHE_DIR", str(tmp_path / "cache"))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    how = ["--dry-run"] if dry_run else ["-o", tmp_path / "made" / "p.tkpack"]
    for args, message in (
        (["--all"], "--all is of the kernels that ship with tk; of FILE.py everything is built without it"),
        (["--arch", "75"], "--arch 75: tk needs compute capability 8.0 or newer; there are kernels for 80, 90"),
        (["--arch", "86"], "--arch 86: cubins of sm_80 run on it, too: write --arch 80"),
        (["--arch", "90,89"], "--arch 89: cubins of sm_80 run on it, too: write --arch 80"),
        (["--arch", "120"], "--arch 120: write --arch 120f, whose cubins run on newer GPUs of 12.x, too, or ptx80"),
        (["--arch", "ptx120"], "--arch ptx120: there is no PTX for it alone; write --arch ptx80"),
        (["--arch", "h100"], "--arch h100: 'h100' names no architecture; write 80 (A100), 90 (H100), … or ptx80"),
        (["--arch", "90,"], "--arch 90,: '' names no architecture"),
        (["--arch", "90", "--only", "scale("], "--only 'scale(' is no regular expression: "),
        (["--arch", "90", "--only", "scale_adds"], "the nearest: 'scale_add'"),
        (["--arch", "90", "--only", "^$"], "--only '^$' matches none of the names of"),
        (["--arch", "90", "--only", "^$"], " sm_90'\n"),  # and nothing is said to be near it
    ):
        assert run(parser.parse_args(list(map(str, [unit_kernels.__file__, *how, *args])))) == 2
        said = capsys.readouterr()
        assert message in said.err and not said.out
    assert not list(tmp_path.glob("made/*"))


@pytest.mark.parametrize("arguments", [[], ["--arch", "90"], ["-o", "there"]])
def test_without_a_file_it_says_what_it_would_do(arguments, tmp_path, monkeypatch, capsys):
    """All kernels take an hour: nobody is to start that by leaving a name out."""
    monkeypatch.setattr("tk.build.command.package_families", lambda debug: pytest.fail("traced"))
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run(parser.parse_args(arguments)) == 2
    said = capsys.readouterr().err
    assert said.startswith("tk build: no FILE.py is named.") and "tk build --all -o FOLDER" in said
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_is_said_before_anything_is_compiled(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tk.build.command.build", lambda *args, **kwargs: pytest.fail("compiled"))
    monkeypatch.setenv("TK_CACHE_DIR", str(tmp_path / "cache"))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    (tmp_path / "file").write_text("")
    own = tmp_path / "own.py"
    own.write_text(Path(unit_kernels.__file__).read_text())
    for args, message in (
        ([unit_kernels.__file__, "-o", tmp_path], "it is a folder; write the name of the pack, such as"),
        ([unit_kernels.__file__, "-o", tmp_path / "file" / "p.tkpack"], "file cannot be made: "),
        ([unit_kernels.__file__, "-o", "/proc/p.tkpack"], "/proc cannot be written to"),
        ([own, "-o", own, "--arch", "90"], f"-o {own}: it is the file that is built; write {tmp_path / 'own.tkpack'}"),
        ([tmp_path], "is a folder; name the files in it that declare ops or mods"),
    ):
        assert run(parser.parse_args(list(map(str, args)))) == 1
        assert message in capsys.readouterr().err


def test_the_command_fails_with_a_status(tmp_path):
    done = run_cli(tmp_path / "gone.py", cache=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (1, f"tk build: {tmp_path}/gone.py: there is no such file\n")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import sys; sys.exit(3)", 'SystemExit: 3; what ends the process belongs under if __name__ == "__main__"'),
        ("from .beside import x", "; a file is imported by itself, with its folder on the path: write import NAME"),
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
    ],
)
def test_a_file_that_cannot_be_imported_says_why(source, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("TK_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "wrong.py").write_text(source)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run(parser.parse_args([str(tmp_path / "wrong.py"), "--dry-run"])) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tk build: {tmp_path}/wrong.py cannot be imported: ") and said in line


def test_what_is_no_file_of_sources_is_called_what_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TK_CACHE_DIR", str(tmp_path / "cache"))
    os.mkfifo(tmp_path / "pipe.py")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run(parser.parse_args([str(tmp_path / "pipe.py"), "--dry-run"])) == 1
    assert capsys.readouterr().err == f"tk build: {tmp_path}/pipe.py is no regular file\n"


def test_two_files_that_declare_an_op_of_one_name_are_both_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("TK_CACHE_DIR", str(tmp_path / "cache"))
    files = [tmp_path / "one.py", tmp_path / "other.py"]
    for file in files:
        file.write_text('import tk\n\n@tk.op(x="T[N]", T="fp32")\ndef named_alike(x):\n    return x * 2\n')
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run(parser.parse_args([*map(str, files), "--dry-run"])) == 1
    said = f"more than one family declares op named_alike, in {files[0]} and in {files[1]}; rename one"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "-1", "two"])
def test_jobs_are_a_positive_number(text):
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        parser.parse_args(["--jobs", text])


def test_an_older_triton_is_refused_with_what_to_do(monkeypatch):
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'build = ["triton>={}.{}"'.format(*OLDEST_TRITON) in project
    monkeypatch.setattr("triton.__version__", "3.6.0")
    with pytest.raises(SystemExit, match=r"needs Triton 3\.8 or newer, and this is 3\.6\.0(?s:.*)torch-tk\[build\]"):
        run(argparse.Namespace())


@pytest.fixture(scope="module")
def own_families():
    from tk.build.sources import package_families

    return package_families()


@pytest.mark.drawn  # make sample plans sm_80 and sm_90 as well
@pytest.mark.parametrize("target", [SM80, SM90, Target(80, True)], ids=str)
def test_the_packages_own_kernels_plan_for_every_wheel_target(own_families, target, tmp_path):
    """Records without contradictions, launches that fit their functions. What a sample lacks, its build says."""
    counts = Counter()
    for op in plan_pack(own_families, target, tmp_path).ops:
        family = op.grid.family
        sampled = [v for v in op.grid.variants if family.sampled and family.sample(v.kernel, v.point)]
        assert bool(sampled) == (family.sampled and bool(op.variants)), "an op of the target is in its sample too"
        counts.update(sampled=len(sampled), all=len(op.variants))
    # Where nothing was measured there are few settings beside the sample's.
    assert counts["sampled"] < (0.5 if target == SM90 else 1.0) * counts["all"]


def test_products_on_hopper_run_on_its_own_tensor_cores(cache, tmp_path):
    from triton.tools.disasm import get_sass

    from tk.kernels.mm.family import FAMILY

    sampled = plan_pack([FAMILY], SM90, tmp_path / "x.tkpack", sample=True)
    first = {p.variant.kernel.name: p.variant.name for op in sampled.ops for p in reversed(op.variants)}
    only = "|".join(f"^{re.escape(name)}$" for name in first.values() if name.startswith("mm_tma"))
    pack = plan_pack([FAMILY], SM90, tmp_path / "x.tkpack", sample=True, only=only)
    build([pack], cache, jobs=2, out=io.StringIO())
    work = find_work([pack], cache)
    assert work.sources
    for key in work.sources:
        assert "HGMMA" in get_sass(work.done[key].image)


# --- Definitions of generated ops ---


def test_definitions_are_ops_without_kernels():
    x, out = tensors("x", "out")
    op = Op(
        name="doubled", tensors=(x, out), ints=(), floats=("alpha",), locals={}, selectors={}, dims=(),
        outputs=(Output(x.dtype, (), (), leading=0),),
        params=(Param("x", "tensor", leading=True), Param("alpha", "float", default=2.0)),
        checks=(require(x.dtype == DTYPES["fp32"], "x of fp32"),), meta='{"doc": ""}',
    )  # fmt: skip
    generated = Family(op, (), lambda kernel, point: True)
    pack = read_pack(definitions([unit_kernels.FAMILY, generated]))
    assert (pack.arch, len(pack.variants), len(pack.images)) == (0, 0, 0)
    (row,) = pack.ops
    assert pack.string(row.name) == "doubled", "an op that a library registers needs no definition"
    assert pack.string(row.schema) == "doubled(Tensor x, float alpha=2.0, int config=-1, int mode=0) -> Tensor"
    assert pack.string(row.meta) == '{"doc": ""}'
    first, second = pack.slice("params", row.params)
    assert (pack.string(first.name), fmt.PARAM_KINDS[first.kind], first.flags) == ("x", "tensor", fmt.PARAM_LEADING)
    assert (pack.string(second.name), pack.string(second.default_value)) == ("alpha", "2.0")
    (output,) = pack.slice("outputs", row.outputs)
    assert (output.leading, output.ndim) == (1, 0)
    assert [pack.string(c.message) for c in pack.slice("constraints", row.checks)] == ["x of fp32"]


def test_the_packages_packs_come_with_definitions(cache, tmp_path):
    out = io.StringIO()
    data = definitions([])
    packs = [plan_pack([unit_kernels.FAMILY], SM80, tmp_path / "sm80.tkpack")]
    build(packs, cache, 2, tmp_path / "roots.inc", out, (tmp_path / "ops.tkpack", data))
    assert (tmp_path / "ops.tkpack").read_bytes() == data
    lines = (tmp_path / "roots.inc").read_text().splitlines()
    assert lines[1] == f'{{"ops.tkpack", "{read_pack(data).index_hash}"}},'


def test_a_build_prints_where_stdout_is_by_then(tmp_path: Path) -> None:
    """And not where it was when the module was imported: a program may have redirected it since."""
    with redirect_stdout(io.StringIO()) as printed:
        build([], Cache(tmp_path), jobs=1)
    assert "done in" in printed.getvalue()
