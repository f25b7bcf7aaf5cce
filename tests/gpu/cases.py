"""Random products: what a caller may ask for, drawn, run, and judged."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

import tk
from benchmarks import accuracy, products

from .device import DEVICE
from .layouts import OPERAND_LAYOUTS, OUT_LAYOUTS, Placed, place

BIASES = ("none", "row", "strided_row", "one_row", "column", "scalar", "matrix", "matrix_t")
FACTORS = (1.0, 1.0, 0.5, -1.25, 0.0, 2.0)


@dataclass(frozen=True)
class Kind:
    """What decides which kernels can serve a case. precision: of fp32."""

    dtype: torch.dtype
    out_dtype: torch.dtype | None = None
    precision: str = "ieee"

    def __str__(self) -> str:
        out = "_out_fp32" if self.out_dtype is not None else ""
        return products.SHORT[self.dtype] + out + (f"_{self.precision}" if self.dtype == torch.float32 else "")

    @property
    def tensor_cores(self) -> bool:
        return self.dtype != torch.float32 or self.precision == "tf32"

    @property
    def rounds_coarsely(self) -> bool:
        """Whether rounding operands or results outweighs how a sum is ordered."""
        return self.tensor_cores and self.out_dtype is None


KINDS = (
    Kind(torch.bfloat16),
    Kind(torch.float16),
    Kind(torch.bfloat16, torch.float32),
    Kind(torch.float16, torch.float32),
    Kind(torch.float32, precision="ieee"),
    Kind(torch.float32, precision="tf32"),
)


@dataclass(frozen=True)
class Case:
    """op: mm, addmm or linear. out: the layout of a given result, "" for none."""

    op: str
    kind: Kind
    m: int
    n: int
    k: int
    a: str
    b: str
    bias: str
    activation: int
    alpha: float
    beta: float
    out: str


def draw(rng: random.Random, kind: Kind) -> Case:
    op = rng.choice(("mm", "addmm", "linear"))
    m, n, k = draw_sizes(rng)
    # Half of the operands as usual: fast kernels are to be met as often as the general one.
    usual = ("row", "column", "row_pitch", "column_pitch")
    a, b = (rng.choice(usual if rng.random() < 0.5 else OPERAND_LAYOUTS) for _ in range(2))
    if a == b == "expanded":  # all products are one number: rounding errors that add up say nothing of a kernel
        b = "row"
    biases = {"mm": BIASES, "addmm": BIASES[1:], "linear": BIASES[:3]}[op]
    factors = (rng.choice(FACTORS), rng.choice(FACTORS)) if op == "addmm" else (1.0, 1.0)
    out = rng.choice(OUT_LAYOUTS) if rng.random() < 0.25 else ""
    bias = rng.choice(biases) if rng.random() < 0.7 else biases[0]
    return Case(op, kind, m, n, k, a, b, bias, rng.randrange(len(products.ACTIVATIONS)), *factors, out)


def draw_sizes(rng: random.Random) -> tuple[int, int, int]:
    """M, N, K: mostly below 1500; sometimes few rows and a long K, where kernels cut K; rarely nothing at all."""
    if rng.random() < 0.2:
        return rng.randint(1, 64), draw_size(rng, 4096), draw_size(rng, 8192)
    sizes = [draw_size(rng, largest) for largest in (1500, 1500, 2500)]
    if rng.random() < 0.03:
        sizes[rng.randrange(3)] = 0
    return sizes[0], sizes[1], sizes[2]


def draw_size(rng: random.Random, largest: int) -> int:
    way = rng.random()
    if way < 0.2:
        return rng.randint(1, 17)
    if way < 0.5:
        return 16 * rng.randint(1, largest // 16)
    if way < 0.7:  # around powers of two
        return max(1, 2 ** rng.randint(3, largest.bit_length() - 1) + rng.choice((-1, 0, 1)))
    return round(largest ** rng.random())


# --- Running one ---


@dataclass
class Inputs:
    a: Placed
    b: Placed
    bias: torch.Tensor | None
    out: Placed | None


def make_inputs(case: Case, rng: random.Random) -> Inputs:
    out = None
    if case.out:
        out = place(case.m, case.n, case.kind.out_dtype or case.kind.dtype, case.out, rng, fill=float("nan"))
    return Inputs(
        place(case.m, case.k, case.kind.dtype, case.a, rng),
        place(case.k, case.n, case.kind.dtype, case.b, rng),
        make_bias(case),
        out,
    )


def make_bias(case: Case) -> torch.Tensor | None:
    m, n = case.m, case.n

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE).to(case.kind.dtype)

    made = {
        "none": lambda: None,
        "row": lambda: randn(n),
        "strided_row": lambda: randn(n, 3)[:, 1],
        "one_row": lambda: randn(1, n),
        "column": lambda: randn(m, 1),
        "scalar": lambda: randn(),
        "matrix": lambda: randn(m, n),
        "matrix_t": lambda: randn(n, m).t(),
    }
    return made[case.bias]()


def run_tk(case: Case, inputs: Inputs) -> torch.Tensor:
    options = {
        "activation": products.ACTIVATIONS[case.activation][0],
        "out_dtype": case.kind.out_dtype,
        "precision": case.kind.precision if case.kind.dtype == torch.float32 else None,
        "out": inputs.out.view if inputs.out else None,
    }
    a, b, bias = inputs.a.view, inputs.b.view, inputs.bias
    if case.op == "mm":
        return tk.mm(a, b, bias, **options)
    if case.op == "linear":
        return tk.linear(a, b.t(), bias, **options)
    return tk.addmm(bias, a, b, beta=case.beta, alpha=case.alpha, **options)


def run_torch(case: Case, inputs: Inputs) -> torch.Tensor:
    """torch's own result, from its own ops."""
    a, b, bias = inputs.a.view, inputs.b.view, inputs.bias
    activate = products.ACTIVATIONS[case.activation][1]
    with products.torch_precision(case.kind.precision):
        if case.kind.out_dtype is not None:
            z = torch.mm(a, b, out_dtype=torch.float32) if DEVICE == "cuda" else a.float() @ b.float()
            z = case.alpha * z if bias is None else case.alpha * z + case.beta * bias.float()
        elif bias is None:
            z = case.alpha * torch.mm(a, b)
        else:
            z = torch.addmm(bias, a, b, beta=case.beta, alpha=case.alpha)
    return activate(z)


