"""What every op pays beside its kernel: the host's time of a call, cold starts, choosing, and how well is chosen.

Launching through the C API is compared with ``cuLaunchKernelEx`` itself by calling both the same way, through ctypes in
the same loop: what ctypes costs falls out of the difference, and nothing has to be compiled on the GPU's machine. The
driver's call launches an empty kernel with parameters of the same kinds and size as a matrix product's.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks import first_call, peers, shapes
from benchmarks.products import Product, run_tk
from benchmarks.report import Figure, Goal, Report, Row
from benchmarks.runner import ROOT, Options
from tk import _library, capi, timing
from tk.heuristics import overrides
from tk.heuristics.problem import describe
from tk.tune.measure import Operands, Result, Task, measure

SMALL = Product(64, 256, 256)  # a kernel shorter than any launch


def add(report: Report, name: str, title: str, value: float, unit: str, limit: float | None = None) -> None:
    report.figures.append(Figure(name, title, value, unit, limit))
    print(f"{title:60} {value:10.3f} {unit}", flush=True)


# --- The host's time ---


def host_time(options: Options, report: Report) -> None:
    """Of one call with one output, the device not in the way: tk's, and what a program calls instead."""
    inputs = peers.Inputs.random(SMALL, "cuda")
    with torch.inference_mode():
        calls = _prepared(report, inputs)
        inference = timing.host_times({**calls, "generated": partial(torch.ops.tk.gelu, inputs.a, False)})
    grad_mode = timing.host_times({name: calls[name] for name in ("op", "tk", "torch_mm")})
    limits = {"op": 5.5}
    for way in peers.WAYS:
        if way.name in inference:
            title = f"{way.title}, inference mode"
            add(report, way.host_figure, title, inference[way.name].us, "µs", limits.get(way.name))
    wrapper = inference["tk"].us - inference["op"].us
    add(report, "host_wrapper", "tk.mm beyond the op, inference mode", wrapper, "µs", 2.0)
    beyond = inference["generated"].us - inference["op"].us
    add(report, "host_generated", "torch.ops.tk.gelu, which is generated, beyond torch.ops.tk.mm", beyond, "µs", 1.0)
    add(report, "host_tk_mm", "tk.mm, grad mode, nothing needs a gradient", grad_mode["tk"].us, "µs")
    add(report, "host_op_grad", "torch.ops.tk.mm, grad mode", grad_mode["op"].us, "µs")
    add(report, "host_torch_mm_grad", "torch.mm, grad mode", grad_mode["torch_mm"].us, "µs")


def _prepared(report: Report, inputs: peers.Inputs) -> dict[str, peers.Call]:
    """By the way's name. One that cannot run, or is wrong, is among the report's failures instead."""
    calls: dict[str, peers.Call] = {}
    for way in peers.WAYS:
        report.attempt(way.host_figure, lambda way=way: calls.update({way.name: peers.prepare(way, inputs)}))
    return calls


# --- The C API beside the driver ---

_EMPTY_KERNEL = """
.version 7.8
.target sm_80
.address_size 64
.visible .entry empty({parameters}) {{ ret; }}
"""


def _empty_kernel_ptx() -> str:
    """Parameters like those of a product: three tensor maps with their sizes and strides, pointers and numbers."""
    maps = [f".param .align 64 .b8 map{i}[128]" for i in range(3)]
    numbers = [f".param .b64 number{i}" for i in range(28)]
    return _EMPTY_KERNEL.format(parameters=", ".join(maps + numbers))


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("n_attributes", ctypes.c_uint),
    ]


PROGRAMMATIC_STREAM_SERIALIZATION = 6


