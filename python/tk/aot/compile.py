"""Compile: one launch, one architecture -> one image, with no GPU.

A :class:`Source` is what decides an image: the device function and everything it reaches, the kinds and dtypes of its
arguments, the constants, the options, the target. Two launches with equal sources share the image. Its ``key`` names it
in the cache.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import io
import json
import re
import resource
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import triton
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.backends.nvidia.compiler import CUDAOptions, get_ptxas
from triton.compiler import ASTSource
from triton.compiler import compile as triton_compile
from triton.compiler.errors import CompilationError
from triton.experimental.gluon._runtime import GluonASTSource
from triton.language import constexpr, dtype
from triton.runtime.jit import DependenciesFinder, JITCallable, JITFunction

from tk.aot.cache import Artifact, compress
from tk.aot.errors import CompileError
from tk.aot.expr import divisor
from tk.aot.spec import (
    DTYPES,
    Arg,
    Bundle,
    Const,
    Float,
    Int,
    Launch,
    Plan,
    Pointer,
    Scratch,
    TensorMap,
    named_fields,
)

# What the JIT would tell the compiler of an address or a number that is a multiple of 16.
DIVISIBLE_BY_16 = [["tt.divisibility", 16]]

# PTX that a driver of CUDA 12.0 can still translate; what a newer ptxas would call itself shuts older drivers out.
BASELINE_PTX_VERSION = 80

WARP_SIZE = 32

Types = str | Bundle  # a bundle's are a NamedTuple too


@dataclass(frozen=True)
class Target:
    """arch: 90 for sm_90. ptx: the image is PTX, for any GPU from `arch` on. family: a cubin for sm_100f, which uses
    nothing that newer GPUs of 10.x lack."""

    arch: int
    ptx: bool = False
    family: bool = False

    @property
    def name(self) -> str:
        return f"{'ptx' if self.ptx else 'sm'}{self.arch}{'f' if self.family else ''}"

    @staticmethod
    def parse(text: str) -> Target:
        """Reads ``80``, ``sm80``, ``sm_80``, ``100f`` or ``ptx80``."""
        match = re.fullmatch(r"(?:sm_?|(ptx))?(\d{2,3})(f?)", text.strip())
        if not match or (match[3] and (match[1] or int(match[2]) < 100)):
            raise ValueError(
                f"{text!r} names no architecture; write 80 (A100), 90 (H100), … or ptx80, or a family from 100f on"
            )
        return Target(int(match[2]), bool(match[1]), bool(match[3]))


@dataclass(frozen=True)
class Source:
    """signature: a type for every parameter, in order; of a bundle a NamedTuple of types. constants, and aligned, which
    are known to be multiples of 16: by name, those of a bundle as ``bundle.field``."""

    fn: JITFunction
    signature: Mapping[str, Types]
    constants: Mapping[str, Any]
    aligned: frozenset[str]
    options: Mapping[str, Any]
    target: Target

    @property
    def name(self) -> str:
        return f"{self.fn.__name__} for {self.target.name}"

    @functools.cached_property
    def key(self) -> str:
        """SHA-256, hexadecimal, over all that decides the image."""
        parts = {
            "source": source_digest(self.fn),
            "signature": [(name, _types_text(types)) for name, types in self.signature.items()],
            "constants": {name: constant_text(value) for name, value in self.constants.items()},
            "aligned": sorted(self.aligned),
            "options": {name: constant_text(value) for name, value in self.options.items()},
            "target": self.target.name,
            "compiler": compiler_version(self.target.arch),
            "environment": _environment(),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


# --- From a launch to its source ---


def source_of(plan: Plan, launch: Launch, target: Target) -> Source:
    """Raises CompileError where the launch does not fit its device function."""
    fn = launch.fn
    if not isinstance(fn, JITFunction):
        hint = ": unset TRITON_INTERPRET" if type(fn).__name__ == "InterpretedFunction" else ""
        raise CompileError(f"{fn!r} is not a function of triton.jit or gluon.jit{hint}")
    _check_arguments(fn, launch.args)
    signature = {name: _types(name, launch.args[name], target) for name in fn.arg_names}
    constants, aligned = {}, set()
    for name, arg in launch.leaves():
        if isinstance(arg, Scratch) and not 0 <= arg.buffer < len(plan.buffers):
            raise CompileError(f"{fn.__name__}: {name} is buffer {arg.buffer}, the plan has {len(plan.buffers)}")
        if isinstance(arg, Const):
            constants[name] = arg.value
        elif is_aligned(arg, plan):
            aligned.add(name)
    return Source(fn, signature, constants, frozenset(aligned), _options(launch), target)


def _check_arguments(fn: JITFunction, args: Mapping[str, Arg | Bundle]) -> None:
    missing = [n for n in fn.arg_names if n not in args]
    extra = [n for n in args if n not in fn.arg_names]
    if missing or extra:
        what = [
            f"{kind} {', '.join(names)}" for kind, names in (("lacks", missing), ("has no parameter", extra)) if names
        ]
        raise CompileError(f"{fn.__name__}: the launch {' and '.join(what)}; it takes {', '.join(fn.arg_names)}")
    for param in fn.params:
        if param.is_constexpr and not isinstance(args[param.name], Const):
            raise CompileError(f"{fn.__name__}: {param.name} is a constexpr, give it a Const")


def _types(name: str, arg: Arg | Bundle, target: Target) -> Types:
    if isinstance(arg, tuple):
        make: Any = type(arg)
        return make(*(_types(f"{name}.{field}", inner, target) for field, inner in named_fields(arg)))
    return _type_text(name, arg, target)


def _types_text(types: Types) -> Any:
    """The text with which they enter the key."""
    return types if isinstance(types, str) else [(name, _types_text(inner)) for name, inner in named_fields(types)]


def _type_text(name: str, arg: Arg, target: Target) -> str:
    if isinstance(arg, Const):
        return "constexpr"
    if arg.dtype not in DTYPES:
        raise CompileError(f"{name}: {arg.dtype!r} is no dtype; there are {', '.join(DTYPES)}")
    if isinstance(arg, Pointer | Scratch):
        return f"*{arg.dtype}"
    if isinstance(arg, TensorMap):
        return _tensor_map_text(name, arg, target)
    is_float = arg.dtype.startswith(("fp", "bf"))
    if is_float != isinstance(arg, Float) or arg.dtype.startswith("fp8"):
        raise CompileError(f"{name}: a number of dtype {arg.dtype} cannot be passed as {type(arg).__name__}")
    return arg.dtype


def _tensor_map_text(name: str, arg: TensorMap, target: Target) -> str:
    if target.arch < 90:
        raise CompileError(f"{name}: there are no tensor maps before sm_90, and this is {target.name}")
    if arg.im2col:
        return _im2col_text(name, arg)
    rank = len(arg.block)
    if not 1 <= rank <= 5 or len(arg.sizes) != rank or len(arg.strides) != rank:
        raise CompileError(
            f"{name}: a tensor map has 1 to 5 dimensions, the same number of sizes, strides and block; here are "
            f"{len(arg.sizes)}, {len(arg.strides)} and {rank}"
        )
    _check_last_stride(name, arg)
    block = ", ".join(map(str, arg.block))
    return f"tensordesc<{arg.dtype}[{block}]{',' + arg.layout if arg.layout else ''}>"


def _check_last_stride(name: str, arg: TensorMap) -> None:
    if not (isinstance(arg.strides[-1], int) and arg.strides[-1] == 1):
        raise CompileError(f"{name}: the last stride of a tensor map is 1: write it so and require it of the problem")


def _im2col_text(name: str, arg: TensorMap) -> str:
    assert arg.im2col
    rank = len(arg.sizes)
    corners = (arg.im2col.lower, arg.im2col.upper, arg.im2col.steps)
    if not 3 <= rank <= 5 or len(arg.strides) != rank or any(len(c) != rank - 2 for c in corners):
        raise CompileError(
            f"{name}: an im2col tensor map has 3 to 5 sizes and as many strides, and lower, upper and steps of two "
            f"fewer; here are {rank}, {len(arg.strides)} and {', '.join(str(len(c)) for c in corners)}"
        )
    if len(arg.block) != 2:
        raise CompileError(f"{name}: the block of an im2col tensor map is (pixels, channels), not {arg.block}")
    _check_last_stride(name, arg)
    return f"tensordesc_im2col<{arg.dtype}[{arg.block[0]}, {arg.block[1]}],input_rank={rank},{arg.layout}>"


def is_aligned(arg: Arg, plan: Plan) -> bool:
    """Whether the compiler may take the argument for a multiple of 16."""
    if isinstance(arg, Pointer):
        return arg.aligned
    if isinstance(arg, Int):
        return arg.divisible
    if isinstance(arg, Scratch):
        return plan.buffers[arg.buffer].alignment % 16 == 0 and divisor(arg.offset) % 16 == 0
    return False


def _options(launch: Launch) -> dict[str, Any]:
    own = dict(num_warps=launch.num_warps, num_stages=launch.num_stages, num_ctas=launch.num_ctas)
    own["enable_fp_fusion"] = True
    if launch.maxnreg is not None:
        own["maxnreg"] = launch.maxnreg
    known = {f.name for f in fields(CUDAOptions)}
    # The backend itself would pass over a misspelt one in silence.
    if unknown := sorted(set(launch.options) - known):
        raise CompileError(f"{launch.fn.__name__}: the compiler has no option {', '.join(unknown)}")
    return {**own, **launch.options}


# --- What an image depends on ---


class _Dependencies(DependenciesFinder):
    """One function's own text and what it refers to. Triton's walk, which would also hash line numbers: they do not
    reach an image without line tables, and would make every edit of a file a new key for all that is below it."""

    def __init__(self, fn: JITCallable):
        nonlocals = inspect.getclosurevars(fn.fn).nonlocals
        super().__init__(name=fn._fn_name, globals=fn.__globals__, nonlocals=nonlocals, src=fn.src)
        self.reached: list[JITCallable] = []
        self.visit(fn.parse())

    def _update_hash(self, func: JITCallable) -> None:
        self.reached.append(func)


def _function_text(fn: JITCallable, found: _Dependencies) -> str:
    values = {name: _plain_repr(value) for (name, _), (value, _) in found.used_global_vals.items()}
    defaults = {name: _plain_repr(p.default) for name, p in fn.signature.parameters.items() if p.default is not p.empty}
    parts = [fn._fn_name, type(fn).__name__, str(getattr(fn, "noinline", None)), found.ret, values, defaults]
    return json.dumps(parts, sort_keys=True)


def _plain_repr(value: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


_digests: dict[int, tuple[JITCallable, str]] = {}


def source_digest(fn: JITCallable) -> str:
    """SHA-256 over the source of `fn` and of every function it reaches, the globals they read and their defaults.

    Computed once for each function and process."""
    if id(fn) in _digests:
        return _digests[id(fn)][1]
    texts: dict[int, str] = {}
    pending = [fn]
    while pending:
        current = pending.pop()
        if id(current) in texts:
            continue
        found = _Dependencies(current)
        texts[id(current)] = _function_text(current, found)
        pending += found.reached
        pending += [p.default for p in current.signature.parameters.values() if isinstance(p.default, JITCallable)]
    digest = hashlib.sha256("\n".join([texts[id(fn)], *sorted(texts.values())]).encode()).hexdigest()
    _digests[id(fn)] = (fn, digest)  # holds `fn`, so that its id stays its own
    return digest


def constant_text(value: Any) -> str:
    """A constant as it enters the key: equal texts, equal images. Raises CompileError for what has no such text."""
    if isinstance(value, JITCallable):
        return f"function {source_digest(value)}"
    if isinstance(value, constexpr):
        return constant_text(value.value)
    if isinstance(value, tuple | list):
        return f"({', '.join(map(constant_text, value))})"
    if is_dataclass(value):
        cls: Any = type(value)
        return f"{cls.__name__} {value!r}{_class_digest(cls)}"
    if value is None or isinstance(value, bool | int | float | str | dtype):
        return f"{type(value).__name__} {value!r}"
    raise CompileError(
        f"{value!r} of type {type(value).__name__} cannot be a constant of a kernel compiled ahead of time"
    )


@functools.cache
def _class_digest(cls: Any) -> str:
    """A digest of a class whose properties a kernel may read. Triton's own classes are as Triton's version says."""
    if cls.__module__.split(".")[0] == "triton":
        return ""
    return f" {hashlib.sha256(inspect.getsource(cls).encode()).hexdigest()}"


@functools.cache
def compiler_version(arch: int) -> str:
    """``triton 3.9.0, ptxas 12.9.86``."""
    with _one_ptxas():
        ptxas = get_ptxas(arch).path
    text = subprocess.run([ptxas, "--version"], check=True, capture_output=True, text=True).stdout
    version = re.search(r"\bV(\d[\d.]*)", text)
    return f"triton {triton.__version__}, ptxas {version[1] if version else text.strip()}"


def _environment() -> list[tuple[str, str]]:
    """Variables that Triton says change what it makes, less the one that is always set here."""
    return sorted((k, v) for k, v in get_cache_invalidating_env_vars().items() if k != "TRITON_DISABLE_LINE_INFO")


# --- Compiling ---


def compile_source(source: Source) -> Artifact:
    """Raises CompileError with the compiler's own words, first of all those on the line that is at fault."""
    ast_source = (GluonASTSource if source.fn.is_gluon() else ASTSource)(
        source.fn,
        dict(source.signature),
        {_path(source, n): v for n, v in source.constants.items()},
        {_path(source, n): DIVISIBLE_BY_16 for n in sorted(source.aligned)},
    )
    options = dict(source.options)
    if source.target.ptx:
        options.setdefault("ptx_version", BASELINE_PTX_VERSION)
    start = _cpu_seconds()
    with _compiler_settings(), _for_family(source.target), contextlib.redirect_stdout(io.StringIO()) as log:
        try:
            compiled = triton_compile(ast_source, GPUTarget("cuda", source.target.arch, WARP_SIZE), options)
        except CompileError:
            raise
        except Exception as e:
            raise CompileError(_words(e, source.fn)) from e
        asm = {kind: compiled.asm[kind] for kind in ("ptx", "cubin")}
    image = asm["ptx"].encode() if source.target.ptx else asm["cubin"]
    return _artifact(compiled.metadata, image, log.getvalue(), _cpu_seconds() - start)


