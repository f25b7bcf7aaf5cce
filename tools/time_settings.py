"""Times more settings of generated kernels than ship, to find which should.

    python tools/time_settings.py build -o build/candidates.tkpack     # needs no GPU
    python tools/time_settings.py time build/candidates.tkpack --out timings.json --seconds 250
    python tools/time_settings.py judge timings.json            # what today's settings and predictions make of them

With `--rows` they take fewer ops, settings and shapes: rows of 2,000 to 12,000 columns, rows at odd addresses, and
walks, in a minute and a half. With `--scans` they take scans, sorts and topk.

The ops are those of tools/settings_candidates.py and tools/scan_candidates.py, for bf16 (fp32 where a name ends so) on
sm_90. `time` writes, for every op at every shape, each config's median and what was predicted for it, in µs. What is
worth most comes first, since time may be short.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
OPS = HERE / "settings_candidates.py"
SCAN_OPS = HERE / "scan_candidates.py"

# --- What is tried: by kind and layout, (p, q, warps) of blocks and of loops ---

Blocks = Sequence[tuple[int, int, int]]

FLAT: Blocks = ((1, 512, 4), (1, 1024, 4), (1, 2048, 4), (1, 2048, 8), (1, 4096, 8), (1, 4096, 4), (1, 8192, 8))
FLAT_ROWS: Blocks = ((1, 512, 4), (1, 1024, 4), (1, 1024, 8), (1, 2048, 8), (1, 2048, 4))
ROWS: Blocks = ((1, 1024, 4), (1, 2048, 4), (2, 1024, 4), (2, 2048, 8), (4, 256, 4), (4, 512, 4), (8, 256, 4),
                (16, 64, 4), (16, 128, 4), (4, 1024, 8), (8, 1024, 8), (32, 64, 4))  # fmt: skip
ROWS_UNALIGNED: Blocks = ((1, 1024, 4), (2, 512, 4), (4, 256, 4), (16, 64, 4), (128, 8, 4), (1, 2048, 8))
INNER: Blocks = (
    (32, 64, 4), (64, 64, 4), (16, 128, 4), (8, 256, 4), (4, 256, 4), (4, 512, 4), (2, 512, 4), (2, 1024, 4),
    (1, 1024, 4), (1, 1024, 2), (4, 1024, 8), (1, 2048, 4), (1, 2048, 8), (2, 2048, 8), (1, 4096, 4), (1, 4096, 8),
    (1, 4096, 16), (1, 8192, 8), (1, 8192, 16), (1, 16384, 16), (1, 16384, 32), (1, 32768, 32),
)  # fmt: skip
INNER_LOOPS: Blocks = ((1, 1024, 4), (1, 2048, 4), (1, 2048, 8), (1, 4096, 8), (1, 4096, 16), (1, 8192, 16),
                       (2, 2048, 8), (1, 8192, 32))  # fmt: skip
INNER_UNALIGNED: Blocks = ((32, 64, 4), (16, 128, 4), (8, 256, 4), (4, 512, 4), (2, 1024, 4), (1, 1024, 4),
                           (1, 2048, 4), (1, 2048, 8), (1, 4096, 8), (1, 4096, 16), (1, 8192, 8), (1, 8192, 16),
                           (1, 16384, 16), (1, 16384, 32))  # fmt: skip
INNER_UNALIGNED_LOOPS: Blocks = ((1, 2048, 8), (1, 4096, 8), (1, 4096, 16), (1, 8192, 16))
# And of rows in segments: (p, q, warps, segments)
SEGMENTS = ((1, 1024, 4, 3), (1, 2048, 8, 3), (1, 4096, 16, 3))
SEGMENTS_UNALIGNED = ((1, 1024, 4, 2), (1, 1024, 4, 3), (1, 1024, 8, 3), (1, 1024, 4, 4), (1, 1024, 8, 4),
                      (1, 2048, 8, 3), (1, 2048, 16, 3), (1, 2048, 8, 4), (1, 2048, 16, 4))  # fmt: skip
WALK: Blocks = ((16, 128, 4), (8, 256, 4), (4, 256, 4), (4, 512, 4), (1, 1024, 4), (2, 1024, 4), (4, 1024, 4),
                (4, 1024, 8), (1, 2048, 4), (2, 2048, 8), (1, 4096, 8), (1, 4096, 16), (1, 8192, 8), (1, 8192, 16),
                (1, 16384, 16), (1, 16384, 32))  # fmt: skip
WALK_UNALIGNED: Blocks = ((4, 256, 4), (2, 1024, 4), (1, 1024, 4), (1, 2048, 4), (1, 2048, 8), (1, 4096, 8),
                          (1, 4096, 16), (1, 8192, 16))  # fmt: skip
OUTER: Blocks = ((64, 32, 8), (32, 32, 4), (32, 64, 4), (64, 32, 4), (64, 64, 8), (128, 32, 8), (32, 128, 8),
                 (16, 128, 4), (8, 256, 4), (16, 256, 8), (128, 64, 8), (8, 512, 4), (128, 16, 4))  # fmt: skip
SCANS: Blocks = ((8, 256, 4), (1, 1024, 4), (1, 2048, 4), (1, 4096, 4), (1, 4096, 8), (1, 4096, 16), (1, 8192, 8),
                 (1, 8192, 16), (1, 16384, 16), (1, 16384, 32))  # fmt: skip
SCAN_LOOPS: Blocks = ((1, 4096, 8), (1, 2048, 4), (1, 4096, 4), (1, 8192, 16))
SCAN_SPREAD: Blocks = ((1, 4096, 8), (1, 8192, 16), (1, 16384, 16), (1, 16384, 32))
SORTS: Blocks = ((16, 64, 4), (1, 256, 1), (1, 512, 1), (1, 1024, 2), (1, 2048, 4), (1, 4096, 8))
OUTER_UNALIGNED: Blocks = ((64, 32, 8), (32, 32, 4), (32, 64, 4), (64, 64, 8), (128, 32, 8), (16, 128, 4), (128, 8, 4))


def candidates() -> dict[str, dict[str, Any]]:
    """A table of settings, about three times the one that ships."""
    from tk.codegen.scheduling.settings import SETTINGS, Setting

    def once(blocks: Blocks) -> tuple[Setting, ...]:
        return tuple(Setting(*b) for b in blocks)

    def loops(blocks: Blocks) -> tuple[Setting, ...]:
        return tuple(Setting(*b, True) for b in blocks)

    def segments(found: Sequence[tuple[int, int, int, int]]) -> tuple[Setting, ...]:
        return tuple(Setting(p, q, warps, segments=n) for p, q, warps, n in found)

    return {
        "flat": {"aligned": once(FLAT), "rows": (*once(FLAT_ROWS), Setting(1, 2048, 4, vectors=True))},
        "rows": {"aligned": once(ROWS), "rows": once(ROWS_UNALIGNED)},
        "inner": {
            "aligned": (*loops(INNER_LOOPS), *once(INNER), *segments(SEGMENTS)),
            "rows": (*loops(INNER_UNALIGNED_LOOPS), *once(INNER_UNALIGNED), *segments(SEGMENTS_UNALIGNED)),
        },
        "walk": {"aligned": once(WALK), "rows": once(WALK_UNALIGNED)},
        "parts": {"aligned": SETTINGS["parts"]["aligned"], "rows": SETTINGS["parts"]["rows"]},
        "full": {"aligned": SETTINGS["full"]["aligned"], "rows": SETTINGS["full"]["rows"]},
        "outer": {"aligned": loops(OUTER), "rows": loops(OUTER_UNALIGNED)},
    }


def row_candidates() -> dict[str, dict[str, Any]]:
    """What ships for long rows, those at odd addresses and walks, and up to four more for each class of sizes."""
    from tk.codegen.scheduling.settings import SETTINGS, Setting

    def without_short(found: Sequence[Setting]) -> list[Setting]:
        return [s for s in found if s.looped or s.row >= 2048]

    tried = dict(vectors=True, ahead=True)
    walk = (
        Setting(1, 2048, 4), Setting(1, 2048, 4, ahead=True), Setting(2, 2048, 8, stages=2),
        Setting(1, 4096, 8), Setting(1, 4096, 8, stages=3), Setting(1, 4096, 16, stages=3),
        Setting(2, 4096, 16, stages=2), Setting(1, 4096, 8, ahead=True, registers=128), Setting(1, 8192, 8),
        Setting(1, 8192, 16, stages=2), Setting(1, 2048, 8, segments=3, ahead=True, rereads=True),
        Setting(1, 4096, 16, segments=3, rereads=True),
    )  # fmt: skip
    walk_rows = (
        Setting(1, 2048, 8, **tried), Setting(1, 4096, 8), Setting(1, 4096, 16, **tried), Setting(1, 4096, 8, **tried),
        Setting(1, 2048, 8, segments=3, rereads=True, **tried),
    )  # fmt: skip
    rows = (
        Setting(8, 256, 4, vectors=True), Setting(1, 256, 1, vectors=True), Setting(1, 1024, 4, vectors=True),
        *(Setting(*block, segments=3, vectors=True) for block in ((1, 256, 1), (8, 256, 4))),
        Setting(1, 1024, 4, segments=3), Setting(1, 2048, 8, segments=5, vectors=True),
    )  # fmt: skip
    inner = (Setting(1, 2048, 8, segments=5), Setting(1, 4096, 16, segments=2), Setting(1, 8192, 32, segments=4))
    new = {"walk": {"aligned": walk, "rows": walk_rows}, "inner": {"aligned": inner, "rows": rows}}
    found: dict[str, dict[str, Any]] = {kind: dict(of) for kind, of in SETTINGS.items()}
    for kind, of in new.items():
        for layout, more in of.items():
            shipped = SETTINGS[kind][layout]
            shipped = without_short(shipped) if (kind, layout) == ("inner", "aligned") else shipped
            found[kind][layout] = tuple(dict.fromkeys((*shipped, *more)))
    return found


def scan_candidates() -> dict[str, dict[str, Any]]:
    """The same for scans and sorts."""
    from tk.codegen.scheduling.settings import SETTINGS, Setting

    found = [Setting(*b, True) for b in SCAN_LOOPS] + [Setting(*b) for b in SCANS]
    found += [Setting(*b, spread=True) for b in SCAN_SPREAD]
    shipped = SETTINGS["scan"]["rows"]
    realigned = tuple(replace(s, realigned=True) for s in found if s.p == 1)
    narrow = tuple(Setting(*b, True) for b in ((32, 16, 4), (64, 16, 4), (16, 64, 4), (32, 64, 8), (4, 64, 1)))
    return {
        **SETTINGS,
        "scan": {"aligned": tuple(found), "rows": (*(s for s in shipped if not s.realigned), *realigned)},
        "sort": {"aligned": (Setting(16, 64, 4),), "rows": tuple(Setting(*b) for b in SORTS)},
        "narrow": {"aligned": narrow, "rows": narrow},
    }


# --- Where it is tried ---

Shape = tuple[int, int]

LONG: Sequence[Shape] = ((32768, 4096), (131072, 1024), (4096, 32768), (16, 8192), (71224, 2593), (512, 262144),
                         (8192, 16384), (524288, 256), (256, 4096))  # fmt: skip
MORE: Sequence[Shape] = ((65536, 2048), (16384, 8192), (2048, 1024), (20000, 6912), (10007, 12289), (1024, 131072),
                         (262147, 257), (132, 16384), (8, 262144), (1048576, 64), (30011, 4097), (40000, 3200),
                         (1, 65536), (262144, 512), (2048, 65536), (64, 1024))  # fmt: skip
FLAT_SHAPES: Sequence[Shape] = ((32768, 4096), (4096, 4096), (1024, 1024), (12345, 4097), (8192, 14336), (128, 1024),
                                (2048, 2048), (100003, 771))  # fmt: skip
COLUMNS: Sequence[Shape] = ((32768, 4096), (131072, 1024), (4096, 32768), (2048, 4096), (71224, 2593), (1048576, 64),
                            (512, 1024), (16384, 2048), (100003, 768), (8192, 16384), (1048576, 16),
                            (64, 65536))  # fmt: skip
ROWS_BEHIND: Sequence[tuple[str, Shape]] = (
    ("layer_norm_backward", (32768, 4096)), ("rms_norm_backward", (32768, 4096)), ("row_var_mean", (400000, 601)),
    ("softmax", (480000, 237)), ("softmax_backward", (10000, 10112)), ("layer_norm_backward", (20000, 10240)),
    ("layer_norm_backward", (60000, 2947)), ("softmax_backward", (20000, 8999)), ("rms_norm_backward", (36000, 6272)),
    ("rms_norm_backward", (14000, 4101)), ("layer_norm_backward", (14000, 12001)), ("rms_norm", (14000, 10624)),
    ("layer_norm_backward", (14000, 7601)), ("softmax_backward", (21000, 4480)), ("row_sum", (24000, 9009)),
    ("row_var_mean", (12000, 8801)), ("layer_norm", (7000, 8633)), ("rms_norm_backward", (14000, 12032)),
    ("layer_norm_backward", (65536, 2048)), ("rms_norm_backward", (12000, 12101)), ("softmax", (70000, 1501)),
    ("rms_norm_backward", (13000, 3501)), ("softmax", (200000, 493)), ("layer_norm", (70000, 2593)),
    ("layer_norm_backward", (100000, 1499)), ("row_sum", (30000, 5001)), ("rms_norm", (4096, 32768)),
    ("softmax", (1000000, 101)), ("layer_norm_backward", (16384, 8192)), ("softmax_backward", (30000, 6501)),
    ("layer_norm", (150000, 999)), ("rms_norm", (20000, 5504)), ("softmax_backward", (8192, 12544)),
    ("row_sum", (400000, 333)),
)  # fmt: skip
INNER_OPS = ("softmax", "layer_norm", "rms_norm", "row_argmax", "row_sum", "softmax_backward", "add_rms_norm",
             "row_var_mean", "quantize_fp8_rows", "cross_entropy_rows")  # fmt: skip
FLAT_OPS = ("gelu", "swiglu", "bias_silu")
COLUMN_OPS = ("column_sum", "layer_norm_backward", "rms_norm_backward")
LEAST, MOST = 1 << 16, 1 << 27  # elements


def tasks() -> Iterator[tuple[str, Shape]]:
    """The first shapes of all ops, then the rest."""
    for shapes, columns, flat in ((LONG, COLUMNS[:6], FLAT_SHAPES[:4]), (MORE, COLUMNS[6:], FLAT_SHAPES[4:])):
        for shape in flat:
            yield from ((op, shape) for op in FLAT_OPS)
        for shape in columns:
            yield from ((op, shape) for op in COLUMN_OPS)
        for shape in shapes:
            yield from ((op, shape) for op in INNER_OPS)


SCAN_SHAPES: Sequence[Shape] = (
    (32768, 4096), (14742, 2203), (9671, 12083), (13653, 9728), (33977, 3328), (10540, 4301), (30392, 6833),
    (4448, 7808), (41670, 1009), (32, 1 << 22), (33, (1 << 22) - 1), (4096, 32768),
)  # fmt: skip
SORT_SHAPES: Sequence[Shape] = (
    (16264, 8832), (47936, 2195), (32768, 4096), (7134, 5504), (20000, 2048), (10028, 11008), (40000, 1000),
    (3732, 9161),
)  # fmt: skip


def scan_tasks() -> Iterator[tuple[str, Shape]]:
    """Turn about, so that all have something where time is short."""
    for i in range(max(len(SCAN_SHAPES), len(SORT_SHAPES))):
        yield from ((op, shape) for shape in SCAN_SHAPES[i : i + 1] for op in ("cumsum", "cumsum_backward"))
        yield from ((op, shape) for shape in SORT_SHAPES[i : i + 1] for op in ("sort", "sort_fp32", "topk"))
        yield from (("cummax", shape) for shape in SCAN_SHAPES[i : i + 1])


@dataclass(frozen=True)
class Trial:
    """Which settings of which ops are tried where."""

    ops: Path
    candidates: Callable[[], dict[str, dict[str, Any]]]
    tasks: Callable[[], Iterable[tuple[str, Shape]]]

    def table(self) -> dict[str, dict[str, Any]]:
        from tk.codegen.scheduling.settings import SETTINGS

        return {kind: {"strided": SETTINGS[kind]["strided"][:1], **of} for kind, of in self.candidates().items()}

    def has(self, op: str) -> bool:
        """A backward is found by its op."""
        return op.removeprefix("try_") in {name.removesuffix("_backward") for name, _ in self.tasks()}


TRIALS = {
    "all": Trial(OPS, candidates, tasks),
    "rows": Trial(OPS, row_candidates, lambda: ROWS_BEHIND),
    "scans": Trial(SCAN_OPS, scan_candidates, scan_tasks),
}


def build(out: Path, jobs: int | None, trial: Trial) -> None:
    """Every setting compiled; what spills is left out."""
    from tk.aot.cache import open_cache
    from tk.aot.compile import Target
    from tk.aot.pool import default_jobs
    from tk.build.packs import build as build_packs
    from tk.build.packs import plan_pack
    from tk.build.sources import file_families
    from tk.codegen.scheduling.settings import replaced

    with replaced(trial.table()):
        planned = plan_pack([f for f in file_families([trial.ops]) if trial.has(f.op.name)], Target(90), out)
        out.parent.mkdir(parents=True, exist_ok=True)
        with open_cache(print) as cache:
            build_packs([planned], cache, jobs or default_jobs())


# --- Timing ---

HOPELESS = 4.0

# ATen adds up bf16 in bf16, which rounds more than an error would show.
REFERENCES: dict[str, Callable[..., torch.Tensor]] = {
    "cumsum": lambda x: x.float().cumsum(-1),
    "cumsum_backward": lambda grad: grad.float().flip(-1).cumsum(-1).flip(-1),
}


def time_task(name: str, shape: Shape) -> dict[str, Any]:
    """Every config that fits. Each result is held against ATen's own kernels for the same graph."""
    from tk import capi, timing
    from tk.generated import inputs, interpret, register
    from tk.generated.problem import Call
    from tk.heuristics.problem import describe
    from tk.tune.ops import call

    op = register.find(f"try_{name}")
    assert op is not None, name
    example = inputs.of_shape(op, shape, "fp32" if name.endswith("_fp32") else "bf16")
    args = example.arguments("cuda")
    described = describe(call, example, args)
    assert described is not None
    problem = described.problem
    copies = timing.copies_to_rotate(inputs.bytes_moved(args, ()), most=16)
    sets = [args, *([x.clone() if torch.is_tensor(x) else x for x in args] for _ in range(copies - 1))]
    expected = (REFERENCES[name](*args),) if name in REFERENCES else interpret.aten(Call(op, [*args, -1, 0]))
    compared = 1 if name == "topk" else len(expected)  # ATen's order of equal ones is any
    fitting = {c.config_name: c for c in capi.candidates(problem)
               if c.fits and capi.choose(problem, c.config).variant == c.variant}  # fmt: skip
    captures: dict[str, Any] = {}
    found: dict[str, Any] = {}
    failures: dict[str, str] = {}
    best = float("inf")
    for config, row in sorted(fitting.items(), key=lambda item: item[1].cost):
        try:
            if problem_of := wrong(inputs.listed(call(example, args, row.config))[:compared], expected[:compared]):
                raise RuntimeError(problem_of)
            captured = timing.capture([partial(call, example, a, row.config) for a in sets], at_least_us=250)
        except (RuntimeError, ValueError) as error:
            failures[config] = str(error)[:200]
            continue
        us = captured.us / captured.calls
        best = min(best, us)
        if us <= HOPELESS * best:
            captures[config] = captured
        else:
            found[config] = [round(us, 2), round(row.cost * 1e-6, 2)]
    for config, t in timing.device_times(captures, rounds=3, ms=1.5, warm_ms=1.0).items():
        found[config] = [round(t.us, 2), round(fitting[config].cost * 1e-6, 2)]
    moved = inputs.bytes_moved(args, inputs.listed(call(example, args)))
    return {
        "op": name, "shape": list(shape), "bytes": moved, "chosen": capi.choose(problem).config_name,
        "kernels": sorted({c.kernel_name for c in fitting.values()}),
        "configs": dict(sorted(found.items(), key=lambda item: item[1][0])), "failures": failures,
    }  # fmt: skip


