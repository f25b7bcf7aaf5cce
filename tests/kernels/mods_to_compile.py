"""Mods of every kind that people write, for tests of what is printed of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

TABLE = torch.randn(4, 9, dtype=torch.bfloat16)
SLOPES = torch.rand(4)
IDS = torch.zeros(2, 64, dtype=torch.int64)
KEEP = torch.ones(64, dtype=torch.bool)
TEMPERATURE = torch.tensor(1.5)
WIDE = torch.rand(4, dtype=torch.float64)
BYTES = torch.zeros(64, dtype=torch.uint8)
PICTURE = torch.rand(4, 64, 64)
CAP, WINDOW, RATE = 20.0, 16, 0.25

SCORES: dict[str, Callable[..., Any]] = {
    "where": lambda s, b, h, q, k: torch.where(q >= k, s, float("-inf")),
    "where_of_constants": lambda s, b, h, q, k: s + torch.where(q - k < WINDOW, 0.0, -1e4),
    "where_of_int": lambda s, b, h, q, k: s * torch.where(q > k, 1, 2),
    "masked_fill": lambda s, b, h, q, k: s.masked_fill(IDS[b, q] != IDS[b, k], float("-inf")),
    "clamp": lambda s, b, h, q, k: s.clamp(-CAP, CAP),
    "clamp_of_index": lambda s, b, h, q, k: s + RATE * (k - q).clamp(min=-8, max=8),
    "abs_sign": lambda s, b, h, q, k: s.abs().sqrt() * s.sign(),
    "tanh": lambda s, b, h, q, k: CAP * torch.tanh(s / CAP),
    "constant": lambda s, b, h, q, k: torch.zeros_like(s) + torch.tensor(3.0),
    "no_score": lambda s, b, h, q, k: SLOPES[h] * torch.ones_like(s),
    "only_query": lambda s, b, h, q, k: (q * 0.5).float(),
    "table": lambda s, b, h, q, k: s + TABLE[h, (k - q).clamp(-4, 4) + 4],
    "by_keys": lambda s, b, h, q, k: s * PICTURE[h, (q + 1).clamp(max=63), k],
    "from_the_end": lambda s, b, h, q, k: s + SLOPES[-1] * TABLE[h, -2],
    "temperature": lambda s, b, h, q, k: s / TEMPERATURE,
    "double": lambda s, b, h, q, k: s * WIDE[h] + 0.1,
    "bytes": lambda s, b, h, q, k: s * (BYTES[q] + BYTES[k]),
    "bools": lambda s, b, h, q, k: torch.where(KEEP[k] & ~KEEP[q], s, s * 2) + KEEP[k],
    "alibi_by_heads": lambda s, b, h, q, k: s + torch.exp2(-((h + 1) * 8.0 / 4)) * (k - q),
    "powers": lambda s, b, h, q, k: s**3 + s.abs() ** 1.5 + 2.0 ** (-h) + s**2,
    "integer_power": lambda s, b, h, q, k: s.abs() ** WINDOW + (q - k) ** 2,
    "gelu": lambda s, b, h, q, k: F.gelu(s) + F.gelu(s, approximate="tanh"),
    "activations": lambda s, b, h, q, k: F.silu(s) + F.relu(s) + F.leaky_relu(s, 0.1) + F.elu(s) + F.softplus(s),
    "more_activations": lambda s, b, h, q, k: F.mish(s) + F.hardswish(s) + F.softshrink(s) + F.relu6(s) + F.selu(s),
    "sigmoid": lambda s, b, h, q, k: torch.sigmoid(s) + F.logsigmoid(s) + torch.special.expit(s),
    "exponentials": lambda s, b, h, q, k: torch.exp(-s.abs()) + torch.exp2(s) + torch.expm1(s) + torch.log1p(s.abs()),
    "logarithms": lambda s, b, h, q, k: torch.log(s.abs() + 1) + torch.log2(s.abs() + 1) + torch.logaddexp(s, s * 2),
    "angles": lambda s, b, h, q, k: torch.sin(s) + torch.cos(s) + torch.atan2(s, s + 2) + torch.erf(s),
    "steps": lambda s, b, h, q, k: torch.floor(s) + torch.round(s * 3) + torch.trunc(s) + torch.ceil(s) + torch.frac(s),
    "divisions": lambda s, b, h, q, k: torch.fmod(s, 1.5) + torch.remainder(s, 0.7) + (q % 3) + q // 5,
    "tests": lambda s, b, h, q, k: torch.where(torch.isnan(s) | torch.isinf(s), torch.zeros_like(s), s).nan_to_num(),
    "least_and_most": lambda s, b, h, q, k: torch.minimum(s, TEMPERATURE) + torch.maximum(s, s * 2) + torch.fmax(s, -s),
    "lerp": lambda s, b, h, q, k: torch.lerp(s, s * 2, RATE) + torch.hypot(s, s + 1) + torch.copysign(s, q - k + 0.5),
    "bits": lambda s, b, h, q, k: s * (((q << 1) ^ (k >> 1)) & 7 | (h & 1)) + (~q).float(),
    "casts": lambda s, b, h, q, k: s.half().float() + s.to(torch.bfloat16) + q.to(torch.int8) + (s * 3).int(),
    "logs_of_distance": lambda s, b, h, q, k: s + torch.log((q - k).abs().float() + 1) * SLOPES[h],
}  # fmt: skip

MASKS: dict[str, Callable[..., Any]] = {
    "causal": lambda b, h, q, k: ~(k > q),
    "window": lambda b, h, q, k: (k <= q) & (q - k < WINDOW),
    "document": lambda b, h, q, k: IDS[b, q] == IDS[b, k],
    "by_head": lambda b, h, q, k: (q - k) % (h + 2) == 0,
    "table": lambda b, h, q, k: KEEP[k],
    "of_batch": lambda b, h, q, k: b % 2 == 0,
    "everything": lambda b, h, q, k: torch.ones_like(b, dtype=torch.bool) | (q > k),
    "nothing": lambda b, h, q, k: torch.zeros((), dtype=torch.bool),
    "floats": lambda b, h, q, k: (q.float() / 3).floor() == (k / 3.0).floor(),
    "where": lambda b, h, q, k: torch.where(h > 1, q >= k, q - k < 4),
    "xor": lambda b, h, q, k: (q > k) ^ (k % 2 == 1),
    "logical": lambda b, h, q, k: torch.logical_and(q > k, torch.logical_not(k == 3)),
}