def _cpu_seconds() -> float:
    """The time of this process and its children, such as ptxas, without what others do on the machine."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _path(source: Source, name: str) -> tuple[int, ...]:
    """An argument's place: its parameter's index and, within a bundle, the indices of the fields that lead to it."""
    parameter, *fields_within = name.split(".")
    path: list[int] = [source.fn.arg_names.index(parameter)]
    types: Any = source.signature[parameter]
    for field in fields_within:
        path.append([name for name, _ in named_fields(types)].index(field))
        types = types[path[-1]]
    return tuple(path)


def _words(error: Exception, fn: JITFunction) -> str:
    """The compiler wraps the error of a function that is called into one for each caller, without a word of its own:
    the innermost says what is wrong."""
    innermost, chain = None, error
    while chain is not None:
        innermost = chain if isinstance(chain, CompilationError) else innermost
        chain = chain.__cause__  # type: ignore[assignment]
    if innermost is None:
        return f"{type(error).__name__}: {error}"
    message = innermost.error_message or (repr(innermost.__cause__) if innermost.__cause__ else "not understood")
    where = _where(innermost, fn)
    return f"error: {' '.join(message.split())}{f' ({where})' if where else ''}\n{error}"


def _where(error: CompilationError, fn: JITFunction) -> str:
    """File, line, function and text of the line that an error is about, as far as they can be found out."""
    line = getattr(error.node, "lineno", 0)
    if not error.src or not line:
        return ""
    text = error.src.splitlines()[line - 1].strip()
    for called in _reached(fn):
        if called.src == error.src:
            lines, first = inspect.getsourcelines(called.fn)
            before = next(i for i, x in enumerate(lines) if x.lstrip().startswith("def "))
            return f"{inspect.getsourcefile(called.fn)}:{first + before + line - 1}, in {called.fn.__name__}: {text}"
    return text


def _reached(fn: JITCallable) -> Iterator[JITCallable]:
    """`fn` and every function that it refers to, or has as a default."""
    seen: set[int] = set()
    pending = [fn]
    while pending:
        current = pending.pop()
        if id(current) not in seen:
            seen.add(id(current))
            yield current
            pending += _Dependencies(current).reached
            pending += [p.default for p in current.signature.parameters.values() if isinstance(p.default, JITCallable)]


@contextlib.contextmanager
def _compiler_settings() -> Iterator[None]:
    """No line tables (they put paths into the image and are most of it), ptxas's figures, and nothing in the user's
    own Triton cache."""
    with tempfile.TemporaryDirectory(prefix="tk-triton-") as folder, contextlib.ExitStack() as scopes:
        for group in (knobs.compilation, knobs.nvidia, knobs.cache, knobs.runtime):
            scopes.enter_context(group.scope())
        knobs.runtime.add_stages_inspection_hook = _with_bounded_ptx
        knobs.compilation.disable_line_info = True
        knobs.nvidia.dump_ptxas_log = True
        knobs.cache.dir = folder
        scopes.enter_context(_one_ptxas())
        yield


# The package's largest kernel has 20 thousand instructions. Over 130 thousand lines, of a mod in fp64, ptxas worked for
# more than eight minutes; what it makes of half as many spills tens of kilobytes.
MOST_PTX_LINES = 80_000


def _with_bounded_ptx(backend: Any = None, stages: Any = None, *_: Any) -> tuple[str, str]:
    """Triton's hook for its stages, which it calls without arguments for the key of its own cache."""
    if stages is not None:
        to_cubin = stages["cubin"]

        def bounded(ptx: str, metadata: Any) -> Any:
            if (lines := ptx.count("\n")) > MOST_PTX_LINES:
                raise CompileError(
                    f"{lines} lines of PTX, of which ptxas takes minutes to make what spills; at most {MOST_PTX_LINES}"
                )
            return to_cubin(ptx, metadata)

        stages["cubin"] = bounded
    return "", ""


