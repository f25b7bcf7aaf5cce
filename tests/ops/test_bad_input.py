"""Wrong and unusual arguments: an error that can be read, or torch's answer."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import replace

import pytest
import seeds
import torch

import tk
from tk.cli import _calls

from .bad_input import TENSOR_CHANGES, failures, judge_names, report

CASES = 2000


def test_every_public_function_has_a_right_call():
    made = _calls.calls()
    assert {call.name for call in made} == set(tk.inspect.functions())
    for call in made:
        found = call.function(*call.args, **call.kwargs)
        if call.torchs is not None:
            found, wanted = (
                (x,) if isinstance(x, torch.Tensor) else tuple(x) for x in (found, call.torchs(*call.args))
            )
            torch.testing.assert_close(
                found, wanted, rtol=1e-4, atol=1e-4, msg=lambda text, c=call: f"{c.name}: {text}"
            )


@pytest.mark.slow
def test_changed_calls_of_every_function():
    """Other changes in every run; TK_CALLS_SEED, which a failure prints, makes the same ones again."""
    seed = seeds.seed("TK_CALLS_SEED")
    print(f"TK_CALLS_SEED={seed}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(failures(seed, CASES, "cpu", "meta"))
    assert not found, f"TK_CALLS_SEED={seed}:\n{report(found)}"


@pytest.mark.parametrize(
    ("function", "args"),
    [
        ("linear", (torch.ones(2, 3), torch.ones(4, 3), torch.ones(4, device="meta"))),
        ("conv1d", (torch.ones(1, 2, 5), torch.ones(3, 2, 2), torch.ones(3, device="meta"))),
        ("layer_norm", (torch.ones(2, 3), (3,), torch.ones(3, device="meta"), torch.ones(3))),
    ],
)
def test_a_tensor_of_the_meta_device_among_real_ones_is_refused(function: str, args: tuple):
    """torch takes such a call for one of fakes, and what these allocate for a result."""
    with pytest.raises((ValueError, RuntimeError), match="device"):
        getattr(tk, function)(*args)


def test_norms_of_orders_that_are_none():
    for p in ((1.5,), (), "other"):
        with pytest.raises((TypeError, ValueError), match=r"tk\.norm: p"):
            tk.norm(torch.ones(3), p)


def test_sdpa_with_batches_that_do_not_broadcast():
    q = torch.ones(3, 2, 4, 8)
    with pytest.raises(ValueError, match="must broadcast"):
        tk.sdpa(q, torch.ones(5, 2, 2, 4, 8), q)


@pytest.mark.parametrize("kind", ["sparse", "sparse csr", "nested"])
def test_a_tensor_that_is_not_dense_is_refused_by_the_name_of_its_argument(kind: str):
    """Of every function every tensor that it takes by itself."""
    tried = 0
    for call in _calls.calls():
        names = list(inspect.signature(call.function).parameters)
        for i, x in enumerate(call.args):
            if not isinstance(x, torch.Tensor):
                continue
            try:
                changed = TENSOR_CHANGES[kind](x)
            except (RuntimeError, NotImplementedError):  # torch has no such tensor
                continue
            tried += 1
            with pytest.raises(
                tk.UnsupportedError, match=rf"tk\.{call.name}: {names[i]} is \w+, must be a dense tensor"
            ):
                call.function(*call.args[:i], changed, *call.args[i + 1 :], **call.kwargs)
    assert tried > 80


def quantized(*shape: int) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(shape), 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore")  # torch is about to drop these
@pytest.mark.parametrize("shape", [(), (0, 6), (4, 6)])
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda q: tk.bucketize(q, torch.ones(3)), "tk.bucketize: input"),
        (lambda q: tk.bucketize(torch.ones(3), q), "tk.bucketize: boundaries"),
        (lambda q: tk.searchsorted(q, torch.ones(3)), "tk.searchsorted: sorted_sequence"),
        (lambda q: tk.searchsorted(torch.ones(3), q), "tk.searchsorted: input"),
        (lambda q: tk.cummax(q, -1), "tk.cummax: input"),
        (lambda q: tk.cummin(q, -1), "tk.cummin: input"),
        (lambda q: tk.gather(torch.ones(4, 6), 0, q), "tk.gather: index"),
        (lambda q: tk.scatter_add(torch.ones(4, 6), 0, q, torch.ones(4, 6)), "tk.scatter_add: index"),
        (lambda q: tk.group_norm(q, 2), "tk.group_norm: input"),
    ],
)
def test_a_quantized_tensor_is_refused_by_name_where_aten_takes_none(call, name: str, shape: tuple):
    """Whatever its shape: of one without dimensions or elements ATen speaks of the quantizer, and of no argument."""
    with pytest.raises(tk.UnsupportedError, match=rf"{name} is quantized \(qint8\), must be a plain tensor"):
        call(quantized(*shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("layout", ["sparse", "sparse csr"])
def test_a_sparse_tensor_is_refused_in_every_dtype(layout: str, dtype: torch.dtype):
    """Integers and float64 are scanned by keys, which are made before the op sees the tensor."""
    sparse = TENSOR_CHANGES[layout](torch.ones(4, 6)).to(dtype)
    for scan in (tk.cummax, tk.cummin):
        with pytest.raises(tk.UnsupportedError, match=rf"tk\.{scan.__name__}: input is \w+, must be a dense tensor"):
            scan(sparse, -1)


def test_a_loss_of_a_batch_is_held_against_torchs():
    """Classes come last, where those of cross_entropy come second."""
    (call,) = [call for call in _calls.calls() if call.name == "linear_cross_entropy"]
    x, weight, target = call.args
    batch = x[None], weight, target[None]
    torch.testing.assert_close(tk.linear_cross_entropy(*batch), call.torchs(*batch))
    torch.testing.assert_close(call.torchs(*batch), torch.nn.functional.cross_entropy(x @ weight.mT, target))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: tk.layer_norm(torch.ones(2, 3), (3,), None, None, "x"),
            r"tk\.layer_norm: eps must be a float, is of type str",
        ),
        (
            lambda: tk.conv1d(torch.ones(1, 2, 5), torch.ones(3, 2, 2), None, 1.5),
            r"stride must be an int or a list of ints",
        ),
        (
            lambda: tk.mm(torch.ones(2, 3), torch.ones(3, 2), out_dtype="x"),
            r"tk\.mm: out_dtype must be a torch\.dtype or None",
        ),
        (
            lambda: tk.mm(torch.ones(2, 3), torch.ones(3, 2), out_dtype=5),
            r"tk\.mm: out_dtype must be a torch\.dtype or None",
        ),
        (lambda: tk.addmm(None, torch.ones(2, 3), torch.ones(3, 2)), r"tk\.addmm: bias must be a Tensor, is NoneType"),
        (
            lambda: tk.scatter_add(torch.ones(3, 4), 0, torch.zeros(3, 4).long(), None),
            r"tk\.scatter_add: src must be a Tensor, is NoneType",
        ),
        (
            lambda: tk.index_add(torch.ones(3, 4), 0, torch.zeros(3).long(), None),
            r"tk\.index_add: source must be a Tensor, is NoneType",
        ),
        (lambda: tk.load_pack(3), r"tk\.load_pack: path must be a str or a path"),
        (lambda: tk.config.override(["mm"], 1).__enter__(), r"tk\.config\.override: op must be a string"),
        (lambda: tk.flex.create_block_mask(tk.flex.mods.causal, 1, "x", 8, 8), r"create_block_mask: H must be an int"),
        (
            lambda: tk.flex.create_block_mask(tk.flex.mods.causal, 1, 1, None, 8),
            r"create_block_mask: Q_LEN must be an int",
        ),
        (lambda: tk.flex.register("m", None, tk.flex.mods.causal, head_dims=64), r"register: head_dims must be a list"),
        (
            lambda: tk.flex.register("m", None, tk.flex.mods.causal, dtypes=torch.half),
            r"register: dtypes must be a list",
        ),
    ],
)
def test_a_wrong_type_is_said_by_name(call, message: str):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (NotImplementedError("Could not run 'tk::softmax' with arguments from the 'SparseCPU' backend."), "softmax"),
        (RuntimeError("it is a pity that this did not work"), "mm"),
        (RuntimeError("tk.mm: something is wrong"), "mm"),
        (TypeError("len() of a 0-d tensor"), "adamw_"),
    ],
)
def test_an_error_that_names_no_argument_is_seen(error: Exception, name: str):
    (call, *_) = [call for call in _calls.calls() if call.name == name]
    assert judge_names(error, replace(call, torchs=None)) is not None
    assert (
        judge_names(ValueError(f"tk.{name}: {next(iter(inspect.signature(call.function).parameters))} is 1"), call)
        is None
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_none_for_a_tensor_of_an_op_is_said_by_name(device: str):
    """A schema's Tensor takes None; the op's checks spoke of its dtype."""
    x = torch.ones(2, 3, device=device)
    with pytest.raises(ValueError, match=r"tk\.layer_norm: weight must be a Tensor, is None; x is float32"):
        torch.ops.tk.layer_norm(x, None, None, 1e-5)
    with pytest.raises(ValueError, match=r"tk\.gather: index must be a Tensor, is None"):
        torch.ops.tk.gather(x, None)
