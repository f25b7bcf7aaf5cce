"""docs/supported.md: by function which dtypes, gradients and transforms there are; what is refused, and why.

Found by calling: on the CPU with small tensors, for CUDA with tensors that are not there. What kernels written by hand
take is read off their records in kernels/. So it comes out the same on every machine, from the sample of the kernels as
from all.

    python tools/supported.py [--check]    # writes it; needs tk with its library and Triton, and no GPU
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

import tk
from tk import capi, errors, functional
from tk._library import ops as ops_library
from tk.cli import _calls
from tk.cli._calls import Call
from tk.generated.signature import DTYPES
from tk.heuristics.problem import describe

DOCUMENT = Path(__file__).parents[1] / "docs" / "supported.md"
COLUMNS: Mapping[str, torch.dtype] = {
    name: DTYPES[name]
    for name in ("bf16", "fp16", "fp32", "fp64", "i64", "i32", "i16", "i8", "u8", "bool", "fp8e4m3fn", "fp8e5m2")
} | {"complex64": torch.complex64}
TORCH = torch.__version__.partition("+")[0]
REFUSALS = (errors.Error, RuntimeError, ValueError, TypeError, IndexError)  # NotImplementedError is a RuntimeError


@contextmanager
def quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@cache
def calls() -> Mapping[str, Call]:
    """The first right call of each function, in float32 where it takes that."""
    with quietly():
        found = {call.name: call for call in reversed(_calls.calls())}
    return dict(sorted(found.items()))


# --- Dtypes ---


def name_of(error: Exception) -> str:
    typed = errors.typed(error)
    return f"tk.{type(typed).__name__}" if isinstance(typed, errors.Error) else type(typed).__name__


def subject(call: Call) -> torch.dtype | None:
    """The dtype in question: that of the first tensor with a floating-point one, else of the first tensor."""
    dtypes = [x.dtype for x in tree_flatten((call.args, call.kwargs))[0] if isinstance(x, Tensor)]
    return next((d for d in dtypes if d.is_floating_point), dtypes[0] if dtypes else None)


def in_dtype(call: Call, dtype: torch.dtype) -> Call:
    """The call with that dtype in the place of its own; scalars, such as the steps of an optimizer, keep theirs."""
    own = subject(call)
    if own is None:
        return replace(call, kwargs={**call.kwargs, "dtype": dtype})
    if call.name.startswith("scaled_") and dtype == torch.float8_e5m2:  # of which one operand alone may be
        return replace(call, args=(call.args[0].to(dtype), *call.args[1:]))
    args, kwargs = tree_map_only(
        Tensor, lambda x: x.to(dtype) if x.dtype == own and x.dim() else x.clone(), (call.args, call.kwargs)
    )
    return replace(call, args=args, kwargs=kwargs)


def on_cpu(call: Call) -> str:
    """The error, or "" where it runs."""
    try:
        with quietly(), torch.no_grad():
            call.function(*call.args, **call.kwargs)
    except REFUSALS as error:
        return name_of(error)
    return ""


def on_cuda(call: Call) -> str:
    """What serves a function with torch's arguments, which decides by itself: "tk", "ATen", or the error."""
    for is_strict, way in ((True, "tk"), (False, "ATen")):
        with quietly(), tk.config.strict(is_strict):
            found = _elsewhere(call, "cuda")
            if _NO_CUDA in found:
                found = _elsewhere(call, "meta")
        if not found:
            return way
    return found


_NO_CUDA = "not linked with support for cuda"  # says a torch for the CPU, of slices of tensors that only pretend


