"""kernels/conv: every kernel at every combination of its axes, against float64. fp32 and fp16 only: the interpreter's
bf16 `tl.dot` is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from tk.aot.expr import evaluate_locals
from tk.aot.grid import Variant, enumerate_grid
from tk.aot.spec import Const
from tk.kernels.conv.copies.blocks import FAMILY as BLOCKS_FAMILY
from tk.kernels.conv.copies.blocks import OP as BLOCKS
from tk.kernels.conv.copies.layout import FAMILY as LAYOUT_FAMILY
from tk.kernels.conv.copies.layout import OP as LAYOUT
from tk.kernels.conv.copies.unfold import FAMILY as UNFOLD_FAMILY
from tk.kernels.conv.copies.unfold import OP as UNFOLD
from tk.kernels.conv.forward.contained_op import FAMILY as CONTAINED_FAMILY
from tk.kernels.conv.forward.contained_op import OP as CONTAINED
from tk.kernels.conv.forward.family import FAMILY
from tk.kernels.conv.op import OP
from tk.kernels.conv.weight_grad.family import FAMILY as WEIGHT_GRAD_FAMILY
from tk.kernels.conv.weight_grad.op import OP as WEIGHT_GRAD
from tk.kernels.conv.weight_grad.reduce import SPLITS

from .launcher import describe, run

DTYPES = {"fp16": torch.float16, "fp32": torch.float32}
# One rounding to the result; of fp32 the sum and the activation, which is within 1e-6 of its value.
EPSILON = {torch.float16: 2.0**-10, torch.float32: 2.0**-20}
ACTIVATIONS = {0: lambda z: z, 1: F.relu, 2: F.gelu, 4: F.silu}


Spoil = Callable[[torch.Tensor, torch.Tensor], None]


def untouched(x: torch.Tensor, weight: torch.Tensor) -> None:
    pass


@dataclass(frozen=True)
class Case:
    """A convolution of [n, groups * c, *sizes]."""

    n: int
    groups: int
    c: int
    o: int
    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    bias: bool = False
    activation: int = 0

    @property
    def out_sizes(self) -> tuple[int, ...]:
        extents = zip(self.sizes, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in extents)


CASES = (
    Case(2, 1, 16, 32, (5, 6), (3, 3), (1, 1), (1, 1), (1, 1), bias=True),
    Case(1, 1, 48, 80, (9, 7), (3, 2), (2, 1), (2, 0), (1, 2), activation=4),
    Case(1, 1, 16, 16, (3, 6, 5), (2, 3, 3), (1, 2, 1), (1, 1, 0), (1, 1, 1), bias=True, activation=2),
    Case(1, 1, 32, 16, (40,), (5,), (3,), (2,), (2,)),
    Case(2, 1, 16, 16, (4, 4), (1, 1), (2, 2), (0, 0), (1, 1), bias=True, activation=1),
)
GENERAL = (
    Case(2, 1, 3, 20, (11, 9), (5, 3), (2, 2), (2, 1), (1, 1), bias=True, activation=1),
    Case(1, 1, 5, 7, (4, 5, 3), (2, 2, 2), (1, 1, 2), (1, 0, 1), (2, 1, 1)),
    Case(1, 1, 70, 130, (6,), (3,), (1,), (1,), (1,)),
)
GROUPED = (
    Case(1, 4, 8, 8, (5, 6), (3, 3), (1, 1), (1, 1), (1, 1), bias=True, activation=1),
    Case(1, 3, 16, 32, (4, 4), (2, 2), (1, 1), (1, 0), (1, 1)),
)
GROUPED_GENERAL = (
    Case(2, 5, 3, 2, (5, 6), (3, 3), (2, 1), (1, 1), (1, 2), bias=True),
    Case(1, 3, 16, 40, (4, 4), (2, 2), (1, 1), (1, 0), (1, 1)),
)
DEPTHWISE = (
    Case(2, 40, 1, 1, (6, 5), (3, 3), (1, 1), (1, 1), (1, 1), bias=True, activation=4),
    Case(1, 104, 1, 1, (17,), (7,), (2,), (3,), (1,)),
)
DEPTHWISE_ODD = (
    Case(2, 21, 1, 1, (6, 5), (3, 2), (1, 2), (1, 1), (2, 1), bias=True, activation=4),
    Case(1, 70, 1, 1, (17,), (7,), (2,), (3,), (1,)),
)
DEPTHWISE_GENERAL = (
    *DEPTHWISE,
    Case(1, 5, 1, 3, (4, 6, 5), (3, 2, 3), (1, 1, 2), (1, 1, 0), (1, 1, 1), bias=True),
)


def interpretable() -> list[Variant]:
    return [v for v in enumerate_grid(FAMILY, 80).variants if v.point.dtype in DTYPES]


def cases(v: Variant) -> tuple[Case, ...]:
    general = v.point.layout == "any"
    if v.kernel.name == "conv_depthwise":
        return {"any": DEPTHWISE_GENERAL, "channels_last_odd": DEPTHWISE_ODD}.get(v.point.layout, DEPTHWISE)
    if v.kernel.name == "conv_depthwise_slide":
        return sliding(v)
    if v.point.grouped:
        return GROUPED_GENERAL if general else GROUPED
    return (*CASES[:2], *GENERAL) if general else CASES


def sliding(v: Variant) -> tuple[Case, ...]:
    """More than one block along every dimension, and none that is full; other taps, strides and dilations across."""
    k, s = v.point.taps, v.point.stride
    if v.point.layout != "contiguous":
        many, few = (37, 18) if v.point.layout == "channels_last_odd" else (40, 24)
        return (
            Case(2, many, 1, 1, (9, 9 * s + 1), (3, k), (2, s), (1, k // 2), (2, 1), bias=True, activation=4),
            Case(1, few, 1, 1, (3, 4, 5 * s + k), (2, 1, k), (1, 1, s), (1, 0, 1), (1, 1, 1)),
        )
    return (
        Case(2, 9, 1, 2, (9 * s + 1, 19), (k, 3), (s, 2), (k // 2, 2), (1, 2), bias=True, activation=4),
        Case(1, 5, 1, 1, (3, 5 * s + k, 4), (2, k, 1), (1, s, 1), (1, 1, 0), (1, 1, 1)),
    )


def as_3d(values: tuple[int, ...], fill: int) -> tuple[int, ...]:
    return (fill,) * (3 - len(values)) + values


def channels_last(x: torch.Tensor, channels: int) -> torch.Tensor:
    """The same values, dimension `channels` contiguous."""
    return x.movedim(channels, -1).contiguous().movedim(-1, channels)


def as_operand(x: torch.Tensor, layout: str, unit: int) -> torch.Tensor:
    """In a layout, NaN around it. unit: the dimension of channels."""
    if layout.startswith("channels_last"):
        return channels_last(x, unit)
    memory = torch.full((x.numel() + 5,), math.nan, dtype=x.dtype)
    return memory[5:].view(x.shape).copy_(x)


def split_groups(x: torch.Tensor, groups: int, dim: int) -> torch.Tensor:
    return x.unflatten(dim, (groups, -1))


def without_size_one(x: torch.Tensor) -> torch.Tensor:
    """As the ops library describes it: the stride of a dimension of size 1 is 0, of the channels 1."""
    channels = 1 if x.dim() == 2 else 2
    strides = [(s if n > 1 else int(d == channels)) for d, (n, s) in enumerate(zip(x.shape, x.stride(), strict=True))]
    return x.as_strided(x.shape, strides)


def convolve(v: Variant, case: Case, spoil: Spoil = untouched) -> tuple[torch.Tensor, torch.Tensor]:
    """By the variant's plan, and exactly. spoil: what is done to input and weight before."""
    dtype, layout = DTYPES[v.point.dtype], v.point.layout
    g, out_layout = case.groups, "any" if layout == "mixed" else layout
    in_layout = "channels_last" if layout == "mixed" else layout
    sizes, kernel, out_sizes = as_3d(case.sizes, 1), as_3d(case.kernel, 1), as_3d(case.out_sizes, 1)
    x = torch.randn(case.n, g * case.c, *sizes, dtype=dtype)
    weight = torch.randn(g * case.o, case.c, *kernel, dtype=dtype)
    bias = torch.randn(g * case.o, dtype=dtype) if case.bias else None
    geometry = (*as_3d(case.stride, 1), *as_3d(case.padding, 0), *as_3d(case.dilation, 1))
    if v.point.precision == "tf32":  # what tf32 has room for: both sides see the same numbers
        x, weight = (t.half().float() for t in (x, weight))
    spoil(x, weight)
    exact = F.conv3d(x.double(), weight.double(), None if bias is None else bias.double(), *(
        geometry[i : i + 3] for i in (0, 3, 6)), groups=g)  # fmt: skip
    exact = ACTIVATIONS[case.activation](exact)

    out = as_operand(torch.zeros(case.n, g * case.o, *out_sizes, dtype=dtype), out_layout, 1).fill_(math.nan)
    tensors = [
        split_groups(as_operand(x, in_layout, 1), g, 1),
        split_groups(as_operand(weight, in_layout, 1), g, 0),
        None if bias is None else split_groups(bias, g, 0),
        split_groups(out, g, 1),
    ]
    tensors = [None if t is None else without_size_one(t) for t in tensors]
    precision = ("ieee", "tf32").index(v.point.precision)
    run(OP, v.plan, tensors, (*geometry, case.activation, precision), ())
    return out, exact


