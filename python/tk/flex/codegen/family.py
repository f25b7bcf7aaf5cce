"""Build side: a traced pair of mods becomes the families of its ops. Nothing at run time imports this."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tk import errors
from tk.aot.assemble import MAX_TENSORS
from tk.aot.spec import REDUCED_FLOATS, Family, Kernel, Plan, Point
from tk.flex import own_ops
from tk.flex.codegen import printing
from tk.flex.codegen.printing import Mods
from tk.flex.registry import Registered
from tk.flex.tracing.trace import Traced
from tk.kernels.attention import backward, decode, forward, hopper_backward_plans, hopper_forward
from tk.kernels.attention.problem import Head, Problem


@dataclass(frozen=True)
class Wanted:
    """What is built of a pair. exact: head sizes (query and key, value) with kernels of their own, where they are worth
    it; rounded: those whose kernels serve every smaller one, the largest last, which alone has gradients, and the
    largest up to 256. paged: also kernels for whole prompts in pages; decoding has them in any case, but else of the
    smallest rounded size alone, and of decode_dtypes. Past 256 there are the kernels for every layout alone, of
    wide_dtypes."""

    dtypes: tuple[str, ...] = REDUCED_FLOATS
    exact: tuple[tuple[int, int], ...] = ((64, 64), (128, 128))
    rounded: tuple[tuple[int, int], ...] = ((128, 128), (256, 256))
    paged: bool = False
    backward: bool = True
    decode: bool = True
    wide_dtypes: tuple[str, ...] = ("bf16", "fp16", "fp32")
    decode_dtypes: tuple[str, ...] = ("bf16", "fp16", "fp32")
    sampled: bool = False  # among what tests compile

    @property
    def exact_heads(self) -> tuple[Head, ...]:
        return tuple(Head(*h, True) for h in self.exact)

    @property
    def rounded_heads(self) -> tuple[Head, ...]:
        return tuple(Head(*h, False) for h in self.rounded)

    @property
    def usual_heads(self) -> tuple[Head, ...]:
        return tuple(h for h in self.rounded_heads if not h.is_wide)


def registered_families(registered: Registered) -> list[Family]:
    """The families of what a user's file announced: kernels for exactly its head sizes, and rounded up; of sizes that
    differ one for the largest of both, too, which takes every layout."""
    heads = [h if isinstance(h, tuple) else (h, h) for h in registered.head_dims]
    rounded = dict.fromkeys((_round_up(qk), _round_up(v)) for qk, v in heads)
    for some in ([h for h in rounded if max(h) <= 256], list(rounded)):
        rounded |= dict.fromkeys([(max(qk for qk, _ in some), max(v for _, v in some))] if some else [])
    wanted = Wanted(
        dtypes=tuple(printing.NAMES[d] for d in registered.dtypes),
        exact=tuple(h for h in heads if h in _EXACT),
        rounded=tuple(sorted(rounded, key=lambda h: (max(h), h))),
        paged=registered.decode,
        backward=registered.backward,
        decode=registered.decode,
    )
    try:
        return families(registered.traced, wanted)
    except errors.UnsupportedError as error:
        raise errors.UnsupportedError(f"{registered.name}: {error}") from error


_EXACT = ((64, 64), (128, 128), (128, 64), (64, 128))  # what the kernels for Hopper are made for


def _round_up(size: int) -> int:
    return next(n for n in (64, 128, 256, 512) if size <= n)


def problem_of(traced: Traced, wanted: Wanted) -> Problem:
    return Problem(own_ops.op_name(traced), printing.captures_of(traced), wanted.dtypes, traced.text)


def families(traced: Traced, wanted: Wanted) -> list[Family]:
    """The families of the pair's op and, with `backward`, of its gradients' op. Raises tk.UnsupportedError where it
    reads more tensors than an op can have."""
    problem = problem_of(traced, wanted)
    ops = {"attention": problem.op} | ({"its gradient": problem.backward_op} if wanted.backward else {})
    for what, op in ops.items():
        if len(op.tensors) > MAX_TENSORS:
            read = sum(c.kind == "tensor" for c in traced.captures)
            raise errors.UnsupportedError(
                f"the mods read {read} tensors, with which {what} has {len(op.tensors)}; there may be {MAX_TENSORS}. "
                "Put tensors of one shape into one, with a dimension more"
            )
    mods = printing.mods_of(traced, wanted.backward)
    kernels = forward_kernels(problem, mods, wanted)
    found = [Family(problem.op, kernels, _sample, portable=_portable, sampled=wanted.sampled)]
    if wanted.backward:
        found.append(Family(problem.backward_op, backward_kernels(problem, mods, wanted), _sample, portable=_portable,
                            sampled=wanted.sampled))  # fmt: skip
    return found


def forward_kernels(problem: Problem, mods: Mods, wanted: Wanted) -> tuple[Kernel, ...]:
    own = mods.bundle(f"{problem.name}_mods", problem.captured(problem.op))
    layouts = ("aligned", "paged", "strided") if wanted.paged else ("aligned", "strided")
    found = [forward.kernel(problem, own, wanted.rounded_heads, layouts)]
    if wanted.decode and wanted.usual_heads:
        heads = wanted.usual_heads if wanted.paged else wanted.usual_heads[:1]
        found.append(_of_dtypes(decode.kernel(problem, own, heads), wanted.decode_dtypes))
    if set(wanted.dtypes) & {"bf16", "fp16"}:
        heads = tuple(dict.fromkeys((*(Head(*h, False) for h in wanted.exact), *wanted.usual_heads)))
        if heads:
            found.append(hopper_forward.kernel(problem, own, heads))
    return tuple(_with_wide_heads(k, wanted) for k in found)


def backward_kernels(problem: Problem, mods: Mods, wanted: Wanted) -> tuple[Kernel, ...]:
    own = mods.bundle(f"{problem.name}_mods", problem.captured(problem.backward_op))
    heads = tuple(dict.fromkeys((*wanted.exact_heads, *wanted.usual_heads[-1:], wanted.rounded_heads[-1])))
    found = [backward.kernel(problem, own, heads)]
    if set(wanted.dtypes) & {"bf16", "fp16"}:
        sizes = dict.fromkeys(h for h in (*wanted.exact, *wanted.rounded) if max(h) <= 128)
        if heads := tuple(Head(*h, False) for h in sizes):
            found.append(hopper_backward_plans.kernel(problem, own, heads))
    return tuple(_with_wide_heads(k, wanted) for k in found)


def _of_dtypes(kernel: Kernel, dtypes: tuple[str, ...]) -> Kernel:
    plan = kernel.plan
    return replace(kernel, plan=lambda point: plan(point) if point.dtype in dtypes else None)


def _with_wide_heads(kernel: Kernel, wanted: Wanted) -> Kernel:
    """The kernel without wide heads of dtypes that are not to have them."""
    plan = kernel.plan

    def chosen(point: Point) -> Plan | None:
        return None if point.head.is_wide and point.dtype not in wanted.wide_dtypes else plan(point)

    return replace(kernel, plan=chosen)


def _sample(kernel: Kernel, point: Point) -> bool:
    """Whether tests compile a point of a pair: the first of all axes, and what differs from it in one respect. What
    takes every layout is of one head size."""
    heads = kernel.axes["head"]
    usual = {axis: values[0] for axis, values in kernel.axes.items()}
    if point.layout == "strided":
        usual |= {"layout": "strided", "head": heads[-1]}
    elif "strided" in kernel.axes["layout"]:
        usual |= {"layout": "aligned"}
    if point.axes.get("precision") == "tf32":  # which is of fp32 alone
        usual |= {"dtype": "fp32"}
    return sum(point.axes[axis] != value for axis, value in usual.items()) <= 1


def _portable(kernel: Kernel, point: Point) -> bool:
    """Whether a point is for GPUs that no cubin is for: the kernels that take everything are."""
    return point.layout == "strided" and point.dtype != "fp32"