def wrong(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> str:
    """What is wrong with a result, if anything is: this far off nothing is by rounding alone."""
    for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        other = other.reshape(mine.shape)
        if not mine.is_floating_point():
            if not torch.equal(mine, other):
                return f"result {i} differs"
            continue
        step = 0.08 if mine.itemsize == 1 else 0.03
        mine, other = mine.float(), other.float()
        away, largest = (mine - other).abs().max().item(), other.abs().max().item()
        if not away <= step * largest + 1e-3:
            return f"result {i} is {away:.3g} off, of {largest:.3g}"
    return ""


def measure(pack: Path, out: Path, seconds: float, only: str | None, trial: Trial) -> None:
    import tk
    from tk import timing
    from tk.tune.record import driver_version

    tk.load_pack(pack)
    torch.manual_seed(0)
    start = time.monotonic()
    copy = timing.copy_bandwidth()
    results, errors = [], {}
    for name, shape in trial.tasks():
        if only and only not in name:
            continue
        if time.monotonic() - start > seconds:
            errors[f"{name} {shape}"] = "out of time"
            continue
        try:
            results.append(time_task(name, shape))
        except Exception as error:  # one op that fails is no reason to lose the others' timings
            errors[f"{name} {shape}"] = f"{type(error).__name__}: {error}"[:300]
            print(f"FAILED {name} {shape}: {errors[f'{name} {shape}']}", flush=True)
            continue
        finally:
            torch.cuda.empty_cache()
        r = results[-1]
        best = list(r["configs"].items())[:3]
        share = r["bytes"] / best[0][1][0] * 1e-3 / copy if best else 0
        print(f"{name:20} {shape[0]:>8}x{shape[1]:<7} {share:5.2f} of copy, chosen {r['chosen']} "
              f"{r['configs'].get(r['chosen'], ['?'])[0]}; " + "  ".join(f"{c} {t[0]}" for c, t in best)
              + (f"  FAILED {r['failures']}" if r["failures"] else ""), flush=True)  # fmt: skip
        out.write_text(json.dumps({
            "gpu": torch.cuda.get_device_name(), "driver": driver_version(), "torch": torch.__version__,
            "copy_gbps": round(copy), "problems": results, "errors": errors,
        }))  # fmt: skip
    print(f"{len(results)} problems in {time.monotonic() - start:.0f} s")


# --- Judging ---


def judge(path: Path, trial: Trial) -> None:
    """The table's settings and the predicted times, by what was measured: what choosing costs, and what is missing."""
    from tk.aot.files import import_file
    from tk.codegen.family import Generated, generate
    from tk.generated.declare import Declared

    ops: dict[str, Generated] = {}
    for declared in vars(import_file(trial.ops)).values():
        if isinstance(declared, Declared):
            op: Generated | None = generate(declared.fn, declared.signature, declared.name, declared.grad)
            while op is not None:
                ops[op.name.removeprefix("try_")] = op
                op = op.backward
    chosen: dict[str, list[float]] = {}
    table: dict[str, list[float]] = {}
    for r in json.loads(path.read_text())["problems"]:
        measured = {name: us for name, (us, _) in r["configs"].items()}
        predicted = predict(ops[r["op"]], r["shape"])
        both = predicted.keys() & measured.keys()
        if not both:
            print(f"{r['op']} {r['shape']}: none of {', '.join(predicted)} was measured")
            continue
        choice = min(both, key=lambda name: predicted[name])
        best, best_of_all = (min(of, key=lambda name: measured[name]) for of in (both, measured))
        chosen.setdefault(r["op"], []).append(measured[choice] / measured[best])
        table.setdefault(r["op"], []).append(measured[best] / measured[best_of_all])
        if measured[choice] > 1.05 * measured[best_of_all]:
            print(f"{r['op']:20} {r['shape'][0]:>8}x{r['shape'][1]:<7} "
                  + ", ".join(f"{what} {c} {measured[c]:.1f} (predicted {predicted.get(c, 0):.1f})" for what, c in
                              (("chosen", choice), ("best", best), ("of all", best_of_all))))  # fmt: skip
    for name in chosen:
        print(f"{name:20} {len(chosen[name]):3} problems: the choice costs {_mean(chosen[name])} (worst "
              f"{max(chosen[name]):.2f}), the table {_mean(table[name])} (worst {max(table[name]):.2f})")  # fmt: skip
    everything = [[x for ratios in of.values() for x in ratios] for of in (chosen, table)]
    print(f"all: the choice costs {_mean(everything[0])}, the table {_mean(everything[1])}")


def _mean(ratios: Sequence[float]) -> str:
    return f"{100 * (math.exp(sum(map(math.log, ratios)) / len(ratios)) - 1):.1f} %"


def predict(op: Any, shape: Sequence[int]) -> dict[str, float]:
    """What an H200 is predicted to take, in µs, for every config that fits a call on dense tensors."""
    from tk.aot.expr import Problem, TensorValue, as_expr, evaluate_locals
    from tk.codegen.tile import LAYOUTS
    from tk.generated.inputs import COUNTS
    from tk.generated.signature import TensorSpec

    sizes = dict(zip("MN", shape, strict=True))
    inputs = [s for s in op.signature.params.values() if isinstance(s, TensorSpec)]
    shapes = [_canonical(tuple(sizes[n] for n in s.sizes), shape if s.leading else None) for s in inputs]
    numbers = dict(bf16=15, fp32=6, i64=4)
    dtypes = [numbers[op.first.dtypes.get(s.dtype, s.dtype)] for s in inputs]
    device = {"sm_count": 132, "arch": 90, "shared_optin": 232_448, "l2_bytes": 50 << 20}
    ints = tuple(COUNTS.get(name, 0) for name in op.op.ints)
    values = [TensorValue(*shape, dtype, 256) for shape, dtype in zip(shapes, dtypes, strict=True)]
    problem = Problem([*values, *([None] * len(op.op.outputs))], ints, 0, device)
    problem = replace(problem, locals=evaluate_locals(op.op.locals.values(), problem))
    for o in op.op.outputs:
        own = tuple(as_expr(x).evaluate(problem) for x in o.sizes)
        values.append(TensorValue(*_canonical(own, shape if o.leading is not None else None), 15, 256))
    problem = replace(problem, tensors=values)
    problem = replace(problem, locals=evaluate_locals(op.op.locals.values(), problem))
    found: dict[str, float] = {}
    for layout in LAYOUTS:
        for config, setting, way in op.ways():
            plan = op.plan(op.graphs[0], layout, setting, way)
            if plan and config.name not in found and all(c.holds.evaluate(problem) for c in plan.constraints):
                found[config.name] = plan.cost.evaluate(problem) * 1e-6
    return found


def _canonical(own: tuple[int, ...], whole: Sequence[int] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(sizes, strides) as the core sees them. whole: the shape of a tensor with leading dimensions."""
    front = () if whole is None else (1, 1, math.prod(whole[: len(whole) - len(own)]))
    sizes = (*front, *own)
    strides = [math.prod(sizes[d + 1 :]) for d in range(len(sizes))]
    return sizes, tuple(0 if n == 1 else s for n, s in zip(sizes, strides, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("build")
    one.add_argument("-o", "--out", type=Path, required=True)
    one.add_argument("-j", "--jobs", type=int)
    two = commands.add_parser("time")
    two.add_argument("pack", type=Path)
    two.add_argument("--out", type=Path, required=True)
    two.add_argument("--seconds", type=float, default=250)
    two.add_argument("--only", help="ops whose name has this in it")
    three = commands.add_parser("judge")
    three.add_argument("timings", type=Path)
    for command in (one, two, three):
        trials = command.add_mutually_exclusive_group()
        trials.add_argument("--rows", dest="trial", action="store_const", const="rows", default="all",
                            help="rows that are long or at odd addresses, and walks, alone")  # fmt: skip
        trials.add_argument("--scans", dest="trial", action="store_const", const="scans", default="all",
                            help="scans, sorts and topk")  # fmt: skip
    args = parser.parse_args()
    trial = TRIALS[args.trial]
    if args.command == "build":
        build(args.out, args.jobs, trial)
    elif args.command == "judge":
        judge(args.timings, trial)
    else:
        measure(args.pack, args.out, args.seconds, args.only, trial)
    return 0


if __name__ == "__main__":
    sys.exit(main())