def name(v: Variant) -> str:
    return "-".join(map(str, (v.kernel.name, v.point.config.name, *v.point.axes.values())))


@pytest.mark.drawn
@pytest.mark.parametrize("v", interpretable(), ids=name)
def test_against_float64(v):
    torch.manual_seed(0)
    for case in cases(v):
        out, exact = convolve(v, case)
        inner = case.c * math.prod(case.kernel)
        eps = EPSILON[out.dtype]
        torch.testing.assert_close(out.double(), exact, rtol=2 * eps, atol=eps * inner**0.5)


def kinds(variants: list[Variant], *axes: str) -> list[Variant]:
    """One variant of each kernel at each value of these axes, of fp32 and the fewest taps."""
    found: dict[tuple[object, ...], Variant] = {}
    for v in variants:
        if (
            v.point.dtype == "fp32"
            and v.point.axes.get("precision", "ieee") == "ieee"
            and v.point.axes.get("taps", 3) == 3
        ):
            found.setdefault((v.kernel.name, *(v.point.axes.get(axis) for axis in axes)), v)
    return list(found.values())


# What is spoilt: input or weight (of its gradient: the result's gradient or the input), at which of its elements.
PLACES = [(0, 0.37, math.nan), (0, 0.43, math.inf), (1, 0.6, math.nan)]