def _elsewhere(call: Call, device: str) -> str:
    """The error of a call with tensors that are not there, or ""."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def there(x: Tensor) -> Tensor:
            return mode.fake_tensor_converter.from_meta_and_device(mode, x.to("meta"), torch.device(device))

        args, kwargs = tree_map_only(Tensor, there, (call.args, call.kwargs))
        seed = torch.empty((), dtype=torch.int64, device=device)
        kwargs |= {name: x for name, x in {"device": device, "seed": seed}.items() if name in kwargs}
        try:
            call.function(*args, **kwargs)
        except REFUSALS as error:
            return _NO_CUDA if _NO_CUDA in str(error) else name_of(error)
    return ""


# Bytes are float8 of either format to the kernels that read them so.
_BY_RECORDS = {"fp8e4nv": ("fp8e4m3fn",), "fp8e5": ("fp8e5m2",), "u8": ("fp8e4m3fn", "fp8e5m2")}


@cache
def kernel_dtypes() -> Mapping[str, frozenset[str]]:
    """The dtypes of the kernels written by hand, by the op."""
    found: dict[str, frozenset[str]] = {}
    root = Path(__file__).parents[1]
    for path in root.glob("kernels/**/family.py"):
        if path.parent.name == "attention":  # whose pairs are read below
            continue
        module = importlib.import_module(".".join(("tk", *path.relative_to(root).with_suffix("").parts)))
        for family in getattr(module, "FAMILIES", None) or [module.FAMILY]:
            axes = [kernel.axes for kernel in family.kernels]
            dtypes = {str(d) for a in axes for d in (*a.get("dtype", ()), *a.get("b_dtype", ()))}
            found[family.op.name] = frozenset(name for d in dtypes for name in _BY_RECORDS.get(d, (d,)))
    pairs = importlib.import_module("tk.kernels.attention.pairs")
    plain = next(wanted for score, mask, wanted in pairs.chosen() if score is None and mask is None)
    return found | dict.fromkeys(("sdpa", "flex_attention", "varlen_attn"), frozenset(plain.dtypes))


@cache
def _h100() -> int:
    return capi.describe_device(132, 90, 232448, 50 << 20)


def op_of(call: Call) -> str | None:
    """The op that it would call on a GPU; None for what is made of ATen's."""
    if call.name in kernel_dtypes():
        return call.name
    ops_library().tk_ops_capture_device(_h100())
    try:
        described = describe(call.function, *call.args, **call.kwargs)
    finally:
        ops_library().tk_ops_capture_device(-1)
    return described.problem.op if described else None


def taken(call: Call, column: str) -> tuple[str, str]:
    """What takes a call: on CUDA "tk" (a kernel), "ATen" or the error; on the CPU the error, or "" where it runs."""
    changed = in_dtype(call, COLUMNS[column])
    cpu = on_cpu(changed)
    if call.name in functional.FUNCTIONS:
        return on_cuda(changed), cpu
    op = op_of(call)
    if op is None:  # made of ATen's ops, wherever the tensors are
        return cpu or "ATen", cpu
    return "tk" if column in kernel_dtypes()[op] else "tk.UnsupportedError", cpu


def mark(call: Call, column: str) -> str:
    """A cell."""
    cuda, cpu = taken(call, column)
    if cuda in ("tk", "ATen"):
        return {"tk": "**tk**", "ATen": "ATen"}[cuda] + (f" (CPU: {MARKS[cpu]})" if cpu else "")
    return MARKS[cuda] if cuda == cpu else f"{MARKS[cuda]} {MARKS[cpu] if cpu else 'CPU'}"


MARKS = {
    "tk.UnsupportedError": "U",
    "NotImplementedError": "N",
    "RuntimeError": "R",
    "ValueError": "V",
    "TypeError": "T",
}


def dtype_table() -> str:
    return table(
        ("function", *COLUMNS),
        ((f"`{name}`", *(mark(call, column) for column in COLUMNS)) for name, call in calls().items()),
    )


# --- Gradients and transforms ---


def leaves_of(call: Call) -> tuple[list[Tensor], Callable[..., list[Tensor]]]:
    """The tensors that a gradient may be of, and the function of them to its floating-point results."""
    own = subject(call)
    flat, structure = tree_flatten((call.args, call.kwargs))
    places = [i for i, x in enumerate(flat) if isinstance(x, Tensor) and x.dtype == own and x.is_floating_point()]
    places = places[:1] if call.name == "rope" else places  # the tables carry none

    def function(*leaves: Tensor) -> list[Tensor]:
        given = [x.clone() if isinstance(x, Tensor) else x for x in flat]
        for place, leaf in zip(places, leaves, strict=True):
            given[place] = leaf
        args, kwargs = tree_unflatten(given, structure)
        results = tree_flatten(call.function(*args, **kwargs))[0]
        return [x for x in results if isinstance(x, Tensor) and x.is_floating_point()]

    return [flat[i].clone() for i in places], function