def judge(case: Case, inputs: Inputs, result: torch.Tensor) -> accuracy.Verdict:
    a, b, bias = inputs.a.view, inputs.b.view, inputs.bias
    product = a.double() @ b.double()
    z = case.alpha * product
    if bias is not None and case.beta != 0:
        z = z + case.beta * bias.double()
    reference = products.ACTIVATIONS[case.activation][1](z)
    is_empty = 0 in (case.m, case.n, case.k)
    torchs = reference.to(result.dtype) if is_empty else run_torch(case, inputs)
    magnitude = abs(case.alpha) * max(products.magnitude(a, b), rms(product)) + (rms(z) if bias is not None else 0.0)
    slack = accuracy.slack(case.k, magnitude, case.kind.tensor_cores)
    verdict = accuracy.judge(result, torchs, reference, slack)
    if verdict.ok or case.kind.precision != "tf32":
        return verdict
    # For a single row or column torch does not use tf32 at all. What is asked for is tf32's own error.
    exact = case.alpha * (products.rounded_to_tf32(a).double() @ products.rounded_to_tf32(b).double()) + (
        z - case.alpha * product
    )
    return accuracy.judge(result, products.ACTIVATIONS[case.activation][1](exact).float(), reference, slack)


def rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item() if x.numel() else 0.0


@dataclass(frozen=True)
class Outcome:
    """problem: what is wrong, "" if nothing. magnitude: of the reference, to add errors of several cases."""

    problem: str
    verdict: accuracy.Verdict


def check(case: Case, rng: random.Random) -> Outcome:
    inputs = make_inputs(case, rng)
    result = run_tk(case, inputs)
    verdict = judge(case, inputs, result)
    problem = "" if verdict.ok else str(verdict)
    if result.shape != (case.m, case.n) or result.dtype != (case.kind.out_dtype or case.kind.dtype):
        problem = f"a result of {tuple(result.shape)}, {result.dtype}"
    if inputs.out is not None:
        if result.data_ptr() != inputs.out.view.data_ptr():
            problem = "out was not used"
        elif not inputs.out.untouched():
            problem = "memory outside out was written"
    return Outcome(problem, verdict)
