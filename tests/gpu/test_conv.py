"""1,200 random convolutions of one to three dimensions against fp64, and their gradients; every config."""

import math
import random
from dataclasses import replace
from functools import partial

import pytest
import torch

import tk
from benchmarks import accuracy
from benchmarks.convolutions import Convolution, judge
from benchmarks.products import ACTIVATIONS, SHORT
from tk import _packs, capi
from tk.heuristics.problem import describe_all

from .device import DEVICE

CASES = 50  # of one test
CHUNKS = 8
KINDS = ((torch.bfloat16, "ieee"), (torch.float16, "ieee"), (torch.float32, "tf32"))
LAYOUTS = ("channels_last", "channels_last", "contiguous", "strided")


def name(kind: tuple[torch.dtype, str]) -> str:
    return kind[1] if kind[0] == torch.float32 else SHORT[kind[0]]


def draw(rng: random.Random, dtype: torch.dtype, precision: str) -> Convolution:
    """Small ones, of which some suit the fast kernels; the two sides of an image differ, and so does all else. tf32 has
    no activations: rounding may take an element past relu's corner, which is no error of the kernel's."""
    spatial = rng.choice((1, 2, 2, 2, 3))
    is_tf32 = dtype == torch.float32 and precision == "tf32"
    while True:
        groups, c, o = _channels(rng)
        kernel = tuple(rng.choice((1, 1, 2, 3, 3, 3, 4, 5)) for _ in range(spatial))
        dilation = tuple(rng.choice((1, 1, 1, 2, 3)) for _ in range(spatial))
        stride = tuple(rng.choice((1, 1, 2, 3)) for _ in range(spatial))
        padding: tuple[int, ...] | str = tuple(rng.choice((0, 0, 1, 2, 3)) for _ in range(spatial))
        if rng.random() < 0.2:
            stride, padding = (1,) * spatial, rng.choice(("same", "valid"))
        size = tuple(rng.randint(1, (200, 40, 14)[spatial - 1]) for _ in range(spatial))
        low = padding if isinstance(padding, tuple) else (0,) * spatial
        spans = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
        if padding == "same" or all(n + 2 * p >= span for n, p, span in zip(size, low, spans, strict=True)):
            break
    return Convolution(
        rng.randint(1, 4), c, o, size, kernel, stride, padding, dilation, groups, dtype, rng.choice(LAYOUTS),
        rng.random() < 0.4, rng.randrange(len(ACTIVATIONS)) if rng.random() < 0.3 and not is_tf32 else 0, precision,
    )  # fmt: skip


def _channels(rng: random.Random) -> tuple[int, int, int]:
    way = rng.random()
    if way < 0.5:
        return 1, 8 * rng.randint(1, 24), 8 * rng.randint(1, 40)
    if way < 0.65:
        return 1, rng.randint(1, 40), rng.randint(1, 70)
    groups = rng.choice((2, 3, 4, 16, 32, 64))
    if way < 0.8:
        return groups, groups, groups * rng.choice((1, 1, 2))
    return groups, groups * rng.choice((2, 4, 8, 16, 5)), groups * rng.choice((2, 4, 8, 16, 3))