def _first(leaves: list[Tensor], function: Callable[..., list[Tensor]]) -> str:
    found = [x for x in function(*(x.requires_grad_() for x in leaves)) if x.requires_grad]
    if not found:
        return "none"
    torch.autograd.grad([x.sum() for x in found], leaves, allow_unused=True)
    return "yes"


def _second(leaves: list[Tensor], function: Callable[..., list[Tensor]]) -> str:
    leaves = [x.requires_grad_() for x in leaves]
    loss = sum((x.float() ** 2).sum() for x in function(*leaves))
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        return "none"
    firsts = [g for g in torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True) if g is not None]
    torch.autograd.grad([(g**2).sum() for g in firsts], leaves, allow_unused=True)
    return "yes"


def _forward_mode(leaves: list[Tensor], function: Callable[..., list[Tensor]]) -> str:
    if not function(*leaves):
        return "none"
    torch.func.jvp(lambda *xs: tuple(function(*xs)), tuple(leaves), tuple(torch.ones_like(x) for x in leaves))
    return "yes"


def _batched(leaves: list[Tensor], function: Callable[..., list[Tensor]]) -> str:
    if not leaves or not function(*leaves):
        return "none"
    found = torch.vmap(lambda *xs: tuple(function(*xs)))(*(torch.stack((x, x)) for x in leaves))
    for one, each in zip(function(*leaves), found, strict=True):  # of dropout the first alone: the next has own numbers
        torch.testing.assert_close(each[0].float(), one.float(), rtol=2e-2, atol=2e-2)
    return "yes"


WAYS: Mapping[str, Callable[[list[Tensor], Callable[..., list[Tensor]]], str]] = {
    "gradient": _first, "second": _second, "forward mode": _forward_mode, "vmap": _batched,
}  # fmt: skip


def way_of(call: Call, way: str) -> str:
    """ "yes", "none" where the results have none, or the error."""
    leaves, function = leaves_of(call)
    if not leaves:
        return "none"
    try:
        with quietly():
            return WAYS[way](leaves, function)
    except REFUSALS as error:
        return name_of(error)


def ways_of(call: Call) -> Iterator[str]:
    """What has no gradient has no further ones, whatever torch makes of its constants."""
    first = way_of(call, "gradient")
    for way in WAYS:
        found = "none" if first == "none" and way != "vmap" else way_of(call, way)
        yield {"none": "", "yes": "yes"}.get(found) if found in ("none", "yes") else f"`{found}`"


def ways_table() -> str:
    rows = []
    for name, call in calls().items():
        out = "yes" if "out" in inspect.signature(call.function).parameters else ""
        rows.append((f"`{name}`", *ways_of(call), out))
    return table(("function", *WAYS, "`out=`"), rows)


# --- Attention's mods ---


def pairs_table() -> str:
    """What the wheel has kernels for, by pair of mods."""
    pairs = importlib.import_module("tk.kernels.attention.pairs")
    rows: dict[tuple[str, str], list[Any]] = {}
    for score, mask, wanted in pairs.chosen():
        rows.setdefault((mod_name(score), mod_name(mask)), []).append(wanted)
    return table(
        ("score_mod", "mask_mod", "dtypes", "head sizes up to", "gradients", "decoding", "whole prompts in pages"),
        ((*names, *merged(wanted)) for names, wanted in rows.items()),
    )


def merged(wanted: Sequence[Any]) -> Iterator[str]:
    """Merges the forms of one pair: ids of two types, tables of several ranks and dtypes."""
    dtypes = [d for d in COLUMNS if any(d in w.dtypes for w in wanted)]
    yield " ".join(dtypes)
    yield str(max(max(sizes) for w in wanted for sizes in w.rounded))
    for flag in ("backward", "decode", "paged"):
        values = {getattr(w, flag) for w in wanted}
        yield "some" if len(values) > 1 else "yes" if values == {True} else ""


def mod_name(mod: Any) -> str:
    if mod is None:
        return ""
    outer = mod.__qualname__.partition(".")[0]
    inner = [c.cell_contents for c in mod.__closure__ or ()]
    parts = [m for c in inner for m in (c if isinstance(c, list | tuple) else [c]) if callable(m)]
    if outer == "behind":
        return f"{mod_name(parts[0])} at `q_idx + offset`"
    return " & ".join(mod_name(m) for m in parts) if outer == "and_masks" else f"`{outer}`"


