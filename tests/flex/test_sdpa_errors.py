"""What tk.sdpa says where no pack serves a call: in its own name and arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tk
from tk import errors
from tk.flex import autograd, ops, own_ops
from tk.ops import flex

Q = torch.randn(2, 3, 4, 16)
MASKS: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({}, "no attn_mask"),
    "causal": ({"is_causal": True}, "is_causal=True"),
    "bool": ({"attn_mask": torch.ones(4, 4, dtype=torch.bool)}, "an attn_mask of torch.bool"),
    "added": ({"attn_mask": torch.zeros(3, 4, 4)}, "an attn_mask of torch.float32"),
}


def without_packs(monkeypatch: pytest.MonkeyPatch, ask: Any) -> None:
    """Calls ask a loaded pack for kernels, as on a GPU, and there is none."""

    monkeypatch.setattr(autograd, "_has_kernels", lambda query: True)
    monkeypatch.setattr(ops, "_call", ask)
    monkeypatch.setattr(own_ops, "_known", list)
    monkeypatch.setattr(own_ops, "_packed", lambda traced, suffix: None)
    monkeypatch.setattr(own_ops, "_matched", {})  # later tests find what these do not


def sought(traced: Any, request: Any) -> Any:
    return own_ops.find(traced, request.tensors, request.floats, request.ints, "_of_no_pack")


def lacking(traced: Any, request: Any) -> Any:
    own_ops._raise_lack(traced, (request.query.shape[3],) * 2, request.query.dtype, "")


def too_wide(traced: Any, request: Any) -> Any:
    own_ops._raise_lack(traced, (4096, 4096), request.query.dtype, "")


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("held", [[], ["bf16, head sizes up to 64 and 64"]])
@pytest.mark.parametrize("ask", [sought, lacking])
def test_no_pack(name: str, held: list[str], ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given, named = MASKS[name]
    without_packs(monkeypatch, ask)
    kernels = [own_ops._Kernels(torch.bfloat16, (64, 64), False)] if held else []
    monkeypatch.setattr(own_ops, "_held", lambda op: kernels)
    with pytest.raises(errors.VariantNotFoundError) as caught:
        tk.sdpa(Q, Q, Q, **given)
    said = str(caught.value).split("As they were traced")[0]
    assert said.startswith("tk.sdpa: ") and named in said, said
    assert "flex_attention" not in said and "mods (" not in said and "tk build mods.py" in said
    with pytest.raises(errors.VariantNotFoundError, match=r"^tk\.flex_attention: .*these mods"):
        tk.flex_attention(Q, Q, Q, lambda s, b, h, q, k: s * 0.5)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("ask", [sought, lacking])
def test_no_pack_has_the_gradient(name: str, ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given, named = MASKS[name]
    without_packs(monkeypatch, lambda traced, request: ops.cpu(*request))
    monkeypatch.setattr(ops, "_call_backward", lambda traced, request, *_: ask(traced, request))
    monkeypatch.setattr(own_ops, "_held", lambda op: [])
    q = Q.clone().requires_grad_()
    with pytest.raises(errors.VariantNotFoundError) as caught:
        tk.sdpa(q, Q, Q, **given).sum().backward()
    said = str(caught.value).split("As they were traced")[0]
    assert said.startswith("tk.sdpa: ") and named in said and "flex_attention" not in said, said
    with pytest.raises(errors.VariantNotFoundError, match=r"^tk\.flex_attention: .*these mods"):
        tk.flex_attention(q, Q, Q, lambda s, b, h, q, k: s * 0.5).sum().backward()


@pytest.mark.parametrize("name", MASKS)
def test_a_compiled_graph_says_who_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, examples: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    torch.compile(lambda q: tk.sdpa(q, q, q, **MASKS[name][0]), backend=backend, fullgraph=True)(Q)
    (call,) = (n for n in graphs[0].graph.nodes if n.target is flex.forward)
    request = flex.Request(*call.args, **call.kwargs)
    assert request.caller == "sdpa"
    monkeypatch.setattr(ops, "_call", sought)
    monkeypatch.setattr(own_ops, "_known", list)
    monkeypatch.setattr(own_ops, "_packed", lambda traced, suffix: None)
    monkeypatch.setattr(own_ops, "_matched", {})  # later tests find what these do not
    with pytest.raises(errors.VariantNotFoundError, match=r"^tk\.sdpa: no loaded pack") as caught:
        ops.cuda(*request._replace(query=Q, key=Q, value=Q, tensors=[torch.zeros(0)] * len(request.tensors)))
    assert MASKS[name][1] in str(caught.value)


def test_what_has_no_formula() -> None:
    q = Q.clone().requires_grad_()
    (grad,) = torch.autograd.grad(tk.sdpa(q, Q, Q).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^tk\.sdpa has no gradient of its gradient"):
        grad.sum().backward()
    with pytest.raises(NotImplementedError, match=r"^tk\.sdpa has no formula for forward-mode"):
        torch.func.jvp(lambda q: tk.sdpa(q, Q, Q), (Q,), (Q,))
    with pytest.raises(NotImplementedError, match=r"^tk\.sdpa has no vmap over"):
        torch.vmap(lambda q, mask: tk.sdpa(q, Q, Q, mask))(torch.zeros(0, *Q.shape), torch.zeros(0, 4, 4))


def test_head_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    without_packs(monkeypatch, too_wide)
    monkeypatch.setattr(own_ops, "_held", lambda op: [])
    with pytest.raises(errors.UnsupportedError, match=r"^tk\.sdpa: head sizes go up to"):
        tk.sdpa(Q, Q, Q)


@pytest.mark.parametrize(
    "given",
    [
        (Q, Q[..., :8], Q), (Q, Q, Q[:, :2]), (Q.half(), Q, Q), (Q.to_sparse(), Q, Q), (Q.int(), Q.int(), Q.int()),
        (Q[0, 0, 0], Q, Q), (Q, Q, None), (Q, Q, Q, torch.zeros(5, 4)), (Q, Q, Q, torch.zeros(4, 4), 0.0, True),
        (Q, Q, Q, None, 0.1), (Q, Q.expand(2, 3, 4, 16)[:, :2], Q[:, :2], None, 0.0, False, None, True),
        (Q, Q, Q, torch.zeros(4, 4, device="meta")), (Q, Q.to("meta"), Q), (Q, Q, Q, torch.zeros(4, 4).to_sparse()),
    ],
)  # fmt: skip
def test_of_its_arguments(given: tuple[Tensor, ...]) -> None:
    with pytest.raises((errors.Error, ValueError, TypeError)) as caught:
        tk.sdpa(*given)
    assert "tk.sdpa" in str(caught.value) and "flex_attention" not in str(caught.value), caught.value
