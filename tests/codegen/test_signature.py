"""@tk.op: what is read, and what is refused when it decorates."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch

from tk._dtypes import DTYPES
from tk.codegen.family import generate
from tk.generated import op
from tk.generated.signature import NumberSpec, SignatureError, TensorSpec


def declare(fn=lambda x: x, **texts):
    return op(**texts)(fn)


def test_texts_are_parsed() -> None:
    def fn(x, y, alpha, n, flag):
        return x

    declared = declare(fn, x="T[..., M, 3]", y="bf16[]", alpha="float", n="int", flag="bool", T=("fp16", "fp32"))
    signature = declared.signature
    assert signature.params["x"] == TensorSpec("T", ("M", 3), leading=True)
    assert signature.params["y"] == TensorSpec("bf16", ())
    assert signature.params["alpha"] == NumberSpec("float")
    assert signature.flags == ("flag",) and signature.letters == ("M",)
    assert list(signature.assignments()) == [{"T": "fp16"}, {"T": "fp32"}]
    assert str(signature.params["x"]) == "T[..., M, 3]"


def test_the_function_stays_callable() -> None:
    declared = declare(lambda x: x + 1, x="fp32[M]")
    assert declared(2) == 3


def test_one_dtype_may_be_given_alone() -> None:
    assert dict(declare(x="T[M]", T="bf16").signature.variables) == {"T": ("bf16",)}


SPELLINGS = [(n, d) for n, dtype in DTYPES.items() for d in (n, dtype, str(dtype), str(dtype).removeprefix("torch."))]


@pytest.mark.parametrize(("name", "spelled"), SPELLINGS, ids=str)
def test_a_dtype_has_torch_s_names_too(name: str, spelled: str | torch.dtype) -> None:
    """One signature, and so the same kernels, whichever is written."""
    wanted = declare(x="T[M]", T=(name,)).signature
    assert declare(x="T[M]", T=(spelled,)).signature == wanted == declare(x="T[M]", T=[spelled]).signature
    assert declare(x=f"{spelled}[M]").signature == declare(x=f"{name}[M]").signature
    if spelled != "bool":  # which as a text is a number
        assert declare(x="T[M]", T=spelled).signature == wanted


def test_a_variable_may_have_the_name_of_a_dtype_of_torch() -> None:
    """What the decorator itself says goes first."""
    assert declare(x="float32[M]", float32=("bf16",)).signature.variables == {"float32": ("bf16",)}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({}, "parameter x is not declared"),
        ({"x": "T[M]"}, "T is neither a dtype"),
        ({"x": "fp32[M"}, "is neither a tensor such as"),
        ({"x": "fp32[M, ...]"}, "size '...' is neither a letter"),
        ({"x": "fp32[0]"}, "size '0' is neither"),
        ({"x": "double"}, "is neither a tensor such as"),
        ({"x": "float"}, "needs a tensor"),
        ({"x": "fp32[M]", "z": "fp32[M]"}, "the function has no parameter z"),
        ({"x": "T[M]", "T": ("fp31",)}, "'fp31' is no dtype"),
        ({"x": "T[M]", "T": ("fp32", "fp32")}, "give each dtype once"),
        ({"x": "fp32[M]", "T": ("fp32",)}, "T is neither a parameter of the function nor the dtype of one"),
        ({"x": "fp32[x]"}, "x is a size and something else"),
        ({"x": "fp32[..., A, B, C, D, E, F]"}, "6 declared dimensions, there may be 5 beside '...'"),
        ({"x": "fp32[A, B, C, D, E, F, G, H, I]"}, "9 declared dimensions, there may be 8"),
        ({"x": "f32[M]"}, "Here f32 is 'fp32'"),
        ({"x": "T[M]", "T": ("half",)}, "Here half is 'fp16'"),
        ({"x": "T[M]", "T": ("bfloat61",)}, "T=('bfloat61'): 'bfloat61' is no dtype; there are bf16, fp16, "),
        ({"x": "T[M]", "T": ("bfloat61",)}, "or torch's names for them, such as torch.bfloat16; did you mean bfloat16"),
        ({"x": "T[M]", "T": torch.complex64}, "torch.complex64 is no dtype that a variable could stand for"),
        ({"x": "T[M]", "T": (torch.bfloat16, None)}, "T=(torch.bfloat16, None): None is no dtype"),
        ({"x": "T[M]", "T": (torch.bfloat16, "bf16")}, "give each dtype once"),
        ({"x": "T[M]", "T": ("torch.bf16",)}, "Here torch.bf16 is 'bf16'"),
        ({"x": "T[M]", "T": float}, "T=float: give a text"),
        ({"x": "T[M]", "T": float}, "Here float is 'fp32'"),
        ({"x": torch.bfloat16}, "x=torch.bfloat16: x is a parameter; its sizes belong to it: x='bf16[...]'"),
        ({"x": "fp32[N/2]"}, "size 'N/2' is neither a letter"),
        ({"x": "fp32[N//2]"}, "the size N is known from no tensor"),
        ({"x": "fp32[A*B]"}, "the size A is known from no tensor"),
    ],
)
def test_refusals(texts, message) -> None:
    with pytest.raises(ValueError, match=r"@tk.op on <lambda> \(.*test_signature.py:\d+\)") as caught:
        declare(**texts)
    assert message in str(caught.value)


def test_sizes_may_be_expressions() -> None:
    signature = declare(lambda x, y: x, x="fp32[M, 2 * N + 1]", y="fp32[(N - K) * 3, M // 2, 2 * 3]").signature
    assert signature.letters == ("M", "N", "K") and str(signature.params["y"]) == "fp32[(N-K)*3, M//2, 6]"
    assert signature.params["y"].shape({"M": 5, "N": 9, "K": 2}) == [21, 2, 6]
    values = {"M": 5}
    for letter, name, d, factor, rest in signature.solved():
        size = {"x": (5, 19), "y": (21, 2, 6)}[name][d]
        values[letter] = (size - rest.evaluate(values)) // factor.evaluate(values)
    assert values == {"M": 5, "N": 9, "K": 2}


def test_without_parentheses() -> None:
    def scaled(x, alpha):
        return x * alpha

    with pytest.raises(ValueError, match=r"@tk.op on scaled \(.*@tk.op\(x='fp32\[...\]', alpha='fp32\[...\]'\)"):
        op(scaled)
    with pytest.raises(ValueError, match="it was given 'fp32'"):
        op("fp32")


def test_grad_is_no_parameter() -> None:
    with pytest.raises(ValueError, match="a parameter of that name must be renamed"):
        declare(lambda grad: grad, grad="fp32[M]")


def test_any_number_of_arguments_is_refused() -> None:
    with pytest.raises(ValueError, match="name each"):
        declare(lambda *x: x, x="fp32[M]")


def test_declaring_imports_no_triton() -> None:
    code = (
        "import sys; from tk.generated import op\ndef fn(x): return x\nop(x='fp32[M]')(fn)\n"
        "assert 'triton' not in sys.modules and 'tk.codegen' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_numbers_may_have_defaults() -> None:
    @op(x="fp32[M]", a="float", n="int", flag="bool")
    def fn(x, a=1e-5, n=-3, flag=True):
        return x

    numbers = fn.signature.numbers
    assert [(spec.kind, spec.default) for spec in numbers.values()] == [("float", 1e-5), ("int", -3), ("bool", True)]
    assert "Tensor x, float a=1e-05, SymInt n=-3, bool flag=True," in generate(fn.fn, fn.signature, "fn").op.schema


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("x=None", "no tensor of an op may be left out"),
        ("x, a='1'", "default '1' is no finite float"),
        ("x, a=float('inf')", "default inf is no finite float"),
        ("x, a=True", "default True is no finite float"),
        ("x, *, a=1, n", "parameter n has no default and follows one that has"),
    ],
)
def test_defaults_that_are_refused(parameters: str, message: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"def fn({parameters}): return x", scope)
    texts = {"x": "fp32[M]", "a": "float", "n": "int"}
    with pytest.raises(SignatureError, match=message):
        op(**{name: texts[name] for name in inspect.signature(scope["fn"]).parameters})(scope["fn"])


@pytest.mark.parametrize("name", ["config", "mode", "mode_bits", "größe"])
def test_names_that_no_parameter_may_have(name: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"def fn(x, {name}): return x", scope)
    with pytest.raises(SignatureError, match=f"parameter {name}: .*call it something else"):
        op(x="fp32[M]", **{name: "float"})(scope["fn"])
