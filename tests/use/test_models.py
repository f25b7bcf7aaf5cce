"""tk.use on whole models: what runs, what it computes, and that nothing else is changed."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from use_models import MODELS, OPS, Llama, calls, ops_of

import tk
from tk.dropin.replace import _use
from tk.dropin.report import Report
from tk.dropin.target import Target


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(name: str) -> nn.Module:
    return MODELS[name][0]().eval()


@pytest.fixture
def x(name: str) -> Tensor:
    return MODELS[name][1]()


def state(model: nn.Module) -> dict[str, Any]:
    """All that a model's modules hold."""
    return {path: dict(vars(module)) for path, module in model.named_modules()}


def close(actual: Any, expected: Any) -> None:
    assert_close(actual, expected, rtol=1e-4, atol=1e-5)


# --- In place, and back ---


def test_it_runs_through_tk(name: str, model: nn.Module, x: Tensor) -> None:
    expected = model(x)
    assert calls(model, x) == {}
    report = tk.use(model)
    assert calls(model, x) == OPS[name]
    close(model(x), expected)
    report.undo()
    assert calls(model, x) == {}


def test_undone_bit_for_bit(model: nn.Module, x: Tensor) -> None:
    before, expected = state(model), model(x)
    report = tk.use(model)
    assert state(model) != before
    model(x)
    report.undo()
    after = state(model)
    assert after.keys() == before.keys()
    for path, members in before.items():
        assert list(after[path]) == list(members)
        assert all(after[path][key] is value for key, value in members.items())
    assert torch.equal(model(x), expected)
    report.undo()  # nothing is left to undo


def test_parameters_and_state_dict_stay(model: nn.Module) -> None:
    parameters, saved = dict(model.named_parameters()), model.state_dict(keep_vars=True)
    classes = [type(m) for m in model.modules()]
    tk.use(model)
    assert all(p is parameters[name] for name, p in model.named_parameters())
    used = model.state_dict(keep_vars=True)
    assert list(used) == list(saved) and all(used[key] is value for key, value in saved.items())
    assert [type(m) for m in model.modules()] == classes
    model.load_state_dict(model.state_dict())


def test_classes_and_functions_stay(model: nn.Module, x: Tensor) -> None:
    """Another model of the same classes, and torch itself, are as they were."""
    other = copy.deepcopy(model)
    functional = dict(vars(torch.nn.functional))
    tk.use(model)
    assert dict(vars(torch.nn.functional)) == functional
    assert calls(other, x) == {}


def test_context_manager(model: nn.Module, x: Tensor) -> None:
    before = state(model)
    with tk.use(model) as report:
        assert isinstance(report, Report)
        assert calls(model, x)
    assert state(model) == before
    with pytest.raises(KeyError), tk.use(model):
        raise KeyError
    assert state(model) == before


def test_twice(model: nn.Module, x: Tensor) -> None:
    first = tk.use(model)
    found = calls(model, x)
    second = tk.use(model)
    assert not second.replaced
    assert {r.reason for r in second if r.path in {f.path for f in first.replaced}} == {"runs through tk already"}
    second.undo()
    assert calls(model, x) == found
    first.undo()
    assert calls(model, x) == {}


def test_a_part_of_a_model_first(x: Tensor, name: str) -> None:
    if name != "llama":
        pytest.skip("one model says it")
    model = Llama()
    with tk.use(model.layers[0]) as part:
        with tk.use(model):
            assert calls(model, x)["linear"] == 15
        assert calls(model, x)["linear"] == 7
        assert len(part.replaced) > 7