def spoilt(tensors: tuple[torch.Tensor, ...], which: int, at: float, value: float) -> None:
    flat = tensors[which].view(-1)
    flat[int(at * flat.numel())] = value


@pytest.mark.drawn
@pytest.mark.parametrize(("which", "at", "value"), PLACES)
@pytest.mark.parametrize("v", kinds(interpretable(), "layout", "grouped", "stride"), ids=name)
def test_one_nan_goes_where_atens_goes(v, which, at, value):
    torch.manual_seed(0)
    case = cases(v)[0]
    case = replace(case, activation=min(case.activation, 1))
    if v.kernel.name == "conv_depthwise" and v.point.layout == "any":
        case = replace(case, groups=4)  # a program for each channel
    out, exact = convolve(v, case, lambda x, weight: spoilt((x, weight), which, at, value))
    assert exact.isfinite().any()
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4, equal_nan=True)


def multiplied_as_one(x, weight, case, merge):
    """What groups give of which `merge` are one product: 0 * NaN and 0 * inf are NaN."""
    c, o = case.c, case.o
    blocks = []
    for first in range(0, case.groups, merge):
        count = min(merge, case.groups - first)
        block = torch.zeros(count * o, count * c, *case.kernel, dtype=torch.double)
        for g in range(count):
            block[g * o : (g + 1) * o, g * c : (g + 1) * c] = weight[(first + g) * o : (first + g + 1) * o].double()
        part = x[:, first * c : (first + count) * c].double()
        read = F.unfold(part, case.kernel, case.dilation, case.padding, case.stride)
        blocks.append((block.flatten(1)[None, :, :, None] * read[:, None]).sum(2))
    return torch.cat(blocks, 1).unflatten(2, case.out_sizes)


