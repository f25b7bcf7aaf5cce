"""Random score mods and mask mods over the ops that kernels have, as their source and what they capture."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_UNARY = (
    "torch.tanh({a})", "torch.sigmoid({a})", "torch.sin({a})", "torch.cos({a})", "torch.abs({a})", "(-{a})",
    "torch.exp(-torch.abs({a}))", "torch.log1p(torch.abs({a}))", "torch.sqrt(torch.abs({a}) + 0.1)", "F.gelu({a})",
    "F.gelu({a}, approximate='tanh')", "F.silu({a})", "F.relu({a})", "F.leaky_relu({a}, 0.1)", "F.elu({a})",
    "F.softplus({a})", "F.mish({a})", "F.hardswish({a})", "F.logsigmoid({a})", "torch.erf({a})", "torch.atan({a})",
    "({a}).clamp(-2.0, 3.0)", "({a}).clamp(min=-1)", "({a}).clamp(-ABOVE, ABOVE)", "({a}) ** 2", "(({a}) * 0.3) ** 3",
    "torch.exp2(-torch.abs({a}))", "torch.rsqrt(torch.abs({a}) + 1)", "torch.log2(torch.abs({a}) + 1)",
    "torch.expm1(-torch.abs({a}))", "torch.reciprocal(torch.abs({a}) + 1)", "torch.square(torch.tanh({a}))",
    "torch.nan_to_num({a})", "({a}).float()", "F.softsign({a})", "torch.sign({a}) * 0.5", "torch.frac({a} * 0.37)",
    "torch.where(torch.isnan({a}), 0.0, {a})", "torch.lerp({a}, s, 0.3)", "torch.lerp({a}, s, NUMBER)",
    "(torch.abs({a}) + 0.5) ** 1.5", "(torch.abs({a} * 0.1) + 0.5) ** WHOLE", "torch.zeros_like({a}) + {a}",
    "({a}) * torch.tensor(0.7)", "({a}) / NUMBER", "NUMBER * ({a})", "(1 - {a})", "({a}).masked_fill(q > k, 0.25)",
)  # fmt: skip
_BINARY = (
    "({a} + {b})", "({a} - {b})", "({a} * torch.tanh({b}))", "({a} / (torch.abs({b}) + 1))",
    "torch.maximum({a}, {b} + s)",
    "torch.minimum({a} + s, {b})", "torch.where({c}, {a}, {b} + s * 0)", "torch.atan2({a} + 3, torch.abs({b}) + 1)",
    "torch.hypot({a} + s * 0, {b} + 1.5)", "torch.where({c}, {a}, 0.5)", "torch.fmod({a}, torch.abs({b}) + 1.3)",
    "torch.logaddexp({a} + s * 0, {b} + s * 0)", "torch.copysign({a} + s * 0, {b} + 0.05)",
    "torch.add({a}, {b}, alpha=0.5)",
    "torch.addcmul({a} + s * 0, torch.tanh({b} + s * 0), s)", "({a} - {b}).where({c}, {b} + s * 0)",
)  # fmt: skip
_FLOATS = ("s", "s", "s", "0.5", "NUMBER", "TABLE1[h]", "TABLE2[h, q]", "TABLE3[h, q, k]", "HALF[k]", "WEIGHT[q]",
           "SCALAR",
           "(k - q) * 0.05", "(q - k).float() / 9", "h / 3", "TABLE1[h] * (k - q) * 0.02", "WIDE[k]",
           "FLAGS[q] * 0.5",
           "BYTES[k] * 0.25", "TABLE2[-1, q]", "CLOSED(s)")  # fmt: skip
_INTS = ("q", "k", "q - k", "b", "h", "WHOLE", "IDS[q]", "IDS[k]", "IDS2[b, k]", "3", "q // 3", "k % 4", "q & 3",
        "k ^ 1",
         "(q << 1) - k", "q >> 1", "(q - k).abs()", "(q - k).clamp(-3, 5)", "OFFSET + q", "q + WHOLE",
         "torch.maximum(q, k)", "SHORT[k]")  # fmt: skip
_COMPARE = ("<", "<=", ">", ">=", "==", "!=")


@dataclass
class RandomMod:
    """source: of a lambda. captured: the names in it. wanted: those that may have gradients."""

    source: str
    captured: dict[str, Any]
    wanted: list[str] = field(default_factory=list)

    def function(self, captured: dict[str, Any] | None = None) -> Any:
        """A closure over what it captures, by default these; each name is a cell."""
        given = captured or self.captured
        names = [n for n in given if n in self.source]
        scope: dict[str, Any] = {"torch": torch, "F": F}
        text = f"def made({', '.join(names)}):\n    return {self.source}\n"
        exec(compile(text, "<random mod>", "exec"), scope)
        return scope["made"](*(given[n] for n in names))


def _closed(x: Tensor) -> Tensor:
    return x * 0.25 + 1


def captured_of(rng: random.Random, B: int, H: int, M: int, N: int, device: str = "cpu") -> dict[str, Any]:
    """Ranks 0 to 3, several dtypes, numbers and a function."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    L = max(M, N)

    def floats(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype).to(device)

    def ints(dtype: torch.dtype, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator).to(dtype).to(device)

    return {
        "NUMBER": rng.choice([0.75, 1.5, 2.0, -1.25]), "WHOLE": rng.choice([1, 2, 3]), "OFFSET": rng.choice([-2, 0, 4]),
        "ABOVE": rng.choice([1.0, 2.5]), "TABLE1": floats(torch.float32, H), "TABLE2": floats(torch.float32, H, L),
        "TABLE3": floats(torch.float32, H, M, N), "HALF": floats(rng.choice([torch.float16, torch.bfloat16]), L),
        "WEIGHT": floats(torch.float32, L), "SCALAR": floats(torch.float32), "WIDE": floats(torch.float64, L),
        "FLAGS": ints(torch.bool, 2, L), "BYTES": ints(torch.uint8, 4, L), "SHORT": ints(torch.int16, 5, L),
        "IDS": ints(rng.choice([torch.int32, torch.int64]), 3, L), "IDS2": ints(torch.int32, 3, B, L),
        "CLOSED": _closed,
    }  # fmt: skip