# --- What is refused ---


@dataclass(frozen=True)
class Refused:
    """A call that raises, in Python's words, and why it is so. device: of `x` and its like; CUDA's are not there."""

    call: str
    why: str
    device: str = "cpu"
    strict: bool = False

    def error(self) -> Exception:
        with quietly(), tk.config.strict(self.strict), torch.enable_grad():
            if self.device == "cpu":
                return self._raised()
            with FakeTensorMode():
                return self._raised()

    def _raised(self) -> Exception:
        try:
            exec(self.call, names(self.device))
        except REFUSALS as error:
            return errors.typed(error)
        raise AssertionError(f"{self.call} is not refused")


def names(device: str) -> dict[str, Any]:
    """What the calls are of."""
    x = torch.zeros(32, 32, device=device)
    q = torch.zeros(1, 2, 16, 16, device=device)
    fp8 = torch.zeros(32, 32, device=device, dtype=torch.float8_e5m2)
    one = torch.ones((), device=device)
    packed = torch.zeros(16, 32, device=device, dtype=torch.uint8)
    image = torch.zeros(1, 4, 8, 8, device=device)
    kernel, row = torch.zeros(4, 4, 3, 3, device=device), torch.zeros(32, device=device)
    classes = torch.zeros(32, dtype=torch.int64, device=device)
    return {"tk": tk, "torch": torch, "x": x, "q": q, "fp8": fp8, "one": one, "packed": packed, "image": image,
            "kernel": kernel, "row": row, "classes": classes}  # fmt: skip


REFUSED: Mapping[str, Sequence[Refused]] = {
    "Products": (
        Refused("tk.mm(x.int(), x.int())", "The wheel has no products of integers."),
        Refused("tk.mm(x, x.half())", "As in torch; autocast makes them one."),
        Refused("tk.mm(x, x, out_dtype=torch.bfloat16)", "A result is of the operands' dtype or wider: float32."),
        Refused("tk.mm(x.requires_grad_(), x, out=x.clone())", "As in torch."),
        Refused("tk.scaled_mm(fp8, fp8.t(), one, one)", "As in torch: the hardware's libraries have no such product."),
        Refused("tk.int4_mm(x, packed, x[:1], None, 48)", "A tile of the inner size has whole groups."),
        Refused("tk.int4_mm(x.requires_grad_(), packed, x[:1], None, 32)", "Quantised weights are for inference."),
        Refused("tk.b2b_gemm(x.requires_grad_(), x, x)",
                "What stands between the products is not kept; write two products to train."),
        Refused("tk.b2b_gemm(x, x, x, f='tanh')", "Register a function of your own (docs/products.md)."),
    ),
    "Convolutions": (
        Refused("tk.conv2d(image, kernel, stride=2, padding='same')", "As in torch."),
        Refused("tk.conv2d(image.double(), kernel)", "As in torch."),
    ),
    "Functions": (
        Refused("tk.gelu(x.int())", "torch has no gelu of integers.", "cuda"),
        Refused("tk.gelu(x.double())", "No kernel has it; without strict mode it is ATen's.", "cuda", True),
        Refused("tk.embedding(classes, x, max_norm=1.0)", "The same: it changes the weight.", "cuda", True),
        Refused("tk.norm(x, 'nuc')", "The same: it takes singular values.", "cuda", True),
        Refused("tk.vector_norm(x, 3)", "The same: 1, 2, inf and -inf are the orders that have kernels.", "cuda", True),
        Refused("tk.cross_entropy(x, classes, row.requires_grad_())", "The same.", "cuda", True),
        Refused("tk.rand((3,), dtype=torch.float64, device=x.device)", "Kernels draw 24 bits at most.", "cuda"),
        Refused("tk.swiglu(x, x.half())", "All tensors are of one dtype; norms alone take weights in float32.", "cuda"),
        Refused("tk.mean(x.int())", "As in torch: give dtype.", "cuda"),
        Refused("tk.sum(x.to(torch.uint16))", "torch has few ops of such integers, and kernels have none.", "cuda"),
        Refused("tk.sum(x.to(torch.complex64))", "Kernels work on real numbers.", "cuda"),
        Refused("tk.adamw_(*([x.double()] for _ in range(4)), [one], lr=0.1)",
                "Optimizers' kernels work in float32.", "cuda"),
    ),
    "Attention": (
        Refused("tk.sdpa(q, q, q, dropout_p=0.5)", "No kernel draws numbers within attention."),
        Refused("tk.sdpa(q, q, q, q[..., :16], is_causal=True)", "As in torch."),
        Refused("tk.flex_attention(q, q, q, kernel_options={'num_stages': 3})",
                "Kernels are compiled already; of the forward pass a config may be named by its tile."),
        Refused("tk.flex_attention(q, q, q, kernel_options={'BACKEND': 'FLASH'})", "The wheel has no other."),
        Refused("y = tk.flex_attention(q.requires_grad_(), q, q)\n"
                "g, = torch.autograd.grad(y.sum(), q, create_graph=True)\ng.sum().backward()",
                "torch's has no gradients of gradients either."),
        Refused("torch.func.jvp(lambda q: tk.flex_attention(q, q, q), (q,), (q,))", "Nor forward mode."),
        Refused("tk.flex_attention(q, q, q, lambda s, b, h, i, j: s.sort()[0])",
                "A mod is worked out for every score by itself."),
        Refused("tk.flex_attention(q, q, q, lambda s, b, h, i, j: s if i > j else -s)", "The same: use torch.where."),
    ),
}  # fmt: skip


