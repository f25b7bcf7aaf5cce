"""What tk.use does not touch, and the reason that it gives."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from use_models import calls

import tk
from tk.dropin.report import Record


def record(module: nn.Module, path: str = "") -> Record:
    """Of a module that is left alone: nothing in it or below it is changed."""
    part = module.get_submodule(path)
    before = [dict(vars(m)) for m in part.modules()]
    found = {r.path: r for r in tk.use(module)}[path]
    assert not found.replaced
    assert [dict(vars(m)) for m in part.modules()] == before
    return found


@pytest.mark.parametrize(
    ("kind", "register"),
    [
        ("forward hook", lambda m: m.register_forward_hook(lambda *_: None)),
        ("forward pre hook", lambda m: m.register_forward_pre_hook(lambda *_: None)),
        ("backward hook", lambda m: m.register_full_backward_hook(lambda *_: None)),
        ("backward pre hook", lambda m: m.register_full_backward_pre_hook(lambda *_: None)),
    ],
)
def test_hooks(kind: str, register: Callable[[nn.Module], Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    handle = register(model[0])
    assert record(model, "0").reason == f"has a {kind}"
    assert calls(model, torch.randn(2, 4)) == {"linear": 1}  # the other
    handle.remove()
    assert {r.path: r.replaced for r in tk.use(model)} == {"0": True, "1": False}


def test_tied_weights() -> None:
    model = nn.ModuleDict({"tokens": nn.Embedding(10, 4), "middle": nn.Linear(4, 4), "head": nn.Linear(4, 10)})
    model["head"].weight = model["tokens"].weight
    report = {r.path: r for r in tk.use(model)}
    assert report["tokens"].reason == "weight is shared with head.weight"
    assert report["head"].reason == "weight is shared with tokens.weight"
    assert report["middle"].replaced


def test_a_module_at_two_places() -> None:
    layer = nn.Linear(4, 4)
    report = tk.use(nn.Sequential(layer, nn.ReLU(), layer))
    assert [(r.path, r.reason) for r in report if r.type == "Linear"] == [("0", "weight is shared with 2.weight")]


def test_an_activation_at_two_places() -> None:
    """It has no weights: there is nothing to share."""
    act = nn.GELU()
    model = nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4), act)
    tk.use(model)
    assert calls(model, torch.randn(2, 4)) == {"linear": 2, "gelu": 2}


@pytest.mark.parametrize("apply", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrised(apply: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(apply(nn.Linear(4, 4)), nn.Linear(4, 4))
    assert record(model, "0").reason == "parametrised"
    assert calls(model, torch.randn(2, 4)) == {"linear": 1}


def test_what_a_parametrisation_computes_with() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(4, 4, bias=False)

        def forward(self, weight: Tensor) -> Tensor:
            return self.mix(weight)

    model = nn.Sequential(nn.Linear(4, 4))
    parametrize.register_parametrization(model[0], "weight", Mixing())
    found = record(model, "0.parametrizations.weight.0.mix")
    assert found.reason == "below 0, which is parametrised"
    assert calls(model, torch.randn(2, 4)) == {}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
def test_the_old_weight_norm_is_a_hook() -> None:
    assert record(nn.utils.weight_norm(nn.Linear(4, 4))).reason == "has a forward pre hook"


def test_float64() -> None:
    assert record(nn.Linear(4, 4).double()).reason == (
        "weight is float64; there are kernels for bfloat16, float16, float32"
    )


def test_integer_weights() -> None:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight.to(x.dtype))

    assert record(Quantised()).reason.startswith("weight is int8")


def test_another_device() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    assert record(model, "1").reason == "weight is on meta, the model on cpu"


def test_a_model_on_meta_is_used_as_one_on_the_cpu() -> None:
    """So that tk.check lists what its calls would run on a GPU."""
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()), torch.empty(4, 8)
    report = tk.use(model)
    assert all(r.replaced for r in report)
    with tk.check(90) as found:
        assert model(x).shape == x.shape
    assert [call.op for call in found.calls] == ["linear", "layer_norm", "gelu"]
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).shape == x.shape


def test_a_model_on_meta_runs_after_a_sample_was_measured() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.ones(4, 8)
    tk.use(model, sample=x).undo()
    tk.use(model.to("meta"))
    with tk.check(90) as found:
        assert model(x.to("meta")).shape == x.shape
    assert [call.op for call in found.calls] == ["linear", "gelu"]


def test_lazy_modules() -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    assert not record(model, "0").replaced
    model(torch.randn(2, 3))
    assert tk.use(model)[0].replaced


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_torchscript() -> None:
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(4, 4))), nn.Linear(4, 4))
    report = {r.path: r for r in tk.use(model)}
    assert report["0"].reason == "compiled to TorchScript"
    assert report["0.0"].reason == "below 0, which is compiled to TorchScript"
    assert report["1"].replaced


def test_a_forward_of_the_instance() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(4, 4, 1))
    own = model[0].forward = MethodType(lambda self, x: x + 1, model[0])
    own_conv = model[1]._conv_forward = MethodType(lambda self, x, w, b: x, model[1])
    assert record(model, "0").reason == "its forward was set on the instance"
    assert record(model, "1").reason == "its _conv_forward was set on the instance"
    assert model[0].forward is own and model[1]._conv_forward is own_conv


def test_what_tk_has_no_op_for() -> None:
    assert "other random numbers" in record(nn.Dropout()).reason and record(nn.Dropout()).op is None
    for module in (nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)):
        assert record(module).reason == "calls nothing by its name that tk has"
        assert record(module).op is None
    assert len(tk.use(nn.Sequential(nn.ModuleList(), nn.Sequential()))) == 2  # leaves
    assert [r.path for r in tk.use(nn.Sequential(nn.Sequential(nn.ReLU())))] == ["0.0"]  # no containers


def test_operators_and_methods_are_torchs() -> None:
    class Products(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ x).softmax(-1).matmul(x)

    assert record(Products()).reason == "calls nothing by its name that tk has"


# --- Parameters that are no plain tensors ---


def test_a_table_that_is_sharded_by_rows(group: None) -> None:
    """Torch's op looks up what a GPU has itself."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    index = distribute_tensor(torch.tensor([1, 3]), mesh, [Replicate()])
    for placement, found in ((Shard(0), {}), (Shard(1), {"embedding": 1})):
        model = nn.Embedding(6, 4)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [placement]))
        expected = model(index).full_tensor()
        with tk.use(model):
            assert torch.equal(model(index).full_tensor(), expected)
            assert calls(model, index) == found


