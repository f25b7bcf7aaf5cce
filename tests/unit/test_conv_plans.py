"""The plans of convolutions as expressions: what they tell TMA, and which kernels take what, without a GPU."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from tk.aot.expr import MODE_BITS, Problem, TensorValue, evaluate_locals
from tk.aot.grid import Variant, bucket_expr, buckets, enumerate_grid
from tk.aot.spec import DTYPES
from tk.kernels.conv.copies.layout import FAMILY as LAYOUT_FAMILY
from tk.kernels.conv.copies.layout import OP as LAYOUT
from tk.kernels.conv.forward.family import FAMILY
from tk.kernels.conv.op import OP
from tk.kernels.conv.weight_grad.family import FAMILY as WEIGHT_GRAD_FAMILY
from tk.kernels.conv.weight_grad.op import OP as WEIGHT_GRAD
from tk.kernels.conv.weight_grad.reduce import SHARE, SPLITS

H200 = {"sm_count": 132, "arch": 90, "shared_optin": 232448, "l2_bytes": 60 << 20}
GRID = enumerate_grid(FAMILY, 90)
LAYOUT_GRID = enumerate_grid(LAYOUT_FAMILY, 90)
WEIGHT_GRAD_GRID = enumerate_grid(WEIGHT_GRAD_FAMILY, 90)


@dataclass(frozen=True)
class Case:
    n: int
    c: int
    o: int
    size: tuple[int, int, int]
    kernel: tuple[int, int, int]
    stride: tuple[int, int, int]
    padding: tuple[int, int, int]
    dilation: tuple[int, int, int]
    out: tuple[int, int, int]
    groups: int = 1
    last: bool = True
    mode: int = 0
    bias: bool = False

    def problem(self) -> Problem:
        image = [self.n, self.groups, self.c, *self.size]
        weight = [self.groups, self.o, self.c, *self.kernel]
        out = [self.n, self.groups, self.o, *self.out]
        tensors = [
            value(image, (0, 3, 4, 5, 1, 2) if self.last else range(6)),
            value(weight, (0, 1, 3, 4, 5, 2)),
            value([self.groups, self.o], (0, 1)) if self.bias else None,
            value(out, (0, 3, 4, 5, 1, 2) if self.last else range(6)),
        ]
        bare = Problem(tensors, (*self.stride, *self.padding, *self.dilation, 0, 0), self.mode, H200)
        return replace(bare, locals=evaluate_locals(OP.locals.values(), bare))


def value(sizes: list[int], order) -> TensorValue:
    """Dense, its dimensions in this order; strides of size 1 as the ops library gives them."""
    strides, stride = [0] * len(sizes), 1
    for d in reversed(list(order)):
        strides[d] = stride
        stride *= sizes[d]
    units = (2,) if len(sizes) == 6 else (1,)
    strides = [s if n != 1 else int(d in units) for d, (n, s) in enumerate(zip(sizes, strides, strict=True))]
    return TensorValue(tuple(sizes), tuple(strides), DTYPES["bf16"], 256)


def result(size, kernel, stride, padding, dilation) -> tuple[int, ...]:
    parts = zip(size, kernel, stride, padding, dilation, strict=True)
    return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in parts)


def conv2d(n, c, o, size, kernel=3, stride=1, padding=None, groups=1, **other) -> Case:
    padding = kernel // 2 if padding is None else padding
    geometry = (1, kernel, kernel), (1, stride, stride), (0, padding, padding), (1, 1, 1)
    return Case(n, c, o, (1, size, size), *geometry, result((1, size, size), *geometry), groups, **other)


def fitting(problem: Problem) -> dict[str, tuple[Variant, int]]:
    """The variants that can run, with their predicted time."""
    found = {}
    for i in buckets(OP, GRID.variants)[bucket_expr(OP).evaluate(problem)]:
        v = GRID.variants[i]
        if all(c.holds.evaluate(problem) for c in v.plan.constraints):
            inner = replace(problem, locals=evaluate_locals(v.plan.locals, problem))
            found[v.name] = v, v.plan.cost.evaluate(inner)
    return found


def fastest(case: Case) -> Variant:
    return min(fitting(case.problem()).values(), key=lambda entry: entry[1])[0]


@pytest.mark.parametrize(
    ("case", "kernel"),
    [
        (conv2d(32, 256, 256, 56), "conv_tma"),
        (conv2d(32, 64, 128, 224, stride=2), "conv_tma"),
        (conv2d(32, 1024, 2048, 14, kernel=1, stride=2), "conv_tma"),
        (conv2d(32, 3, 64, 224, kernel=7, stride=2), "conv_pointer"),
        (conv2d(32, 8, 8, 56, groups=32), "conv_pointer"),
        (conv2d(32, 64, 64, 56, groups=4), "conv_tma"),
        (conv2d(32, 64, 48, 56, groups=4), "conv_pointer"),  # a tile of 64 would have 16 of the next group's
        (conv2d(32, 48, 64, 56, groups=4), "conv_pointer"),  # and a step of 64 channels
        (conv2d(32, 1, 1, 56, kernel=7, groups=96), "conv_depthwise_slide"),
        (conv2d(32, 1, 1, 56, kernel=7, groups=96, last=False), "conv_depthwise_slide"),
        (conv2d(8, 1, 1, 112, stride=2, groups=32), "conv_depthwise_slide"),
        (conv2d(1, 1, 1, 14, groups=96), "conv_depthwise"),  # too little for a launch more
        (conv2d(32, 1, 1, 56, kernel=9, groups=96), "conv_depthwise"),
        (conv2d(32, 16, 32, 56, last=False), "conv_pointer"),
    ],
)
def test_which_kernel_is_for_what(case, kernel):
    assert fastest(case).kernel.name == kernel


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("channels", [16, 17, 20, 24, 40, 72, 104, 168, 240, 672])
@pytest.mark.parametrize(("size", "kernel", "stride"), [(112, 5, 1), (28, 7, 2), (56, 3, 2)])
def test_images_of_any_number_of_channels_slide(channels, size, kernel, stride, last):
    case = conv2d(64, 1, 1, size, kernel, stride, groups=channels, last=last)
    v = fastest(case)
    assert v.kernel.name == "conv_depthwise_slide"
    assert v.point.layout == ("contiguous" if not last else "channels_last_odd" if channels % 8 else "channels_last")


def test_pieces_of_16_bytes_are_for_pixels_that_begin_on_them():
    """Channels of a larger tensor lie further apart, or begin elsewhere."""
    problem = conv2d(2, 1, 1, 28, groups=40).problem()

    def layouts(pitch: int, alignment: int) -> set[str]:
        x = problem.tensors[0]
        strides = tuple(s if s == 1 else s // 40 * pitch for s in x.strides)
        tensors = [replace(x, strides=strides, alignment=alignment), *problem.tensors[1:]]
        found = fitting(replace(problem, tensors=tensors)).values()
        return {v.point.layout for v, _ in found if v.kernel.name == "conv_depthwise_slide"}

    assert layouts(40, 16) == layouts(48, 256) == {"channels_last", "channels_last_odd"}
    assert layouts(44, 16) == layouts(40, 8) == layouts(41, 2) == {"channels_last_odd"}


@pytest.mark.parametrize(
    ("case", "config"),
    [
        (conv2d(16, 1, 1, 112, 5, groups=168), "slide_w8_32x32_w4"),
        (conv2d(32, 1, 1, 14, 7, groups=384), "slide_w8_32x32_w4"),
        (conv2d(14, 1, 1, 7, 7, groups=104), "slide_w4_8x32_w2"),
        (conv2d(45, 1, 1, 7, 5, groups=480), "slide_w4_8x32_w2"),
        (conv2d(13, 1, 1, 14, 5, 2, groups=576), "slide_w4_8x32_w2"),
        (conv2d(14, 1, 1, 7, 7, groups=104, last=False), "slide_h8_8x8_w1"),
        (conv2d(45, 1, 1, 7, 5, groups=480, last=False), "slide_h8_8x8_w1"),
        (conv2d(13, 1, 1, 14, 5, 2, groups=576, last=False), "slide_h8_8x8_w1"),
        (conv2d(16, 1, 1, 112, 5, groups=168, last=False), "slide_h8_32x16_w4"),
    ],
)
def test_small_images_have_smaller_programs(case, config):
    assert fastest(case).point.config.name == config


def test_a_tile_of_a_group_reads_that_groups_channels():
    problem = conv2d(2, 64, 128, 14, groups=4).problem()
    grouped = [v for v, _ in fitting(problem).values() if v.kernel.name == "conv_tma"]
    assert grouped
    for v in grouped:
        args = v.plan.launches[0].args
        assert args["tiles_of_group"].value.evaluate(problem) == 128 // v.point.config.block_n
        assert args["cols"].value.evaluate(problem) == 4 * 128
        assert args["x_desc"].sizes[-1].evaluate(problem) == 4 * 64
        assert [args["weight_desc"].sizes[i].evaluate(problem) for i in (0, -1)] == [4 * 128, 64]
        if v.point.store == "matrix":
            assert [n.evaluate(problem) for n in args["out_desc"].sizes] == [2 * 14 * 14, 4 * 128]


def test_one_group_of_several_is_for_tma():
    """Its pixels lie as far from each other as all groups' channels are many."""
    problem = conv2d(32, 64, 64, 56).problem()
    for name, t in (("x", 0), ("out", 3)):
        wide = replace(problem.tensors[t], strides=tuple(s if s == 1 else 4 * s for s in problem.tensors[t].strides))
        tensors = [wide if i == t else other for i, other in enumerate(problem.tensors)]
        found = fitting(replace(problem, tensors=tensors))
        stores = {v.point.store for v, _ in found.values() if v.kernel.name == "conv_tma"}
        assert "matrix" in stores, name
    # Every second line of a larger result is no matrix.
    strides = list(problem.tensors[3].strides)
    strides[0], strides[4] = 2 * strides[0], 2 * strides[4]
    tensors = [*problem.tensors[:3], replace(problem.tensors[3], strides=tuple(strides))]
    found = fitting(replace(problem, tensors=tensors))
    assert {v.point.store for v, _ in found.values() if v.kernel.name == "conv_tma"} == {"channels_last", "contiguous"}


