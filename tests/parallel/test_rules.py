"""Sharding rules of every op, by torch's own validation: each is tried on parts of the arguments, as two GPUs have
them, and its results are put together and compared with those of the whole."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

import pytest
import seeds
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor._ops import strategy_validation as validation
from torch.testing._internal.distributed.fake_pg import FakeStore

import tk
from tk.generated import inputs, register
from tk.ops import _register

SEED = seeds.seed("TK_SHARDING_SEED")
WORLD = 2
RANDOM = ("dropout", "dropout_add", "fill_uniform", "fill_normal", "fill_integers")


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    yield
    dist.destroy_process_group()


Rules = "set[tuple[tuple[str, ...], tuple[str, ...]]]"


def rules_of(overload: Any, args: Sequence[Any]) -> Any:
    """(placements of the tensor arguments, placements of the results) by their short names."""
    tensors = validation.extract_tensors_from_args(tuple(args), {})
    results = listed(overload(*args))
    return validation._query_dtensor_rules(
        overload, tensors, tuple(args), {}, tuple(t.shape for _, t in tensors), tuple(r.shape for r in results),
        WORLD, False,
    )  # fmt: skip


def listed(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def problems(overload: Any, args: Sequence[Any]) -> list[str]:
    """What is wrong with the rules for a call."""
    results = overload(*args)
    found = validation.ComparisonStats()
    validation._validate_aten_op_for_sample(overload, tuple(args), {}, results if isinstance(results, Tensor) else
                                            list(results), WORLD, True, False, 0, "", found)  # fmt: skip
    return [f"{overload} of {d.input_shapes}: {d.input_placements} -> {d.output_placements}: {d.error_msg}"
            for d in found.false_positives]  # fmt: skip


# --- Generated ops ---


def generated() -> list[str]:
    return [n for n in register.names() if not register.find(n).takes_lists and n not in (*RANDOM, "b2b_fused")]


def draw(name: str, random: Random) -> tuple[Any, ...]:
    op = register.find(name)
    assert op is not None
    kinds = list(inputs.kinds(op))
    wide = [k for k in kinds if k[0].get("T", "fp32") == "fp32"]  # sums in another order differ less
    dtypes, flags = random.choice(wide or kinds)
    signature = inputs.signature_of(op)
    sizes = {x: random.choice((2, 4, 6, 8)) for x in signature.letters}
    has_leading = any(t.leading for t in signature.tensors.values())
    leading = tuple(random.choice((2, 4, 6)) for _ in range(random.randint(1, 3))) if has_leading else ()
    return inputs.Example(op, signature, dtypes, leading, sizes, flags).arguments("cpu")


@pytest.mark.parametrize("name", [n for n in generated() if n != "quantize_fp8_rows"])
def test_rules_of_generated_ops(name: str) -> None:
    random = Random(f"{SEED} {name}")
    torch.manual_seed(random.randrange(1 << 30))
    overload = getattr(torch.ops.tk, name).default
    assert problems(overload, draw(name, random)) == [], f"TK_SHARDING_SEED={SEED}"


def test_rules_of_rows_in_float8() -> None:
    """Torch's validation does not compare float8."""
    overload = torch.ops.tk.quantize_fp8_rows.default
    args = (torch.randn(4, 6, 8), False)
    assert rules_of(overload, args) == {((f"S({d})",), (f"S({d})",) * 2) for d in (0, 1)}
    for d in (0, 1):
        parts = zip(*(overload(part, False) for part in args[0].chunk(WORLD, d)), strict=True)
        for whole, part in zip(overload(*args), parts, strict=True):
            assert torch.equal(whole.float(), torch.cat([p.float() for p in part], d))


