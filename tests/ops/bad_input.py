"""Wrong and unusual calls of every public function: a right call (tk.cli._calls), an argument or two changed.

Judged against torch's own function, where there is one. Where that raises, tk raises an error that a user can read;
where it answers, tk gives the same answer, or says what it does not take. Never an error of Python's own making, never
another answer in silence. An error names an argument as tk does, or is the one that torch raises."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from tk import errors
from tk.cli import _calls
from tk.cli._calls import Call

from . import settings

TYPED = (ValueError, TypeError, IndexError, NotImplementedError, RuntimeError, OverflowError, MemoryError)
# What only a mistake of tk's own says.
RAW = re.compile(
    r"object has no attribute|INTERNAL ASSERT|KeyError|AssertionError|unsupported operand type|is not subscriptable|"
    r"object is not iterable|not supported between instances|list index out of range|tuple index out of range|"
    r"has no __|unhashable|cannot unpack|is not callable|stable::|TORCH_CHECK|"
    r"division by zero|mark it as a leaf|aoti_torch"
)

LAST = Path("build/bad_input_last.txt")  # the call that runs on a GPU, for when the process does not outlive it
Change = Callable[[Tensor], Any]

TENSOR_CHANGES: dict[str, Change] = {
    "none": lambda x: None,
    "number": lambda x: 1.5,
    "text": lambda x: "x",
    "list": lambda x: [1.0, 2.0],
    "numpy": lambda x: x.float().cpu().numpy() if not x.requires_grad else None,
    "meta": lambda x: x.to("meta"),
    "complex": lambda x: x.to(torch.complex64),
    "conjugate": lambda x: x.to(torch.complex64).conj(),
    "negative bit": lambda x: x.to(torch.complex64).conj().imag,
    "sparse": lambda x: x.float().to_sparse(),
    "sparse csr": lambda x: x.float().reshape(-1, max(1, x.shape[-1] if x.dim() else 1)).to_sparse_csr(),
    "quantized": lambda x: torch.quantize_per_tensor(x.float().cpu(), 0.1, 0, torch.qint8).to(x.device),
    "nested": lambda x: torch.nested.nested_tensor([x.float(), x.float()]),
    "double": lambda x: x.double(),
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "float8": lambda x: x.float().to(torch.float8_e4m3fn),
    "int64": lambda x: x.long(),
    "int32": lambda x: x.int(),
    "int16": lambda x: x.short(),
    "uint8": lambda x: x.to(torch.uint8),
    "uint16": lambda x: x.abs().to(torch.uint16),
    "bool": lambda x: x.bool(),
    "scalar": lambda x: x.flatten()[:1].reshape(()),
    "vector": lambda x: x.flatten(),
    "one more dimension": lambda x: x.unsqueeze(0),
    "one dimension less": lambda x: x.select(0, 0) if x.dim() and x.shape[0] else x.reshape(()),
    "no rows": lambda x: x[:0] if x.dim() else x.reshape(1)[:0],
    "no columns": lambda x: x[..., :0] if x.dim() else x.reshape(1)[:0],
    "one row less": lambda x: x[:-1] if x.dim() else x,
    "one column less": lambda x: x[..., :-1] if x.dim() else x,
    "one element": lambda x: x.flatten()[:1],
    "nine dimensions": lambda x: x.reshape((1,) * (9 - x.dim()) + tuple(x.shape)) if x.dim() < 9 else x,
    "transposed": lambda x: x.mT if x.dim() >= 2 else x,
    "expanded": lambda x: x.flatten()[:1].reshape((1,) * x.dim()).expand(x.shape) if x.numel() else x,
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "misaligned": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].reshape(x.shape) if x.numel() else x,
    "nan": lambda x: torch.full_like(x, float("nan")) if x.is_floating_point() and x.itemsize > 1 else x,
    "infinite": lambda x: torch.full_like(x, float("inf")) if x.is_floating_point() and x.itemsize > 1 else x,
    "negative": lambda x: -x.abs() - 1 if x.dtype != torch.bool and x.itemsize > 1 else x,
    "needs a gradient": lambda x: x.detach().requires_grad_() if x.is_floating_point() else x,
}
# Of functions whose tensors say where to read: what leaves all of it inside. On a GPU the rest ends the context.
INSIDE = frozenset({
    "none", "number", "text", "list", "numpy", "meta", "complex", "conjugate", "negative bit", "sparse", "quantized",
    "nested", "double", "half", "bfloat16", "int64", "int32", "int16", "strided", "misaligned", "nan", "infinite",
    "needs a gradient", "one more dimension",
})  # fmt: skip
READ_WHERE_TOLD = (
    "embedding", "cross_entropy", "linear_cross_entropy", "grouped_mm", "scaled_grouped_mm", "gather", "scatter_add",
    "index_add", "index_put", "varlen_attn",
)  # fmt: skip

NUMBERS: Sequence[Any] = (
    *(
        None,
        True,
        0,
        1,
        -1,
        2,
        3,
        -2,
        -100,
        7,
        2**31,
        2**63 - 1,
        -(2**63),
        2**70,
        1.5,
        -0.5,
        float("nan"),
        float("inf"),
    ),
    *("x", "mean", (), (0,), (0, 0), (0, -1), (0, 1), (5,), [1], (1.5,), ("x",), (-1, None), object(), torch.float16),
    *(torch.int32, torch.complex64, torch.device("meta"), 1j),
)


@dataclass(frozen=True)
class Changed:
    """A call of a function, and what was done to a right one."""

    call: Call
    changes: tuple[str, ...]

    def __str__(self) -> str:
        return f"tk.{self.call.name}: {'; '.join(self.changes)}"


def changed(made: Sequence[Call], rng: random.Random, other: torch.device | None = None) -> Changed:
    """One at random. other: a device that some tensor may be moved to."""
    call = rng.choice(made)
    changes: list[str] = []
    for _ in range(rng.choice((1, 1, 1, 2))):
        call = _change(call, rng, other, changes)
    return Changed(call, tuple(changes))


def _change(call: Call, rng: random.Random, other: torch.device | None, said: list[str]) -> Call:
    i = rng.randrange(len(call.args) + 1)
    if i == len(call.args):
        return _more_or_less(call, rng, said)
    before = call.args[i]
    if isinstance(before, Tensor):
        after = _tensor(before, rng, other, said, f"argument {i}")
    elif isinstance(before, list) and before and isinstance(before[0], Tensor):
        after = _list(before, rng, other, said, f"argument {i}")
    else:
        after = rng.choice(NUMBERS)
        said.append(f"argument {i} is {after!r}")
    return replace(call, args=(*call.args[:i], after, *call.args[i + 1 :]))


def _tensor(x: Tensor, rng: random.Random, other: torch.device | None, said: list[str], name: str) -> Any:
    kind, change = rng.choice(list(TENSOR_CHANGES.items()))
    if other is not None and rng.random() < 0.1:
        kind, change = f"on {other}", lambda x: x.to(other)
    try:
        found = change(x)
    except (RuntimeError, TypeError, NotImplementedError, ValueError):  # torch has no such tensor
        return x
    said.append(f"{name}: {kind}")
    return found


def _list(xs: list[Any], rng: random.Random, other: torch.device | None, said: list[str], name: str) -> Any:
    way = rng.randrange(3)
    if way == 0:
        said.append(f"{name}: one less")
        return xs[:-1]
    if way == 1:
        said.append(f"{name} is a tensor")
        return xs[0]
    return [_tensor(xs[0], rng, other, said, f"{name}[0]"), *xs[1:]]


def _more_or_less(call: Call, rng: random.Random, said: list[str]) -> Call:
    if rng.random() < 0.3:
        said.append("the last argument is missing")
        return replace(call, args=call.args[:-1])
    if call.kwargs and rng.random() < 0.7:
        name = rng.choice(list(call.kwargs))
        value = rng.choice(NUMBERS)
        said.append(f"{name}={value!r}")
        return replace(call, kwargs={**call.kwargs, name: value})
    value = rng.choice(NUMBERS)
    said.append(f"one more argument, {value!r}")
    return replace(call, args=(*call.args, value))


def _copied(x: Any) -> Any:
    """What a function writes must not reach the other's arguments."""
    return tree_map_only(Tensor, lambda t: t.clone() if t.layout == torch.strided and not t.requires_grad else t, x)


