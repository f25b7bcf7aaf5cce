"""Convolutions against torch's own, which is cuDNN's (``torch.backends.cudnn.benchmark`` on, warmed up).

Layers of ResNet-50 and ConvNeXt-T at batch 32 and of a video network at batch 4, in both layouts; layers drawn at
random, in one layout or the other; and gradients. Inputs rotate through 300 MB; all is replayed from CUDA graphs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from benchmarks.convolutions import Convolution, judge
from benchmarks.report import Goal, Group, Report, Row
from benchmarks.runner import Options
from tk import timing
from tk.heuristics.problem import describe

GOALS = {"channels_last": Goal(0.95, 0.8), "contiguous": Goal(1.1, 0.9), "grouped": Goal(1.5, 1.0)}


def _layer(n: int, c: int, size: int, o: int, kernel: int, stride: int = 1, groups: int = 1) -> Convolution:
    """Of square images, padded so that a stride of 1 keeps their size."""
    return Convolution(n, c, o, (size,) * 2, (kernel,) * 2, (stride,) * 2, (kernel // 2,) * 2, (1, 1), groups)


LISTED = (
    _layer(32, 256, 56, 256, 3),
    _layer(32, 64, 224, 128, 3, 2),
    _layer(32, 1024, 14, 2048, 1),
)
RESNET = (
    _layer(32, 3, 224, 64, 7, 2),
    _layer(32, 64, 56, 64, 1),
    _layer(32, 64, 56, 64, 3),
    _layer(32, 64, 56, 256, 1),
    _layer(32, 256, 56, 128, 1),
    _layer(32, 128, 56, 128, 3, 2),
    _layer(32, 256, 56, 512, 1, 2),
    _layer(32, 128, 28, 128, 3),
    _layer(32, 256, 14, 256, 3),
    _layer(32, 512, 14, 512, 3, 2),
    _layer(32, 512, 7, 512, 3),
    _layer(32, 512, 7, 2048, 1),
)
CONVNEXT = (
    replace(_layer(32, 3, 224, 96, 4, 4), padding=(0, 0)),
    replace(_layer(32, 96, 56, 192, 2, 2), padding=(0, 0)),
    replace(_layer(32, 384, 14, 768, 2, 2), padding=(0, 0)),
)
VIDEO = tuple(
    Convolution(4, c, o, size, kernel, stride, tuple(k // 2 for k in kernel), (1, 1, 1))
    for c, o, size, kernel, stride in (
        (3, 64, (16, 112, 112), (3, 7, 7), (1, 2, 2)),
        (64, 64, (16, 56, 56), (3, 3, 3), (1, 1, 1)),
        (128, 256, (8, 28, 28), (3, 3, 3), (2, 2, 2)),
    )
)
GROUPED = (
    _layer(32, 256, 56, 256, 3, groups=32),
    _layer(32, 96, 56, 96, 7, groups=96),
    _layer(32, 384, 14, 384, 7, groups=384),
    _layer(32, 512, 28, 512, 3, groups=32),
)


def drawn(count: int) -> Iterator[Convolution]:
    rng = random.Random("convolutions")
    for _ in range(count):
        channels = [8 * rng.randint(2, 96), 64, 128, 256, 512]
        kernel = rng.choice((1, 3, 3, 3, 5, 7))
        size = rng.choice((7, 14, 28, 56, 112, rng.randint(5, 100)))
        c, o = rng.choice(channels), rng.choice(channels)
        n = max(1, min(64, (1 << 27) // max(c * size * size, 1)))
        yield _layer(rng.randint(1, n), c, size, o, kernel, rng.choice((1, 1, 2)))


def drawn_groups(count: int) -> Iterator[Convolution]:
    """Half of them depthwise."""
    rng = random.Random("groups")
    for i in range(count):
        each = 1 if i % 2 else rng.choice((4, 8, 16, 24, 32, 64))
        groups = rng.choice((4, 8, 16, 32)) if each > 1 else 8 * rng.randint(2, 128)
        kernel, size = rng.choice((3, 3, 5, 7)), rng.choice((7, 14, 28, 56, 112, rng.randint(7, 100)))
        n = max(1, min(64, (1 << 26) // (each * groups * size * size)))
        yield _layer(rng.randint(1, n), each * groups, size, each * groups, kernel, rng.choice((1, 1, 2)), groups)


def _forward(p: Convolution, group: Group) -> None:
    x, weight, bias = p.make()
    with torch.no_grad():
        ours, torchs = p.run_tk(x, weight, bias), p.run_torch(x, weight, bias)
        few = x[:1], weight, bias
        verdict = judge(ours[:1], torchs[:1], p.exact(*few), p.inner, True)
        if not verdict.ok:
            raise ValueError(f"wrong result: {verdict}")
        sets = [p.make() for _ in range(timing.copies_to_rotate((x.numel() + ours.numel()) * x.itemsize, most=16))]
        captures = {
            "tk": timing.capture([partial(p.run_tk, *s) for s in sets]),
            "torch": timing.capture([partial(p.run_torch, *s) for s in sets]),
        }
        _add(group, p.label, captures, p.flops(ours), _config(p, sets[0]))


def _config(p: Convolution, operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]) -> str:
    from tk import capi

    described = describe(p.run_tk, *operands)
    if described is None:
        return ""
    return f"{described.problem.op} {capi.choose(described.problem, described.config).config_name}"


def _backward(p: Convolution, group: Group, of_input: bool) -> None:
    x, weight, _ = p.make()
    grad = torch.randn_like(p.run_torch(x, weight, None))
    ints = (p.stride, p.padding, p.dilation, p.groups)
    op = torch.ops.tk.conv_input_grad if of_input else torch.ops.tk.conv_weight_grad
    mask = [of_input, not of_input, False]
    zeros = [0] * p.spatial

    def torchs() -> torch.Tensor:
        found = torch.ops.aten.convolution_backward(
            grad, x, weight, None, p.stride, p.padding, p.dilation, False, zeros, p.groups, mask
        )
        return found[0 if of_input else 1]

    ours = partial(op, grad, x, weight, *ints)
    difference = (ours().double() - torchs().double()).norm() / torchs().double().norm()
    if not difference < 1e-2:
        raise ValueError(f"wrong gradient: off by {difference:.2g}")
    captures = {"tk": timing.capture([ours]), "torch": timing.capture([torchs])}
    _add(group, f"{p.label} {'input' if of_input else 'weight'}", captures, p.flops(grad), "")


def _add(group: Group, label: str, captures: dict[str, timing.Capture], flops: int, config: str) -> None:
    times = timing.device_times(captures, rounds=5, ms=8, warm_ms=8)
    us = {name: t.us for name, t in times.items()}
    ratio = us["torch"] / us["tk"]
    group.rows.append(Row(label, ratio, us, {"config": config, "tflops": flops / us["tk"] * 1e-6}))
    print(f"{group.name:20} {label:84} {us['tk']:8.1f} {us['torch']:8.1f} us {ratio:5.2f}  {config}", flush=True)


def run(options: Options, report: Report) -> None:
    torch.backends.cudnn.benchmark = True
    random_layers = list(drawn(24 if options.quick else 200))
    random_groups = list(drawn_groups(len(random_layers) // 4))

    def attempt(group: Group, p: Convolution, measure: Callable[[], None]) -> None:
        label = f"{group.name} {p.label}"
        if options.wants(label) and options.has_time():
            report.attempt(label, measure)

    for layout in ("channels_last", "contiguous"):
        goal = GOALS[layout]
        group = report.group(layout, f"{layout}, layers of networks", "cuDNN", goal)
        for p in (*LISTED, *RESNET, *CONVNEXT, *VIDEO):
            p = replace(p, layout=layout)
            attempt(group, p, partial(_forward, p, group))
        group = report.group(f"grouped_{layout}", f"groups and depthwise, {layout}", "cuDNN", GOALS["grouped"])
        for p in GROUPED:
            p = replace(p, layout=layout)
            attempt(group, p, partial(_forward, p, group))
    gradients = report.group("gradients", "gradients of input and weight, channels-last", "cuDNN")
    for p in (*LISTED, *RESNET[2::4], *GROUPED[:2]):
        for of_input in (True, False):
            attempt(gradients, p, partial(_backward, p, gradients, of_input))

    def at_random(name: str, title: str, goal: Goal | None) -> Group:
        return report.group(f"{name}_random", f"{title}, random", "cuDNN", goal)

    layouts = ("channels_last", "contiguous")
    plain = [at_random(layout, layout, GOALS[layout]) for layout in layouts]
    grouped = [at_random(f"grouped_{x}", f"groups and depthwise, {x}", GOALS["grouped"]) for x in layouts]
    gradients = at_random("gradients", gradients.title, None)
    for i, p in enumerate(random_layers):  # in turn, so that time that runs out is missed by all alike
        q = replace(p, layout=layouts[i % 2])
        attempt(plain[i % 2], q, partial(_forward, q, plain[i % 2]))
        if i % 4 == 0:
            with_groups = random_groups[i // 4]
            for layout, group in zip(layouts, grouped, strict=True):
                attempt(group, q := replace(with_groups, layout=layout), partial(_forward, q, group))
            attempt(gradients, p, partial(_backward, p, gradients, i % 8 == 0))