def test_in_batch_invariant_mode_the_choice_does_not_depend_on_the_batch():
    times = []
    for n in (1, 3, 64):
        problem = conv2d(n, 64, 64, 28, mode=MODE_BITS["batch_invariant"]).problem()
        times.append({name: time for name, (_, time) in fitting(problem).items()})
    assert len(times[0]) > 5
    assert times[0] == times[1] == times[2]


def test_every_predicted_time_is_positive_and_grows_with_the_work():
    little, much = (fitting(conv2d(8, c, c, 28).problem()) for c in (64, 512))
    both = little.keys() & much.keys()
    assert len(both) > 5
    assert all(0 < little[name][1] < much[name][1] for name in both)


# --- What TMA gathers ---


def gathered(case: Case, v: Variant) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """By the driver's rules for an im2col map: (row, tap, pixel of x) of all rows and taps."""
    problem = case.problem()

    def numbers(expressions) -> list[int]:
        return [e if isinstance(e, int) else e.evaluate(problem) for e in expressions]

    launch = v.plan.launches[0]
    im2col = launch.args["x_desc"].im2col
    lower, upper, steps = numbers(im2col.lower), numbers(im2col.upper), numbers(im2col.steps)
    first = 3 - len(lower)
    last = [n - 1 + u for n, u in zip(case.size[first:], upper, strict=True)]
    begin = numbers([n.value for n in launch.args["gather"].lower])[first:]
    assert begin == lower, "a tile begins where the map does"
    shift = numbers([n.value for n in launch.args["gather"].shift])[first:]

    image, at = 0, list(lower)
    for row in range(case.n * case.out[0] * case.out[1] * case.out[2]):
        for tap in itertools.product(*(range(k) for k in case.kernel[first:])):
            offsets = [t * d + s for t, d, s in zip(tap, case.dilation[first:], shift, strict=True)]
            assert min(offsets) >= 0
            yield row, tap, (image, *(a + o for a, o in zip(at, offsets, strict=True)))
        for d in reversed(range(len(at))):
            at[d] += steps[d]
            if at[d] <= last[d]:
                break
            at[d] = lower[d]
        else:
            image += 1


