"""Triton for PyTorch without the JIT: kernels compiled ahead of time, called as ``torch.ops.tk.*``.

    import tk

    y = tk.linear(x, weight, bias, activation="gelu")

Importing tk registers the ops; it leaves CUDA uninitialised and never imports Triton. Environment variables:

- ``TK_PACK_PATH``: packs to load besides the package's own, separated by ``:``.
- ``TK_LOG``: a level of the ``tk`` logger ("debug", "info", …), printed to stderr.
- ``TK_LIBRARY_DIR``: where the native libraries are, if not in the package.
- ``TK_NO_LIBRARY=1``: do without them; only what builds packs can be used.
"""

from tk import _library, _log
from tk._version import __version__
from tk.errors import DriverError, Error, PackError, UnsupportedError, VariantNotFoundError
from tk.generated import op

__all__ = ["DriverError", "Error", "PackError", "UnsupportedError", "VariantNotFoundError", "__version__", "op"]

_log.set_up()

if _library.is_wanted():
    _library.load()
    from tk import config
    from tk.generated import register as _generated
    from tk.heuristics import tuning as _tuning
    from tk.inspect import coverage, explain, load_pack, packs, preload, supports
    from tk.ops.mm import addmm, linear, mm

    __all__ += ["addmm", "config", "coverage", "explain", "linear", "load_pack", "mm", "packs", "preload", "supports"]

    _generated.register_new()
    _tuning.load_with_cuda()
