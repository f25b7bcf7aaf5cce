"""``tk bench softmax 32768x4096``: generated ops on this machine's GPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TypeVar

import torch
from torch.utils._pytree import tree_leaves

from tk import _cache, errors, timing
from tk._table import table
from tk.cli._judge import host_us
from tk.cli._shown import Usage, dtype_name, parse
from tk.generated import inputs, register
from tk.generated.inputs import Example
from tk.tune.ops import OpTimes, call, measure

T = TypeVar("T")

SHAPES = ((32768, 4096),)
HEADER = (
    *("op", "shape", "dtype", "config", "ms", "GB", "GB/s", "of copy", "TFLOP/s", "torch ms", "speedup", "verdict"),
)


CPU_HEADER = ("op", "tensors", "dtype", "us")
NO_GPU = "tk bench measures on a CUDA GPU, and torch sees none; --device cpu times the reference"


def is_meant(arguments: Sequence[str]) -> bool:
    """Whether these arguments of ``tk bench`` name generated ops."""
    return bool(arguments) and (arguments[0] == "all" or register.find(arguments[0]) is not None)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="tk bench", description=__doc__)
    add = found.add_argument
    add(
        "what",
        nargs="+",
        metavar="OP|SHAPE",
        help="ops, or all; shapes of their largest tensor, as 32768x4096; of lists how many tensors, and their shape",
    )
    add("--dtype", type=dtype_name, default="bf16", help="of every variable of the signature (bf16)")
    add("--configs", action="store_true", help="time every config that fits, too")
    add("--write", type=Path, metavar="FILE", help="the timings as JSON; those of other calls in it are kept")
    add("--device", default="cuda", choices=("cuda", "cpu"), help="cpu times the reference, the recorded graph")
    add("--plot", type=Path, metavar="FILE", help="GB/s beside the copy ceiling, as SVG")
    return found


def run(arguments: Sequence[str]) -> int:
    """The exit status: 1 when a call failed or was wrong."""
    args = parse(parser(), arguments)
    wanted = _wanted(args)
    for name in ("write", "plot"):
        path = getattr(args, name)
        if path is not None and not path.absolute().parent.is_dir():
            raise Usage(f"--{name} {path}: there is no folder {path.parent}; make it first: mkdir -p {path.parent}")
    if args.device == "cpu":
        if args.configs or args.write or args.plot:
            raise Usage("--configs, --write and --plot are of kernels, which --device cpu does not run")
        return _on_cpu(wanted)
    if not torch.cuda.is_available():
        raise errors.UnsupportedError(NO_GPU)
    torch.manual_seed(0)
    copy = timing.copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: a copy moves {copy:.0f} GB/s")
    found, failed = _each(wanted, _timed(args.configs))
    print(report(found, copy))
    if args.write:
        write(args.write, found, copy)
    if args.plot:
        args.plot.write_text(draw(found, copy))
    return int(failed > 0 or any(t.failures or not t.is_right for t in found))


def _wanted(args: argparse.Namespace) -> list[Example]:
    """Raises Usage where the arguments name no op, or no shape of one."""
    if named := [text for text in args.what if "=" in text]:
        raise Usage(f"{named[0]}: only shapes are given to an op; write tk bench {args.what[0]} 32768x4096")
    try:
        return list(examples(args.what, args.dtype))
    except ValueError as error:
        raise Usage(str(error)) from None


def _each(wanted: Sequence[Example], measured: Callable[[Example], T]) -> tuple[list[T], int]:
    """What was measured of each example, and how many failed, which is printed: they cost no other."""
    found, failed = [], 0
    for example in wanted:
        try:
            found.append(measured(example))
        except (RuntimeError, ValueError) as error:
            failed += 1
            print(f"FAILED {example}: {type(error).__name__}: {error}", flush=True)
    return found, failed


def _timed(configs: bool) -> Callable[[Example], OpTimes]:
    def timed(example: Example) -> OpTimes:
        times = measure(example, configs)
        for config, error in times.failures.items():
            print(f"FAILED {example} {config}: {error}", flush=True)
        torch.cuda.empty_cache()
        return times

    return timed


def _on_cpu(wanted: Sequence[Example]) -> int:
    """Prints the table of the reference. The exit status: 1 when an op did not take its shape."""
    torch.manual_seed(0)
    rows, failed = _each(wanted, _cpu_row)
    if rows:
        print(table(CPU_HEADER, rows))
    return int(failed > 0)


def _cpu_row(example: Example) -> tuple[object, ...]:
    arguments = example.arguments("cpu")
    tensors = [x for x in tree_leaves(arguments) if isinstance(x, torch.Tensor)]
    sizes = " ".join("x".join(map(str, x.shape)) or "0-d" for x in tensors[:4])
    with torch.no_grad():
        return example.op.name, sizes, ",".join(example.dtypes.values()), host_us(lambda: call(example, arguments))


def examples(what: Sequence[str], dtype: str) -> Iterator[Example]:
    """Every op at every shape; a bool is false. Of ``all``, those that have the shape and dtype. Raises ValueError."""
    return inputs.asked_for(what, (dtype,), SHAPES)


def report(found: Sequence[OpTimes], copy: float) -> str:
    """The table; and below it, where all configs were timed, the best of each call."""
    lines = [table(HEADER, [cells(t, copy) for t in found])]
    for t in found:
        if t.configs:
            best = "  ".join(f"{c.config} {c.us:.1f} us (predicted {c.predicted_us:.1f})" for c in t.configs[:4])
            lines.append(f"{t.example}: chosen {t.config}; {best}")
    return "\n".join(lines)


def cells(t: OpTimes, copy: float) -> tuple[object, ...]:
    spec = next(name for name, s in t.example.signature.tensors.items() if s is inputs.widest(t.example.signature))
    places = (t.example.places,) if t.example.op.takes_lists else ()
    shape = "x".join(map(str, (*places, *t.example.shape(spec))))
    dtype = ",".join(t.example.dtypes.values())
    return (t.example.op.name, shape, dtype, t.config, f"{t.us * 1e-3:.4f}", f"{t.bytes * 1e-9:.3f}", f"{t.gbps:.0f}",
            f"{100 * t.gbps / copy:.0f} %", f"{t.tflops:.3g}", f"{t.torch_us * 1e-3:.4f}", t.torch_us / t.us,
            "ok" if t.is_right else "WRONG")  # fmt: skip


def write(path: Path, found: Sequence[OpTimes], copy: float) -> None:
    from tk.tune.record import driver_version

    old = json.loads(path.read_text())["timings"] if path.is_file() else []
    new = [t.to_json() for t in found]
    seen = [_call_of(t) for t in new]
    kept = [t for t in old if _call_of(t) not in seen]
    about = {"gpu": torch.cuda.get_device_name(), "driver": driver_version(), "torch": torch.__version__}
    _cache.write_json(path, {**about, "copy_gbps": round(copy), "timings": [*kept, *new]})


def _call_of(entry: dict[str, object]) -> tuple[object, ...]:
    return tuple(entry[key] for key in ("op", "shapes", "dtypes", "flags"))


# --- The plot ---

LEFT, BAR, STEP, SCALE = 300, 9, 30, 480  # pixels; SCALE is as long as the ceiling
STYLE = """
  text { font: 12px -apple-system, "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif; fill: #1f2328; }
  .ground { fill: #ffffff; }
  .ours { fill: #0b62c4; }
  .theirs { fill: #59636e; }
  line { stroke: #59636e; }
"""


def draw(found: Sequence[OpTimes], copy: float) -> str:
    """GB/s of every call, a bar for tk and one for torch, against the ceiling. The same timings give the same bytes."""
    height = 60 + STEP * len(found)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + SCALE + 120}" height="{height}" role="img">',
        f"<title>GB/s of generated ops; a copy moves {copy:.0f}</title>",
        f"<style>{STYLE}</style>",
        '<rect class="ground" width="100%" height="100%"/>',
        f'<text x="{LEFT}" y="22">GB/s: tk (blue), torch op by op (grey); the line is a copy, {copy:.0f}</text>',
        f'<line x1="{LEFT + SCALE}" y1="34" x2="{LEFT + SCALE}" y2="{height - 16}"/>',
    ]
    for i, t in enumerate(found):
        y = 44 + STEP * i
        name, shape, dtype = cells(t, copy)[:3]
        lines.append(f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(f"{name} {shape} {dtype}")}</text>')
        for kind, us, at in (("ours", t.us, y), ("theirs", t.torch_us, y + BAR + 1)):
            width = SCALE * t.bytes / us * 1e-3 / copy
            lines.append(f'<rect class="{kind}" x="{LEFT}" y="{at}" width="{width:.1f}" height="{BAR}"/>')
        lines.append(f'<text x="{LEFT + SCALE + 8}" y="{y + 13}">{t.gbps:.0f}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"
