"""The words for a dtype, one table for all that takes one: the decorators, the command line and what packs say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tk._names import did_you_mean

DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8e4m3fn": torch.float8_e4m3fn,
    "fp8e5m2": torch.float8_e5m2,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
    "bool": torch.bool,
}
_OF_TORCH: Mapping[str, str] = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}
# Words that are not taken, since "float" and "int" are numbers here and others are not torch's: only hints.
_ELSEWHERE: Mapping[str, str] = {
    "half": "fp16", "float": "fp32", "double": "fp64", "f16": "fp16", "f32": "fp32", "f64": "fp64", "short": "i16",
    "int": "i32", "long": "i64", "byte": "u8", "char": "i8", "fp8e4nv": "fp8e4m3fn", "fp8e5": "fp8e5m2",
    "e4m3": "fp8e4m3fn", "e5m2": "fp8e5m2", "fp8": "fp8e4m3fn", "float8": "fp8e4m3fn", "f8": "fp8e4m3fn",
}  # fmt: skip


def named(dtype: Any) -> str | None:
    """The name in DTYPES of a torch.dtype, of torch's name for it ("bfloat16", "torch.bfloat16") or of the name itself;
    None for anything else."""
    if not isinstance(dtype, str | torch.dtype):
        return None
    bare = str(dtype).removeprefix("torch.")
    return bare if bare in DTYPES and bare == dtype else _OF_TORCH.get(bare)


def there_are(names: Mapping[str, torch.dtype] = DTYPES) -> str:
    """What is taken, for a message."""
    return f"{', '.join(names)}, or torch's names for them, such as {next(iter(names.values()))}"


def hint(dtype: Any, names: Mapping[str, torch.dtype] = DTYPES) -> str:
    """The nearest name, as the end of a message; nothing where no name is near."""
    said = dtype.__name__ if isinstance(dtype, type) else str(dtype)
    bare = said.removeprefix("torch.").removeprefix("np.").removeprefix("numpy.").lower()
    if (ours := _ELSEWHERE.get(bare) or named(bare)) in names:
        return f". Here {said} is {ours!r}"
    words = [*names, *(torchs for torchs, name in _OF_TORCH.items() if name in names)]
    question = did_you_mean(bare, words, 0.6)
    return f"; {question}" if question else ""
