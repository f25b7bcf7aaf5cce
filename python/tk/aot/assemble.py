"""Assemble: an op's variants and their images -> the tables and launch recipes of a pack.

A recipe lists the parameters of a cubin in its own order: the function's parameters without its constants, a tensor map
followed by its sizes and strides, and at the end two pointers to scratch memory that Triton always declares.

What the core would refuse is refused here, with the variant's name.
"""

from __future__ import annotations

import json
import keyword
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tk.aot import pack as fmt
from tk.aot.cache import Artifact
from tk.aot.compile import Target
from tk.aot.errors import BuildError, CompileError
from tk.aot.expr import Expr, Tensor, as_expr, shared
from tk.aot.grid import Grid, Variant, bucket_expr, bucket_key, buckets, config_numbers
from tk.aot.pack import PackWriter, Range
from tk.aot.spec import (
    ITEMSIZE,
    Arg,
    Buffer,
    Const,
    Constraint,
    Float,
    Int,
    Launch,
    Op,
    Output,
    Param,
    Pointer,
    Scratch,
    TensorMap,
)
from tk.generated.signature import RESERVED_ARGUMENTS

MAX_TENSORS, MAX_INTS, MAX_FLOATS, MAX_LOCALS = 32, 32, 448, 64  # tk.h, csrc/core/expr.h
MAX_DIMS = 8
MAX_MUTATED = 26  # csrc/core/interface.h: a letter of the schema for each

# A power of two, up to what any allocation of the driver has.
ALIGNMENTS = [2**i for i in range(9)]

FLOAT_WIDTHS = {"fp16": 2, "bf16": 3, "fp32": 4, "fp64": 8}  # ArgKind::Float

# CUtensorMapDataType by the number that the device side uses, where the two differ.
TENSOR_MAP_TYPE = {8: 10, 9: 8, 10: 9}
TENSOR_MAP_TF32 = 11
L2_PROMOTION = {0: 0, 64: 1, 128: 2, 256: 3}  # CUtensorMapL2promotion by bytes


@dataclass(frozen=True)
class Compiled:
    """A variant with what its launches became, in the order of its plan."""

    variant: Variant
    artifacts: tuple[Artifact, ...]


def add_op(writer: PackWriter, grid: Grid, compiled: Sequence[Compiled], target: Target, tuned: Mapping[str, Any],
           partial: bool = False) -> None:  # fmt: skip
    """Write an op with all its variants. tuned: its table, as a file of kernels/tuned has it. partial: variants may
    have been left out on purpose, so a pin without its variant is passed over.

    Raises BuildError."""
    op = grid.op
    _check_op(op)
    configs = config_numbers(grid.family, grid.arch)
    numbers = {c.config.name: c.number for c in configs}
    first_variant = writer.count("variants")
    records = [_variant(writer, op, c, numbers[c.variant.point.config.name], target) for c in compiled]
    table = buckets(op, [c.variant for c in compiled])
    record = _op(writer, op) | dict(
        configs=writer.add("configs", [_config(writer, c) for c in configs], share=False),
        buckets=_buckets(writer, table, first_variant),
        variants=writer.add("variants", records, share=False),
        pins=_pins(writer, op, compiled, table, numbers, tuned, partial),
    )
    writer.add("ops", [record], share=False)


def add_definition(writer: PackWriter, op: Op) -> None:
    """Write an op without kernels. Raises BuildError."""
    _check_op(op)
    writer.add("ops", [_op(writer, op)], share=False)


def _op(writer: PackWriter, op: Op) -> dict[str, Any]:
    """What an op is, whatever kernels there are."""
    scope = _Scope(op, len(op.locals), f"op {op.name}")
    return dict(
        name=writer.string(op.name),
        schema=writer.string(op.schema),
        n_tensors=len(op.tensors),
        n_ints=len(op.ints),
        n_floats=len(op.floats),
        n_dims=len(op.dims),
        locals=_locals(writer, op, op.locals.values(), 0, f"op {op.name}"),
        key=scope.code(writer, bucket_expr(op)),
        dims=_dims(op),
        outputs=writer.add("outputs", [_output(writer, scope, o) for o in op.outputs]),
        params=writer.add("params", [_param(writer, p) for p in op.params]),
        checks=writer.add("constraints", [_constraint(writer, scope, c) for c in op.checks]),
        meta=writer.string(op.meta),
        backward=writer.string(op.backward.get("op", "")),
        n_saved=op.backward.get("extra_outputs", 0),
    )