def random_cases() -> Iterator[Case]:
    rng = random.Random("gathered")
    for spatial in (2, 3):
        for _ in range(40):
            flat = spatial == 2
            size = tuple(1 if flat and d == 0 else rng.randint(1, 9) for d in range(3))
            kernel = tuple(1 if flat and d == 0 else rng.randint(1, 4) for d in range(3))
            stride = tuple(1 if flat and d == 0 else rng.randint(1, 3) for d in range(3))
            padding = tuple(0 if flat and d == 0 else rng.randint(0, 3) for d in range(3))
            dilation = tuple(1 if flat and d == 0 else rng.choice((1, 2, -1, -2)) for d in range(3))
            if any(d < 0 for d in dilation):  # as a gradient has it: another size, any padding
                stride = (1, 1, 1)
                out = tuple(1 if flat and d == 0 else rng.randint(1, 9) for d in range(3))
                padding = tuple(0 if flat and d == 0 else rng.randint(-4, 2) for d in range(3))
            else:
                out = result(size, kernel, stride, padding, dilation)
            if min(out) >= 1:
                yield Case(2, 8, 8, size, kernel, stride, padding, dilation, out)


def test_tma_gathers_what_a_convolution_reads():
    count = 0
    for case in random_cases():
        flat = case.size[0] == case.kernel[0] == case.out[0] == 1
        for v, _ in list(fitting(case.problem()).values()):
            if v.kernel.name != "conv_tma" or v.point.spatial != (2 if flat else 3):
                continue
            first = 3 - v.point.spatial
            for row, tap, (image, *place) in gathered(case, v):
                rest, pw = divmod(row, case.out[2])
                rest, ph = divmod(rest, case.out[1])
                n, pd = divmod(rest, case.out[0])
                pixel = (pd, ph, pw)[first:]
                geometry = zip(
                    pixel, tap, case.stride[first:], case.padding[first:], case.dilation[first:], strict=True
                )
                assert image == n
                assert place == [p * s - pad + t * d for p, t, s, pad, d in geometry]
            count += 1
            break
    assert count > 50


