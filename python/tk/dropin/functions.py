"""Stand-ins for torch's functions: they call tk where it takes the arguments and is not slower, else torch.

Everything is decided from what a tensor says of itself, so that torch.compile and torch.export trace through a stand-in
and keep the branch that is taken. What tk would refuse goes to torch, which raises its own errors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

import tk
from tk import capi, errors
from tk.dropin import speed
from tk.functional import find as find_function
from tk.functional._call import AUTOCAST_TO_FLOAT32
from tk.heuristics.problem import describe

__all__ = ["Place", "StandIn", "Target", "is_served", "stand_ins"]

Function = Callable[..., Any]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Place:
    """Where a model's code looks a function up: ``F.gelu`` is the name "F" in the model's module, which leads to the
    module torch.nn.functional, and there the name "gelu".

    root: the model's module, or what stands for it. first: what its name led to. owner: the module that has the
    function under ``name``, the root itself for a name alone.
    """

    root: Any
    root_name: str
    first: Any
    owner: Any
    name: str
    original: Function

    def guarded(self, ours: Function) -> Function:
        """ours, as long as the original stands there: both names are looked at in every call, for either may be
        patched. Then that is called, as the model wrote it."""
        root, root_name, first, owner, name, original = (
            self.root, self.root_name, self.first, self.owner, self.name, self.original,
        )  # fmt: skip

        def call(*args: Any, **kwargs: Any) -> Any:
            if getattr(owner, name, None) is original and getattr(root, root_name, None) is first:
                return ours(*args, **kwargs)
            found = getattr(root, root_name)
            if owner is not root:
                found = getattr(owner if found is first else found, name)
            return found(*args, **kwargs)

        return call


@dataclass(frozen=True)
class Target:
    """Where the model is when it is used.

    device_type: "cpu" or "cuda". arch: "cpu", "sm_90", … only_faster: leave to torch what no measurement says is as
    fast; on the CPU, where tk computes with ATen, nothing was measured, and all is served.
    """

    device_type: str
    arch: str
    only_faster: bool

    @property
    def serves_all(self) -> bool:
        return self.arch == "cpu" or not self.only_faster

    def takes(self, first: Any, *others: Any, optional: tuple[Any, ...] = ()) -> bool:
        """Plain tensors of this device and of one dtype that there are kernels for; under autocast of several. Nothing
        where a mode wants to see torch's function."""
        if not _is_plain(first) or _is_intercepted():
            return False
        device, dtype = first.device, first.dtype
        if device.type != self.device_type or dtype not in DTYPES:
            return False
        for t in (*others, *[t for t in optional if t is not None]):
            if not _is_plain(t) or t.device != device or t.dtype not in DTYPES:
                return False
            if t.dtype is not dtype and not torch.is_autocast_enabled(self.device_type):
                return False
        return forward_ad._current_level < 0  # there are no formulas for forward mode

    def is_fast(self, line: str, size: Any, *tensors: Tensor | None) -> bool:
        """Whether a line of speed.py says so for a call with these operands."""
        if self.serves_all:
            return True
        rule = speed.find(self.arch, line)
        return rule is not None and speed.holds(rule, _needs_gradient(*tensors), size)

    def serves_training(self, op: str) -> bool:
        """Whether any call of it that needs a gradient is served; else a stand-in need not look at such a call."""
        return self.serves_all or speed.serves_training(self.arch, op)

    def product_dtype(self, x: Tensor) -> torch.dtype:
        """What a product is computed in."""
        if torch.is_autocast_enabled(self.device_type):
            return torch.get_autocast_dtype(self.device_type)
        return x.dtype


@dataclass(frozen=True)
class StandIn:
    """op: the function of tk that ``function`` calls in the place of ``original``."""

    op: str
    function: Function
    original: Function


def _is_intercepted() -> bool:
    """By a TorchFunctionMode of the user's, which would see an op of tk where it waits for a function of torch. A
    default device is one as well, and changes nothing for tensors that there are."""
    if torch.compiler.is_exporting():
        return False  # which traces with modes of its own
    count = torch._C._len_torch_function_stack()
    if count == 0:
        return False
    return any(type(torch._C._get_function_stack_at(i)) is not DeviceContext for i in range(count))