def _check_op(op: Op) -> None:
    for what, count, most in (("tensors", len(op.tensors), MAX_TENSORS), ("ints", len(op.ints), MAX_INTS),
                              ("floats", len(op.floats), MAX_FLOATS), ("locals", len(op.locals), MAX_LOCALS),
                              ("dims", len(op.dims), 4)):  # fmt: skip
        if count > most:
            raise BuildError(f"op {op.name}: {count} {what}, there may be {most}")
    unknown = [d for d in op.dims if d not in op.locals]
    if unknown:
        raise BuildError(f"op {op.name}: dims {unknown} are not among its locals {list(op.locals)}")
    if [t.index for t in op.tensors] != list(range(len(op.tensors))):
        raise BuildError(f"op {op.name}: its tensors are not numbered in order")
    if op.params:
        _check_interface(op)


def _check_interface(op: Op) -> None:
    """What torch and the core ask of a generated op."""
    where = f"op {op.name}"
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", op.name) or keyword.iskeyword(op.name):
        raise BuildError(f"{where}: a generated op's name begins with a letter and has letters, digits and _ alone")
    names = [p.name for p in op.params]
    for p in op.params:
        _check_param(where, p)
    if len(set(names)) < len(names):
        raise BuildError(f"{where}: two arguments have one name: {', '.join(names)}")
    try:
        saved = op.backward.get("extra_outputs", 0)
    except ValueError as e:
        raise BuildError(f"{where}: its meta is no JSON: {e}") from e
    if not 0 <= saved <= len(op.outputs):
        raise BuildError(f"{where}: {saved} of its {len(op.outputs)} outputs are saved")
    tensors = [p for p in op.params if p.is_tensor]
    lists = [p for p in tensors if p.kind == "tensors"]
    ints = tuple(p.name for p in op.params if p.kind in ("int", "bool"))
    floats = tuple(p.name for p in op.params if p.kind == "float")
    if lists and (op.backward or any(p.leading or p.rank or p.mutated for p in tensors if p not in lists)):
        raise BuildError(f"{where}: what is no list beside lists of tensors has no dimensions and is not written")
    if lists and any(p.kind == "optional_tensor" for p in tensors):
        raise BuildError(f"{where}: beside lists of tensors none may be left out")
    if all(p.kind == "optional_tensor" for p in tensors):
        raise BuildError(f"{where}: a generated op takes at least one tensor that is always there")
    if list(map(bool, defaults := [p.default_text for p in op.params])) != sorted(map(bool, defaults)):
        raise BuildError(f"{where}: an argument without a default follows one with a default")
    if sum(p.mutated for p in tensors) > MAX_MUTATED:
        raise BuildError(f"{where}: more than {MAX_MUTATED} arguments are written in place")
    if (len(op.tensors), op.ints, op.floats) != (len(tensors) + len(op.outputs), ints, floats):
        raise BuildError(
            f"{where}: its params and outputs make {len(tensors)} + {len(op.outputs)} tensors, ints {ints} and floats "
            f"{floats}; it has {len(op.tensors)} tensors, {op.ints} and {op.floats}"
        )
    for o in op.outputs:
        of = tensors[o.leading] if o.leading is not None and o.leading < len(tensors) else None
        if o.leading is not None and not (of and (of in lists if lists else of.leading)):
            raise BuildError(f"{where}: an output follows tensor {o.leading}, which has no leading dimensions")
        if len(o.sizes) > _max_rank(o.leading is not None):
            raise BuildError(f"{where}: an output of {len(o.sizes)} dimensions")
        if lists and len(o.sizes) > (o.leading is not None):
            raise BuildError(f"{where}: an output of lists has dimensions of its own")