def refused_table() -> str:
    rows: list[tuple[str, ...]] = []
    for refused in (r for group in REFUSED.values() for r in group):
        where = ("" if refused.device == "cpu" else " on CUDA") + (", strict" if refused.strict else "")
        error = refused.error()
        lines = "<br>".join(f"`{line}`" for line in refused.call.splitlines())
        rows.append((f"{lines}{where}", f"`{name_of(error)}`: {said(error)}", refused.why))
    return table(("call", "error", "why"), rows)


def said(error: Exception) -> str:
    """The first sentence or so."""
    text = " ".join(str(error).split()).replace("|", "\\|")
    return text if len(text) <= 200 else text[:200].rpartition(" ")[0] + " …"


def hints_table() -> str:
    """What stands in a function under @tk.op, and what to do instead."""
    from tk.codegen import unsupported as refused_ops  # it needs Triton, as the records of kernels do

    by_hint: dict[str, list[str]] = {}
    for name, hint in refused_ops.HINTS.items():
        by_hint.setdefault(hint, []).append(f"`{name}`")
    for start, hint in refused_ops._BEGINNINGS.items():
        by_hint.setdefault(hint, []).append(f"`{start}…`")
    return table(("ATen's op", "why, and what instead"), ((", ".join(names), h) for h, names in by_hint.items()))


# --- The document ---