# --- What is done with models ---


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    out = model(x)
    (out * torch.randn_like(out)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_training(name: str, x: Tensor) -> None:
    model = MODELS[name][0]().train()
    saved = copy.deepcopy(model.state_dict())
    expected = gradients(model, x)
    model.load_state_dict(saved)  # batch norms count
    with tk.use(model):
        found = gradients(model, x)
    assert found.keys() == expected.keys() == dict(model.named_parameters()).keys()
    for key, gradient in expected.items():
        assert_close(found[key], gradient, rtol=1e-3, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_as_one_graph(name: str, model: nn.Module, x: Tensor, dynamic: bool) -> None:
    expected = model(x)
    seen: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append(graph)
        return graph

    torch._dynamo.reset()
    with tk.use(model), torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=dynamic)
        close(compiled(x), expected)
    assert len(seen) == 1
    with torch.no_grad():
        assert torch.equal(compiled(x), expected)  # undone: traced anew, without tk
    assert len(seen) == 2
    assert not ops_of(seen[1])


def test_compiled_training(name: str, x: Tensor) -> None:
    model = MODELS[name][0]()  # batch norms in training mode would count twice
    model.eval()
    expected = gradients(model, x)
    torch._dynamo.reset()
    with tk.use(model):
        found = gradients(torch.compile(model, fullgraph=True, backend="aot_eager"), x)
    for key, gradient in expected.items():
        assert_close(found[f"_orig_mod.{key}"], gradient, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("strict", [False, True])
def test_export(name: str, model: nn.Module, x: Tensor, strict: bool) -> None:
    expected = model(x)
    with tk.use(model):
        program = torch.export.export(model, (x,), strict=strict)
    ops = ops_of(program)
    assert len(ops) == sum(OPS[name].values())
    close(program.module()(x), expected)


def test_export_of_any_batch(name: str, model: nn.Module, x: Tensor) -> None:
    with tk.use(model):
        program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    assert ops_of(program)
    more = torch.cat([x, x, x])
    close(program.module()(more), model(more))


def test_autocast(name: str, model: nn.Module, x: Tensor) -> None:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        with tk.use(model):
            found = calls(model, x)
            assert found.get("linear", 0) == OPS[name].get("linear", 0)
            assert found.get("conv2d", 0) == OPS[name].get("conv2d", 0)
            out = model(x)
    assert out.dtype == expected.dtype
    assert_close(out, expected, rtol=0.1, atol=0.1)


def test_reduced_precision(model: nn.Module, x: Tensor) -> None:
    model, x = model.bfloat16(), x.bfloat16() if x.is_floating_point() else x
    expected = model(x)
    with tk.use(model):
        assert calls(model, x)
        out = model(x)
    assert out.dtype is torch.bfloat16
    assert_close(out, expected, rtol=0.1, atol=0.1)


def test_moved_after_use(name: str, model: nn.Module, x: Tensor) -> None:
    """What there are no kernels for runs as it did."""
    tk.use(model)
    model.double()
    x = x.double() if x.is_floating_point() else x
    assert calls(model, x) == {}
    meta = copy.deepcopy(model).to("meta")
    assert meta(x.to("meta")).shape == model(x).shape


def test_hooks_registered_after(model: nn.Module, x: Tensor) -> None:
    seen: list[str] = []
    tk.use(model)
    for path, module in model.named_modules():
        if path.endswith(("norm", "fc", "gelu")):
            module.register_forward_hook(lambda *_, path=path: seen.append(path))
            module.register_forward_pre_hook(lambda *_, path=path: seen.append(f"{path} before"))
    model(x)
    assert len(seen) == 2


def test_functional_call_and_transforms(model: nn.Module, x: Tensor) -> None:
    parameters = dict(model.named_parameters())
    doubled = {name: 2 * p for name, p in parameters.items()}
    expected = torch.func.functional_call(model, doubled, (x,))

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    expected_gradient = torch.func.grad(loss)(parameters)
    with tk.use(model):
        close(torch.func.functional_call(model, doubled, (x,)), expected)
        found = torch.func.grad(loss)(parameters)
        for key, gradient in expected_gradient.items():
            assert_close(found[key], gradient, rtol=1e-3, atol=1e-4)


def test_forward_mode_is_torchs(x: Tensor, name: str) -> None:
    """tk has no formulas for it."""
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))
    x, t = torch.randn(3, 8), torch.randn(3, 8)
    expected = torch.func.jvp(model, (x,), (t,))
    with tk.use(model):
        close(torch.func.jvp(model, (x,), (t,)), expected)


def test_deepcopy(model: nn.Module, x: Tensor) -> None:
    """A copy runs through tk as well, with parameters of its own."""
    report = tk.use(model)
    made = copy.deepcopy(model)
    assert calls(made, x) == calls(model, x)
    for module in made.modules():
        assert "forward" not in vars(module) or module.forward.__self__ is module
    with torch.no_grad():
        for p in made.parameters():
            p.mul_(1.5)
    report.undo()
    assert not torch.allclose(made(x), model(x))
    assert calls(made, x)


def test_pickled_is_as_before(model: nn.Module, x: Tensor) -> None:
    """What is loaded needs no tk."""
    expected = model(x)
    with tk.use(model):
        file = io.BytesIO()
        torch.save(model, file)
        text = pickle.dumps(model)
    file.seek(0)
    for loaded in (torch.load(file, weights_only=False), pickle.loads(text)):
        assert calls(loaded, x) == {}
        assert torch.equal(loaded(x), expected)
        with tk.use(loaded) as report:
            assert report.replaced and calls(loaded, x)
        assert calls(loaded, x) == {}


def replicated(module: nn.Module, factor: float) -> nn.Module:
    """As ``torch.nn.parallel.replicate`` does it, but that the copy's parameters are others on the same device."""
    replica = module._replicate_for_data_parallel()
    replica._parameters = {n: p if p is None else p.detach() * factor for n, p in module._parameters.items()}
    replica._modules = {n: None if m is None else replicated(m, factor) for n, m in module._modules.items()}
    return replica


def test_a_replica_of_data_parallel_has_its_own_parameters(model: nn.Module, x: Tensor) -> None:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    expected = other(x)
    with tk.use(model):
        replica = replicated(model, 1.5)
        assert calls(replica, x)
        assert_close(replica(x), expected, rtol=1e-3, atol=1e-4)
    assert "_replicate_for_data_parallel" not in vars(model)


@pytest.mark.parametrize("arch", ["cpu", "sm_90"])
@pytest.mark.parametrize("only_faster", [False, True])
def test_what_torch_jit_traces_is_torchs(model: nn.Module, x: Tensor, arch: str, only_faster: bool) -> None:
    """It asks about sizes as the model does, and no more."""
    _use(model, Target("cpu", arch, only_faster))
    for _ in range(2):
        with torch.no_grad():
            traced = torch.jit.trace(model, (x,))
            assert "tk::" not in str(traced.inlined_graph)
            assert_close(traced(x[:1]), model(x[:1]), rtol=1e-3, atol=1e-4)
            model(x)


def test_distributed_data_parallel(group: None, name: str, x: Tensor) -> None:
    model = MODELS[name][0]().eval()
    expected = gradients(model, x)
    wrapped = DistributedDataParallel(model)
    with tk.use(wrapped) as report:
        assert all(r.path.startswith("module") for r in report.replaced)
        found = gradients(wrapped, x)
    for key, gradient in expected.items():
        assert_close(found[f"module.{key}"], gradient, rtol=1e-3, atol=1e-4)