def _check_param(where: str, p: Param) -> None:
    where = f"{where}, argument {p.name}"
    is_name = p.name.isidentifier() and p.name.isascii() and not keyword.iskeyword(p.name)
    if not is_name or p.name in RESERVED_ARGUMENTS:
        raise BuildError(f"{where}: it cannot have this name")
    if p.kind == "tensors" and p.rank:
        raise BuildError(f"{where}: the tensors of a list have no declared dimensions")
    if p.kind not in fmt.PARAM_KINDS:
        raise BuildError(f"{where}: its kind is one of {', '.join(fmt.PARAM_KINDS)}, not {p.kind!r}")
    if not p.is_tensor and (p.leading or p.rank or p.mutated or p.in_order):
        raise BuildError(f"{where}: a number has no dimensions and is not written")
    if p.kind == "optional_tensor" and (p.leading or p.mutated or p.in_order):
        raise BuildError(f"{where}: a tensor that may be left out has no leading dimensions and is not written")
    if not 0 <= p.rank <= _max_rank(p.leading):
        raise BuildError(f"{where}: {p.rank} declared dimensions, there may be {_max_rank(p.leading)}")
    default: Mapping[str, Any] = {"float": float, "int": int, "bool": bool}
    if p.default is not None and (type(p.default) is not default.get(p.kind) or not math.isfinite(p.default)):
        raise BuildError(f"{where}: its default is {p.default!r}, must be a finite {p.kind}")


def _max_rank(leading: bool) -> int:
    return MAX_DIMS - fmt.LEADING_DIMS * leading


def _param(writer: PackWriter, p: Param) -> dict[str, Any]:
    return dict(
        name=writer.string(p.name),
        kind=fmt.PARAM_KINDS.index(p.kind),
        flags=fmt.PARAM_LEADING * p.leading | fmt.PARAM_MUTATED * p.mutated | fmt.PARAM_IN_ORDER * p.in_order,
        rank=p.rank,
        default_value=writer.string(p.default_text),
    )


def _dims(op: Op) -> list[int]:
    names = list(op.locals)
    return [names.index(d) for d in op.dims] + [0] * (4 - len(op.dims))


def _config(writer: PackWriter, numbered: Any) -> dict[str, Any]:
    params = json.dumps(dict(numbered.config.params), sort_keys=True)
    return dict(number=numbered.number, name=writer.string(numbered.config.name), params=writer.string(params))


def _buckets(writer: PackWriter, table: Mapping[int, Sequence[int]], first_variant: int) -> Range:
    records = []
    for key, indices in table.items():
        candidates = writer.add("candidates", [dict(variant=first_variant + i) for i in indices], share=False)
        records.append(dict(key=key, candidates=candidates))
    return writer.add("buckets", records, share=False)


def _pins(writer: PackWriter, op: Op, compiled: Sequence[Compiled], table: Mapping[int, Sequence[int]],
          numbers: Mapping[str, int], tuned: Mapping[str, Any], partial: bool) -> Range:  # fmt: skip
    found: dict[tuple[int, ...], int] = {}
    for pin in tuned.get("pins", ()):
        name, key, dims = pin["config"], pin["key"], tuple(pin["dims"])
        if name not in numbers:
            raise BuildError(f"op {op.name}: a tuned pin names config {name}, which does not exist")
        if set(key) != set(op.selectors) or len(dims) != len(op.dims):
            raise BuildError(
                f"op {op.name}: a tuned pin needs {list(op.selectors)} and {list(op.dims)}, not {key}, {dims}"
            )
        bucket = bucket_key(op, key)
        if not any(compiled[i].variant.point.config.name == name for i in table.get(bucket, ())):
            if partial:
                continue
            raise BuildError(f"op {op.name}: a tuned pin names config {name} for {key}, where nothing has it")
        if found.setdefault((bucket, *dims), numbers[name]) != numbers[name]:
            raise BuildError(f"op {op.name}: two tuned pins for {key}, {dims}")
    padding = [0] * (4 - len(op.dims))
    records = [dict(key=at[0], dims=[*at[1:], *padding], config=n) for at, n in sorted(found.items())]
    return writer.add("pins", records, share=False)