# --- The weight's gradient ---


def gradient_problem(case: Case) -> Problem:
    image = [case.n, case.groups, case.c, *case.size]
    weight = [case.groups, case.o, case.c, *case.kernel]
    grad = [case.n, case.groups, case.o, *case.out]
    order = (0, 3, 4, 5, 1, 2)
    tensors = [value(grad, order), value(image, order), value(weight, (0, 1, 3, 4, 5, 2))]
    bare = Problem(tensors, (*case.stride, *case.padding, *case.dilation, 0), 0, H200)
    return replace(bare, locals=evaluate_locals(WEIGHT_GRAD.locals.values(), bare))


@pytest.mark.parametrize(
    "case",
    [
        conv2d(32, 256, 256, 56),
        conv2d(32, 64, 128, 224, stride=2),
        conv2d(32, 64, 64, 56),
        conv2d(32, 256, 512, 56),  # 72 tiles: two waves of 3 parts would leave a fifth of the GPU idle
        conv2d(32, 512, 512, 7),  # 144 tiles, in one part twelve more than there are multiprocessors
        conv2d(32, 256, 512, 56, kernel=1, stride=2),
        conv2d(32, 1024, 512, 14, kernel=1),
    ],
)
def test_the_pixels_of_a_weights_gradient_are_split_to_keep_all_multiprocessors_busy(case):
    problem = gradient_problem(case)
    for v in WEIGHT_GRAD_GRID.variants:
        if v.kernel.name != "weight_grad_tma" or v.point.dtype != "bf16" or v.point.spatial != 2:
            continue
        inner = replace(problem, locals=evaluate_locals(v.plan.locals, problem))
        tiles = -(-case.o // v.point.config.block_m) * -(-case.c // v.point.config.block_n) * math.prod(case.kernel)
        steps = -(-problem.locals[0] // 64)
        splits, share = SPLITS.evaluate(inner), SHARE.evaluate(inner) // 64
        assert (splits - 1) * share < steps <= splits * share
        busiest = -(-tiles * splits // 132) * share
        even = tiles * steps / 132
        step_us = 2 * 128 * v.point.config.block_n * 64 / 5.6e6
        # Beside it, the parts are written and read: 8 bytes for each number of the gradient, at 4 TB/s.
        part_us = case.o * case.c * math.prod(case.kernel) * 2e-6
        assert busiest * step_us + splits * part_us < 1.1 * even * step_us + 13, (v.name, tiles, splits, busiest, even)


@pytest.mark.parametrize("tensor", [0, 1], ids=["grad", "x"])
def test_every_second_channel_is_not_read_as_neighbours(tensor):
    problem = gradient_problem(conv2d(2, 1, 1, 28, groups=32))

    def kernels(problem: Problem) -> set[str]:
        return {v.kernel.name for v in WEIGHT_GRAD_GRID.variants if v.point.axes.get("layout") == "channels_last"
                and all(c.holds.evaluate(problem) for c in v.plan.constraints)}  # fmt: skip

    depthwise = {"weight_grad_slide", "weight_grad_depthwise"}
    assert depthwise <= kernels(problem)
    apart = problem.tensors[tensor]
    apart = replace(apart, strides=tuple(s if d == 2 else 2 * s for d, s in enumerate(apart.strides)))
    tensors = [apart if i == tensor else t for i, t in enumerate(problem.tensors)]
    assert not depthwise & kernels(replace(problem, tensors=tensors))


# --- Copies ---


@pytest.mark.parametrize(
    ("channels", "sizes", "config"),
    [
        (512, (1, 3, 3), "128x16_w4"),
        (256, (1, 56, 56), "64x64_w4"),
        (256, (1, 14, 14), "64x64_w4"),
        (64, (1, 1, 1), "128x16_w4"),
    ],
)
def test_filters_are_copied_in_tiles_of_few_pixels(channels, sizes, config):
    x = value([32, 1, channels, *sizes], range(6))
    out = value([32, 1, channels, *sizes], (0, 3, 4, 5, 1, 2))
    bare = Problem([x, out], (), 0, H200)
    problem = replace(bare, locals=evaluate_locals(LAYOUT.locals.values(), bare))
    fits = [v for v in LAYOUT_GRID.variants if v.point.bits == "i16"
            and all(c.holds.evaluate(problem) for c in v.plan.constraints)]  # fmt: skip
    assert min(fits, key=lambda v: v.plan.cost.evaluate(problem)).point.config.name == config