@dataclass(frozen=True)
class Outcome:
    value: Any = None
    error: BaseException | None = None


def _run(function: Callable[..., Any], call: Call) -> Outcome:
    args, kwargs = _copied((call.args, call.kwargs))
    try:
        return Outcome(function(*args, **kwargs))
    except Exception as error:
        return Outcome(error=error)


def judge(case: Changed) -> str | None:
    """What is wrong with tk's answer; None when nothing is."""
    call = case.call
    ours = _run(call.function, call)
    if ours.error is not None:
        return _judge_error(ours.error) or judge_names(ours.error, call)
    if call.torchs is None:
        return None
    theirs = _run(call.torchs, call)
    if theirs.error is not None:
        return None if _may_answer(theirs.error, case) else f"torch raises {theirs.error!r:.150}, tk answers"
    return _differ(_determined(call, ours.value), _determined(call, theirs.value), case)


def _judge_error(error: BaseException) -> str | None:
    text = str(error)
    if isinstance(error, KeyError | AttributeError | AssertionError | ZeroDivisionError | UnboundLocalError):
        return f"raw {error!r:.200}"
    if not isinstance(error, TYPED) or not text or RAW.search(text):
        return f"{type(error).__name__}: {text[:200]!r}"
    return None


# What ATen says of a dtype or a size on the CPU, where it computes what no kernel does, with no name of an argument.
ATEN = re.compile(
    r"not implemented for|Promotion for |promoteTypes with quantized|supports? floating|floating point|"
    r"expected scalar type|mixed dtype \(CPU\)|Sort does not support|Could not run 'aten::|"
    r"out of memory|allocate memory|index out of range in self|is out of bounds for dimension|"
    r"accelerator device|Device index|Storage size calculation|Overflow when unpacking|primitive descriptor|"
    r"kernel size should be"
)