def _output(writer: PackWriter, scope: _Scope, output: Output) -> dict[str, Any]:
    if len(output.sizes) != len(output.strides) or len(output.sizes) > 8:
        raise BuildError(f"{scope.where}: an output has {len(output.sizes)} sizes and {len(output.strides)} strides")
    return dict(
        dtype=scope.code(writer, output.dtype),
        ndim=len(output.sizes),
        leading=0 if output.leading is None else output.leading + 1,
        sizes=_padded([scope.code(writer, x) for x in output.sizes], 8),
        strides=_padded([scope.code(writer, x) for x in output.strides], 8),
    )


def _padded(ranges: list[Range], count: int) -> list[Range]:
    return ranges + [fmt.EMPTY] * (count - len(ranges))


# --- Expressions ---


@dataclass(frozen=True)
class _Scope:
    """What an expression may read here: the op's arguments and the first `n_locals` locals."""

    op: Op
    n_locals: int
    where: str

    def code(self, writer: PackWriter, value: Expr | int) -> Range:
        expr = as_expr(value)
        for node in expr.walk():
            self._check(node)
        try:
            Expr.decode(expr.encode())
        except ValueError as e:
            raise BuildError(f"{self.where}: {e}") from e
        return writer.code(expr)

    def _check(self, node: Expr) -> None:
        op = self.op
        if node.op == "local" and node.operand >= self.n_locals:
            raise BuildError(f"{self.where}: local {node.operand} is read, but there are {self.n_locals} at this point")
        if node.op == "int" and node.operand >= len(op.ints):
            raise BuildError(f"{self.where}: int {node.operand} is read, op {op.name} has {len(op.ints)}")
        tensor_ops = ("size", "stride", "dtype", "ndim", "alignment")
        if node.op in tensor_ops and node.operand & 0xFF >= len(op.tensors):
            raise BuildError(f"{self.where}: tensor {node.operand & 0xFF} is read, op {op.name} has {len(op.tensors)}")


def _locals(writer: PackWriter, op: Op, values: Any, first: int, where: str) -> Range:
    """Each may read those before it."""
    ranges = [_Scope(op, first + i, f"{where}, local {first + i}").code(writer, v) for i, v in enumerate(values)]
    return writer.add("locals", [dict(value=r) for r in ranges])


# --- Variants ---


def _variant(writer: PackWriter, op: Op, compiled: Compiled, config: int, target: Target) -> dict[str, Any]:
    variant, plan = compiled.variant, compiled.variant.plan
    n_locals = len(op.locals) + len(plan.locals)
    if n_locals > MAX_LOCALS:
        raise BuildError(f"{variant.name}: {n_locals} locals, there may be {MAX_LOCALS}")
    _check_alignment(op, variant)
    # A predicted time repeats what it is made of: three of four words of a generated op's.
    of_cost, cost = shared(plan.cost, n_locals, MAX_LOCALS - n_locals)
    locals_ = (*plan.locals, *of_cost)
    before, after = (_Scope(op, n, variant.name) for n in (len(op.locals), len(op.locals) + len(locals_)))
    launches = [
        _launch(writer, after, variant, launch, artifact, target)
        for launch, artifact in zip(plan.launches, compiled.artifacts, strict=True)
    ]
    return dict(
        kernel=writer.string(variant.kernel.name),
        config=config,
        flags=fmt.VARIANT_GENERAL * plan.general | fmt.VARIANT_NONDETERMINISTIC * (not plan.deterministic),
        constraints=writer.add("constraints", [_constraint(writer, before, c) for c in plan.constraints]),
        locals=_locals(writer, op, locals_, len(op.locals), variant.name),
        cost=after.code(writer, cost),
        buffers=writer.add("buffers", [_buffer(writer, after, b) for b in plan.buffers]),
        launches=writer.add("launches", launches),
    )


