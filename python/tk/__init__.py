"""Triton kernels for PyTorch that are compiled ahead of time, called as ``torch.ops.tk.*``.

    import tk

    y = tk.linear(x, weight, bias, activation="gelu")

Importing tk registers the ops. It does not initialise CUDA and never imports Triton. These environment variables are
read:

- ``TK_PACK_PATH``: packs to load besides the package's own, separated by ``:``.
- ``TK_CACHE_DIR``: the folder of what was built or measured on this machine. Without it that is ``tk`` under
  ``XDG_CACHE_HOME`` or ``~/.cache``. ``tk info`` shows it.
- ``TK_LOG``: the level of the ``tk`` logger ("debug", "info", …), which prints to stderr.
- ``TK_LIBRARY_DIR``: the folder of the native libraries, if they are not in the package.
- ``TK_NO_LIBRARY=1``: import tk without the native libraries. Only what builds packs can be used then.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from tk import _library, _log
from tk._version import __version__
from tk.errors import DriverError, Error, PackError, UnsupportedError, VariantNotFoundError

__all__ = ["DriverError", "Error", "PackError", "UnsupportedError", "VariantNotFoundError", "__version__", "op"]

_log.set_up()

if _library.is_wanted():
    _library.load()
    from tk import _addons, _flash, config
    from tk.generated import namespace as _namespace
    from tk.heuristics.checking import check
    from tk.inspect import coverage, explain, load_pack, packs, preload, supports
    from tk.ops import flex as _flex_ops  # noqa: F401
    from tk.ops.b2b import b2b_gemm
    from tk.ops.bmm import baddbmm, bmm
    from tk.ops.conv import conv1d, conv2d, conv3d
    from tk.ops.grouped_mm import grouped_mm
    from tk.ops.int4 import int4_from_torch, int4_mm, pack_int4, uint4x2_mixed_mm, unpack_int4
    from tk.ops.mm import addmm, linear, mm
    from tk.ops.mm_plus_mm import mm_plus_mm
    from tk.ops.scaled_grouped_mm import scaled_grouped_mm
    from tk.ops.scaled_mm import scaled_mm
    from tk.parallel import registering as _parallel
    from tk.tune import loading as _tuning

    from tk import nn  # isort: skip  # over the ops

    __all__ += ["addmm", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "grouped_mm", "linear", "mm", "mm_plus_mm"]
    __all__ += ["scaled_grouped_mm", "scaled_mm"]
    __all__ += ["b2b_gemm", "int4_from_torch", "int4_mm", "nn", "pack_int4", "uint4x2_mixed_mm", "unpack_int4"]
    __all__ += ["check", "config", "coverage", "explain", "load_pack", "packs", "preload", "supports"]

    _addons.load()
    _namespace.install()
    _parallel.install()
    _flash.install()
    _tuning.load_with_cuda()


def _functions() -> Any:
    """tk.functional, which is imported when it is first needed. (``from tk import`` would ask for it again.)"""
    return importlib.import_module("tk.functional")


_OF_FLEX = ("flex", "flex_attention", "sdpa", "varlen_attn")


def __getattr__(name: str) -> Any:
    """Finds what is imported late: ``tk.op``, which needs torch, tk.flex, and functions of tk.functional.

    Such a function exists if a loaded pack has its ops.
    """
    if name == "op":
        from tk.generated import op

        return op
    if name == "b2b":
        return importlib.import_module("tk.b2b")
    if name in _OF_FLEX:
        flex = importlib.import_module("tk.flex")
        return flex if name == "flex" else globals().setdefault(name, getattr(flex, name))
    if name in ("enable", "use") and _library.is_wanted():
        return globals().setdefault(name, getattr(importlib.import_module("tk.dropin"), name))
    if not name.startswith("_") and _library.is_wanted():
        functional = _functions()
        if name == "functional":
            return functional
        if (found := functional.find(name)) is not None:
            globals()[name] = found
            return found
        if name in functional.FUNCTIONS:
            raise AttributeError(f"tk.{name} needs {', '.join(functional.FUNCTIONS[name].ops)}: in no loaded pack")
    # With these Python itself names the nearest, and only where the error is shown.
    raise AttributeError(f"module 'tk' has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    names = {*globals(), "b2b", "enable", "op", "use", *_OF_FLEX}
    return sorted(names.union(_functions().available() if _library.is_wanted() else ()))


if TYPE_CHECKING:
    from tk import b2b, flex
    from tk.dropin import enable, use
    from tk.flex import flex_attention, sdpa, varlen_attn
    from tk.functional.activations import geglu, gelu, silu, swiglu
    from tk.functional.indexing import gather, index_add, index_put, scatter_add
    from tk.functional.linear_losses import linear_cross_entropy
    from tk.functional.losses import cross_entropy
    from tk.functional.norms import add_layer_norm, add_rms_norm, group_norm, layer_norm, rms_norm
    from tk.functional.optimizers import adamw_
    from tk.functional.quantization import quantize_fp8
    from tk.functional.random import dropout, dropout_add, rand, randint, randn
    from tk.functional.reductions import amax, argmax, logsumexp, mean, std_mean, sum, var_mean
    from tk.functional.scans import cummax, cummin, cumprod, cumsum, logcumsumexp
    from tk.functional.searches import bucketize, searchsorted
    from tk.functional.softmaxes import log_softmax, softmax
    from tk.functional.sorts import argsort, sort, topk
    from tk.functional.tables import embedding, rope
    from tk.generated import op

    # A type checker takes what an installed package imports for its own, but for what is in here.
    __all__ += [
        "adamw_", "add_layer_norm", "add_rms_norm", "amax", "argmax", "argsort", "b2b", "bucketize", "cross_entropy",
        "cummax", "cummin", "cumprod", "cumsum", "dropout", "dropout_add", "embedding", "enable", "flex",
        "flex_attention", "gather", "geglu", "gelu", "group_norm", "index_add", "index_put", "layer_norm",
        "linear_cross_entropy", "log_softmax", "logcumsumexp", "logsumexp", "mean", "quantize_fp8", "rand", "randint",
        "randn", "rms_norm", "rope", "scatter_add", "sdpa", "searchsorted", "silu", "softmax", "sort", "std_mean",
        "sum", "swiglu", "topk", "use", "var_mean", "varlen_attn",
    ]  # fmt: skip
