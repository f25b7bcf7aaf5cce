"""Random functions for ``@tk.op``: their text, their signature, and arguments to call them with.

A function grows by one line at a time. Each line is a template filled with what stands already, and it stays when eager
torch takes it for two different choices of sizes, with results that are finite and small. So what comes out is legal
torch by construction, whatever is drawn. Everything is drawn from one ``random.Random``: hypothesis hands in its own,
which it can shrink, and a plain one with a seed gives the same functions without hypothesis.

What rounding may turn round — comparisons, rounding to integers, positions, sorting — is asked of values alone that no
arithmetic has touched (`exact`), so that results can be compared with torch's at all.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
INTS = {"i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8}
DTYPES = {**FLOATS, **INTS, "bool": torch.bool}
TORCH_NAMES = {name: str(dtype) for name, dtype in DTYPES.items()}
LETTERS = ("M", "N", "K")
# The sizes by which a line is tried. Their sums, halves and products are all different.
TRIALS = ({"M": 6, "N": 10, "K": 4}, {"M": 9, "N": 5, "K": 14})
LEADING = (5, 7)  # what "..." stands for then
LEADING_OF_TRIALS = [(n,) * len(TRIALS) for n in LEADING]
SIZES = (1, 2, 3, 5, 7, 8, 12, 16, 17, 31, 32, 33, 48, 61, 64, 96, 100, 128, 130, 257)
LARGER_SIZES = (*SIZES, 511, 1000, 2049, 4100)
WHOLE_VECTORS = (16, 32, 64)
MOST_ELEMENTS = 6000  # of anything that is tried
MOST_CALLED = 240  # of sizes, multiplied: the interpreter takes a hundredth of a second for each program
LARGEST = 2000.0  # of what a line may give


@dataclass(frozen=True)
class Param:
    """text: as @tk.op has it. dims: letters and numbers; "..." stands for two dimensions while a function is tried.
    below: the letter of the size that an index stays below."""

    name: str
    text: str
    kind: str  # a dtype, or "float", "int", "flag"
    dims: tuple[Any, ...] = ()
    leading: bool = False
    below: str | int = ""

    @property
    def is_tensor(self) -> bool:
        return self.kind in DTYPES


@dataclass(frozen=True)
class Function:
    """source: of a plain function, with its imports. has_grad: whether it is to be built with its gradient."""

    name: str
    params: tuple[Param, ...]
    lines: tuple[str, ...]
    results: tuple[str, ...]
    has_grad: bool = False

    @property
    def text(self) -> str:
        """The function alone."""
        head = f"def {self.name}({', '.join(p.name for p in self.params)}):"
        return "\n".join([head, *(f"    {line}" for line in (*self.lines, f"return {', '.join(self.results)}"))]) + "\n"

    @property
    def decorator(self) -> str:
        parts = [f'{p.name}="{p.text}"' for p in self.params] + ["grad=True"] * self.has_grad
        return f"@tk.op({', '.join(parts)})"

    @property
    def source(self) -> str:
        """A file for ``tk build``."""
        return f"{IMPORTS}import tk\n\n\n{self.decorator}\n{self.text}"

    def compiled(self, folder: Path) -> Callable[..., Any]:
        """The plain function, with a file that its lines can be found in."""
        path = folder / f"{self.name}.py"
        path.write_text(IMPORTS + "\n\n" + self.text)
        namespace: dict[str, Any] = {"__name__": self.name}
        exec(compile(path.read_text(), str(path), "exec"), namespace)
        return namespace[self.name]  # type: ignore[no-any-return]

    @property
    def texts(self) -> dict[str, str]:
        """The decorator's."""
        return {p.name: p.text for p in self.params}


IMPORTS = "import torch\nimport torch.nn.functional as F\n"


# --- Arguments ---


def argument(param: Param, sizes: Mapping[str, int], leading: Sequence[int], generator: torch.Generator) -> Any:
    """Numbers of both signs around 1, each of them once; indices in range."""
    if param.kind == "float":
        return round(0.25 + torch.rand((), generator=generator).item(), 3)
    if param.kind == "int":
        return int(torch.randint(1, 5, (), generator=generator))
    if param.kind == "flag":
        return bool(torch.randint(0, 2, (), generator=generator))
    shape = [*(leading if param.leading else ()), *(sizes.get(d, d) for d in param.dims)]
    if param.below:
        below = sizes.get(str(param.below), param.below)
        return torch.randint(0, max(int(below), 1), shape, generator=generator, dtype=DTYPES[param.kind])
    if param.kind in FLOATS:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(DTYPES[param.kind])
    if param.kind == "bool":
        return torch.rand(shape, generator=generator) > 0.5
    low = 0 if param.kind == "u8" else -9
    return torch.randint(low, 10, shape, generator=generator).to(DTYPES[param.kind])


