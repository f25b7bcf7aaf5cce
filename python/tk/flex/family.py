"""Build side: a traced pair of mods becomes the families of its ops. Nothing at run time imports this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tk.aot.spec import Family, Kernel, Point
from tk.codegen import source
from tk.flex import printing
from tk.flex.registry import Registered
from tk.flex.trace import Traced
from tk.kernels.attention import backward, decode, forward, hopper_backward, hopper_backward_plans, hopper_forward
from tk.kernels.attention.entry import Mods, entry
from tk.kernels.attention.problem import Head, Problem


@dataclass(frozen=True)
class Wanted:
    """What is built of a pair. exact: head sizes (query and key, value) with kernels of their own, where they are worth
    it; rounded: those whose kernels serve every smaller one, the largest last, which alone has gradients. paged: also
    kernels for whole prompts in pages; decoding has them in any case, but else of the smallest rounded size alone."""

    dtypes: tuple[str, ...] = ("bf16", "fp16")
    exact: tuple[tuple[int, int], ...] = ((64, 64), (128, 128))
    rounded: tuple[tuple[int, int], ...] = ((128, 128), (256, 256))
    paged: bool = False
    backward: bool = True
    decode: bool = True
    sampled: bool = False  # among what tests compile

    @property
    def exact_heads(self) -> tuple[Head, ...]:
        return tuple(Head(*h, True) for h in self.exact)

    @property
    def rounded_heads(self) -> tuple[Head, ...]:
        return tuple(Head(*h, False) for h in self.rounded)


def op_name(traced: Traced) -> str:
    return f"flex_{traced.fingerprint[:16]}"


def registered_families(registered: Registered) -> list[Family]:
    """Of what a user's file announced: kernels for exactly its head sizes, and rounded up."""
    heads = [h if isinstance(h, tuple) else (h, h) for h in registered.head_dims]
    rounded = dict.fromkeys((_round_up(qk), _round_up(v)) for qk, v in heads)
    wanted = Wanted(
        dtypes=tuple(printing.NAMES[d] for d in registered.dtypes),
        exact=tuple(h for h in heads if h in _EXACT),
        rounded=tuple(sorted(rounded)),
        paged=registered.decode,
        backward=registered.backward,
        decode=registered.decode,
    )
    return families(registered.traced, wanted)


_EXACT = ((64, 64), (128, 128), (128, 64), (64, 128))  # what the kernels for Hopper are made for


def _round_up(size: int) -> int:
    return next(n for n in (64, 128, 256) if size <= n)


def problem_of(traced: Traced, wanted: Wanted) -> Problem:
    return Problem(op_name(traced), printing.captures_of(traced), wanted.dtypes, traced.text)


def families(traced: Traced, wanted: Wanted) -> list[Family]:
    """Of the pair's op and, with `backward`, of its gradients' op."""
    problem = problem_of(traced, wanted)
    mods = printing.mods_of(traced, wanted.backward)
    kernels = forward_kernels(problem, mods, wanted)
    found = [Family(problem.op, kernels, _sample, portable=_portable, sampled=wanted.sampled)]
    if wanted.backward:
        found.append(Family(problem.backward_op, backward_kernels(problem, mods, wanted), _sample, portable=_portable,
                            sampled=wanted.sampled))  # fmt: skip
    return found


def forward_kernels(problem: Problem, mods: Mods, wanted: Wanted) -> tuple[Kernel, ...]:
    plain = printed(problem, "forward", forward.attention_forward, mods)
    layouts = ("aligned", "paged", "strided") if wanted.paged else ("aligned", "strided")
    found = [forward.kernel(problem, plain, wanted.rounded_heads, layouts)]
    if wanted.decode:
        split = printed(problem, "decode", decode.attention_decode, mods)
        heads = wanted.rounded_heads if wanted.paged else wanted.rounded_heads[:1]
        found.append(decode.kernel(problem, split, heads))
    if set(wanted.dtypes) & {"bf16", "fp16"}:
        fn = printed(problem, "hopper", hopper_forward.attention_hopper_forward, mods, decorator="gluon.jit")
        heads = tuple(dict.fromkeys(Head(*h, False) for h in (*wanted.exact, *wanted.rounded)))
        found.append(hopper_forward.kernel(problem, fn, heads, bool(mods.mask), bool(mods.score)))
    return tuple(found)


def backward_kernels(problem: Problem, mods: Mods, wanted: Wanted) -> tuple[Kernel, ...]:
    grads = ["largest", *(f"grad_{c.name}" for c in problem.grad_captures)] if problem.grad_captures else []
    fn = printed(problem, "backward", backward.attention_backward, mods)
    with_captures = printed(problem, "backward_captures", backward.attention_backward, mods, grads) if grads else fn
    found = [backward.kernel(problem, fn, with_captures, (*wanted.exact_heads, wanted.rounded_heads[-1]))]
    if set(wanted.dtypes) & {"bf16", "fp16"}:
        of_keys, of_queries = (
            printed(problem, f"backward_hopper_{name}", body, mods, decorator="gluon.jit")
            for name, body in (("keys", hopper_backward.attention_hopper_keys),
                               ("queries", hopper_backward.attention_hopper_queries))
        )  # fmt: skip
        sizes = dict.fromkeys(h for h in (*wanted.exact, *wanted.rounded) if max(h) <= 128)
        if heads := tuple(Head(*h, False) for h in sizes):
            found.append(
                hopper_backward_plans.kernel(problem, of_keys, of_queries, heads, bool(mods.mask), bool(mods.score))
            )
    return tuple(found)


def printed(problem: Problem, kind: str, body: Any, mods: Mods, grads: Sequence[str] = (),
            decorator: str = "triton.jit") -> Any:  # fmt: skip
    """The kernel of this pair in front of a shared function."""
    name = f"{problem.name}_{kind}"
    return source.function(name, entry(name, body, mods, list(problem.capture_args(problem.op)), grads, decorator))


def _sample(kernel: Kernel, point: Point) -> bool:
    """Of the pairs that tests compile: the first of all axes, and what differs from it in one respect. What takes every
    layout is of one head size."""
    heads = kernel.axes["head"]
    usual = {axis: values[0] for axis, values in kernel.axes.items()}
    if point.layout == "strided":
        usual |= {"layout": "strided", "head": heads[-1]}
    elif "strided" in kernel.axes["layout"]:
        usual |= {"layout": "aligned"}
    return sum(point.axes[axis] != value for axis, value in usual.items()) <= 1


def _portable(kernel: Kernel, point: Point) -> bool:
    """For GPUs that no cubin is for: the kernels that take everything."""
    return point.layout == "strided" and point.dtype != "fp32"