def _driver_launch(stream: int) -> Callable[[], int]:
    """cuLaunchKernelEx of an empty kernel with one launch attribute, all arguments prepared."""
    driver = ctypes.CDLL("libcuda.so.1")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _succeeded(driver.cuModuleLoadData(ctypes.byref(module), _empty_kernel_ptx().encode()))
    _succeeded(driver.cuModuleGetFunction(ctypes.byref(function), module, b"empty"))
    storage = [ctypes.create_string_buffer(192) for _ in range(3)] + [ctypes.c_int64() for _ in range(28)]
    addresses = [ctypes.addressof(s) for s in storage]
    addresses[:3] = [(address + 63) // 64 * 64 for address in addresses[:3]]
    parameters = (ctypes.c_void_p * len(addresses))(*addresses)
    attribute = _Attribute(PROGRAMMATIC_STREAM_SERIALIZATION)
    attribute.value[0] = 1
    config = _LaunchConfig((1, 1, 1), (128, 1, 1), 0, stream, ctypes.pointer(attribute), 1)
    launch = partial(driver["cuLaunchKernelEx"], ctypes.byref(config), function, parameters, None)
    launch.keep = storage, attribute, config  # type: ignore[attr-defined]
    _succeeded(launch())
    return launch


def _succeeded(code: int) -> None:
    if code:
        raise RuntimeError(f"the CUDA driver refused a call: error {code}")


def c_api(options: Options, report: Report) -> None:
    """tk_launch with a prepared call of one launch, whose address and sizes do not change, over the driver's own."""
    a, b, out = SMALL.make_a(), SMALL.make_b(), SMALL.make_out()
    problem = describe(run_tk, a, b, None, 0, out).problem
    rows = [c for c in capi.candidates(problem) if c.fits and c.kernel_name == "mm_tma"]
    config = rows[0].config if rows else capi.choose(problem).config
    prepared = capi.prepare(problem, config)
    core = ctypes.CDLL(str(_library.directory() / "libtk_core.so"))
    with torch.cuda.stream(torch.cuda.Stream()):
        stream = torch.cuda.current_stream().cuda_stream
        ours = partial(core["tk_launch"], prepared.pointer, ctypes.c_void_p(stream), None)
        calls = {"tk_launch": ours, "cuLaunchKernelEx": _driver_launch(stream)}
        _succeeded(ours())
        times = timing.host_times(calls, rounds=31)
    us = {name: t.us for name, t in times.items()}
    add(report, "launch_driver", "cuLaunchKernelEx, through ctypes", us["cuLaunchKernelEx"], "µs")
    extra = us["tk_launch"] - us["cuLaunchKernelEx"]
    add(report, "launch_c_api", "tk_launch over cuLaunchKernelEx, prepared arguments", extra, "µs", 0.8)


# --- Choosing ---


def choosing(options: Options, report: Report) -> None:
    """Known problem: what a wrapper looks up (the engine's own memory is a part of tk_launch). New problem: the engine,
    over all configs of a bucket, less what a ctypes call costs that does nothing."""
    a, b, out = SMALL.make_a(), SMALL.make_b(), SMALL.make_out()
    known = timing.host_times({"known": partial(overrides.find, "mm", a)})["known"].us
    add(report, "choose_known", "choosing, known problem (Python's part)", known, "µs", 0.3)
    problem = describe(run_tk, a, b, None, 0, out).problem
    core = ctypes.CDLL(str(_library.directory() / "libtk_core.so"))
    choice = capi._Choice()
    samples = []
    for m in range(1, 400):  # each size once: none is known
        sized = [replace(t, sizes=(m, t.sizes[1])) if i in (0, 3) else t for i, t in enumerate(problem.tensors)]
        call = capi.prepare(replace(problem, tensors=sized))
        one = partial(core["tk_choose"], call.pointer, ctypes.byref(choice))
        nothing = partial(core["tk_abi_version"], call.pointer, ctypes.byref(choice))
        samples.append(timing.loop_us(one, 1) - timing.loop_us(nothing, 1))
    add(report, "choose_new", "choosing, new problem", statistics.median(samples), "µs", 20.0)


# --- Cold start: fresh processes ---

_IMPORTS = """
import json, sys, time
t0 = time.perf_counter()
import torch
t1 = time.perf_counter()
import tk
t2 = time.perf_counter()
"""

_OPEN_PACK = (
    _IMPORTS
    + """
from tk import capi
torch.cuda.synchronize()
square = capi.Matrix(torch.bfloat16, (256, 256), (256, 1))
problem = capi.Problem("mm", (square, square, None, square), (0, 0), (1.0, 1.0))
capi._core()
t3 = time.perf_counter()
capi.choose(problem)
t4 = time.perf_counter()
print(json.dumps({"import_tk": t2 - t1, "open": t4 - t3}))
"""
)


def _in_fresh_processes(code: str, count: int) -> dict[str, float]:
    """Medians of what the code prints, in ms. The first process, which fills the page cache, does not count."""
    found = []
    for _ in range(count + 1):
        process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        if process.returncode:
            raise RuntimeError(f"a fresh process failed: {process.stderr.strip()[-400:]}")
        found.append(json.loads(process.stdout.splitlines()[-1]))
    return {name: 1e3 * statistics.median(f[name] for f in found[1:]) for name in found[0]}


def cold_start(options: Options, report: Report) -> None:
    opened = _in_fresh_processes(_OPEN_PACK, 1 if options.quick else 3)
    add(report, "import", "import tk beyond import torch", opened["import_tk"], "ms", 60.0)
    add(report, "open_pack", "opening a pack (with the first choice)", opened["open"], "ms", 2.0)


FIRST_CALLS_SECONDS = 75.0  # for all of them; 20 to 30 a round, most of it torch.compile's


def first_calls(options: Options, report: Report) -> None:
    """Of tk and of what a program calls instead, a product of 256 x 256 x 256, with the context up."""
    ways = {way.name: way for way in peers.WAYS}
    rounds = 1 if options.quick else 3
    seconds = min(FIRST_CALLS_SECONDS, options.seconds_left)
    for name, found in first_call.measure(list(ways), rounds=rounds, seconds=seconds).items():
        figure = ways[name].first_figure
        report.attempt(figure, partial(_add_first_call, report, ways[name], found))


def _add_first_call(report: Report, way: peers.Way, found: first_call.Found) -> None:
    if found.error:
        raise first_call.Failed(found.error)
    title = f"first call of {way.title}, context up, median of {len(found.ms)}"
    add(report, way.first_figure, title, found.median, "ms", 5.0 if way.name == "tk" else None)


# --- How well is chosen ---


def unseen(quick: bool) -> Iterator[Task]:
    """Sizes that no table was made from: other seeds than tuning's and the benchmarks' own."""
    count = 8 if quick else 20
    for i, (m, n, k) in enumerate(
        shapes.neighbours(31, count, (1, 256))
        + shapes.neighbours(32, count // 2, (257, 1023))
        + shapes.neighbours(33, count, (1024, 8192))
    ):
        yield Task(m, n, k, order=("nn", "nt")[i % 2])


def regret(options: Options, report: Report) -> None:
    group = report.group("regret", "choice, unseen sizes", "the best config", Goal(1 / 1.03, 1 / 1.15))
    operands = Operands()
    for task in unseen(options.quick):
        if options.wants(f"regret {task}") and options.has_time():
            report.attempt(f"regret {task}", lambda task=task: group.rows.append(_regret(measure(task, operands))))


def _regret(result: Result) -> Row:
    """ratio: the best config's time over that of the one chosen, at most 1."""
    if result.failures:
        raise RuntimeError(f"configs failed: {result.failures}")
    choice = capi.choose(result.problem)
    us = {m.config: m.us for m in result.measured}
    best = min(us, key=us.__getitem__)
    row = Row(str(result.task), us[best] / us[choice.config_name], us, {"chosen": choice.config_name, "best": best})
    print(f"regret   {row.label:38} {row.ratio:6.3f}  {choice.config_name} {us[choice.config_name]:.2f} µs, "
          f"best {best} {us[best]:.2f} µs", flush=True)  # fmt: skip
    return row


# --- What was built ---


def built(options: Options, report: Report) -> None:
    """The wheel's size and the time to build the grid. dist/build.json: {"cold_seconds": s, "unchanged_seconds": s}."""
    wheels = sorted((ROOT / "dist").glob("torch_tk-*.whl"), key=os.path.getmtime)
    if wheels and _ships(wheels[-1]):
        add(report, "wheel", "wheel with sm_80, sm_90 and PTX", wheels[-1].stat().st_size * 1e-6, "MB", 95.0)
    packs = _library.directory().parent / "packs"
    for pack in sorted(packs.glob("*.tkpack")):
        add(report, f"pack_{pack.stem}", f"pack {pack.name}", pack.stat().st_size * 1e-6, "MB")
    times = Path(ROOT, "dist", "build.json")
    if times.is_file():
        seconds = json.loads(times.read_text())
        add(report, "build_cold", "building the whole grid, cold", seconds["cold_seconds"] / 60, "min", 110.0)
        add(
            report,
            "build_unchanged",
            "building the whole grid, nothing changed",
            seconds["unchanged_seconds"],
            "s",
            20.0,
        )


def _ships(wheel: Path) -> bool:
    """Whether it is the whole wheel, and not one for a single GPU."""
    packs = {Path(name).stem for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".tkpack")}
    return {"sm80", "sm90", "ptx80"} <= packs


def run(options: Options, report: Report) -> None:
    for part in (host_time, c_api, choosing, cold_start, first_calls, regret, built):
        if options.wants(part.__name__) or part is regret:
            report.attempt_part(part.__name__, partial(part, options, report))
            report.write(options.out)