def laid_out(x: Tensor, how: str) -> Tensor:
    """The same numbers, otherwise in memory."""
    if x.dim() == 0 or how == "dense":
        return x
    if how == "pitched":
        wide = x.new_zeros([*x.shape[:-1], x.shape[-1] + 8])
        wide[..., : x.shape[-1]] = x
        return wide[..., : x.shape[-1]]
    if how == "transposed":
        order = list(reversed(range(x.dim())))
        return x.permute(order).contiguous().permute(order)
    if how == "misaligned":
        flat = x.new_zeros(x.numel() + 1)
        flat[1:] = x.reshape(-1)
        return flat[1:].view(x.shape)
    if how == "stepped":
        wide = x.new_zeros([*x.shape[:-1], x.shape[-1] * 2])
        wide[..., ::2] = x
        return wide[..., ::2]
    assert how == "expanded"
    return x[:1].expand(x.shape) if x.shape[0] else x


LAYOUTS = ("dense", "pitched", "transposed", "misaligned", "stepped", "expanded")


@dataclass(frozen=True)
class Call:
    """What a function is called with: everything follows from these few, so that a failure can be repeated."""

    sizes: Mapping[str, int]
    leading: tuple[int, ...]
    layouts: Mapping[str, str]
    seed: int

    def arguments(self, params: Sequence[Param]) -> list[Any]:
        generator = torch.Generator().manual_seed(self.seed)
        found = [argument(p, self.sizes, self.leading, generator) for p in params]
        return [laid_out(x, self.layouts.get(p.name, "dense")) if isinstance(x, Tensor) else x
                for p, x in zip(params, found, strict=True)]  # fmt: skip


def calls(random: Random, function: Function, count: int, most_elements: int = MOST_CALLED) -> Iterator[Call]:
    """The first of sizes above 1, dense, and now and then with rows of whole vectors; then any."""
    letters = sorted({d for p in function.params for d in (*p.dims, p.below) if d in LETTERS})
    has_places = re.search(r"topk\(.*\)\[1\]", function.text) is not None
    ways = [way for way in LAYOUTS if way != "expanded" or not has_places]  # torch promises no place of equal elements
    for n in range(count):
        leading = random.choice([(2, 3), (7,), ()] if n else [(2, 3), (7,)])
        most = most_elements // (math.prod(leading) if any(p.leading for p in function.params) else 1)
        sizes: dict[str, int] = {}
        last = [p.dims[-1] for p in function.params if p.is_tensor and p.dims and p.dims[-1] in LETTERS]
        whole = random.choice(last) if n == 0 and last and random.random() < 0.5 else None
        for i, name in enumerate(letters):
            room = most // (math.prod(max(s, 1) for s in sizes.values()) * 4 ** (len(letters) - 1 - i))
            power = max([1, *(p.dims.count(name) for p in function.params)])  # 2 of a square
            pool = [s for s in LARGER_SIZES if s**power <= max(room, 5**power)]
            pool = [s for s in pool if s > 3 and s not in sizes.values()] if n == 0 else [*pool, 0, 1]
            if name == whole:
                pool = [s for s in WHOLE_VECTORS if s not in sizes.values()]
            sizes[name] = random.choice(pool or [5 + i])
        layouts = {p.name: random.choice(ways) for p in function.params if p.is_tensor} if n else {}
        yield Call(sizes, leading, layouts, random.randrange(1 << 30))


# --- What stands already ---


@dataclass
class Value:
    """A variable of the function, with what it is for each trial. exact: no arithmetic has rounded it. distinct: no two
    of its elements are equal."""

    name: str
    values: list[Tensor]
    exact: bool
    distinct: bool = False

    @property
    def rank(self) -> int:
        return self.values[0].dim()

    @property
    def dtype(self) -> torch.dtype:
        return self.values[0].dtype

    @property
    def is_float(self) -> bool:
        return self.dtype.is_floating_point

    @property
    def is_int(self) -> bool:
        return not self.is_float and self.dtype != torch.bool

    def size(self, d: int) -> tuple[int, ...]:
        return tuple(int(v.shape[d]) for v in self.values)


Filled = tuple[str, bool, bool]  # an expression, whether it is exact, whether its elements are distinct