def check(p: Convolution, with_gradients: bool) -> str:
    """What is wrong, or nothing."""
    x, weight, bias = p.make(DEVICE)
    tensors = [t.requires_grad_(with_gradients) for t in (x, weight, bias) if t is not None]
    ours, torchs = p.run_tk(x, weight, bias), p.run_torch(x, weight, bias)
    wide = [t.detach().double().requires_grad_(with_gradients) for t in tensors]
    exact = p.exact(wide[0], wide[1], wide[2] if bias is not None else None)
    is_tf32 = p.dtype == torch.float32 and p.precision == "tf32"
    tensor_cores = is_tf32 or p.dtype != torch.float32
    verdict = judge(ours.detach(), torchs.detach(), exact.detach(), p.inner, tensor_cores, is_tf32)
    if not verdict.ok:
        return f"{verdict}"
    if ours.shape != torchs.shape:
        return f"shape {ours.shape}, not {torchs.shape}"
    if not with_gradients:
        return ""
    grad = torch.randn_like(torchs)
    found = [
        torch.autograd.grad(y, t, grad.to(y.dtype)) for y, t in ((ours, tensors), (torchs, tensors), (exact, wide))
    ]
    pixels = exact.numel() // p.o
    inner = (p.o // p.groups * math.prod(p.kernel), pixels, pixels)
    for what, mine, theirs, reference, steps in zip(("input", "weight", "bias"), *found, inner, strict=False):
        verdict = judge(mine, theirs, reference, steps, tensor_cores, is_tf32)
        if not verdict.ok:
            return f"gradient of {what}: {verdict}"
    return ""


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_random_convolutions(kind, chunk):
    torch.manual_seed(chunk)
    rng = random.Random(f"{name(kind)} {chunk}")
    wrong = []
    for i in range(CASES):
        p = draw(rng, *kind)
        try:
            problem = check(p, with_gradients=i % 3 == 0)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            wrong.append(f"{p.label}: {problem}")
    assert not wrong, f"{len(wrong)} of {CASES} wrong:\n" + "\n".join(wrong[:8])


def test_fp32_without_tensor_cores():
    rng = random.Random("ieee")
    for _ in range(CASES):
        p = draw(rng, torch.float32, "ieee")
        assert not (problem := check(p, with_gradients=True)), f"{p.label}: {problem}"


EVERY_CONFIG = tuple(
    Convolution(
        2,
        c,
        o,
        size,
        (3,) * len(size),
        stride,
        (1,) * len(size),
        (1,) * len(size),
        groups,
        dtype,
        layout,
        bias,
        1 if bias else 0,
        precision,
    )
    for dtype, precision in (*KINDS, (torch.float32, "ieee"))
    for size, stride in (((33, 29), (1, 1)), ((33, 29), (2, 2)), ((7, 12, 11), (1, 2, 1)))
    for c, o, groups in ((64, 80, 1), (72, 136, 1), (64, 64, 8), (48, 48, 48), (40, 40, 40), (21, 21, 21), (5, 7, 1))
    for layout in ("channels_last", "contiguous")
    for bias in (False, True)
)


def _large(n: int, c: int, o: int, size: tuple[int, ...], kernel: int, stride: int = 1, groups: int = 1) -> Convolution:
    dims = len(size)
    return Convolution(n, c, o, size, (kernel,) * dims, (stride,) * dims, (kernel // 2,) * dims, (1,) * dims, groups)


# What is copied, merged or a product where there is enough to multiply.
LARGE = {
    "first layer": _large(2, 3, 64, (121, 120), 7, 2),
    "first layer, three dimensions": _large(1, 3, 48, (9, 44, 43), 5, 2),
    "patches": _large(4, 3, 96, (128, 96), 4, 4),
    "waves": _large(3, 1, 256, (20000,), 10, 5),
    "20 channels": _large(2, 20, 72, (61, 60), 3),
    "37 channels": _large(2, 37, 65, (50, 49), 3),
    "one tap": _large(5, 64, 80, (28, 24), 1),
    "one tap, odd lines": _large(5, 64, 80, (7, 7), 1),
    "one tap, many channels": _large(3, 1024, 1024, (14, 12), 1),
    "one tap, apart": _large(2, 64, 128, (33, 30), 1, 2),
    "32 groups of 8": _large(2, 256, 256, (61, 60), 3, groups=32),
    "groups of 4, apart": _large(4, 64, 64, (120, 120), 3, 2, groups=16),
    "groups of 4, 7x7 taps": _large(35, 16, 16, (14, 14), 7, groups=4),
    "groups of 4, 5x5 taps, apart": _large(16, 32, 32, (7, 7), 5, 2, groups=8),
    "2 groups of 80": _large(2, 160, 192, (40, 40), 3, groups=2),
    "depthwise": _large(3, 96, 96, (57, 61), 7, groups=96),
    "depthwise, 168 channels": _large(3, 168, 168, (57, 61), 5, groups=168),
    "depthwise, 58 channels": _large(3, 58, 58, (57, 61), 3, 2, groups=58),
    "depthwise, lines of 7": _large(21, 104, 104, (7, 7), 7, groups=104),
    "depthwise, apart": _large(3, 96, 96, (57, 61), 5, 2, groups=96),
}


@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
@pytest.mark.parametrize("case", LARGE)
def test_much_to_multiply(case, layout):
    """All ways that small ones do not take, and their gradients."""
    wrong = []
    for dtype, precision in KINDS:
        for bias in (False, True):
            p = replace(LARGE[case], layout=layout, dtype=dtype, precision=precision, bias=bias)
            if problem := check(p, with_gradients=True):
                wrong.append(f"{p.label}: {problem}")
    assert not wrong, "\n".join(wrong)


PARTS = 5  # of EVERY_CONFIG, which memcheck watches side by side
REACHED: dict[str, dict[int, set[str]]] = {"conv": {}, "gradients": {}}  # names of configs, by part


@pytest.mark.skipif(DEVICE == "cpu", reason="nothing is chosen on the CPU")
@pytest.mark.parametrize("part", range(PARTS))
def test_every_config_of_the_forward_pass(part):
    reached = REACHED["conv"][part] = set()
    wrong = []
    for p in EVERY_CONFIG[part::PARTS]:
        x, weight, bias = p.make(DEVICE)
        torchs, exact = p.run_torch(x, weight, bias), p.exact(x, weight, bias)
        for config in _packs.config_numbers("conv"):
            try:
                result = p.run_tk(x, weight, bias, config)
            except ValueError:
                continue  # not for this problem
            reached.add(config)
            is_tf32 = p.precision == "tf32"
            verdict = judge(result, torchs, exact, p.inner, is_tf32 or p.dtype != torch.float32, is_tf32)
            if not verdict.ok:
                wrong.append(f"{config} {p.label}: {verdict}")
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.skipif(DEVICE == "cpu", reason="nothing is chosen on the CPU")
@pytest.mark.parametrize("part", range(PARTS))
def test_every_config_of_the_gradients(part):
    reached = REACHED["gradients"][part] = set()
    wrong = []
    for p in (replace(p, activation=0) for p in EVERY_CONFIG[part::PARTS]):  # whose derivative is not the ops'
        x, weight, _ = (t if t is None else t.requires_grad_() for t in p.make(DEVICE))
        wide = [t.detach().double().requires_grad_() for t in (x, weight)]
        exact = p.exact(*wide, None)
        grad = torch.randn_like(p.run_torch(x, weight, None))
        references = torch.autograd.grad(exact, wide, grad.double())
        torchs = torch.autograd.grad(p.run_torch(x, weight, None), (x, weight), grad)
        inner = (p.o // p.groups * math.prod(p.kernel), exact.numel() // p.o)
        is_tf32 = p.precision == "tf32"
        args = (grad, x.detach(), weight.detach(), p.stride, p.padding, p.dilation, p.groups, int(is_tf32))
        for i, op in enumerate((torch.ops.tk.conv_input_grad, torch.ops.tk.conv_weight_grad)):
            call = partial(op, *args)
            for described in describe_all(call):
                if described.problem.op not in ("conv_input_grad", "conv_weight_grad"):
                    continue
                for candidate in capi.candidates(described.problem):
                    if not candidate.fits:
                        continue
                    reached.add(candidate.config_name)
                    capi.pin(described.problem, candidate.config)
                    try:
                        result = call()
                    finally:
                        capi.pin(described.problem, -1)
                    tensor_cores = is_tf32 or p.dtype != torch.float32
                    verdict = judge(result, torchs[i], references[i], inner[i], tensor_cores, is_tf32)
                    if not verdict.ok:
                        wrong.append(f"{candidate.config_name} {p.label}: gradient {i}: {verdict}")
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.skipif(DEVICE == "cpu", reason="nothing is chosen on the CPU")
@pytest.mark.parametrize("op", REACHED)
def test_no_config_is_left_out(op):
    if len(REACHED[op]) < PARTS:
        pytest.skip("not all parts ran")
    wanted = set(_packs.config_numbers("conv"))
    if op == "gradients":
        is_hopper = torch.cuda.get_device_capability()[0] == 9
        wanted = {*_packs.config_numbers("conv_input_grad"), "128x128x64_s6_coop_whole"} if is_hopper else set()
    assert not (left := wanted - set().union(*REACHED[op].values())), f"no problem here suits {sorted(left)}"


# --- NaN and infinities ---


def spoilt(t: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """With one or two elements that are no numbers, in the same layout."""
    for value in rng.choice(((math.nan,), (math.inf,), (-math.inf, math.nan))):
        t[tuple(rng.randrange(n) for n in t.shape)] = value
    return t


def no_numbers(
    p: Convolution, which: str, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of the result and the gradients of input and weight: what must be no number, and what may be. What depends on an
    element is told by a convolution of ones. What multiplies the padding's zeros with a weight or a gradient, as torch
    does with unfolded images, may be NaN: all of a channel, or of a filter."""
    given = {"input": x, "weight": weight, "gradient": grad}
    ones = {k: ((~t.isfinite()) if k == which else torch.ones_like(t)).double() for k, t in given.items()}
    operands = (ones["input"].requires_grad_(), ones["weight"].requires_grad_())
    y = p.exact(*operands, None)
    of_input, of_weight = torch.autograd.grad(y, operands, ones["gradient"])
    counts = {"result": y.detach(), "input": of_input, "weight": of_weight}
    independent = {"input": "input", "weight": "weight", "gradient": "result"}[which]
    must = {k: torch.zeros_like(t) > 0 if k == independent else t > 0.5 for k, t in counts.items()}
    may = dict(must)
    taps = (1,) * len(p.kernel)
    bad = ~given[which].isfinite()
    if which == "weight":
        may["result"] = must["result"] | bad.flatten(1).any(1).view(-1, *taps)
        of_group = bad.flatten(2).any(2).unflatten(0, (p.groups, -1)).any(1)  # [groups, input channels of a group]
        may["input"] = must["input"] | of_group.flatten().view(-1, *taps)
    elif which == "gradient":
        may["weight"] = must["weight"] | bad.transpose(0, 1).flatten(1).any(1).view(-1, 1, *taps)
    return [(must[k], may[k]) for k in ("result", "input", "weight")]


@pytest.mark.parametrize("which", ["input", "weight", "gradient"])
@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_what_is_no_number_stays_where_it_is_read(kind, which):
    """Small ones of all kinds, and what is merged, unfolded or copied where there is enough to multiply."""
    torch.manual_seed(0)
    rng = random.Random(f"NaN {name(kind)} {which}")
    problems = [draw(rng, *kind) for _ in range(CASES)]
    if DEVICE != "cpu":
        large = [(p, layout) for p in LARGE.values() for layout in ("channels_last", "contiguous")]
        problems += [replace(p, layout=layout, dtype=kind[0], precision=kind[1]) for p, layout in large]
    wrong = []
    for p in problems:
        p = replace(p, bias=False, activation=0)
        x, weight, _ = p.make(DEVICE)
        grad = torch.randn_like(p.run_torch(x, weight, None))
        spoilt({"input": x, "weight": weight, "gradient": grad}[which], rng)
        result = p.run_tk(x.requires_grad_(), weight.requires_grad_(), None)
        found = [result.detach(), *torch.autograd.grad(result, (x, weight), grad)]
        allowed = no_numbers(p, which, x.detach(), weight.detach(), grad)
        for what, mine, (must, may) in zip(("result", "input's", "weight's"), found, allowed, strict=True):
            if (~mine.isfinite() & ~may).any():
                wrong.append(f"{p.label}: {what} is no number where it does not depend on one")
            if (mine.isfinite() & must).any():
                wrong.append(f"{p.label}: {what} is a number where it depends on what is none")
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:8])


@pytest.mark.skipif(DEVICE == "cpu", reason="nothing is chosen on the CPU")
def test_no_config_lets_a_nan_of_another_group_through():
    """Of the forward pass; groups are what is multiplied as one."""
    wrong = []
    for p in EVERY_CONFIG:
        if p.groups == 1 or p.bias:
            continue
        x, weight, _ = p.make(DEVICE)
        channel = p.c // p.groups * (p.groups // 2)  # the first of a group in the middle
        x[:, channel] = math.nan
        exact = p.exact(x, weight, None)
        for config in _packs.config_numbers("conv"):
            try:
                result = p.run_tk(x, weight, None, config)
            except ValueError:
                continue  # not for this problem
            if not torch.equal(result.isnan(), exact.isnan()):
                wrong.append(f"{config} {p.label}")
    assert not wrong, "\n".join(wrong[:20])


def test_the_same_bits_every_time():
    p = Convolution(8, 64, 64, (28, 28), (3, 3), (1, 1), (1, 1), (1, 1))
    x, weight, _ = p.make(DEVICE)
    weight.requires_grad_()
    x.requires_grad_()
    grad = torch.randn_like(p.run_torch(x, weight, None))
    first = torch.autograd.grad(p.run_tk(x, weight, None), (x, weight), grad)
    for _ in range(5):
        again = torch.autograd.grad(p.run_tk(x, weight, None), (x, weight), grad)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.skipif(DEVICE == "cpu", reason="graphs are CUDA's")
def test_graph():
    p = Convolution(2, 64, 64, (14, 14), (3, 3), (1, 1), (1, 1), (1, 1), layout="contiguous")
    x, weight, bias = p.make()
    expected = p.run_tk(x, weight, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = p.run_tk(x, weight, bias)
    graph.replay()
    assert torch.equal(result, expected)


def test_more_than_2_to_the_31_elements():
    """Of the input: 64-bit addresses."""
    if DEVICE == "cpu" or torch.cuda.mem_get_info()[0] < 20e9:
        pytest.skip("needs 20 GB of a GPU's memory")
    x = torch.randn(9, 64, 2048, 2048, device=DEVICE, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    weight = torch.randn(8, 64, 3, 3, device=DEVICE, dtype=torch.bfloat16)
    result = tk.conv2d(x, weight, stride=2, padding=1)
    last = tk.conv2d(x[-1:], weight, stride=2, padding=1)
    torch.testing.assert_close(result[-1:], last, rtol=2**-7, atol=1e-3)
    assert accuracy.error(last, torch.nn.functional.conv2d(x[-1:], weight, stride=2, padding=1).double()).max < 1
