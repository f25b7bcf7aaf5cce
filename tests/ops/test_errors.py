"""What is refused, with which error, and that it says what to do."""

import pytest
import torch

import tk
from tk import errors

from .products import FORMS, Form

A, B = torch.randn(4, 3), torch.randn(3, 5)


@pytest.mark.parametrize(
    ("call", "message"),
    (
        (lambda: tk.mm(A, A), r"the inner sizes differ: a is \[4, 3\], b is \[4, 3\]"),
        (lambda: tk.linear(A, B), r"the inner sizes differ: x is \[4, 3\], weight is \[3, 5\]"),
        (lambda: tk.mm(A[0], B), r"a must have 2 dimensions, is \[3\]"),
        (lambda: tk.mm(A, B[None]), r"b must have 2 dimensions, is \[1, 3, 5\]"),
        (lambda: tk.linear(torch.tensor(1.0), B), "x must have at least 1 dimension"),
        (lambda: tk.linear(A, B.t(), torch.randn(4)), r"bias is \[4\], must be \[5\]"),
        (lambda: tk.linear(A, B.t(), torch.randn(1, 5)), "bias must have 1 dimensions"),
        (lambda: tk.mm(A, B, torch.randn(4)), r"bias is \[4\], which does not broadcast to \[4, 5\]"),
        (lambda: tk.mm(A, B, torch.randn(1, 4, 5)), "does not broadcast"),
        (lambda: tk.mm(A, B.double()), "a is float32, b is float64; they must have one dtype"),
        (lambda: tk.mm(A, B, torch.randn(5).half()), "a is float32, bias is float16"),
        (lambda: tk.mm(A, B.to("meta")), "a is on cpu, b on meta; all tensors must be on one device"),
        (lambda: tk.mm(A, B, activation="tanh"), "activation is 'tanh', must be one of none, relu"),  # type: ignore[arg-type]
        (lambda: tk.mm(A, B, precision="fp16"), "precision is 'fp16'"),  # type: ignore[arg-type]
        (lambda: torch.ops.tk.mm(A, B, activation=5), "activation is 5, must be 0 to 4"),
        (lambda: torch.ops.tk.mm(A, B, precision=2), "precision is 2, must be -1 to 1"),
        (lambda: torch.ops.tk.mm(A, B, config=-2), "config is -2"),
        (lambda: torch.ops.tk.mm(A, B, mode=16), "mode is 16, must be 0 to 15"),
    ),
)
def test_wrong_arguments_are_value_errors(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", (torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn), ids=str)
def test_dtypes_without_kernels(form: Form, dtype: torch.dtype) -> None:
    a, b = torch.zeros(4, 3).to(dtype), torch.zeros(3, 5).to(dtype)
    with pytest.raises(tk.UnsupportedError, match="bfloat16, float16 and float32 are supported"):
        form.call(a, b, torch.zeros(5).to(dtype))


@pytest.mark.parametrize("out_dtype", (torch.float16, torch.float64, torch.int32), ids=str)
def test_out_dtype_must_be_that_of_the_operands_or_float32(out_dtype: torch.dtype) -> None:
    with pytest.raises(tk.UnsupportedError, match="for bfloat16 operands bfloat16 and float32 are supported"):
        tk.mm(A.bfloat16(), B.bfloat16(), out_dtype=out_dtype)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
def test_out_dtype_of_operands_that_have_no_other(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(tk.UnsupportedError, match=f"for {name} operands only {name} is supported"):
        tk.mm(A.to(dtype), B.to(dtype), out_dtype=torch.bfloat16)


@pytest.mark.parametrize("arguments", ((1, B), (A, "b"), (A, B, 3), (A, None)))
def test_what_is_no_tensor_is_a_type_error(arguments: tuple[object, ...]) -> None:
    with pytest.raises(TypeError, match=r"tk\.mm: (a|b|bias) must be a Tensor, is (int|str|NoneType)"):
        tk.mm(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prefix", "kind"),
    (
        ("Unsupported", tk.UnsupportedError),
        ("VariantNotFound", tk.VariantNotFoundError),
        ("Pack", tk.PackError),
        ("Driver", tk.DriverError),
    ),
)
def test_the_librarys_errors_become_typed(prefix: str, kind: type[tk.Error]) -> None:
    found = errors.typed(RuntimeError(f"[tk:{prefix}] what it says"))
    assert type(found) is kind and isinstance(found, tk.Error) and str(found) == "what it says"


def test_out_of_memory_is_torchs() -> None:
    found = errors.typed(RuntimeError("[tk:OutOfMemory] tk could not allocate memory: CUDA out of memory"))
    assert type(found) is torch.OutOfMemoryError


def test_other_errors_stay_as_they_are() -> None:
    error = RuntimeError("CUDA out of memory")
    assert errors.typed(error) is error


@pytest.mark.parametrize(
    ("status", "kind"),
    ((1, ValueError), (2, tk.UnsupportedError), (3, tk.VariantNotFoundError), (4, tk.PackError), (5, tk.DriverError)),
)
def test_statuses_of_the_core(status: int, kind: type[Exception]) -> None:
    assert type(errors.from_status(status, "x")) is kind


def test_load_pack_names_what_is_missing(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(tk.PackError, match=r"absent\.tkpack"):
        tk.load_pack(tmp_path / "absent.tkpack")


def test_load_pack_refuses_what_is_no_pack(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "wrong.tkpack"
    path.write_bytes(b"not a pack" * 100)
    with pytest.raises(tk.PackError, match=r"wrong\.tkpack"):
        tk.load_pack(path)


def test_preload_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(tk.UnsupportedError, match="no CUDA device"):
        tk.preload("mm")
    with pytest.raises(tk.UnsupportedError):
        tk.preload("mm", device=0)
    with pytest.raises(ValueError, match="must be a CUDA device"):
        tk.preload(device="cpu")