@dataclass
class Maker:
    """A function under way."""

    random: Random
    params: list[Param] = field(default_factory=list)
    known: list[Value] = field(default_factory=list)
    numbers: dict[str, list[Any]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    has_leading: bool = False
    has_grad: bool = False

    # --- Parameters ---

    def declare(self) -> None:
        random = self.random
        self.has_grad = random.random() < 0.3
        self.has_leading = random.random() < 0.2
        common = random.choice(["fp32"] * 6 + ["bf16", "fp16", "bf16", "fp64"])
        rank = random.choice([1, 2, 2, 2, 2, 3])
        dims = list(LETTERS[:rank]) if rank > 1 or random.random() < 0.7 else ["N"]
        if random.random() < 0.2:
            dims[random.randrange(rank)] = random.choice([3, 8, 1, 2])
        self._tensor("x", common, dims, self.has_leading)
        for name in ("y", "z", "w")[: random.choice([0, 1, 1, 2])]:
            own = self._beside(dims)
            kind = common if random.random() < 0.8 else random.choice(list(FLOATS if self.has_grad else DTYPES))
            self._tensor(name, kind, own, self.has_leading and len(own) == rank and random.random() < 0.7)
        if random.random() < 0.25 and not self.has_leading:
            self._index(dims)
        for name, kind in (("a", "float"), ("n", "int"), ("flag", "bool")):
            if random.random() < 0.12:
                self._number(name, kind)

    def _beside(self, dims: Sequence[Any]) -> list[Any]:
        """Of the same dimensions, or of some of them, or of others."""
        way = self.random.random()
        if way < 0.4:
            return list(dims)
        if way < 0.6:
            return list(dims[-1:])
        if way < 0.75:
            return [d if self.random.random() < 0.5 else 1 for d in dims]
        if way < 0.8:
            return []
        return [self.random.choice(LETTERS) for _ in range(self.random.choice([1, 2, 2]))]

    def _tensor(self, name: str, kind: str, dims: Sequence[Any], leading: bool, below: str | int = "") -> None:
        sizes = [*(["..."] if leading else []), *map(str, dims)]
        self.params.append(Param(name, f"{kind}[{', '.join(sizes)}]", kind, tuple(dims), leading, below))
        self.known.append(Value(name, self._tried(self.params[-1]), True, kind in ("fp32", "fp64")))

    def _index(self, dims: Sequence[Any]) -> None:
        """Indices into a dimension of x, along it or of their own."""
        d = self.random.randrange(len(dims))
        kind = self.random.choice(["i64", "i64", "i32"])
        way = self.random.random()
        own = [*dims[:d], "K", *dims[d + 1 :]] if way < 0.5 else ["K"] if way < 0.8 else ["K", "M"]
        self._tensor("at", kind, own, False, dims[d])

    def _number(self, name: str, kind: str) -> None:
        self.params.append(Param(name, kind, "flag" if kind == "bool" else kind))
        self.numbers[name] = [{"float": 0.75, "int": 3, "bool": True}[kind]] * len(TRIALS)

    def _tried(self, param: Param) -> list[Tensor]:
        generator = torch.Generator().manual_seed(len(self.params))
        return [argument(param, sizes, LEADING, generator) for sizes in TRIALS]

    # --- Lines ---

    def grow(self) -> None:
        """One more line, if any of a few that are drawn is legal."""
        for _ in range(8):
            template = self.random.choice(self.random.choice(self.groups()))
            try:
                filled = template(self)
            except IndexError:  # nothing that it could be filled with stands there
                continue
            if filled is not None and self._take(*filled):
                return

    def groups(self) -> Sequence[Sequence[Callable[[Maker], Filled | None]]]:
        return GRADIENT_GROUPS if self.has_grad else GROUPS

    def _take(self, text: str, exact: bool, distinct: bool) -> bool:
        results = []
        for trial in range(len(TRIALS)):
            scope: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
            scope |= {v.name: v.values[trial] for v in self.known}
            scope |= {name: values[trial] for name, values in self.numbers.items()}
            try:
                made = eval(text, scope)
            except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
                return False
            results.append(made)
        if not all(isinstance(r, Tensor) and _is_fine(r) for r in results):
            return False
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        self.known.append(Value(name, results, exact, distinct))
        return True

    # --- What templates are filled with ---

    def any(self, accept: Callable[[Value], bool] = lambda v: True) -> Value:
        """The later, the likelier."""
        found = [v for v in self.known if accept(v)]
        place = len(found) - 1  # of nothing that fits: an IndexError, which the caller knows
        while place > 0 and self.random.random() < 0.5:
            place -= 1
        return found[place]

    def float(self) -> Value:
        return self.any(lambda v: v.is_float)

    def dim(self, v: Value) -> int:
        """From the end. Of "..." none that it stands for."""
        first = len(LEADING) if [v.size(d) for d in range(v.rank)][: len(LEADING)] == LEADING_OF_TRIALS else 0
        if v.rank == first > 0:
            raise IndexError("nothing but what ... stands for")
        return self.random.choice(range(min(first, v.rank - 1), v.rank)) - v.rank

    def size_below(self, at: Value) -> tuple[int, ...]:
        """What the indices stay below, in each trial."""
        (below,) = (p.below for p in self.params if p.name == at.name)
        return tuple(int(sizes.get(str(below), below)) for sizes in TRIALS)

    def dims(self, v: Value) -> list[int]:
        return sorted({self.dim(v) for _ in range(self.random.choice([1, 1, 1, 2, 3]))})

    def number(self) -> str:
        own = [n for n in ("a", "n") if n in self.numbers]
        return self.random.choice([*own * 3, "0.5", "2", "-1.5", "3", "0.1", "1"])

    def finish(self) -> Function:
        """The last lines are returned, and now and then one before them."""
        if not self.lines:
            self.lines.append(f"v0 = {self.known[0].name} + 1")
            self.known.append(Value("v0", [v + 1 for v in self.known[0].values], False))
        made = [v for v in self.known if v.name.startswith("v")]
        read = {name for line in self.lines for name in re.findall(r"\bv\d+\b", line.split("=", 1)[1])}
        results = [v for v in made if v.name not in read][-3:]
        if self.random.random() < 0.3:
            results.append(self.random.choice(made))
        names = list(dict.fromkeys(v.name for v in results))
        digest = hashlib.sha256(repr([self.lines, names, self.params, self.has_grad]).encode()).hexdigest()[:8]
        has_float = any(v.is_float for v in results)
        lines = self._needed(names)
        used = set(re.findall(r"\w+", " ".join([*lines, *names])))
        params = [p for p in self.params if p.name in used]
        return Function(f"f_{digest}", tuple(params), tuple(lines), tuple(names), self.has_grad and has_float)

    def _needed(self, names: Sequence[str]) -> list[str]:
        """The lines that the results come of."""
        wanted, kept = set(names), []
        for line in reversed(self.lines):
            if line.split(" = ", 1)[0] in wanted:
                kept.append(line)
                wanted |= set(re.findall(r"\bv\d+\b", line))
        return kept[::-1]


def _is_fine(x: Tensor) -> bool:
    if x.numel() == 0 or x.numel() > MOST_ELEMENTS or x.dim() > 5 or x.dtype not in DTYPES.values():
        return False
    return bool(x.double().abs().max() <= LARGEST)


def function(random: Random) -> Function:
    maker = Maker(random)
    maker.declare()
    for _ in range(random.choice([1, 2, 3, 4, 5, 6, 8])):
        maker.grow()
    return maker.finish()


# --- Templates ---
# Each gives (expression, exact, distinct), or None where what was drawn does not fit.

Template = Callable[[Maker], "Filled | None"]


def _unary(text: str, exact: bool = False) -> Template:
    """text: with one {} for a float."""

    def fill(m: Maker) -> Filled:
        v = m.float()
        return text.replace("{}", v.name), exact and v.exact, False

    return fill


def _hard(m: Maker) -> Filled:
    """ATen's constants of these are fp32 whatever the dtype. Of the slope of hardswish at 3 its CPU and CUDA kernels
    say different things, and numbers of 16 bits are often just that."""
    v, name = m.float(), m.random.choice(["hardswish", "hardsigmoid"])
    scale = " * 0.9901" if m.has_grad and name == "hardswish" else ""
    return f"F.{name}({v.name}{'' if v.dtype == torch.float32 else '.float()'}{scale})", False, False


SMOOTH = [_unary(t) for t in (
    "torch.exp({} * 0.25)", "torch.exp2({} * 0.25)", "torch.expm1({} * 0.25)", "torch.log({}.abs() + 0.5)",
    "torch.log2({}.abs() + 0.5)", "torch.log10({}.abs() + 0.5)", "torch.log1p({}.abs())", "torch.sqrt({}.abs() + 0.5)",
    "torch.rsqrt({}.abs() + 0.5)", "torch.sin({})", "torch.cos({})", "torch.tanh({})", "torch.sinh({} * 0.25)",
    "torch.cosh({} * 0.25)", "torch.tan(torch.sin({}))", "torch.asin(torch.sin({}) * 0.9)",
    "torch.acos(torch.sin({}) * 0.9)", "torch.atan({})", "torch.asinh({})", "torch.acosh({}.abs() + 1.5)",
    "torch.atanh(torch.sin({}) * 0.9)", "torch.erf({})", "torch.erfc({})", "torch.sigmoid({})",
    "torch.reciprocal({}.abs() + 0.5)", "{}.square()", "F.silu({})", "F.gelu({})", 'F.gelu({}, approximate="tanh")',
    "F.softplus({})", "F.mish({})", "F.logsigmoid({})", "F.softsign({})", "F.tanhshrink({})", "1 / ({}.abs() + 0.5)",
    "{} ** 3", "({}.abs() + 0.5) ** 0.5", "({}.abs() + 0.5) ** -1.5", "2 ** ({} * 0.25)", "{} * {}", "-{}",
    "torch.logit(torch.sigmoid({}) * 0.8 + 0.1)", "torch.sinc({})", "torch.lerp({}, -{}, 0.3)",
    "torch.addcmul({}, {}, {}, value=0.1)", "torch.addcdiv({}, {}, {}.abs() + 1, value=0.1)",
)]  # fmt: skip
KINKED = [_unary(t, exact=True) for t in (
    "torch.relu({})", "{}.abs()", "-{}", "{}.clamp(-1, 1.5)", "{}.clamp(min=0.25)", "F.hardtanh({})",
    "torch.where({} > 0, {}, 0.0)", "{}.masked_fill({} < 0, 0.5)", "torch.nan_to_num({})", "{}.clamp_max(0.5)",
)] + [_unary(t) for t in (
    "F.leaky_relu({})", "F.elu({})", "F.celu({})", "F.selu({})", "F.relu6({})",
)] + [_hard, _hard]  # fmt: skip


def _of_exact(text: str, exact: bool = True) -> Template:
    """text: with {} for a float that nothing has rounded: its result jumps."""

    def fill(m: Maker) -> Filled:
        return text.replace("{}", m.any(lambda v: v.is_float and v.exact).name), exact, False

    return fill


JUMPING = [_of_exact(t) for t in (
    "torch.floor({})", "torch.ceil({})", "torch.trunc({})", "torch.round({})", "torch.sign({})", "{} > 0", "{} <= 0.5",
    "torch.signbit({})", "torch.isnan({})", "torch.isfinite({})", "({} * 4).to(torch.int32)",
    "({} * 4).to(torch.int64)", "({} * 4).to(torch.int8)", "{} != 0", "torch.logical_not({} > 0)",
    "F.hardshrink({})", "torch.heaviside({}, {})",
    "torch.copysign({}, {})",
)] + [_of_exact(t, exact=False) for t in ("torch.frac({})", "torch.remainder({}, 0.7)", "torch.fmod({}, 0.7)",
                                          "F.softshrink({})", "torch.frexp({})[0]", "torch.frexp({})[1]")]  # fmt: skip


def _binary(text: str, exact: bool = False) -> Template:
    """text: with {} and [] for two floats that broadcast."""

    def fill(m: Maker) -> Filled | None:
        a, b = m.float(), m.any()
        if not _broadcast(a, b) or b.dtype == torch.bool:
            return None
        if "loss" in text and a.dtype != b.dtype:  # eager torch gives the first one's dtype, its meta function another
            return None
        if m.random.random() < 0.5:
            a, b = b, a
        return text.replace("{}", a.name).replace("[]", b.name), exact and a.exact and b.exact, False

    return fill


def _broadcast(a: Value, b: Value) -> bool:
    """By equal sizes and by ones, whatever the sizes are."""
    for d in range(1, min(a.rank, b.rank) + 1):
        one = (1,) * len(TRIALS)
        if a.size(-d) != b.size(-d) and one not in (a.size(-d), b.size(-d)):
            return False
    return True


BINARY = [_binary(t) for t in ("{} + []", "{} - []", "{} * []", "{} / ([].abs() + 1)", "torch.hypot({}, [])",
                               "torch.atan2({}, [].abs() + 1)", "torch.logaddexp({}, [])", "torch.lerp({}, [], 0.25)",
                               "F.huber_loss({}, [], reduction='none')", "torch.xlogy({}, [].abs() + 1)")]  # fmt: skip
CHOOSING = [_binary(t, exact=True) for t in ("torch.maximum({}, [])", "torch.minimum({}, [])", "torch.fmax({}, [])",
                                             "torch.fmin({}, [])")]  # fmt: skip


def _compared(m: Maker) -> Filled | None:
    a, b = m.any(lambda v: v.is_float and v.exact), m.any(lambda v: v.exact and v.dtype != torch.bool)
    if not _broadcast(a, b):
        return None
    return f"{a.name} {m.random.choice(['<', '<=', '>', '>=', '==', '!='])} {b.name}", True, False


def _where(m: Maker) -> Filled | None:
    condition, a, b = m.any(lambda v: v.dtype == torch.bool), m.any(), m.any()
    if not (_broadcast(condition, a) and _broadcast(condition, b) and _broadcast(a, b)):
        return None
    other = b.name if m.random.random() < 0.7 else m.number()
    return f"torch.where({condition.name}, {a.name}, {other})", a.exact and b.exact, False


def _with_number(m: Maker) -> Filled:
    v = m.float()
    text = m.random.choice(["{} * []", "{} + []", "[] - {}", "{} / 1.7", "torch.add({}, {}, alpha=2)"])
    return text.replace("{}", v.name).replace("[]", m.number()), False, False


def _flagged(m: Maker) -> Filled | None:
    v = m.float()
    return (f"{v.name} * 2 if flag else {v.name} + 1", False, False) if "flag" in m.numbers else None


def _integer(m: Maker) -> Filled:
    v = m.any(lambda v: v.is_int)
    text = m.random.choice([
        "{} + 3", "{} * 2", "-{}", "{} & 5", "{} | 2", "{} ^ 6", "{} // 3", "{} % 4", "{} << 1", "{} >> 1", "~{}",
        "{}.abs()", "{}.clamp(-3, 4)", "torch.bitwise_not({})", "{}.sign()", "{} ** 2", "{} > 1", "{} == 2",
        "torch.maximum({}, {} * 2)", "torch.fmod({}, 3)",
    ])  # fmt: skip
    return text.replace("{}", v.name), True, False


def _integer_to_float(m: Maker) -> Filled:
    v = m.any(lambda v: v.is_int)
    text = m.random.choice(["{} * 0.5", "{} / 4", "{}.float()", "torch.sin({})", "{}.to(torch.bfloat16)"])
    return text.replace("{}", v.name), False, False


def _logic(m: Maker) -> Filled | None:
    a, b = m.any(lambda v: v.dtype == torch.bool), m.any(lambda v: v.dtype == torch.bool)
    if not _broadcast(a, b):
        return None
    text = m.random.choice(["{} & []", "{} | []", "{} ^ []", "~{}", "torch.logical_xor({}, [])", "{}.to(torch.int32)",
                            "{}.float()", "{} * []", "{} * 0.5"])  # fmt: skip
    return text.replace("{}", a.name).replace("[]", b.name), True, False


def _cast(m: Maker) -> Filled:
    v = m.float()
    to = m.random.choice(["float()", "to(torch.bfloat16)", "to(torch.float16)", "double()", "half()", "bfloat16()"])
    return f"{v.name}.{to}", v.exact and to in ("float()", "double()"), False


# --- Along dimensions ---


def _reduced(m: Maker) -> Filled:
    v, keep = m.float(), m.random.choice(["", "", ", keepdim=True"])
    dims = m.dims(v)
    at = str(dims[0]) if len(dims) == 1 else str(dims)
    text = m.random.choice([
        "{}.sum(@)", "{}.mean(@)", "{}.sum(@)", "{}.mean(@)", "{}.amax(@)", "{}.amin(@)", "torch.logsumexp({}, @)",
        "{}.var(@)", "{}.std(@)", "{}.var(@, correction=0)", "torch.var_mean({}, @)[0]", "torch.var_mean({}, @)[1]",
        "{}.norm(dim=@)", "torch.linalg.vector_norm({}, 1, @)", "(torch.sin({}) * 0.25 + 1).prod(*)",
        "{}.square().mean(@)",
    ])  # fmt: skip
    text = text.replace("*)", f"{dims[0]}{keep})") if text.endswith("prod(*)") else text
    text = re.sub(r"@([^)\[]*)\)", lambda found: f"{at}{found[1]}{keep})", text)
    return text.replace("{}", v.name), v.exact and ("amax" in text or "amin" in text), False


def _reduced_fully(m: Maker) -> Filled:
    v = m.float()
    if m.has_leading and m.random.random() < 0.5:
        return f"{v.name}.amax()", v.exact, False
    text = m.random.choice(["{}.sum()", "{}.mean()", "{}.amax()", "{}.var()", "{}.norm()", "{}.max()",
                            "{}.square().mean()"])  # fmt: skip
    return text.replace("{}", v.name), v.exact and ("max" in text), False


def _position(m: Maker) -> Filled:
    v = m.any(lambda v: v.exact and v.dtype != torch.bool)
    keep = m.random.choice(["", ", keepdim=True"])
    text = m.random.choice(["{}.argmax(@)", "{}.argmin(@)", "{}.max(@)[0]", "{}.min(@)[0]", "{}.max(@)[1]",
                            "({} > 0).any(@)", "({} > 0).all(@)", "({} > 0).sum(@)"])  # fmt: skip
    return text.replace("{}", v.name).replace("@", f"{m.dim(v)}{keep}"), True, False


def _normalized(m: Maker) -> Filled:
    v = m.float()
    text = m.random.choice([
        "torch.softmax({}, @)", "torch.softmax({}, @)", "F.log_softmax({}, @)", "F.normalize({}, dim=@)",
        "F.layer_norm({}, ({}.shape[-1],))", "F.rms_norm({}, ({}.shape[-1],))", "{} - {}.mean(@, keepdim=True)",
        "{} / {}.abs().sum(@, keepdim=True).clamp(min=0.5)", "{} - {}.logsumexp(@, keepdim=True)",
        "{} - {}.amax(@, keepdim=True)", "F.softmin({}, @)",
        "({} - {}.mean(@, keepdim=True)) / ({}.std(@, keepdim=True) + 1)",
    ])  # fmt: skip
    return text.replace("{}", v.name).replace("@", str(m.dim(v))), False, False


def _twice(m: Maker) -> Filled | None:
    """Over one dimension and then over another."""
    v = m.float()
    if v.rank < 2 + 2 * m.has_leading:
        return None
    a, b = m.random.sample(range(-v.rank + 2 * m.has_leading, 0), 2)
    text = m.random.choice([
        "torch.softmax({}, @) + torch.softmax({}, #)", "torch.softmax(torch.softmax({}, @), #)",
        "{} - {}.mean(@, keepdim=True) - {}.mean(#, keepdim=True) + {}.mean((@, #), keepdim=True)",
        "F.log_softmax(F.log_softmax({}, @), #)", "{}.sum(@, keepdim=True) * {}.sum(#, keepdim=True)",
        "torch.softmax({}, @) * {}.cumsum(#)", "{}.cumsum(@).cumsum(#)", "{}.amax(@, keepdim=True) + {}.cumsum(#)",
        "{} / ({}.norm(dim=@, keepdim=True) + 1) / ({}.norm(dim=#, keepdim=True) + 1)",
    ])  # fmt: skip
    return text.replace("{}", v.name).replace("@", str(a)).replace("#", str(b)), False, False


def _scanned(m: Maker) -> Filled:
    v = m.float()
    text = m.random.choice([
        "{}.cumsum(@)", "{}.cumsum(@)", "(torch.sin({}) * 0.1 + 1).cumprod(@)", "torch.logcumsumexp({}, @)",
        "{}.flip(@).cumsum(@).flip(@)", "{}.flip(@).cumsum(@)",
    ])  # fmt: skip
    return text.replace("{}", v.name).replace("@", str(m.dim(v))), False, False


def _running(m: Maker) -> Filled:
    v = m.any(lambda v: v.is_float and v.exact)
    text = m.random.choice(["cummax", "cummin"])
    return f"torch.{text}({v.name}, {m.dim(v)})[{m.random.choice('01')}]", True, False


def _sorted(m: Maker) -> Filled:
    v = m.any(lambda v: v.exact and (v.is_float or v.is_int))
    d, down = m.dim(v), m.random.choice(["", ", descending=True"])
    text = m.random.choice(["torch.sort({}, dim=@^, stable=True)[0]", "torch.sort({}, dim=@^, stable=True)[1]",
                            "torch.argsort({}, dim=@^, stable=True)", "{}.sort(@)[0]", "torch.topk({}, 2, @)[0]",
                            "torch.topk({}, 2, @, largest=False)[0]"])  # fmt: skip
    if "topk" in text and v.distinct and v.is_float:
        text = text.replace("[0]", m.random.choice(["[0]", "[1]"]))
    return text.replace("{}", v.name).replace("@", str(d)).replace("^", down), True, False


def _sorted_smooth(m: Maker) -> Filled:
    """The values of what is sorted are as near as what it was made of."""
    v = m.float()
    text = m.random.choice(["torch.sort({}, dim=@)[0]", "torch.topk({}, 2, @)[0]", "torch.kthvalue({}, 1, @)[0]"])
    return text.replace("{}", v.name).replace("@", str(m.dim(v))), v.exact, False


# --- Reads at indices ---


def _gathered(m: Maker) -> Filled | None:
    at = m.any(lambda v: v.name == "at")
    v = m.any(lambda v: v.name == "x") if m.random.random() < 0.5 else m.float()
    text = m.random.choice([
        "torch.gather({}, @, [])", "torch.index_select({}, @, [])", "F.embedding([], {})", "{}[[[]]]", "{}[..., [[]]]",
        "{}.index_add(@, [], torch.index_select({}, @, []))", "{}.scatter_add(@, [], torch.gather({}, @, []))",
        "{}.scatter_reduce(@, [], torch.gather({}, @, []) * 2, 'amax')", "torch.take_along_dim({}, [], @)",
    ])  # fmt: skip
    d = m.dim(v)
    if "@" in text and v.size(d) != m.size_below(at):
        return None  # torch.take_along_dim on the CPU does not hold every index against the size
    wide = "[].long()" if at.dtype != torch.int64 else "[]"
    text = text.replace("[[[]]]", "[<>]").replace("[[]]", "<>").replace("[]", "<>").replace("<>", wide)
    exact = v.exact and "add" not in text and "reduce" not in text
    return text.replace("{}", v.name).replace("@", str(d)).replace("[]", at.name), exact, False


# --- Views ---


def _cut(m: Maker, v: Value, d: int) -> Filled:
    """Whatever bounds, of a size that is a number."""
    start, end = (m.random.choice([None, *range(-9, 10)]) for _ in range(2))
    step = m.random.choice([1, 1, 1, 2, 3])
    text = f"{v.name}[..., {'' if start is None else start}:{'' if end is None else end}:{step}{', :' * (-d - 1)}]"
    if m.random.random() < 0.3:
        text = f"torch.slice_scatter({v.name}, {text}, {d}, {start}, {end}, {step})"
    return text, v.exact, v.distinct


def _moved(m: Maker) -> Filled:
    v, d = m.any(), 0
    d = m.dim(v)
    if v.rank and len(set(v.size(d))) == 1 and m.random.random() < 0.5:
        return _cut(m, v, d)
    bounds = m.random.choice(["1:", ":-1", "::2", "-3:", "1::2", f":{v.name}.shape[{d}] // 2",
                              f"{v.name}.shape[{d}] // 2:", f"{v.name}.shape[{d}] - 2:", "2:4", "0:1"])  # fmt: skip
    places = m.random.choice(["0", "-1", "1", f"{v.name}.shape[{d}] // 2", f"{v.name}.shape[{d}] - 1"])
    rest = ", :" * (-d - 1)
    ways = [f"{{}}[..., {bounds}{rest}]", f"{{}}[..., {places}{rest}]", f"{{}}.flip({d})", f"{{}}.unsqueeze({d})",
            f"{{}}.roll(1, {d})", f"{{}}.narrow({d}, 1, 2)", f"{{}}.chunk(2, {d})[1]", f"torch.cat([{{}}, {{}}], {d})",
            f"torch.stack([{{}}, {{}}], {d})", "{}.contiguous()"]  # fmt: skip
    if not m.has_leading:  # of "..." nothing may say how many dimensions it stands for
        ways += [f"{{}}.unsqueeze({d}).expand(SHAPE)", "{}.transpose(-1, 0)", "{}.reshape(-1)", "{}.flatten(0, 1)",
                 "{}.movedim(0, -1)", "{}.unsqueeze(0)",
                 "{}[None]", "{}.t()", "{}.mT", "{}.squeeze()", "{}.permute(ORDER)", "{}.diagonal(0, -2, -1)",
                 "{}.reshape({}.shape[-1], -1)", "{}.reshape(-1, {}.shape[0])", "{}.tril()", "{}.triu(1)",
                 "F.pad({}, (1, 2))", "F.pad({}, (0, 1, 2, 0), value=0.5)", "F.pad({}, (-1, 1))",
                 "{}.unflatten(0, (1, -1))"]  # fmt: skip
    text = m.random.choice(ways)
    if "ORDER" in text:
        order = list(range(v.rank))
        m.random.shuffle(order)
        text = text.replace("ORDER", ", ".join(map(str, order)))
    if "SHAPE" in text:
        place = v.rank + 1 + d
        text = text.replace("SHAPE", ", ".join("3" if i == place - 1 else "-1" for i in range(v.rank + 1)))
    keeps = not any(word in text for word in ("cat", "stack", "expand", "pad", "tril", "triu"))
    return text.replace("{}", v.name), v.exact, v.distinct and keeps


def _joined(m: Maker) -> Filled | None:
    a, b = m.any(), m.any()
    if a.rank != b.rank or not a.rank or a.is_float != b.is_float:
        return None
    how = m.random.choice(["cat", "cat", "stack"])
    return f"torch.{how}([{a.name}, {b.name}], {m.dim(a)})", a.exact and b.exact, False


def _written(m: Maker) -> Filled | None:
    v = m.float()
    text = m.random.choice(["{}.clone().fill_(0.5)", "torch.zeros_like({})", "torch.full_like({}, 2.5)",
                            "torch.ones_like({}) * {}", "{}.new_zeros({}.shape)",
                            "torch.empty_like({}).copy_({})"])  # fmt: skip
    return text.replace("{}", v.name), v.exact, False


def _counted(m: Maker) -> Filled:
    v = m.float()
    d = m.dim(v)
    text = f"torch.arange({v.name}.shape[{d}], device={v.name}.device)"
    way = m.random.choice(["", " * 0.5", " + 1"])
    return text + way, way != " * 0.5", way == ""


GRADIENT_GROUPS: Sequence[Sequence[Template]] = (
    SMOOTH, SMOOTH, KINKED, BINARY, BINARY, [_with_number, _flagged], [_reduced, _reduced, _reduced_fully],
    [_normalized, _twice], [_moved, _moved, _joined], [_scanned], [_gathered, _cast],
)  # fmt: skip
GROUPS: Sequence[Sequence[Template]] = (
    *GRADIENT_GROUPS, [_scanned, _running], JUMPING, CHOOSING, [_compared, _where, _where],
    [_integer, _integer_to_float], [_logic, _counted, _written], [_position], [_sorted, _sorted_smooth],
    [_twice, _normalized], [_moved], [_gathered],
)  # fmt: skip