@pytest.mark.parametrize("v", enumerate_grid(BLOCKS_FAMILY, 80).variants, ids=name)
@pytest.mark.parametrize("exchanged", [False, True], ids=["forward", "for the way back"])
def test_weights_of_groups_are_blocks_on_a_diagonal(v, exchanged):
    """Whatever the weight's strides."""
    torch.manual_seed(0)
    dtype = torch.float16 if v.point.bits == "i16" else torch.float32
    for groups, merge, o, c, kernel in ((6, 3, 7, 16, (1, 3, 2)), (4, 2, 40, 40, (2, 1, 3))):
        sizes = (groups, c, o) if exchanged else (groups, o, c)
        weight = torch.randn(*sizes, *kernel, dtype=dtype)
        weight = weight.transpose(1, 2) if exchanged else weight
        out = torch.full((groups // merge, *kernel, merge * c), 77, dtype=dtype)
        out = out[:, None].repeat(1, merge * o, 1, 1, 1, 1).movedim(-1, 2)
        run(BLOCKS, v.plan, [without_size_one(t) for t in (weight, out)], (), ())
        for m, product in enumerate(weight.unflatten(0, (-1, merge))):
            expected = torch.zeros_like(out[m])
            for i, filters in enumerate(product):
                expected[i * o : (i + 1) * o, i * c : (i + 1) * c] = filters
            assert torch.equal(out[m], expected)


CONTAINED_CASES = (replace(GROUPED[0], o=16), GROUPED_GENERAL[0])  # 4 groups of 16 channels, 5 of 2


@pytest.mark.parametrize("v", enumerate_grid(CONTAINED_FAMILY, 80).variants, ids=name)
@pytest.mark.parametrize("case", CONTAINED_CASES, ids=["16 channels", "2 channels"])
@pytest.mark.parametrize("merge", [2, 4])
def test_nans_of_merged_groups_are_worked_out_again(v, case, merge):
    """Of out as merged groups leave it, whichever group has what is no number; and numbers stay as they are."""
    dtype = DTYPES.get(v.point.dtype)
    if dtype is None or (v.point.layout == "channels_last" and case.o != 16):
        return
    g = case.groups
    for group in (0, 1, g - 1):
        torch.manual_seed(group)
        x = torch.randn(case.n, g * case.c, *case.sizes, dtype=dtype)
        weight, bias = torch.randn(g * case.o, case.c, *case.kernel, dtype=dtype), torch.randn(g * case.o, dtype=dtype)
        x[0, group * case.c, 2, 2], x[-1, (group + 1) * case.c - 1, 0, 3] = math.nan, math.inf
        exact = F.conv2d(x.double(), weight.double(), bias.double(), case.stride, case.padding, case.dilation, g)
        exact = F.relu(exact)
        merged = F.relu(multiplied_as_one(x, weight, case, merge) + bias.double()[:, None, None]).to(dtype)
        assert exact.isnan().any() and exact.isinf().any()
        alone = group // merge * merge == g - 1
        assert alone or merged.isnan().sum() > exact.isnan().sum()
        out = contained(v, case, merge, x, weight, bias, merged)
        eps = EPSILON[dtype]
        torch.testing.assert_close(out.double(), exact, rtol=4 * eps, atol=16 * eps, equal_nan=True)
        assert torch.equal(out[~merged.isnan()], merged[~merged.isnan()])


@pytest.mark.parametrize("v", enumerate_grid(CONTAINED_FAMILY, 80).variants, ids=name)
def test_two_elements_of_each_pixel_are_looked_at(v):
    """What is carried over from another group is in one of them. So a NaN elsewhere is its group's own, and stays."""
    case = CONTAINED_CASES[0]
    dtype = DTYPES.get(v.point.dtype)
    if dtype is None:
        return
    x, weight, bias = (torch.zeros(n, dtype=dtype) for n in ((1, 32, 5, 6), (64, 8, 3, 3), (64,)))
    looked_at = torch.tensor([15, 16])
    for channel in (0, 14, 15, 16, 17, 63):
        out = torch.ones(1, 64, 5, 6, dtype=dtype)
        out[0, channel, 3, 4] = math.nan
        found = contained(v, case, 4, x, weight, bias, out)[0, channel, 3, 4]
        assert found == 0 if channel in looked_at else found.isnan()


def contained(v, case, merge, x, weight, bias, merged):
    """`merged` after a launch of conv_contained."""
    g = case.groups
    out = as_operand(merged, v.point.layout, 1)
    tensors = [split_groups(x, g, 1).unsqueeze(3), split_groups(weight, g, 0).unsqueeze(3), split_groups(bias, g, 0),
               split_groups(out, g, 1).unsqueeze(3)]  # fmt: skip
    geometry = (case.stride, case.padding, case.dilation)
    ints = sum(((fill, *dims) for fill, dims in zip((1, 0, 1), geometry, strict=True)), ()) + (1, 0, merge)
    run(CONTAINED, v.plan, [without_size_one(t) for t in tensors], ints, ())
    return out


WALKED_BACKWARDS = [
    v
    for v in interpretable()
    if v.point.config.name.startswith("64x32x16_s")
    or (v.kernel.name == "conv_depthwise_slide" and v.point.axes["dtype"] == "fp32" and v.point.taps == 3)
]


@pytest.mark.parametrize("v", [v for v in WALKED_BACKWARDS if v.point.axes.get("stride", 1) == 1], ids=name)
def test_negative_dilation_is_the_gradient_of_the_input(v):
    """A stride of 1: the gradient reads the result at h + padding - tap * dilation."""
    if v.point.layout == "mixed":
        return
    torch.manual_seed(0)
    if v.kernel.name == "conv_depthwise_slide":
        channels = 19 if v.point.layout == "channels_last_odd" else 16
        case = Case(2, channels, 1, 1, (9, 11), (3, 3), (1, 1), (1, 1), (1, 1))
    else:
        case = replace(GROUPED[0] if v.point.grouped else CASES[0], bias=False, activation=0)
    g = case.groups
    x = torch.randn(case.n, g * case.c, *case.sizes, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(g * case.o, case.c, *case.kernel, dtype=torch.float64)
    y = F.conv2d(x, weight, None, case.stride, case.padding, case.dilation, g)
    grad = torch.randn_like(y)
    (exact,) = torch.autograd.grad(y, x, grad)

    layout = v.point.layout
    swapped = split_groups(weight.float(), g, 0).transpose(1, 2)  # [G, C, O, KH, KW]
    if layout.startswith("channels_last"):
        swapped = channels_last(swapped, 2)
    out = as_operand(torch.zeros(x.shape), layout, 1).fill_(math.nan)
    tensors = [
        split_groups(as_operand(grad.float(), layout, 1), g, 1).unsqueeze(3),
        swapped.unsqueeze(3),
        None,
        split_groups(out, g, 1).unsqueeze(3),
    ]
    tensors = [None if t is None else without_size_one(t) for t in tensors]
    run(OP, v.plan, tensors, (1, 1, 1, 0, -1, -1, 1, -1, -1, 0, 0), ())
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


# --- The weight's gradient ---


def gradient_cases(v: Variant) -> tuple[Case, ...]:
    general = v.point.layout == "any"
    if v.kernel.name == "weight_grad_slide":
        return sliding(v)
    if v.kernel.name == "weight_grad_depthwise":
        return DEPTHWISE_GENERAL if general else DEPTHWISE
    if v.point.grouped:
        return GROUPED_GENERAL if general else GROUPED
    return (*CASES[:2], *GENERAL) if general else CASES


def variants_of_the_weights_gradient() -> list[Variant]:
    return [v for v in enumerate_grid(WEIGHT_GRAD_FAMILY, 80).variants if v.point.dtype in DTYPES]


def check_weight_gradient(v: Variant, case: Case, spoil: Spoil = untouched) -> None:
    dtype, layout, g = DTYPES[v.point.dtype], v.point.layout, case.groups
    sizes, kernel, out_sizes = as_3d(case.sizes, 1), as_3d(case.kernel, 1), as_3d(case.out_sizes, 1)
    geometry = (*as_3d(case.stride, 1), *as_3d(case.padding, 0), *as_3d(case.dilation, 1))
    x = torch.randn(case.n, g * case.c, *sizes).half().to(dtype)  # what tf32 has room for
    grad = torch.randn(case.n, g * case.o, *out_sizes).half().to(dtype)
    spoil(grad, x)

    def gradient(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        weight = torch.zeros(g * case.o, case.c, *kernel, dtype=torch.float64, requires_grad=True)
        y = F.conv3d(x, weight, None, *(geometry[i : i + 3] for i in (0, 3, 6)), groups=g)
        return torch.autograd.grad(y, weight, grad)[0]

    exact = gradient(x.double(), grad.double())
    weight = exact

    out = torch.full(weight.shape, math.nan, dtype=dtype)
    tensors = [
        split_groups(as_operand(grad, layout, 1), g, 1),
        split_groups(as_operand(x, layout, 1), g, 1),
        split_groups(out, g, 0),
    ]
    precision = ("ieee", "tf32").index(v.point.precision)
    run(WEIGHT_GRAD, v.plan, [without_size_one(t) for t in tensors], (*geometry, precision), ())
    eps, inner = EPSILON[dtype], case.n * math.prod(out_sizes)
    found = out.double()
    if spoil is not untouched:
        # A gradient that is no number meets zeros of the padding in torch's unfolded images; it need not.
        must = gradient(torch.ones_like(x).double(), (~grad.isfinite()).double()) > 0
        free = ~exact.isfinite() & ~must if not grad.isfinite().all() else torch.zeros_like(must)
        found, exact = found.masked_fill(free, 0), exact.masked_fill(free, 0)
        assert exact.isfinite().any()
    torch.testing.assert_close(found, exact, rtol=2 * eps, atol=eps * inner**0.5, equal_nan=True)


@pytest.mark.drawn
@pytest.mark.parametrize("v", variants_of_the_weights_gradient(), ids=name)
def test_weight_gradient_against_float64(v):
    torch.manual_seed(0)
    for case in gradient_cases(v):
        check_weight_gradient(v, case)


@pytest.mark.drawn
@pytest.mark.parametrize(("which", "at", "value"), PLACES)
@pytest.mark.parametrize("v", kinds(variants_of_the_weights_gradient(), "layout", "grouped", "stride"), ids=name)
def test_one_nan_in_a_weight_gradient(v, which, at, value):
    torch.manual_seed(0)
    case = gradient_cases(v)[0]
    if v.kernel.name == "weight_grad_depthwise" and v.point.layout == "any":
        case = replace(case, groups=4, kernel=(2, 2))  # a program for each channel and tap
    check_weight_gradient(v, case, lambda grad, x: spoilt((grad, x), which, at, value))


def test_a_pixel_that_no_pixel_of_the_result_reads_by_a_tap():
    """The last of a line, which the first tap does not reach."""
    v = next(v for v in variants_of_the_weights_gradient() if v.kernel.name == "weight_grad_slide"
             and v.point.dtype == "fp32" and (v.point.taps, v.point.stride) == (3, 1))  # fmt: skip
    case = Case(2, 16, 1, 1, (5, 9), (3, 3), (1, 1), (0, 0), (1, 1))
    assert case.out_sizes[1] % 4 != 0

    def spoil(grad: torch.Tensor, x: torch.Tensor) -> None:
        x[:, 0, :, :, -1] = math.nan

    check_weight_gradient(v, case, spoil)


def splits(v: Variant, tensors: list[torch.Tensor], ints: tuple[int, ...]) -> int:
    problem = describe(WEIGHT_GRAD, tensors, ints)
    return SPLITS.evaluate(replace(problem, locals=evaluate_locals(v.plan.locals, problem)))


@pytest.mark.parametrize("wide", [False, True])
def test_more_parts_than_are_added_up_at_a_time(wide):
    v = next(v for v in variants_of_the_weights_gradient() if v.point.config.name == "32x32x16_s3_w4_fma"
             and v.point.layout == "channels_last" and not v.point.grouped)  # fmt: skip
    case = Case(1, 1, 16, 16, (27, 31), (1, 2), (1, 1), (0, 0), (1, 1))
    x, grad, out = (torch.zeros(1, 1, 16, 1, *sizes) for sizes in (case.sizes, case.out_sizes, case.kernel))
    assert splits(v, [grad, x, out], (1, 1, 1, 0, 0, 0, 1, 1, 1, 0)) > 4
    torch.manual_seed(0)
    product, reduce = v.plan.launches
    launches = (product, replace(reduce, args={**reduce.args, "WIDE": Const(wide)}))
    check_weight_gradient(replace(v, plan=replace(v.plan, launches=launches)), case)


def test_the_pixels_are_split():
    """Otherwise none of the above would add up several parts."""
    v = next(v for v in variants_of_the_weights_gradient() if v.point.config.name == "64x64x32_s4_w4")
    x = torch.zeros(4, 1, 16, 1, 30, 30, dtype=torch.float16)
    grad = torch.zeros(4, 1, 16, 1, 30, 30, dtype=torch.float16)
    assert splits(v, [grad, x, torch.zeros(1, 16, 16, 1, 3, 3, dtype=torch.float16)], (1,) * 9 + (0,)) > 4


# --- The copy with channels together ---


@pytest.mark.drawn
@pytest.mark.parametrize("v", enumerate_grid(LAYOUT_FAMILY, 80).variants, ids=name)
@pytest.mark.parametrize(("n", "channels", "sizes"), [(2, 80, (1, 8, 10)), (3, 16, (2, 3, 16)), (1, 64, (1, 1, 64))])
def test_layout(v, n, channels, sizes):
    x = torch.randn(n, channels, *sizes, dtype=torch.float32 if v.point.bits == "i32" else torch.float16)
    out = channels_last(torch.full_like(x, math.nan), 1)
    given = x if v.point.joined else as_operand(x.transpose(3, 4), "any", 1).transpose(3, 4)
    tensors = [without_size_one(split_groups(t, 2, 1)) for t in (given, out)]
    run(LAYOUT, v.plan, tensors, (), ())
    assert torch.equal(out, x)


# --- Taps as channels ---


@pytest.mark.drawn
@pytest.mark.parametrize("v", enumerate_grid(UNFOLD_FAMILY, 80).variants, ids=name)
@pytest.mark.parametrize(
    ("channels", "taps", "stride", "padding", "dilation", "room"),
    [(3, 7, 2, 3, 1, 32), (5, 1, 1, 0, 1, 16), (2, 5, 3, 1, 2, 48), (37, 1, 1, 0, 1, 48), (3, 4, 4, 0, 1, 16)],
)
@pytest.mark.parametrize("last", [True, False])
def test_unfold(v, channels, taps, stride, padding, dilation, room, last):
    dtype = torch.float32 if v.point.bits == "i32" else torch.float16
    x = torch.randn(2, channels, 2, 3, 41, dtype=dtype)
    lines = F.pad(x, (padding, padding)).unfold(-1, dilation * (taps - 1) + 1, stride)[..., ::dilation]
    pixels = lines.shape[-2]
    expected = torch.zeros(2, room, 2, 3, pixels, dtype=dtype)
    expected[:, : taps * channels] = lines.movedim(-1, 1).flatten(1, 2)
    out = channels_last(torch.full_like(expected, math.nan), 1)
    given = as_operand(x, "channels_last" if last else "any", 1)
    tensors = [without_size_one(split_groups(t, 1, 1)) for t in (given, out)]
    run(UNFOLD, v.plan, tensors, (taps, stride, padding, dilation), ())
    assert torch.equal(out, expected)
