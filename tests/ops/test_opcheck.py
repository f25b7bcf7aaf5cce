"""torch.library.opcheck of every generated op of the package: schema, fake, autograd and functionalization agree."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tk.generated import inputs, register
from tk.generated.records import GeneratedOp

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # for benchmarks/

from tests.gpu import op_cases  # noqa: E402

# The package's, less those of lists (test_lists.py): no test has loaded a pack yet.
NAMES = [name for name in register.names() if not register.find(name).takes_lists]  # type: ignore[union-attr]


def example(op: GeneratedOp, needs_grad: bool) -> list[object]:
    """Small, in float32 or the first dtype that the op has, all flags false; with gradients where the op has them."""
    shape = op_cases.shape_of(op, (3, 8))
    dtypes = [dtype for allowed in inputs.signature_of(op).variables.values() for dtype in allowed]
    made = inputs.of_shape(op, shape, "fp32" if not dtypes or "fp32" in dtypes else dtypes[0])
    args = made.arguments("cpu")
    return [x.requires_grad_() if needs_grad and isinstance(x, torch.Tensor) and x.is_floating_point() else x
            for x in args]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str) -> None:
    op = register.find(name)
    assert op is not None
    args = example(op, needs_grad=bool(op.backward))
    torch.library.opcheck(getattr(torch.ops.tk, name).default, tuple(args))