def test_every_generated_op_has_rules() -> None:
    """Of the package. What may not be sharded at all is the same on every GPU."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    for name in generated():
        assert getattr(torch.ops.tk, name).default in propagator.op_strategy_funcs, name


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_have_none(name: str) -> None:
    """The GPUs may have other seeds."""
    mesh = init_device_mesh("cpu", (WORLD,))
    x = distribute_tensor(torch.zeros(4, 8), mesh, [Replicate()])
    seed = distribute_tensor(torch.zeros((), dtype=torch.int64), mesh, [Replicate()])
    args = {"dropout": (x, seed, 0.5, 0), "dropout_add": (x, x, seed, 0.5, 0)}.get(name)
    if args is None:
        args = (x.long(), seed, 0, 9, 0) if name == "fill_integers" else (x, seed, 0)
    with pytest.raises(RuntimeError, match="it draws random numbers, and the ranks may have other seeds"):
        getattr(torch.ops.tk, name)(*args)


# --- Ops that are written by hand ---


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _scaled(random: Random) -> tuple[Any, ...]:
    m, k, n = (random.choice((16, 32, 48)) for _ in range(3))
    a, b = (torch.randn(s).to(torch.float8_e4m3fn) for s in ((m, k), (n, k)))
    scales = [torch.rand(s) for s in random.choice([((m, 1), (1, n)), ((), ())])]
    return a, b.t(), *scales, None, False, 0, torch.float32


def _int4(random: Random) -> tuple[Any, ...]:
    k, n = 64, random.choice((32, 64))
    values = torch.randint(0, 16, (k, n), dtype=torch.uint8)
    return randn(*random.choice(((4,), (2, 6))), k), tk.pack_int4(values), randn(2, n), randn(2, n), 32, randn(n)


def _grouped(random: Random) -> tuple[Any, ...]:
    g, m, k, n = 2, *(random.choice((4, 6, 8)) for _ in range(3))
    offs = torch.tensor([m // 2, m], dtype=torch.int32)
    bias = random.choice((None, randn(n), randn(g, n)))
    return random.choice((
        (randn(m, k), randn(g, k, n), offs, bias),
        (randn(g, k, n), randn(n, m), offs, None),
        (randn(k, m), randn(m, n), offs, bias),
        (randn(g, m, k), randn(g, k, n), None, bias),
    ))  # fmt: skip


def _conv(random: Random) -> tuple[Any, ...]:
    n, i, o = (random.choice((2, 4)) for _ in range(3))
    groups = random.choice((1, 1, 2))
    bias = random.choice((None, randn(o)))
    batch = random.choice(((n,), (n,), ()))
    return randn(*batch, i, 5, 6), randn(o, i // groups, 3, 2), bias, [1, 1], [1, 0], [1, 1], groups


def _conv_gradient(random: Random) -> tuple[Any, ...]:
    x, w, _, *numbers = _conv(random)
    y = torch.ops.tk.conv2d(x, w, None, *numbers)
    return torch.randn_like(y), x, w, *numbers


def _bias(random: Random, m: int, n: int) -> Tensor | None:
    return random.choice((None, randn(n), randn(m, n), randn(m, 1), randn(1, n), randn()))


def _mm(random: Random) -> tuple[Any, ...]:
    m, k, n = (random.choice((2, 4, 6)) for _ in range(3))
    return randn(m, k), randn(k, n), _bias(random, m, n), random.choice((0, 0, 1))


def _addmm(random: Random) -> tuple[Any, ...]:
    a, b, bias, activation = _mm(random)
    return randn(b.shape[1]) if bias is None else bias, a, b, 0.5, 2.0, activation


def _bmm(random: Random) -> tuple[Any, ...]:
    a, b, bias, activation = _mm(random)
    g = random.choice((2, 4))
    return randn(g, *a.shape), randn(g, *b.shape), bias, activation


def _baddbmm(random: Random) -> tuple[Any, ...]:
    a, b, bias, activation = _bmm(random)
    return randn(b.shape[2]) if bias is None else bias, a, b, 0.5, 2.0, activation


def _linear(random: Random) -> tuple[Any, ...]:
    k, n = (random.choice((2, 4, 6)) for _ in range(2))
    leading = [random.choice((2, 4)) for _ in range(random.randrange(4))]
    return randn(*leading, k), randn(n, k), random.choice((None, randn(n))), random.choice((0, 0, 2))


CALLS: dict[str, Callable[[Random], tuple[Any, ...]]] = {
    "mm": _mm,
    "addmm": _addmm,
    "linear": _linear,
    "bmm": _bmm,
    "baddbmm": _baddbmm,
    "mm_plus_mm": lambda r: (randn(4, 6), randn(6, 8), randn(4, 2), randn(2, 8), randn(8), r.choice((0, 1))),
    "grouped_mm": _grouped,
    "scaled_mm": _scaled,
    "scaled_grouped_mm": lambda r: (
        torch.randn(32, 16).to(torch.float8_e4m3fn), torch.randn(2, 48, 16).to(torch.float8_e4m3fn).transpose(1, 2),
        torch.rand(32), torch.rand(2, 48), torch.tensor([16, 32], dtype=torch.int32), None, False, 0, torch.float32,
    ),
    "int4_mm": _int4,
    "uint4x2_mixed_mm": lambda r: (randn(4, 64), torch.randint(0, 256, (32, 32), dtype=torch.uint8)),
    "b2b_gemm": lambda r: (randn(4, 6), randn(6, 8), randn(8, 2), r.choice((True, False)), r.choice((0, 1))),
    "conv1d": lambda r: ((c := _conv(r))[0][..., 0], c[1][..., 0], c[2], [1], [1], [1], c[6]),
    "conv2d": _conv,
    "conv3d": lambda r: ((c := _conv(r))[0].unsqueeze(-1), c[1].unsqueeze(-1), c[2], [1] * 3, [1, 0, 0], [1] * 3, c[6]),
    "conv_input_grad": _conv_gradient,
    "conv_weight_grad": _conv_gradient,
}  # fmt: skip


def test_there_is_a_call_of_each() -> None:
    assert set(CALLS) == set(_register.RECORDS)


@pytest.mark.parametrize("name", CALLS)
def test_rules_of_products_and_convolutions(name: str) -> None:
    random = Random(f"{SEED} {name}")
    torch.manual_seed(random.randrange(1 << 30))
    overload = getattr(torch.ops.tk, name).default
    found = set()
    for _ in range(4):
        args = CALLS[name](random)
        assert problems(overload, args) == [], f"TK_SHARDING_SEED={SEED}"
        found |= rules_of(overload, args)
    assert found, "nothing was tried"


# --- None is missing that ATen's has ---

x, y = (lambda *s: torch.rand(s))(4, 6), (lambda *s: torch.rand(s))(4, 6)
index = torch.randint(0, 4, (4, 6))
TWINS = {
    "mm": ((x, y.t()), torch.ops.aten.mm.default, (x, y.t())),
    "bmm": ((x.reshape(2, 2, 6), y.reshape(2, 6, 2)), torch.ops.aten.bmm.default,
            (x.reshape(2, 2, 6), y.reshape(2, 6, 2))),
    "addmm": ((x[0, :4], x, y.t()), torch.ops.aten.addmm.default, (x[0, :4], x, y.t())),
    "gelu": ((x, False), torch.ops.aten.gelu.default, (x,)),
    "gelu_backward": ((x, y, False), torch.ops.aten.gelu_backward.default, (x, y)),
    "silu": ((x,), torch.ops.aten.silu.default, (x,)),
    "softmax": ((x,), torch.ops.aten._softmax.default, (x, -1, False)),
    "log_softmax": ((x,), torch.ops.aten._log_softmax.default, (x, -1, False)),
    "logsumexp": ((x,), torch.ops.aten.logsumexp.default, (x, [-1])),
    "row_sum": ((x,), torch.ops.aten.sum.dim_IntList, (x, [-1])),
    "cumsum": ((x,), torch.ops.aten.cumsum.default, (x, 1)),
    "sort": ((x, False), torch.ops.aten.sort.default, (x,)),
    "topk": ((x, 2, True), torch.ops.aten.topk.default, (x, 2)),
    "row_var_mean": ((x, 1.0, 1.0), torch.ops.aten.var_mean.correction, (x, [-1])),
    "embedding": ((x, index, -1), torch.ops.aten.embedding.default, (x, index)),
    "gather": ((x, index), torch.ops.aten.gather.default, (x, -1, index)),
}  # fmt: skip


@pytest.mark.parametrize("name", TWINS)
def test_no_rule_of_aten_is_missing(name: str) -> None:
    """But those for partial arguments, which are summed up before the call, and for embedding tables that are sharded
    by rows, whose masked partial results are torch's own."""
    args, aten, aten_args = TWINS[name]
    theirs = {(i, o) for i, o in rules_of(aten, aten_args) if not any(p.startswith(("P", "_", "Mask")) for p in i)}
    theirs = {(i, o) for i, o in theirs if not (name == "embedding" and i[0] == "S(0)")}
    ours = rules_of(getattr(torch.ops.tk, name).default, args)
    missing = {(i, o) for i, o in theirs if (i, o) not in ours}
    assert theirs
    assert not missing