def judge_names(error: BaseException, call: Call) -> str | None:
    """Whether one of the function's arguments is named; Python names what is missing or too much itself."""
    text, name = str(error), call.name.rpartition(".")[2]
    if re.match(rf"{re.escape(name)}(\.__init__)?\(\) (takes|got|missing)", text):
        return None
    if _names_argument(text, call.function) or (f"tk.{call.name} has no gradient" in text):
        return None
    if (ATEN.search(text) and "tk::" not in text) or isinstance(error, errors.PackError):  # which names the file
        return None
    if call.torchs is not None and "tk:" not in text and str(_run(call.torchs, call).error) == text:
        return None
    return f"{type(error).__name__} names no argument: {text[:200]!r}"


def _names_argument(text: str, function: Callable[..., Any]) -> bool:
    """A short name is an argument's where it is said what it is, or in quotes: "a" is a word as well."""

    def is_named(name: str) -> bool:
        after = r"(?!\w)" if len(name) > 2 else r"(?= is | must | has | and |\[|'|,? [a-z] is )"
        return re.search(rf"(?<![\w.]){re.escape(name)}{after}", text) is not None

    return any(is_named(name) for name in inspect.signature(function).parameters)


# What tk takes and the function it is held against does not.
MORE = re.compile(
    r"not implemented for|expected m1 and m2 to have the same dtype|must have the same dtype|expected scalar type|"
    r"same dtype|out_dtype|takes \d+ positional argument|unexpected keyword|mixed dtype|mixed|"
    r"missing \d+ required|NoneType|"
    r"at least 1 at dimension 0|Could not run|int too big|match the broadcast shape|does not support bool|"
    r"dtypes? .* not supported|Only Tensors of floating point|Unsupported|unsupported|should be same with|"
    r"requires quantized dtype",
    re.IGNORECASE,
)


def _may_answer(error: BaseException, case: Changed) -> bool:
    """An AttributeError is that of a formula of tk.cli._calls. True is 1 where tk passes a number on to ATen. softmax
    without a dimension is torch.nn.functional's, which torch's own is not; torch 2.11 takes None for a name."""
    is_softmax_of_all = case.call.name in ("softmax", "log_softmax") and len(case.call.args) == 1
    return (
        is_softmax_of_all
        or "look up dimensions by name" in str(error)
        or any(change.endswith("True") for change in case.changes)
        or isinstance(error, AttributeError)
        or bool(MORE.search(str(error)))
    )


def _determined(call: Call, value: Any) -> Any:
    """What torch promises of a result: not which of equal elements topk takes, nor their order in an unstable sort."""
    if call.name == "topk":
        return value[0]
    if call.name not in ("sort", "argsort"):
        return value
    values, indices = value if call.name == "sort" else (None, value)
    dim = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", -1)
    given = call.args[0].dequantize() if call.args[0].is_quantized else call.args[0]
    return values, given.detach().double().gather(dim, indices)