def table(header: Sequence[object], rows: Iterable[Iterable[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


HEAD = """# What is supported, and what is refused

`tools/supported.py` (`make readme`) made this page with torch {torch}, by calling every function: on the CPU, and for
CUDA with fake tensors. [torch-ops.md](torch-ops.md) says what each of torch's ops may do within a function
of your own under `@tk.op`.

## Dtypes

| | |
|---|---|
| **tk** | on CUDA a kernel computes it; on the CPU torch's ops do |
| ATen | torch's ops compute it everywhere; on CUDA, where no kernel has this dtype, `tk.config.strict()` makes it a `tk.UnsupportedError`, and `tk.explain` says so |
| one letter | the call raises an error: U `tk.UnsupportedError`, N `NotImplementedError`, R `RuntimeError`, V `ValueError`, T `TypeError` |
| two entries | what happens on CUDA, and then on the CPU; "U CPU" works on the CPU alone |

The dtype is that of the floating-point arguments. For `embedding` it is the weight's, and for `scaled_mm` and
`scaled_grouped_mm` fp8e5m2 is the dtype of `a` alone. Errors N and R on the CPU are torch's own. On CUDA uint16, uint32
and uint64 are taken by `any` and `all` alone, of which ATen makes bools first.
"""  # noqa: E501

NOTES = """
- Results have ATen's dtypes. Sums and products of integers and bool, and their scans, are int64 (modulo 2^64). `any`
  and `all` of uint8 are uint8. Positions are int64.
- `dtype=` of sums, scans, norms and softmaxes converts the argument first, as in torch.
- float64 is computed in float64, and all other floats in float32. `softmax` and `log_softmax` of float64 are made of
  the maximum and the sum, by the formula of the other dtypes.
- Sorts, `topk`, extremes and searches take every NaN for the largest number, whatever its sign. Torch's own sort on
  CUDA puts those with a negative sign below -inf.
- Integers of 16 bits and fewer are sorted as floats that hold them. Integers of 32 and 64 bits, and float64, are sorted
  by two or three sorts of parts of them. `topk` of these sorts everything.
- A search with two dtypes compares in torch's common dtype. Norms of 16 bits take weights in float32, `rms_norm` and
  `add_rms_norm` weights in any of bfloat16, float16 and float32, and `rope` takes tables in float32.
- `max(a, b)` and `min(a, b)` of two tensors are ATen's on every device, and so is `cross_entropy` of no classes. In
  strict mode they are a `tk.UnsupportedError` on CUDA.
- Products of 16 bits can also have results in float32 (`out_dtype`). float32 products are `ieee` or `tf32`, as torch's
  switch or `precision` says. Products of float8 need a GPU of compute capability 8.9 or newer.
- Products and convolutions of float64 pass as fakes on CUDA, too: what shapes follow from does not know the device. The
  call itself is refused there.
- On CUDA a result of `int4_mm` that reads an infinite activation, scale or zero may be NaN where torch has an infinity
  ([products.md](products.md#int4_mm-and-uint4x2_mixed_mm)).
- `int4_from_torch`, `pack_int4` and `unpack_int4` are made of torch's ops.
"""

WAYS_HEAD = """## Gradients and transforms

An error in a cell is raised when that gradient or transform is asked for. In an empty cell there is none, because the
results are integers, random or rounded, or are written in place. "second" is a gradient of the gradient. The same holds
on CUDA, on the CPU and under `torch.func`. Everything works under `torch.compile(fullgraph=True)` and `torch.export`.
"""

WAYS_NOTES = """
The same call gives the same bits every time, except for sums whose terms are added in the order in which threads
arrive. Those of floats by `scatter_add`, `index_add` and `index_put(accumulate=True)`, the gradient of `gather`, and
that of `embedding`'s weight in float32 become deterministic by `tk.config.deterministic()` or
`torch.use_deterministic_algorithms(True)`, and sums of float64 are then refused. The gradient of `cummax` and `cummin`
is ATen's `scatter_add`. Only torch's switch makes it deterministic. `tk.config.batch_invariant()` makes a row's bits
independent of the other rows.
"""

PAIRS_HEAD = """## Attention: the wheel's mods

The first row is `sdpa`, and `flex_attention` without mods. Numbers and tensors that a mod captures are arguments, and
equal mods are one mod ([attention.md](attention.md)). "some" means that there are kernels for some of a mod's forms
(ids `[S]` and `[B, S]`, tables of two to four dimensions). A call with any other pair raises `tk.VariantNotFoundError`
with the `tk build` line that makes it. On the CPU every pair runs.
"""

REFUSED_HEAD = """## What is refused, and why

Each group has an example of each kind. `x` is float32 [32, 32], `q` is float32 [1, 2, 16, 16], and `fp8` is
float8_e5m2. [use.md](use.md) says what `tk.use` leaves alone.
"""

HINTS_HEAD = """## Within a function under `@tk.op`

[torch-ops.md](torch-ops.md) lists every op. [codegen.md](codegen.md#what-is-refused) names what else is refused:
control flow by a tensor's contents, side effects, large constants. A function over lists of tensors has no gradients
and runs under no transform of `torch.func`: it writes in place, or is for inference. Without `grad=True` a gradient is
refused.
"""


def text() -> str:
    parts = [
        HEAD.replace("{torch}", TORCH),
        dtype_table() + "\n" + NOTES,
        WAYS_HEAD,
        ways_table() + "\n" + WAYS_NOTES,
        PAIRS_HEAD,
    ]
    parts += [pairs_table() + "\n", REFUSED_HEAD, refused_table() + "\n", HINTS_HEAD, hints_table()]
    return "\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail instead of writing when it is out of date")
    args = parser.parse_args(argv)
    if not args.check:
        DOCUMENT.write_text(text())
    elif DOCUMENT.read_text() != text():
        print("docs/supported.md is out of date; run `make readme`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