def _is_plain(t: Any) -> bool:
    """A strided tensor, and no subclass (DTensor, quantised, …) that would have to know tk's ops."""
    if not isinstance(t, Tensor):
        return False
    if type(t) is not Tensor and type(t) is not Parameter and is_traceable_wrapper_subclass(t):
        return False
    return t.layout is torch.strided and not t.is_nested


def _needs_gradient(*tensors: Any) -> bool:
    """What is no tensor, and for torch to refuse, needs none."""
    if torch.is_grad_enabled():
        for t in tensors:
            if getattr(t, "requires_grad", False):
                return True
    return False


def _broadcasts(t: Tensor, shape: tuple[int, ...]) -> bool:
    if t.dim() > len(shape):
        return False
    return all(m == 1 or m == n for m, n in zip(reversed(t.shape), reversed(shape), strict=False))


# --- Products ---


def _linear(target: Target, original: Function) -> Function:
    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if target.takes(input, weight, optional=(bias,)) and input.dim() and weight.dim() == 2:
            k = weight.shape[1]
            if input.shape[-1] == k and (bias is None or bias.shape == weight.shape[:1]):
                line = speed.product("linear", target.product_dtype(input), k)
                if target.is_fast(line, _rows(input), input, weight, bias):
                    return tk.linear(input, weight, bias)
        return original(input, weight, bias)

    return linear


def _mm(target: Target, original: Function) -> Function:
    def mm(input: Tensor, mat2: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not args and not kwargs and _multiplies(target, input, mat2):
            return tk.mm(input, mat2)
        return original(input, mat2, *args, **kwargs)

    return mm


def _addmm(target: Target, original: Function) -> Function:
    def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1, **kwargs: Any) -> Tensor:
        is_taken = not kwargs and _multiplies(target, mat1, mat2) and target.takes(mat1, input)
        if is_taken and _broadcasts(input, (mat1.shape[0], mat2.shape[1])):
            return tk.addmm(input, mat1, mat2, beta=beta, alpha=alpha)
        return original(input, mat1, mat2, beta=beta, alpha=alpha, **kwargs)

    return addmm


def _multiplies(target: Target, a: Tensor, b: Tensor) -> bool:
    if not target.takes(a, b) or a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        return False
    line = speed.product("mm", target.product_dtype(a), a.shape[1], b.shape[1])
    return target.is_fast(line, a.shape[0], a, b)