WANTED = ("TABLE1", "TABLE2", "TABLE3", "HALF", "WEIGHT", "SCALAR", "WIDE")


def _bool(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice([
            f"(({rng.choice(_INTS[:3])}) {rng.choice(_COMPARE)} ({rng.choice(_INTS)}))", "(q >= k)", "FLAGS[k]",
            f"((q - k) {rng.choice(_COMPARE)} {rng.randint(-3, 6)})", "(IDS[q] == IDS[k])",
        ])  # fmt: skip
    a, b = _bool(rng, depth - 1), _bool(rng, rng.randrange(depth))
    return rng.choice([f"({a} & {b})", f"({a} | {b})", f"(~{a})", f"({a} ^ {b})", f"torch.logical_not({a})",
                       f"torch.logical_and({a}, {b})", f"torch.where({_bool(rng, 0)}, {a}, {b})"])  # fmt: skip


def _float(rng: random.Random, depth: int) -> str:
    if depth == 0:
        return rng.choice(_FLOATS)
    a = _float(rng, depth - 1)
    if rng.random() < 0.5:
        return rng.choice(_UNARY).format(a=f"(s * 0 + {a})")
    return rng.choice(_BINARY).format(a=a, b=_float(rng, rng.randrange(depth)), c=_bool(rng, rng.randrange(2)))


def score_mod(rng: random.Random, captured: dict[str, Any]) -> RandomMod:
    source = f"lambda s, b, h, q, k: s + 0.5 * torch.tanh(0.2 * ({_float(rng, rng.randint(1, 4))}))"
    if rng.random() < 0.3:
        source = f"lambda s, b, h, q, k: torch.where({_bool(rng, 1)}, {_float(rng, 1)} + s, s * 0.5)"
    return RandomMod(source, captured, [n for n in WANTED if n in source])


def mask_mod(rng: random.Random, captured: dict[str, Any]) -> RandomMod:
    return RandomMod(f"lambda b, h, q, k: {_bool(rng, rng.randint(0, 3))}", captured)


def with_gradients(mod: RandomMod, dtype: torch.dtype | None = None) -> tuple[Any, Sequence[Tensor]]:
    """The mod over leaves of its own, and these."""
    leaves = {n: mod.captured[n].detach().clone() for n in mod.wanted}
    leaves = {n: (x if dtype is None else x.to(dtype)).requires_grad_() for n, x in leaves.items()}
    return mod.function({**mod.captured, **leaves}), list(leaves.values())
