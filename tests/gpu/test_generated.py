"""Every generated op of the package against its recorded graph in fp64: some 5,000 random calls, and each variant."""

import math
import random
from collections import Counter

import pytest
import torch

from benchmarks import accuracy, ops
from tk.generated import inputs, interpret, register
from tk.generated.problem import Call
from tk.generated.records import GeneratedOp

from .cases import rms
from .device import DEVICE
from .op_cases import candidates, check, check_call, deterministic, draw, make, place, problems, shape_of, variants

NAMES = [name for name in register.names() if not register.find(name).takes_lists]  # test_lists.py has those
CASES = 5000  # of all ops together; TK_TEST_DEVICE=cpu looks at a twentieth
PER_OP = max(8, -(-CASES // (max(len(NAMES), 1) * (1 if DEVICE == "cuda" else 20))))
GRADIENT_SHAPES = ((33, 1000), (2, 3, 5, 64), (1, 64))
GPU = pytest.mark.skipif(DEVICE != "cuda", reason="about streams and graphs of a GPU")


def find(name: str) -> GeneratedOp:
    op = register.find(name)
    assert op is not None
    return op


def test_the_package_has_generated_ops() -> None:
    assert {"softmax", "rms_norm", "rms_norm_backward", "gelu", "row_argmax", "column_sum"} <= set(NAMES)
    assert DEVICE != "cuda" or PER_OP * len(NAMES) >= CASES


@pytest.mark.parametrize("name", NAMES)
def test_random_calls(name: str) -> None:
    op, rng = find(name), random.Random(name)
    wrong = []
    ours = torchs = 0.0
    for _ in range(PER_OP):
        case = draw(rng, op)
        outcome = check(case)
        if outcome.problem:
            wrong.append(outcome.problem)
        for verdict in outcome.verdicts:
            if verdict.slack > 0 and verdict.torch.mean < float("inf"):  # in units in which no case outweighs others
                ours += verdict.ours.mean / verdict.slack
                torchs += verdict.torch.mean / verdict.slack
    assert not wrong, f"{len(wrong)} of {PER_OP} wrong:\n" + "\n".join(wrong[:8])
    assert ours <= accuracy.MEAN_FACTOR * torchs + 0.1 * PER_OP, (
        f"mean error {ours / max(torchs, 1e-30):.3f} of torch's"
    )


# --- Gradients ---

HAVE_GRADIENTS = [name for name in NAMES if find(name).backward]


def gradients(results, leaves, grads) -> list[torch.Tensor]:
    pairs = [(r, g.to(r.dtype).reshape(r.shape)) for r, g in zip(results, grads, strict=True) if r.requires_grad]
    given = [r for r, _ in pairs], leaves, [g for _, g in pairs]
    return list(torch.autograd.grad(*given, allow_unused=True, materialize_grads=True))  # of weights there is none


def as_leaves(args: list) -> tuple[list, list[torch.Tensor]]:
    """The arguments with tensors that want gradients, and those tensors."""
    made = [x.detach().requires_grad_() if is_float(x) else x for x in args]
    return made, [x for x in made if is_float(x)]


def is_float(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


@pytest.mark.parametrize("shape", GRADIENT_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", HAVE_GRADIENTS)
def test_gradients(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    """Of all arguments, with leading dimensions in any order in memory; beside torch's, against fp64 autograd."""
    op = find(name)
    for _, flags in inputs.kinds(op):
        example = inputs.of_shape(op, shape_of(op, shape), dtype, flags)
        rng = random.Random(name)
        args = [place(x, "channels_last", rng) if isinstance(x, torch.Tensor) else x for x in example.arguments(DEVICE)]
        mine, leaves = as_leaves(args)
        results = inputs.listed(getattr(torch.ops.tk, name)(*mine))
        grads = [torch.randn_like(r) for r in results]
        ours = gradients(results, leaves, grads)
        theirs, their_leaves = as_leaves(args)
        call = Call(op, [*theirs, -1, 0])
        torchs = gradients(interpret.aten(call), their_leaves, grads)
        wide, exact_leaves = as_leaves([interpret.wide(x) for x in interpret.seen(call).values()])
        named = dict(zip(interpret.seen(call), wide, strict=True))
        reference = gradients(interpret.aten(call, exact=True, arguments=named), exact_leaves, grads)
        summed = max(x.numel() for x in leaves)
        for leaf, *found in zip(leaves, ours, torchs, reference, strict=True):
            assert (found[0].shape, found[0].dtype) == (leaf.shape, leaf.dtype)
            exact = found[2].reshape(leaf.shape)
            room = accuracy.slack(max(leaf.shape[-1], summed // leaf.numel()), rms(exact), False)
            verdict = accuracy.judge(found[0], found[1], exact, room)
            assert verdict.ok, f"{example}, gradient of {list(leaf.shape)}: {verdict}"


# --- Every config and variant ---


RUNS = 2  # of each variant, the first a long reduction


@GPU
@pytest.mark.parametrize("name", NAMES)
def test_every_variant(name: str) -> None:
    op = find(name)
    wrong: list[str] = []
    waiting: dict[int, str] = {}
    ran: Counter[int] = Counter()
    for case in problems(op):
        args = make(case)
        runs, rests = variants(op, args)
        waiting |= {variant: f"{case.example}: {why}" for variant, why in rests.items()}
        for variant, config in runs.items():
            ran[variant] += 1
            if ran[variant] > RUNS:
                continue
            if problem := check_call(case, args, config).problem:
                wrong.append(problem)
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:8])
    assert ran, "nothing was launched"
    unreached = [why for variant, why in waiting.items() if variant not in ran]
    assert not unreached, f"{len(unreached)} variants suit no problem here:\n" + "\n".join(unreached[:8])


@pytest.mark.parametrize("at", [0, 500, 999])
def test_the_mean_of_a_row_with_an_infinity(at: int) -> None:
    """NaN in every config, wherever it stands."""
    op = find("row_var_mean")
    x = torch.randn(3, 1000, device=DEVICE)
    x[1, at] = math.inf
    for config in {c.config for c in candidates(op, [x, 1.0, 1.0])} or {-1}:
        _, mean = torch.ops.tk.row_var_mean(x, 1.0, 1.0, config=config)
        assert mean.isnan().tolist() == [False, True, False]


# --- Streams, graphs, many elements ---


def a_call(name: str, shape: tuple[int, ...] = (37, 1000), dtype: str = "bf16") -> tuple[GeneratedOp, list]:
    op = find(name)
    dtypes = [next(iter(d.values()), dtype) for d, _ in inputs.kinds(op)]
    dtype = dtype if dtype in dtypes else dtypes[0]
    return op, inputs.of_shape(op, shape_of(op, shape), dtype).arguments(DEVICE)


def other_values(x: torch.Tensor) -> torch.Tensor:
    """Indices 0 and 1 change places."""
    if x.dtype == torch.bool:
        return ~x
    return torch.randn_like(x) if is_float(x) else 1 - x


@GPU
@pytest.mark.parametrize("name", NAMES)
def test_captured_and_replayed(name: str) -> None:
    """With other values in the same tensors, many times, beside calls of the same op."""
    op, args = a_call(name)
    with deterministic(op):
        ops.run_tk(op, args)  # loads what is needed
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = ops.run_tk(op, args)
        for _ in range(3):
            for x in args:
                if isinstance(x, torch.Tensor):
                    x.copy_(other_values(x))
            for _ in range(50):
                graph.replay()
            assert ops.same_bits(found, ops.run_tk(op, args))


@GPU
@pytest.mark.parametrize("name", NAMES)
def test_another_stream(name: str) -> None:
    """The launch goes to the current stream: what is written there before it is seen, whatever other streams do."""
    op, args = a_call(name, (300, 4096))
    with deterministic(op):
        values = [other_values(x) if isinstance(x, torch.Tensor) else x for x in args]
        expected = ops.run_tk(op, values)
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)  # 10 ms: a launch on another stream would be over before
            for x, value in zip(args, values, strict=True):
                if isinstance(x, torch.Tensor):
                    x.copy_(value)
            found = ops.run_tk(op, args)
        side.synchronize()
        assert ops.same_bits(found, expected)


HUGE = (262_400, 8_192)  # more than 2^31 elements: they begin in row 262,144
needs_memory = pytest.mark.skipif(
    DEVICE != "cuda" or not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 40e9,
    reason="needs a GPU with 40 GB",
)


@needs_memory
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "misaligned"])
@pytest.mark.parametrize("name", ["silu", "softmax", "row_sum", "column_sum"])
def test_more_than_two_to_the_31_elements(name: str, offset: int) -> None:
    op = find(name)
    x = torch.empty(HUGE[0] * HUGE[1] + offset, device=DEVICE, dtype=torch.bfloat16).normal_()[offset:].view(HUGE)
    (result,) = ops.run_tk(op, [x])
    at = [0, 1, 131_071, 131_072, 262_143, 262_144, HUGE[0] - 1]
    if name == "column_sum":
        columns = [c % HUGE[1] for c in at]
        x, result = x[:, columns].contiguous(), result[columns]
    else:
        x, result = x[at], result[at]
    ops.judge(op, [x], [result])


@needs_memory
@pytest.mark.parametrize("name", ["silu", "softmax"])
def test_strides_past_two_to_the_31(name: str) -> None:
    """Few elements, far apart."""
    op = find(name)
    x = torch.empty(4, 1 << 30, device=DEVICE, dtype=torch.bfloat16)[:, ::2_097_151].normal_()
    ops.judge(op, [x], ops.run_tk(op, [x]))
