"""Which of torch's ops ``@tk.op`` takes, by torch's own samples (OpInfo): docs/torch-ops.md.

python tools/torch_ops.py            # writes the table; takes a quarter of an hour, needs no GPU
python tools/torch_ops.py add sort   # says of these ops alone what would be written

An op counts as taken where a function that calls it with a sample's arguments is traced and lowered: tensors are
parameters, with a letter for each size, and all else is written down in the function. What Inductor has no Triton
kernel for either (linear algebra, Fourier transforms, …) is refused by name.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("TK_NO_LIBRARY", "1")

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from tk.aot.errors import BuildError
from tk.codegen.lowering.lower import lower
from tk.codegen.lowering.rules import RULED
from tk.codegen.tracing.trace import trace_all
from tk.generated.signature import DTYPES, Signature, TensorSpec

DOCUMENT = Path(__file__).parents[1] / "docs" / "torch-ops.md"
SECONDS = 30  # a sample, then torch's work on symbolic sizes is given up
SAMPLES = 2  # in fp32; one of each other dtype
NAMES = {dtype: name for name, dtype in DTYPES.items()}
COLUMNS = ("fp32", "bf16", "fp64", "i64", "u8", "bool")  # the others go the way of one of these


@dataclass
class Row:
    """taken: by dtype, how many of the samples; total: of how many. reason: of the first refusal."""

    name: str
    taken: dict[str, int] = field(default_factory=dict)
    total: dict[str, int] = field(default_factory=dict)
    reason: str = ""

    def names(self, wanted: str) -> str:
        """The dtypes of which all, some or none of the samples are taken."""
        found = []
        for dtype in COLUMNS:
            if self.total.get(dtype):
                share = self.taken[dtype] / self.total[dtype]
                kind = "all" if share == 1 else "none" if share == 0 else "some"
                found += [dtype] if kind == wanted else []
        return "all" if len(found) == len([t for t in self.total.values() if t]) else " ".join(found)


def samples(info: Any, dtype: torch.dtype) -> Iterator[Any]:
    """Those without empty tensors, with a tensor at all, and with tensors that kernels can read."""
    try:
        for sample in info.sample_inputs("cpu", dtype):
            tensors = [x for x in tree_flatten((sample.input, sample.args, sample.kwargs))[0] if isinstance(x, Tensor)]
            if tensors and all(x.numel() and x.layout == torch.strided and x.dtype in NAMES for x in tensors):
                yield sample
    except (RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError):
        return


def refusal(info: Any, sample: Any) -> str:
    """Why the call of a sample cannot be generated; empty where it can."""
    leaves, structure = tree_flatten((sample.input, sample.args, sample.kwargs))
    tensors = {f"t{i}": x for i, x in enumerate(leaves) if isinstance(x, Tensor)}

    def call(**given: Any) -> Any:
        values = [given.get(f"t{i}", x) for i, x in enumerate(leaves)]
        first, args, kwargs = tree_unflatten(values, structure)
        return info.op(first, *args, **kwargs)

    specs = {name: TensorSpec(NAMES[x.dtype], tuple(1 if n == 1 else f"S{n}" for n in x.shape))
             for name, x in tensors.items()}  # fmt: skip
    signal.alarm(SECONDS)
    try:
        (trace,) = trace_all(call, Signature(specs, {}), RULED)
        lower(trace, "op")
        return ""
    except BuildError as error:
        if TimeoutError.__name__ in str(error):
            return f"torch works on its symbolic sizes for more than {SECONDS} s"
        return plain(re.sub(r"^call \(.*?\): |line \d+: ", "", str(error).splitlines()[0]))
    except Exception as error:  # a raw exception is a mistake of the generator's
        return f"a mistake of the generator's: {type(error).__name__}: {error}".splitlines()[0]
    finally:
        signal.alarm(0)


def plain(reason: str) -> str:
    """A reason without the places in torch's own source that its errors name."""
    reason = re.sub(r'^\d+ INTERNAL ASSERT FAILED at "[^"]*":\d+, please report a bug to PyTorch\. ', "", reason)
    reason = re.sub(r"(?:/[\w.+-]+)+\.\w+:\d+: ", "", reason)
    return re.sub(r"^dispatch_on_subclass called with *$", "torch fails in its own code on symbolic sizes", reason)


def _give_up(*_: Any) -> None:
    raise TimeoutError


def row(info: Any) -> Row:
    name = info.name + (f" ({info.variant_test_name})" if info.variant_test_name else "")
    found = Row(name)
    for column in COLUMNS:
        dtype = DTYPES[column]
        if dtype not in info.dtypes:
            continue
        found.taken[column] = found.total[column] = 0
        for sample in islice(samples(info, dtype), SAMPLES if column == "fp32" else 1):
            why = refusal(info, sample)
            found.total[column] += 1
            found.taken[column] += not why
            found.reason = found.reason or why
    return found


def infos() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return sorted(op_db, key=lambda info: (info.name, info.variant_test_name))


def line(one: Row) -> str:
    reason = one.reason.replace("|", "\\|")
    return f"| {one.name} | {one.names('all')} | {one.names('some')} | {one.names('none')} | {reason[:160]} |"


def text(rows: list[Row]) -> str:
    counted = [r for r in rows if sum(r.total.values())]
    whole = sum(all(r.taken[d] == r.total[d] for d in r.total) for r in counted)
    head = f"""# Which ops a generated kernel may have

By torch {torch.__version__.partition("+")[0]}'s own samples of each op (OpInfo), tried by `tools/torch_ops.py`: {whole} of {len(counted)} ops are taken with
every sample tried, up to {SAMPLES} in fp32 and one in each other dtype. An op counts as taken where a function under `@tk.op`
that calls it, every size a letter, is traced and lowered. Ops of numbers alone, and of tensors that no kernel can read
(sparse, complex), are not in the table.

| op | taken | some samples | refused | why |
|---|---|---|---|---|
"""  # noqa: E501
    return head + "\n".join(line(r) for r in counted) + "\n"


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _give_up)
    chosen = [info for info in infos() if not names or info.name in names]
    rows = []
    for info in chosen:
        rows.append(row(info))
        if names or os.environ.get("TK_PROGRESS"):
            print(line(rows[-1]), flush=True)
    if not names:
        DOCUMENT.write_text(text(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