def _check_alignment(op: Op, variant: Variant) -> None:
    """What the compiler was told of an address, a constraint must ask of it: else a misaligned view would fault."""
    nodes = [node for c in variant.plan.constraints for node in _leaves(op, c.holds)]
    checked = {node.operand for node in nodes if node.op == "alignment"}
    for launch in variant.plan.launches:
        for name, arg in launch.leaves():
            if not isinstance(arg, TensorMap | Pointer) or (isinstance(arg, Pointer) and not arg.aligned):
                continue
            if arg.tensor.index not in checked:
                raise BuildError(
                    f"{variant.name}: {name} is compiled for an aligned {arg.tensor.name}, but no constraint reads "
                    f"{arg.tensor.name}.alignment"
                )


def _leaves(op: Op, expr: Expr) -> Any:
    """All nodes, those of the op's locals that it reads included."""
    for node in expr.walk():
        yield node
        if node.op == "local" and node.operand < len(op.locals):
            yield from _leaves(op, list(op.locals.values())[node.operand])


def _constraint(writer: PackWriter, scope: _Scope, constraint: Constraint) -> dict[str, Any]:
    where = replace(scope, where=f"{scope.where}, constraint {constraint.message!r}")
    return dict(holds=where.code(writer, constraint.holds), message=writer.string(constraint.message))


def _buffer(writer: PackWriter, scope: _Scope, buffer: Buffer) -> dict[str, Any]:
    if buffer.alignment not in ALIGNMENTS:
        raise BuildError(f"{scope.where}: a buffer's alignment is one of {ALIGNMENTS}, not {buffer.alignment}")
    kind = fmt.BUFFER_COUNTERS if buffer.zeroed else fmt.BUFFER_SCRATCH
    return dict(kind=kind, alignment=buffer.alignment, bytes=scope.code(writer, buffer.bytes))


def _launch(writer: PackWriter, scope: _Scope, variant: Variant, launch: Launch, artifact: Artifact,
            target: Target) -> dict[str, Any]:  # fmt: skip
    kind = fmt.IMAGE_PTX if target.ptx else fmt.IMAGE_CUBIN
    name = f"{launch.fn.__name__} of {variant.name}"
    return dict(
        image=writer.image(kind, name, artifact.image, launch.fn.__name__),
        entry=writer.string(artifact.entry),
        threads=artifact.threads,
        shared=artifact.shared,
        cluster=artifact.cluster,
        flags=fmt.LAUNCH_COOPERATIVE * launch.cooperative,
        global_scratch=artifact.global_scratch,
        global_scratch_alignment=artifact.global_scratch_alignment,
        profile_scratch=artifact.profile_scratch,
        profile_scratch_alignment=artifact.profile_scratch_alignment,
        when=scope.code(writer, launch.when),
        dependent=scope.code(writer, launch.dependent),
        grid=[scope.code(writer, g) for g in launch.grid],
        args=writer.add("args", _args(writer, scope, launch, artifact)),
    )


# --- Parameters ---


def _args(writer: PackWriter, scope: _Scope, launch: Launch, artifact: Artifact) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    maps = iter(artifact.tensor_maps)
    for name, arg in launch.leaves():
        inner = replace(scope, where=f"{scope.where}, {launch.fn.__name__}({name})")
        if isinstance(arg, TensorMap):
            meta = next(maps, None)
            if meta is None:
                raise CompileError(f"{inner.where}: the compiler made no tensor map of it")
            records += _tensor_map_args(writer, inner, arg, meta)
        elif not isinstance(arg, Const):
            records.append(_plain_arg(writer, inner, arg))
    if next(maps, None) is not None:
        raise CompileError(f"{scope.where}: {launch.fn.__name__} has more tensor maps than parameters for them")
    return [*records, dict(kind=fmt.ARG_GLOBAL_SCRATCH), dict(kind=fmt.ARG_PROFILE_SCRATCH)]


