"""A Gluon kernel's module for Triton's interpreter, without layouts: they say where values lie, not what they are.

Only for kernels of Gluon's elementwise part: no shared memory, no barriers, no warp roles.
"""

from __future__ import annotations

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import triton
import triton.language as tl


def load(module: str, path: Path, folder: Path) -> ModuleType:
    """The module of the file at `path`, under the name `module`, from a copy in `folder`."""
    text = path.read_text()
    for line in ("from triton.experimental import gluon\n", "from triton.experimental.gluon import language as gl\n"):
        assert line in text, f"{path} has no {line!r}"
        text = text.replace(line, "")
    text = text.replace("from triton.experimental.gluon.language.nvidia.ampere import mma_v2\n", "")
    names = f"import triton.language as tl\n\nfrom {__name__} import gl, gluon, mma_v2\n"
    text = text.replace("gl.constexpr", "tl.constexpr").replace("\nfrom tk.", f"\n{names}from tk.", 1)
    copy = folder / f"{module}.py"
    copy.write_text(re.sub(r"\.reshape\(\[(.*?)\]\)", r".reshape(\1)", text.replace(".type.layout", "")))
    spec = spec_from_file_location(module, copy)
    assert spec is not None and spec.loader is not None
    made = sys.modules[module] = module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def _int(x: Any) -> int:
    """Of a number as the interpreter passes them on."""
    if hasattr(x, "handle"):
        return int(x.handle.data.flat[0])
    return int(getattr(x, "value", x))


gluon = SimpleNamespace(jit=triton.jit, constexpr_function=lambda fn: lambda *args: None)
gl = SimpleNamespace(
    num_warps=lambda: 4,  # a test sets it
    SliceLayout=lambda *args: None,
    BlockedLayout=lambda *args, **kwargs: None,
    DistributedLinearLayout=lambda *args: None,
    DotOperandLayout=lambda *args: None,
    NVMMADistributedLayout=lambda *args: None,
    convert_layout=lambda x, layout, assert_trivial=False: x,
    static_range=lambda n: range(_int(n)),
    arange=lambda a, b, layout=None: tl.arange(tl.constexpr(_int(a)), tl.constexpr(_int(b))),
    zeros=lambda shape, dtype, layout=None: tl.full([_int(n) for n in shape], 0.0, dtype),
    load=lambda *args, **kwargs: tl.load(*args, **kwargs),
    full=lambda shape, value, dtype, layout=None: tl.full([_int(n) for n in shape], value, dtype),
    join=lambda a, b: tl.join(a, b),
    split=lambda x: tl.split(x),
    sum=lambda x, axis: tl.sum(x, axis),
    cdiv=lambda a, b: tl.cdiv(a, b),
    minimum=lambda a, b: tl.minimum(a, b),
    program_id=lambda axis: tl.program_id(axis),
    int16=tl.int16,
    int32=tl.int32,
    uint32=tl.uint32,
    int64=tl.int64,
    float32=tl.float32,
)


def mma_v2(a: Any, b: Any, acc: Any) -> Any:
    return tl.dot(a, b, acc)
