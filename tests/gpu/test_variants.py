"""Every variant that the packs hold for mm, each on several problems, against fp64."""

import pytest
import torch

from benchmarks import accuracy, products

from .cases import rms
from .variants import BUCKETS, Bucket, Operands, problems


def judge(operands: Operands, result: torch.Tensor, reference: torch.Tensor, torchs: torch.Tensor) -> str:
    """What is wrong; "" if nothing."""
    magnitude = products.magnitude(operands.a, operands.b) + rms(reference)
    room = accuracy.slack(operands.a.shape[1], magnitude, operands.kind.tensor_cores)
    verdict = accuracy.judge(result, torchs, reference, room)
    return "" if verdict.ok else str(verdict)


def run_torch(operands: Operands) -> torch.Tensor:
    """Of 16-bit operands the best there is, one rounding of the exact result; of fp32 ones what torch makes of them."""
    if operands.kind.dtype != torch.float32:
        return operands.reference().to(operands.kind.out_dtype or operands.kind.dtype)
    # For a single row torch does not use tf32 at all, so it gets that row twice.
    rows = operands.a.shape[0]
    a = operands.a if rows > 1 else torch.cat([operands.a] * 2)
    with products.torch_precision(operands.kind.precision):
        return products.run_torch(a, operands.b, operands.bias, operands.activation)[:rows]


@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
def test_every_variant_of_a_bucket(bucket: Bucket) -> None:
    wrong: list[str] = []
    waiting: dict[int, str] = {}
    ran: set[int] = set()
    for operands in problems(bucket):
        reference, torchs = operands.reference(), run_torch(operands)
        runs, rests = operands.candidates()
        for row in rests:
            waiting[row.variant] = f"{operands.name(row)}: {row.failed_constraint}"
        for row in runs:
            ran.add(row.variant)
            if trouble := judge(operands, operands.run(row.config), reference, torchs):
                wrong.append(f"{operands.name(row)}: {trouble}")
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:8])
    assert ran, "the bucket has no variant that runs anything"
    assert ran >= set(waiting), f"no problem here suits these: {[waiting[v] for v in set(waiting) - ran]}"