# ATen's own answers differ between its kernels: vectorised gelu, fused affine norms, flash attention.
_FREE_BEYOND_FINITE = (
    "gelu",
    "geglu",
    "group_norm",
    "layer_norm",
    "add_layer_norm",
    "sdpa",
    "flex_attention",
    "varlen_attn",
    "bmm",
    "baddbmm",
    "b2b_gemm",
)


def _differ(ours: Any, theirs: Any, case: Changed) -> str | None:
    mine, others = tree_leaves(ours), tree_leaves(theirs)
    numbers = [n for n in tree_leaves((case.call.args, case.call.kwargs)) if isinstance(n, int)]
    if mine and isinstance(mine[0], Tensor) and mine[0].requires_grad != others[0].requires_grad:
        return f"requires_grad is {mine[0].requires_grad}, torch's {others[0].requires_grad}"
    if len(mine) != len(others):
        return f"{len(mine)} results, torch has {len(others)}"
    for a, b in zip(mine, others, strict=True):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            continue
        if a.shape != b.shape and not (case.call.name == "logsumexp" and a.is_meta):  # ATen raises it on a CPU
            return f"shape {list(a.shape)}, torch's {list(b.shape)}"
        if a.dtype != b.dtype:
            return f"{a.dtype}, torch's {b.dtype}"
        if a.device != b.device:
            return f"on {a.device}, torch's on {b.device}"
        if a.is_meta or a.layout != torch.strided or b.layout != torch.strided or not a.numel():
            continue
        if a.is_quantized and b.is_quantized:
            a, b = a.dequantize(), b.dequantize()
        x, y = (z.detach().to(torch.complex128 if z.is_complex() else torch.float64) for z in (a, b))
        tolerance = 2e-2 if a.dtype in (torch.bfloat16, torch.float16) else 1e-3
        if not torch.allclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=True):
            if case.call.name in _FREE_BEYOND_FINITE and not (x.isfinite().all() and y.isfinite().all()):
                continue
            if case.call.name in ("norm", "vector_norm") and x.dim() == 0 and {2**31, 2**63 - 1} & set(numbers):
                continue  # of one number to such a power ATen gives 0 on a CPU and the number on CUDA
            return f"{x.flatten()[:4].tolist()}, torch's {y.flatten()[:4].tolist()}"
    return None


def failures(seed: int, count: int, device: str, other: str | None = None) -> Iterator[tuple[Changed, str]]:
    """Of so many random calls those that went wrong."""
    rng = random.Random(seed)
    made = [*_calls.calls(device), *_calls.calls(device, torch.bfloat16), *settings.calls(device)]
    for _ in range(count):
        case = changed(made, rng, torch.device(other) if other else None)
        if not case.changes or (device != "cpu" and _may_leave(case)):
            continue
        if device != "cpu":
            LAST.parent.mkdir(parents=True, exist_ok=True)
            LAST.write_text(f"{case}\n{_shown(case.call)}\n")
        try:
            found = judge(case)
            if device != "cpu":
                torch.cuda.synchronize()
        except torch.AcceleratorError as error:
            raise AssertionError(f"{case} ended the CUDA context: {error}\n{_shown(case.call)}") from error
        if found is not None:
            yield case, found


def _shown(call: Call) -> str:
    """The arguments, tensors by dtype, sizes and strides: of a context that ended, nothing else can be read."""

    def shown(x: Tensor) -> str:
        if x.is_nested:
            return f"{x.dtype} nested on {x.device}"
        where = f"strides {list(x.stride())}" if x.layout is torch.strided else str(x.layout)
        return f"{x.dtype} {list(x.shape)} {where} on {x.device}"

    return str(tree_map_only(Tensor, shown, (call.args, call.kwargs)))


def _may_leave(case: Changed) -> bool:
    """Whether the call may read or write outside of a tensor, at which a kernel stops, ATen's too."""
    kinds = {change.rpartition(": ")[2] for change in case.changes if ": " in change}
    return case.call.name in READ_WHERE_TOLD and bool(kinds & (TENSOR_CHANGES.keys() - INSIDE))


def report(found: Sequence[tuple[Changed, str]]) -> str:
    """By function, the same failure once."""
    lines = sorted({f"{case} -> {why}" for case, why in found})
    return "\n".join(lines)


__all__ = ["TENSOR_CHANGES", "changed", "failures", "judge", "judge_names", "report"]
