"""The ops that the package itself declares."""

from __future__ import annotations

import importlib
import pkgutil

import tk.kernels.generated
from tk.generated import Declared

MODULES = [
    importlib.import_module(m.name)
    for m in pkgutil.iter_modules(tk.kernels.generated.__path__, "tk.kernels.generated.")
]
# Those over lists have tests of their own (test_list_kernels.py).
WITHOUT_LISTS = {
    x.name: x
    for module in MODULES
    for x in vars(module).values()
    if isinstance(x, Declared) and not any(spec.is_list for spec in x.signature.tensors.values())
}