def _plain_arg(writer: PackWriter, scope: _Scope, arg: Arg) -> dict[str, Any]:
    if isinstance(arg, Pointer):
        _check_tensor(scope, arg.tensor)
        return dict(kind=fmt.ARG_POINTER, index=arg.tensor.index, value=scope.code(writer, arg.offset))
    if isinstance(arg, Int):
        return _int_arg(writer, scope, arg.value, ITEMSIZE[arg.dtype])
    if isinstance(arg, Float):
        if arg.index >= len(scope.op.floats):
            raise BuildError(f"{scope.where}: float {arg.index}, op {scope.op.name} has {len(scope.op.floats)}")
        return dict(kind=fmt.ARG_FLOAT, width=FLOAT_WIDTHS[arg.dtype], index=arg.index)
    assert isinstance(arg, Scratch)
    return dict(kind=fmt.ARG_BUFFER, index=arg.buffer, value=scope.code(writer, arg.offset))


def _int_arg(writer: PackWriter, scope: _Scope, value: Expr | int, width: int) -> dict[str, Any]:
    return dict(kind=fmt.ARG_INT, width=width, value=scope.code(writer, value))


def _check_tensor(scope: _Scope, tensor: Tensor) -> None:
    if tensor.index >= len(scope.op.tensors):
        raise BuildError(f"{scope.where}: {tensor.name} is tensor {tensor.index}, the op has {len(scope.op.tensors)}")


def _im2col_fields(writer: PackWriter, scope: _Scope, arg: TensorMap) -> dict[str, Any]:
    if not arg.im2col:
        return dict.fromkeys(("lower", "upper", "steps"), _padded([], 3)) | dict(is_im2col=0)
    parts = dict(lower=arg.im2col.lower, upper=arg.im2col.upper, steps=arg.im2col.steps)
    codes = {name: _padded([scope.code(writer, x) for x in part], 3) for name, part in parts.items()}
    return codes | dict(is_im2col=1)


def _tensor_map_args(
    writer: PackWriter, scope: _Scope, arg: TensorMap, meta: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The map itself, then the tensor's sizes in 32 bits and its strides in 64."""
    _check_tensor(scope, arg.tensor)
    if meta["fp4_padded"]:
        raise CompileError(f"{scope.where}: padded fp4 tensor maps are not supported")
    if bool(meta.get("is_im2col")) != bool(arg.im2col):
        raise CompileError(f"{scope.where}: im2col for one of kernel and recipe only")
    if arg.l2_promotion not in L2_PROMOTION:
        raise BuildError(f"{scope.where}: l2_promotion is one of {list(L2_PROMOTION)}, not {arg.l2_promotion}")
    if arg.round_to_tf32 and arg.dtype != "fp32":
        raise BuildError(f"{scope.where}: only fp32 can be rounded to tf32, this is {arg.dtype}")
    sizes = [scope.code(writer, x) for x in arg.sizes]
    strides = [scope.code(writer, x) for x in arg.strides]
    box = list(meta["block_size"])
    element_type = TENSOR_MAP_TYPE.get(meta["elem_type"], meta["elem_type"])
    record = dict(
        tensor=arg.tensor.index,
        rank=len(arg.sizes),
        element_type=TENSOR_MAP_TF32 if arg.round_to_tf32 else element_type,
        element_size=meta["elem_size"],
        swizzle=meta["swizzle"],
        l2_promotion=L2_PROMOTION[arg.l2_promotion],
        oob_fill=int(arg.nan_fill),
        box=box + [0] * (5 - len(box)),
        offset=scope.code(writer, arg.offset),
        sizes=_padded(sizes, 5),
        strides=_padded(strides, 5),
        **_im2col_fields(writer, scope, arg),
    )
    index = writer.add("tensor_maps", [record]).first
    return [
        dict(kind=fmt.ARG_TENSOR_MAP, index=index),
        *(_int_arg(writer, scope, x, 4) for x in arg.sizes),
        *(_int_arg(writer, scope, x, 8) for x in arg.strides),
    ]