def test_distributed_and_plain_tensors(group: None) -> None:
    """Together they are for torch to refuse, in its words."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate()]))
    tk.use(model)
    assert calls(model, distribute_tensor(torch.randn(2, 4), mesh, [Replicate()])) == {"linear": 1}
    with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
        model(torch.randn(2, 4))


def test_attention_of_distributed_tensors(group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    class Attention(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, q, q)

    model = Attention()
    q = distribute_tensor(torch.randn(1, 2, 8, 16), init_device_mesh("cpu", (1,)), [Shard(1)])
    expected = model(q).full_tensor()
    with tk.use(model):
        assert torch.equal(model(q).full_tensor(), expected)
        assert calls(model, q) == {}
        assert calls(model, q.to_local()) == {"flex_attention": 1}


def test_hooks_of_the_users_beside_those_of_an_engine(group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    model[1].register_forward_hook(lambda module, args, out: None)
    report = {r.path: r for r in tk.use(model)}
    assert report["0"].replaced
    assert report["1"].reason == "has a forward hook"


def test_fully_sharded_data_parallel(group: None) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = nn.Sequential(FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")), nn.Linear(4, 4))
    report = {r.path: r for r in tk.use(model)}
    assert report["0"].reason == "wrapped by FSDP"
    assert "wrapped by FSDP" in report["0._fsdp_wrapped_module"].reason
    assert report["1"].replaced


def test_other_subclasses() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(TwoTensor(torch.ones(4, 4), torch.ones(4, 4)))
    assert record(model).reason == "weight is a TwoTensor, no plain tensor"


# --- What cannot be used at all ---


def test_no_module() -> None:
    with pytest.raises(TypeError, match=r"tk\.use: model must be a torch\.nn\.Module, is function"):
        tk.use(F.relu)  # type: ignore[arg-type]


# --- Undoing what was changed since ---


def test_undo_after_another_change() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    report = tk.use(model)
    inner = model[0].forward
    model[0].forward = lambda x: inner(x) + 1
    with pytest.raises(RuntimeError, match=r"cannot undo Linear\.forward: replaced by something else since"):
        report.undo()
    assert "forward" in vars(model[0]) and "forward" not in vars(model[1])
