"""Why an op cannot be generated, and what to do instead. Inductor has no Triton kernel for these either."""

from __future__ import annotations

from collections.abc import Mapping

_PRODUCT = "a product of matrices: call {} outside of the function, which may be split around it"
_LINEAR_ALGEBRA = "linear algebra runs over whole matrices: call it outside of the function"
_FOURIER = "a Fourier transform: call it outside of the function"
_CONVOLUTION = "a convolution: call tk.conv1d, tk.conv2d or tk.conv3d outside of the function"
_ATTENTION = "attention: call tk.sdpa or tk.flex_attention outside of the function"
_SIZE = "the size of its result depends on a tensor's contents, which no kernel can know before it is launched"
_CONTENTS = "it reads a tensor's contents on the host"

HINTS: Mapping[str, str] = {
    **dict.fromkeys(("mm", "mv", "dot", "vdot", "addmv", "linear"), _PRODUCT.format("tk.mm or tk.linear")),
    **dict.fromkeys(("addmm", "_addmm_activation"), _PRODUCT.format("tk.addmm or tk.linear")),
    "bmm": _PRODUCT.format("tk.bmm") + "; a sum of products along one dimension is (a * b).sum(-1)",
    "baddbmm": _PRODUCT.format("tk.baddbmm"), "addbmm": _PRODUCT.format("tk.baddbmm"),
    "_scaled_mm": _PRODUCT.format("tk.scaled_mm"), "_grouped_mm": _PRODUCT.format("tk.grouped_mm"),
    "convolution": _CONVOLUTION, "_convolution": _CONVOLUTION, "convolution_backward": _CONVOLUTION,
    **dict.fromkeys(("nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "bincount"), _SIZE),
    "_local_scalar_dense": _CONTENTS, "equal": _CONTENTS,
    "_cdist_forward": "distances of all pairs by a product of matrices: write (x[:, None] - y).norm(dim=-1)",
}  # fmt: skip

_BEGINNINGS: Mapping[str, str] = {
    "linalg_": _LINEAR_ALGEBRA, "_linalg_": _LINEAR_ALGEBRA, "cholesky": _LINEAR_ALGEBRA, "lu_": _LINEAR_ALGEBRA,
    "triangular_solve": _LINEAR_ALGEBRA, "ormqr": _LINEAR_ALGEBRA, "geqrf": _LINEAR_ALGEBRA,
    "fft_": _FOURIER, "_fft_": _FOURIER, "stft": _FOURIER, "_scaled_dot_product": _ATTENTION,
    "_sparse": "sparse tensors are not among the layouts that kernels read",
}  # fmt: skip


def message(op: str) -> str:
    """For an op without a rule, by the name that graphs have for it (aten.mm)."""
    name = op.partition(".")[2]
    hint = HINTS.get(name) or next((h for start, h in _BEGINNINGS.items() if name.startswith(start)), None)
    return f"{op} cannot be generated" + (f": {hint}" if hint else "")