@contextlib.contextmanager
def _for_family(target: Target) -> Iterator[None]:
    """Triton names an architecture's own target, sm_100a, to LLVM and to ptxas alike, and has no option for another."""
    if not target.family:
        yield
        return
    own = nvidia.sm_arch_from_capability
    nvidia.sm_arch_from_capability = lambda capability: f"sm_{capability}f"
    try:
        yield
    finally:
        nvidia.sm_arch_from_capability = own


@contextlib.contextmanager
def _one_ptxas() -> Iterator[None]:
    """Triton's ptxas of CUDA 12 for every architecture, where it would take that of CUDA 13 from sm_90 on: what CUDA 13
    makes only loads under a driver of CUDA 13, and torch still comes with CUDA 12."""
    with knobs.nvidia.scope():
        knobs.nvidia.ptxas_blackwell = knobs.nvidia.ptxas.path
        yield


def _artifact(metadata: Any, image: bytes, ptxas_log: str, seconds: float) -> Artifact:
    return Artifact(
        entry=metadata.name,
        threads=WARP_SIZE * metadata.num_warps,  # the metadata's: warp specialisation adds to the option's
        shared=metadata.shared,
        cluster=metadata.num_ctas,
        global_scratch=metadata.global_scratch_size,
        global_scratch_alignment=metadata.global_scratch_align,
        profile_scratch=metadata.profile_scratch_size,
        profile_scratch_alignment=metadata.profile_scratch_align,
        tensor_maps=tuple(metadata.tensordesc_meta or ()),
        registers=_figure(ptxas_log, r"Used (\d+) registers"),
        spill_bytes=_figure(ptxas_log, r"(\d+) bytes spill stores") + _figure(ptxas_log, r"(\d+) bytes spill loads"),
        seconds=round(seconds, 3),
        size=len(image),
        hash=hashlib.sha256(image).hexdigest(),
        compressed=compress(image),
    )


def _figure(ptxas_log: str, pattern: str) -> int:
    found = re.findall(pattern, ptxas_log)
    if not found:
        raise CompileError(f"ptxas reported nothing like {pattern!r}:\n{ptxas_log}")
    return max(map(int, found))


def warm_up() -> None:
    """Load and hash what every compilation needs, so that processes forked from this one need not."""
    from triton.compiler import code_generator  # noqa: F401
    from triton.runtime.cache import triton_key

    triton_key()
