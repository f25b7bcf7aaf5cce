"""The examples run, and are right; and models of transformers and torchvision, where these are installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from examples import example
from torch import nn
from torch.testing import assert_close
from use_models import OPS, ResNet, calls, ops_of

import tk


def check(found: dict[str, dict[str, float]]) -> None:
    for name, figures in found.items():
        assert figures["difference"] < 1e-4, name
        assert figures["torch"] > 0 and figures["tk"] > 0


def test_resnets_example_on_a_small_one(capsys: pytest.CaptureFixture[str]) -> None:
    module = example("resnet")
    settings = module.arguments(["--device", "cpu", "--batch", "2", "--size", "32", "--rounds", "1"])
    check(module.run(settings, ResNet()))
    printed = capsys.readouterr().out
    assert "Conv2d" in printed and "inference: torch" in printed and "training step: torch" in printed


def test_resnet50() -> None:
    try:
        import torchvision.models as models
    except Exception as error:
        pytest.skip(f"no torchvision for this torch: {error}")
    model, x = models.resnet50().eval(), torch.randn(1, 3, 64, 64)
    expected = model(x)
    with tk.use(model) as report:
        assert len(report.replaced) == 54
        assert calls(model, x) == {"conv2d": 53, "linear": 1}
        assert_close(model(x), expected, rtol=1e-3, atol=1e-4)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert_close(compiled(x), expected, rtol=1e-3, atol=1e-4)
        program = torch.export.export(model, (x,))
        assert len(ops_of(program)) == 54
    assert torch.equal(model(x), expected)


# --- transformers ---


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=100,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def test_llamas_example(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    module = example("llama")
    check(module.run(module.arguments(["--device", "cpu", "--layers", "2", "--rounds", "1"])))
    printed = capsys.readouterr().out
    for line in ("LlamaRMSNorm", "prefill 16: torch", "decode, batch 2: torch", "training step: torch"):
        assert line in printed


def test_llama() -> None:
    model, x = llama(), torch.randint(0, 100, (2, 12))
    before = {name: set(vars(m)) for name, m in model.model.named_modules()}
    expected = model(x).logits
    with tk.use(model) as report:
        assert {r.type for r in report.left} == {"LlamaRotaryEmbedding"}
        assert calls(model, x) == OPS["llama"]
        assert_close(model(x).logits, expected)
        with torch.no_grad():
            for kwargs in ({}, {"use_cache": False}):
                torch._dynamo.reset()
                compiled = torch.compile(model, fullgraph=True, backend="eager")
                assert_close(compiled(x, **kwargs).logits, expected)
            program = torch.export.export(model, (x,), {"use_cache": False})
        assert len(ops_of(program)) == sum(OPS["llama"].values())
        assert_close(program.module()(x, use_cache=False).logits, expected)
    assert {name: set(vars(m)) for name, m in model.model.named_modules()} == before
    assert torch.equal(model(x).logits, expected)


def test_llama_generates_the_same() -> None:
    model, x = llama(), torch.randint(3, 100, (2, 7))
    settings = dict(max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(x), pad_token_id=0)
    expected = model.generate(x, **settings)
    padded = dict(settings, attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7]))
    expected_padded = model.generate(x, **padded)
    with tk.use(model):
        assert torch.equal(model.generate(x, **settings), expected)
        assert torch.equal(model.generate(x, **padded), expected_padded)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
def test_llamas_attentions(implementation: str) -> None:
    """transformers looks its attention up by name, in a table that all models share."""
    model, x = llama(), torch.randint(0, 100, (2, 12))
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        expected = model(x).logits
    with tk.use(model), torch.no_grad():
        assert_close(model(x).logits, expected)
        if implementation == "eager":
            found = calls(model, x)
            assert (found["linear"], found["softmax"], found["bmm"]) == (15, 2, 4)
        model.set_attn_implementation("sdpa")  # also afterwards
        assert calls(model, x)["flex_attention"] == 2
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    other = llama()
    assert calls(other, x) == {} and "sdpa" in ALL_ATTENTION_FUNCTIONS


def test_other_models() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
    t5 = transformers.T5Config(vocab_size=100, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    gpt2 = transformers.GPT2Config(vocab_size=100, n_embd=64, n_layer=2, n_head=4)
    models: list[tuple[nn.Module, set[str]]] = [
        (transformers.BertModel(transformers.BertConfig(**sizes)), {"linear", "layer_norm", "gelu", "embedding"}),
        (transformers.GPT2Model(gpt2), {"addmm", "layer_norm", "gelu", "embedding"}),
        (transformers.T5EncoderModel(t5), {"linear", "rms_norm"}),
        (
            transformers.Qwen3Model(transformers.Qwen3Config(**sizes, num_key_value_heads=2, head_dim=16)),
            {"rms_norm", "rope", "swiglu"},
        ),
    ]
    x = torch.randint(0, 100, (2, 12))
    for model, ops in models:
        expected = model.eval()(x)[0]
        with tk.use(model):
            assert calls(model, x).keys() >= ops
            assert_close(model(x)[0], expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(model(x)[0], expected)