def _bmm(target: Target, original: Function) -> Function:
    def bmm(input: Tensor, mat2: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not args and not kwargs and _multiplies_batches(target, input, mat2) and input.dim() == 3:
            return tk.bmm(input, mat2)
        return original(input, mat2, *args, **kwargs)

    return bmm


def _multiplies_batches(target: Target, a: Tensor, b: Tensor) -> bool:
    if not target.takes(a, b) or a.dim() < 3 or a.dim() != b.dim():
        return False
    if a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
        return False
    return target.is_fast(speed.product("bmm", target.product_dtype(a), a.shape[-1], b.shape[-1]), a.shape[-2], a, b)


def _matmul(target: Target, original: Function) -> Function:
    """Two matrices, or batches of them in the same leading dimensions; what broadcasts is torch's."""

    def matmul(input: Tensor, other: Tensor, **kwargs: Any) -> Tensor:
        if not kwargs and _multiplies(target, input, other):
            return tk.mm(input, other)
        if not kwargs and _multiplies_batches(target, input, other):
            if input.dim() == 3:
                return tk.bmm(input, other)
            out = tk.bmm(input.flatten(0, -3), other.flatten(0, -3))
            return out.reshape(*input.shape[:-1], other.shape[-1])
        return original(input, other, **kwargs)

    return matmul


def _rows(x: Tensor) -> Any:
    n: Any = 1
    for size in x.shape[:-1]:
        n = n * size
    return n


# --- Convolutions ---


def _conv(spatial: int) -> Callable[[Target, Function], Function]:
    convolve = (tk.conv1d, tk.conv2d, tk.conv3d)[spatial - 1]

    def make(target: Target, original: Function) -> Function:
        serves_training = target.serves_training(speed.convolution_op(spatial))

        def conv(
            input: Tensor,
            weight: Tensor,
            bias: Tensor | None = None,
            stride: Any = 1,
            padding: Any = 0,
            dilation: Any = 1,
            groups: int = 1,
        ) -> Tensor:
            if (
                (serves_training or not _needs_gradient(input, weight, bias))
                and target.takes(input, weight, optional=(bias,))
                and weight.dim() == spatial + 2
                and input.dim() in (spatial + 1, spatial + 2)
                and target.is_fast(
                    speed.convolution(spatial, target.product_dtype(input), groups),
                    weight.shape[1],
                    input,
                    weight,
                    bias,
                )
            ):
                try:
                    return convolve(input, weight, bias, stride, padding, dilation, groups)
                except (ValueError, errors.UnsupportedError, errors.VariantNotFoundError):
                    pass  # before anything was launched: torch says what is wrong, or has a kernel
            return original(input, weight, bias, stride, padding, dilation, groups)

        return conv

    return make


# --- Norms ---


def _layer_norm(target: Target, original: Function) -> Function:
    norm = _own("layer_norm")

    def layer_norm(
        input: Tensor,
        normalized_shape: Any,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        if _normalises(target, "layer_norm", input, normalized_shape, weight, bias):
            return norm(input, normalized_shape, weight, bias, eps)
        return original(input, normalized_shape, weight, bias, eps)

    return layer_norm


def _rms_norm(target: Target, original: Function) -> Function:
    norm = _own("rms_norm")

    def rms_norm(
        input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        if _normalises(target, "rms_norm", input, normalized_shape, weight):
            return norm(input, normalized_shape, weight, eps)
        return original(input, normalized_shape, weight, eps)

    return rms_norm


def _normalises(target: Target, op: str, x: Tensor, shape: Any, *affine: Tensor | None) -> bool:
    if not target.takes(x, optional=affine) or not _one_dtype(target, op, x, *affine):
        return False
    shape = tuple(shape)
    if not shape or tuple(x.shape[-len(shape) :]) != shape or any(t is not None and t.shape != shape for t in affine):
        return False
    return target.is_fast(op, _product(shape), x, *affine)


def _one_dtype(target: Target, op: str, x: Tensor, *others: Tensor | None) -> bool:
    """As they are, or as autocast makes them."""
    if all(t is None or t.dtype is x.dtype for t in others):
        return True
    return op in AUTOCAST_TO_FLOAT32.get(target.device_type, ()) and torch.is_autocast_enabled(target.device_type)


def _product(shape: tuple[int, ...]) -> Any:
    n: Any = 1
    for size in shape:
        n = n * size
    return n


def _group_norm(target: Target, original: Function) -> Function:
    norm = _own("group_norm")

    def group_norm(
        input: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        if (
            target.takes(input, optional=(weight, bias))
            and _one_dtype(target, "group_norm", input, weight, bias)
            and input.dim() >= 2
            and input.shape[1] % num_groups == 0
            and all(t is None or t.shape == input.shape[1:2] for t in (weight, bias))
            and target.is_fast("group_norm", input.shape[1], input, weight, bias)
        ):
            return norm(input, num_groups, weight, bias, eps)
        return original(input, num_groups, weight, bias, eps)

    return group_norm


# --- Activations and softmax ---


def _gelu(target: Target, original: Function) -> Function:
    gelu_of_tk = _own("gelu")

    def gelu(input: Tensor, approximate: str = "none") -> Tensor:
        if target.takes(input) and approximate in ("none", "tanh") and _is_fast_row(target, "gelu", input):
            return gelu_of_tk(input, None, approximate)
        return original(input, approximate=approximate)

    return gelu


def _silu(target: Target, original: Function) -> Function:
    silu_of_tk = _own("silu")

    def silu(input: Tensor, inplace: bool = False) -> Tensor:
        if not inplace and target.takes(input) and _is_fast_row(target, "silu", input):
            return silu_of_tk(input)
        return original(input, inplace=inplace)

    return silu


def _is_fast_row(target: Target, line: str, x: Tensor) -> bool:
    return x.dim() > 0 and target.is_fast(line, x.shape[-1], x)


def _softmax(op: str) -> Callable[[Target, Function], Function]:
    def make(target: Target, original: Function) -> Function:
        softmax_of_tk = _own(op)

        def softmax(input: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
            """Arguments after dim: those of torch.nn.functional (_stacklevel, dtype) and of torch (dtype)."""
            dtype = kwargs.get("dtype")
            if not args and kwargs.keys() <= {"dtype", "_stacklevel"} and dim is not None and _takes(input, dim, dtype):
                return softmax_of_tk(input, dim, dtype)
            return original(input, dim, *args, **kwargs)

        def _takes(x: Tensor, dim: int, dtype: torch.dtype | None) -> bool:
            if not target.takes(x) or not isinstance(dim, int) or (dtype is not None and dtype not in DTYPES):
                return False
            return -x.dim() <= dim < x.dim() and target.is_fast(op, x.shape[dim], x)

        return softmax

    return make


def _embedding(target: Target, original: Function) -> Function:
    embedding_of_tk = _own("embedding")

    def embedding(
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor:
        is_plain = max_norm is None and not scale_grad_by_freq and not sparse and _is_plain(input)
        if (
            is_plain
            and input.dtype in (torch.int64, torch.int32)
            and target.takes(weight)
            and weight.dim() == 2
            and input.device == weight.device
            and target.is_fast("embedding", weight.shape[1], weight)
        ):
            return embedding_of_tk(input, weight, padding_idx)
        return original(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)

    return embedding


# --- Attention ---


def _is_transformed() -> bool:
    """By torch.func.grad and its like, which differentiate gradients: attention's have none."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def _has_chosen_backends() -> bool:
    """Whether some of torch's backends are switched off, by ``torch.nn.attention.sdpa_kernel`` or for good: then one of
    the others is asked for."""
    backends = torch.backends.cuda
    return not (
        backends.flash_sdp_enabled()
        and backends.mem_efficient_sdp_enabled()
        and backends.math_sdp_enabled()
        and backends.cudnn_sdp_enabled()
    )


# While tracing it is run, not traced.
_has_chosen_backends._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _sdpa(target: Target, original: Function) -> Function:
    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p == 0 and _attends(target, query, key, value, attn_mask, is_causal, enable_gqa):
            return tk.sdpa(query, key, value, attn_mask, 0.0, is_causal, scale, enable_gqa)
        return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    return scaled_dot_product_attention


def _attends(
    target: Target, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, enable_gqa: bool
) -> bool:
    if not target.takes(q, k, v) or not (q.dim() == k.dim() == v.dim() >= 3):
        return False
    if q.shape[:-3] != k.shape[:-3] or k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1]:
        return False
    if k.shape[-3] != q.shape[-3] and not (enable_gqa and k.shape[-3] > 0 and q.shape[-3] % k.shape[-3] == 0):
        return False
    kind = "causal" if is_causal else "full"
    if mask is not None:
        if is_causal or not _is_plain(mask) or mask.device != q.device or mask.requires_grad:
            return False
        if mask.dtype not in (torch.bool, q.dtype) or not _broadcasts(mask, (*q.shape[:-1], k.shape[-2])):
            return False
        kind = "bool" if mask.dtype is torch.bool else "bias"
    needs_gradient = _needs_gradient(q, k, v)
    if _is_transformed() or _has_chosen_backends():
        return False
    if not target.is_fast(speed.attention(q.dtype, kind, q.shape[-1]), q.shape[-2], q, k, v):
        return False
    if target.device_type == "cpu":
        return True
    return _has_attention(q.device, q.dtype, q.shape[-1], v.shape[-1], kind, needs_gradient)


def _has_attention(device: torch.device, dtype: torch.dtype, d: int, d_v: int, kind: str, needs_gradient: bool) -> bool:
    return _finds_attention(device, dtype, d, d_v, kind, needs_gradient)


_has_attention._dynamo_marked_constant = True  # type: ignore[attr-defined]  # run while tracing, not traced


@cache
def _finds_attention(
    device: torch.device, dtype: torch.dtype, d: int, d_v: int, kind: str, needs_gradient: bool
) -> bool:
    """Whether a loaded pack has the kernels. Asked once for each: a pack loaded later changes nothing."""
    with _disable_current_modes(), torch.no_grad():
        q, v = (torch.empty(1, 1, 16, n, device=device, dtype=dtype) for n in (d, d_v))
        mask = {"bool": torch.bool, "bias": dtype}.get(kind)
        attn_mask = None if mask is None else torch.empty(1, 1, 16, 16, device=q.device, dtype=mask)
        return is_served(tk.sdpa, q, q, v, attn_mask, 0.0, kind == "causal", needs_gradient=needs_gradient)


def _flex_attention(target: Target, original: Function) -> Function:
    """On CUDA a mod may have no kernels, which is known when it is called: so a compiled graph keeps torch's own."""

    def flex_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        is_taken = target.takes(query, key, value) and not _is_transformed()
        if is_taken and target.is_fast("flex_attention", query.shape[-2], query, key, value):
            if target.device_type == "cpu":
                return tk.flex_attention(query, key, value, *args, **kwargs)
            if not torch.compiler.is_compiling():
                try:
                    return tk.flex_attention(query, key, value, *args, **kwargs)
                except (errors.VariantNotFoundError, errors.UnsupportedError):
                    pass
        return original(query, key, value, *args, **kwargs)

    return flex_attention


# --- All of them ---


def _own(name: str) -> Function:
    """A function of tk.functional, which is there when its ops are."""
    found = find_function(name)
    assert found is not None
    return found


# With where torch has what they stand for; some functions have two names there.
_OPS: Mapping[str, tuple[Callable[[Target, Function], Function], tuple[tuple[ModuleType, str], ...]]] = {
    "linear": (_linear, ((F, "linear"),)),
    "mm": (_mm, ((torch, "mm"),)),
    "addmm": (_addmm, ((torch, "addmm"),)),
    "bmm": (_bmm, ((torch, "bmm"),)),
    "matmul": (_matmul, ((torch, "matmul"),)),
    "conv1d": (_conv(1), ((F, "conv1d"),)),
    "conv2d": (_conv(2), ((F, "conv2d"),)),
    "conv3d": (_conv(3), ((F, "conv3d"),)),
    "layer_norm": (_layer_norm, ((F, "layer_norm"),)),
    "rms_norm": (_rms_norm, ((F, "rms_norm"),)),
    "group_norm": (_group_norm, ((F, "group_norm"),)),
    "gelu": (_gelu, ((F, "gelu"),)),
    "silu": (_silu, ((F, "silu"),)),
    "softmax": (_softmax("softmax"), ((F, "softmax"), (torch, "softmax"))),
    "log_softmax": (_softmax("log_softmax"), ((F, "log_softmax"), (torch, "log_softmax"))),
    "embedding": (_embedding, ((F, "embedding"),)),
    "sdpa": (_sdpa, ((F, "scaled_dot_product_attention"),)),
}
_FLEX = "torch.nn.attention.flex_attention"


def stand_ins(target: Target) -> dict[Function, StandIn]:
    """By the function that they stand for. Left out are those whose ops are in no loaded pack, and functions that are
    not torch's own at this time."""
    found = {}
    for op, (make, places) in _OPS.items():
        if op in tk.functional.FUNCTIONS and find_function(op) is None:
            continue
        for module, name in places:
            if (original := _own_of_torch(module, name)) is not None:
                found[original] = StandIn(op, make(target, original), original)
    module_of_flex = sys.modules.get(_FLEX)  # a model that calls it has imported it
    if module_of_flex is not None and (original := _own_of_torch(module_of_flex, "flex_attention")) is not None:
        found[original] = StandIn("flex_attention", _flex_attention(target, original), original)
    return found


def _own_of_torch(module: ModuleType, name: str) -> Function | None:
    """A function of torch's under its name; None where something else stands in its place."""
    function = getattr(module, name, None)
    if isinstance(function, BuiltinFunctionType):
        own = (getattr(torch._C._nn, name, None), getattr(torch._C._VariableFunctions, name, None))
        return function if any(function is f for f in own) else None
    is_own = isinstance(function, FunctionType) and function.__code__.co_filename == module.__file__
    return function if is_own else None


def is_served(function: Function, *args: Any, needs_gradient: bool = False) -> bool:
    """Whether a call on CUDA would find a kernel. Nothing is launched. needs_gradient: of attention, whose gradients
    are an op of their own; all other ops have theirs wherever they have the forward."""
    try:
        described = describe(function, *args)
        if described is None:
            return True
        capi.choose(described.problem, described.config)
    except (errors.Error, ValueError, TypeError):
        return False
    return not needs_gradient or _has_backward(described.problem.op)


def _has_backward(op: str) -> bool:
    from tk.generated import register

    return register.find(f"{op}_backward") is not None
