"""Why an op cannot be generated, and what to do instead. Inductor has no Triton kernel for these either."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch._ops import OpOverload
from torch.overrides import resolve_name

_PRODUCT = "a product of matrices: call {} outside of the function, which may be split around it"
_LOSS = "the loss of a product of matrices: call tk.linear_cross_entropy outside of the function"
_LINEAR_ALGEBRA = "linear algebra runs over whole matrices: call it outside of the function"
_FOURIER = "a Fourier transform: call it outside of the function"
_CONVOLUTION = "a convolution: call tk.conv1d, tk.conv2d or tk.conv3d outside of the function"
_ATTENTION = "attention: call tk.sdpa or tk.flex_attention outside of the function"
_OTHER = "no kernel has it; call it outside of the function, or write it with ops that docs/torch-ops.md lists as taken"
_SPARSE = "sparse tensors are not among the layouts that kernels read"
_COVARIANCE = "it multiplies matrices: subtract the mean, and call tk.mm outside of the function"
_HOST = "it leaves the device: call it outside of the function"
_SIZE = "the size of its result depends on a tensor's contents, which no kernel can know before it is launched"
_CONTENTS = "it reads a tensor's contents on the host"

HINTS: Mapping[str, str] = {
    **dict.fromkeys(("mm", "mv", "dot", "vdot", "addmv", "linear"), _PRODUCT.format("tk.mm or tk.linear")),
    **dict.fromkeys(("addmm", "_addmm_activation"), _PRODUCT.format("tk.addmm or tk.linear")),
    "bmm": _PRODUCT.format("tk.bmm") + "; a sum of products along one dimension is (a * b).sum(-1)",
    "baddbmm": _PRODUCT.format("tk.baddbmm"), "addbmm": _PRODUCT.format("tk.baddbmm"),
    "linear_cross_entropy": _LOSS,
    "_scaled_mm": _PRODUCT.format("tk.scaled_mm"), "_grouped_mm": _PRODUCT.format("tk.grouped_mm"),
    "convolution": _CONVOLUTION, "_convolution": _CONVOLUTION, "convolution_backward": _CONVOLUTION,
    **dict.fromkeys(("nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "bincount"), _SIZE),
    **dict.fromkeys(("_local_scalar_dense", "equal", "allclose", "is_nonzero"), _CONTENTS),
    **dict.fromkeys(("cov", "corrcoef"), _COVARIANCE), "bilinear": _PRODUCT.format("tk.bmm"),
    "addcmul": "of integers its value must be one, too: ATen cuts the fraction off, so write what is left of it",
    "masked_scatter": "which element goes where depends on the mask's contents; write torch.where with a source of the "
    "mask's shape, or call it outside of the function",
    **dict.fromkeys(("numpy", "cpu", "cuda", "data_ptr"), _HOST),
    "_cdist_forward": "distances of all pairs by a product of matrices: write (x[:, None] - y).norm(dim=-1)",
}  # fmt: skip

_BEGINNINGS: Mapping[str, str] = {
    "linalg_": _LINEAR_ALGEBRA, "_linalg_": _LINEAR_ALGEBRA, "cholesky": _LINEAR_ALGEBRA, "lu_": _LINEAR_ALGEBRA,
    "triangular_solve": _LINEAR_ALGEBRA, "ormqr": _LINEAR_ALGEBRA, "geqrf": _LINEAR_ALGEBRA,
    "fft_": _FOURIER, "_fft_": _FOURIER, "stft": _FOURIER, "_scaled_dot_product": _ATTENTION,
    "_sparse": _SPARSE, "_to_sparse": _SPARSE, "to_sparse": _SPARSE, "sparse_": _SPARSE,
}  # fmt: skip


# What torch makes of some functions has names of its own.
_CALLED: Mapping[str, str] = {"torch_nn._linear_cross_entropy": "torch.nn.functional.linear_cross_entropy"}


def message(op: str, *others: str) -> str:
    """The message for an op without a rule, by the name that graphs have for it (aten.mm). others: names of what called
    it, which may say more."""
    op = next((called for start, called in _CALLED.items() if op.startswith(start)), op.replace("prims.", "aten."))
    hints = (_hint(name.rpartition(".")[2]) for name in (*others, op))
    return f"{op} cannot be generated: {next((h for h in hints if h), _OTHER)}"


def _hint(name: str) -> str | None:
    return HINTS.get(name) or next((h for start, h in _BEGINNINGS.items() if name.startswith(start)), None)


def of_function(func: Callable[..., Any] | OpOverload | None, op: Any) -> str:
    """The message for what torch's tracer stops at. func: the function of torch's that was called, or an op; None: none
    of them. op: the op that it came to, where torch says which."""
    ops = [x._schema.name.replace("::", ".") for x in (op, func) if isinstance(x, OpOverload)]
    if func is None or isinstance(func, OpOverload):
        return message(*ops) if ops else f"torch cannot trace what is called here: {_OTHER}"
    name = resolve_name(func) or getattr(func, "__name__", repr(func))
    of_torch = getattr(func, "__name__", name)  # linalg_pinv of torch.linalg.pinv
    return message(name, of_torch, *ops)