# --- When they are registered ---

_LATE = """
import sys
import tk, torch
used = torch.ops.tk.gelu.default
assert "torch.distributed.tensor" not in sys.modules
before = len(sys.meta_path)
import torch.distributed.tensor as tensor
assert len(sys.meta_path) == before - 1 and "tk" not in type(tensor.__spec__.loader).__module__
known = tensor.DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
assert used in known and torch.ops.tk.mm.default in known and torch.ops.tk.silu.default in known
"""


def test_torch_distributed_tensor_is_imported_after_tk() -> None:
    """tk does not import it."""
    subprocess.run([sys.executable, "-c", _LATE], check=True, env={**os.environ, "PYTHONSAFEPATH": "1"})


# --- From a call ---


def test_a_gradient_of_rows_is_partial_for_the_weight() -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    a = distribute_tensor(torch.randn(4, 6, 16), mesh, [Shard(1)]).requires_grad_()
    w = distribute_tensor(torch.randn(16), mesh, [Replicate()]).requires_grad_()
    out = tk.rms_norm(a, (16,), w)
    assert out.placements == (Shard(1),)
    of_a, of_w = torch.autograd.grad(out.sum(), [a, w])
    assert of_a.placements == (Shard(1),)
    assert of_w.placements == (Partial(),)


def test_sizes_that_do_not_divide_and_an_activation() -> None:
    """What two GPUs cannot share evenly, and sums that something is made of, are whole on each."""
    mesh = init_device_mesh("cpu", (WORLD,))
    a, w = (distribute_tensor(torch.randn(s), mesh, [Shard(1)]) for s in ((4, 6), (8, 6)))
    assert tk.linear(a, w).placements == (Partial(),)
    assert not tk.linear(a, w, activation="gelu").placements[0].is_partial()
    odd = distribute_tensor(torch.randn(3, 6), mesh, [Replicate()])
    assert tk.gelu(odd).placements == (Replicate(),)
