"""The record of a generated op: what it takes and returns, its checks, and what the run time is told of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import sympy
from torch.utils._sympy.functions import FloorDiv

from tk.aot.expr import Expr, Tensor, as_expr, ceil_div, const, device, maximum, minimum, select, tensors
from tk.aot.spec import (
    DTYPES,
    Constraint,
    Op,
    Output,
    Param,
    Selector,
    require,
)
from tk.codegen import index as ix
from tk.codegen import ir
from tk.codegen.choice import dtype_number, graph_number
from tk.codegen.errors import TraceError
from tk.codegen.ir import IR_DTYPES
from tk.codegen.lowering.split import Parts
from tk.codegen.scheduling.context import Context
from tk.codegen.sharding import sharded
from tk.codegen.tracing import saved
from tk.codegen.tracing.arguments import LEADING, letter
from tk.codegen.tracing.trace import Trace
from tk.codegen.ways import Graph
from tk.generated.signature import DTYPES as TORCH_DTYPES
from tk.generated.signature import MAX_RANK, MAX_RANK_BESIDE, Signature, Size, TensorSpec

VECTOR, BLOCK = 16, 4096  # elements of which parts of everything have multiples


@dataclass(frozen=True)
class OpRecord:
    """A function's graphs under a name, as an op."""

    name: str
    signature: Signature
    graphs: tuple[Graph, ...]
    doc: str = ""
    backward: OpRecord | None = None
    debug: bool = False
    differentiable: bool = False  # ATen may differentiate its recorded graph

    @cached_property
    def op(self) -> Op:
        inputs, outputs = list(self.signature.tensors), [f"out{i}" for i in range(len(self.first.new))]
        named = tensors(*inputs, *outputs)
        by_name = {t.name: t for t in named}
        ints = tuple(n for n, s in self.signature.numbers.items() if s.kind in ("int", "bool"))
        floats = tuple(n for n, s in self.signature.numbers.items() if s.kind == "float")
        locals_ = self._locals(by_name, ints)
        letters = [n for n in locals_ if n in (*self.signature.letters, LEADING)]
        bare = Op(
            self.name, named, ints, floats, locals_, {"graph": Selector(const(0), len(self.graphs))}, tuple(letters[:4])
        )
        for piece, size in self._pieces().items():
            if piece not in bare.locals:
                bare = replace(bare, locals={**bare.locals, piece: Context(bare, {}, {}).expr(size)})
        bare = replace(bare, locals=self._with_parts(bare))
        context = Context(bare, by_name, {})
        selectors = {"graph": Selector(bare.local("graph"), len(self.graphs))}
        return replace(
            bare, selectors=selectors, outputs=self._outputs(context), params=self._params(),
            checks=self._checks(context, by_name), meta=self._meta(),
        )  # fmt: skip

    @property
    def first(self) -> Trace:
        return self.graphs[0].trace

    def _locals(self, by_name: Mapping[str, Tensor], ints: Sequence[str]) -> dict[str, Expr]:
        found: dict[str, Expr] = {"graph": graph_number([g.trace for g in self.graphs], self.signature, by_name, ints)}
        for name, spec in self.signature.tensors.items():
            t = by_name[name]
            if spec.leading:
                found.setdefault(LEADING, t.size(0) * t.size(1) * t.size(2))
                for d, size in enumerate(ir.LEADING_SIZES):
                    found.setdefault(size.name, t.size(d))
            for d, size in enumerate(spec.sizes):
                if isinstance(size, str):
                    found.setdefault(size, t.size(d + 3 * spec.leading))
        for unknown, name, d, factor, rest in self.signature.solved():
            size = by_name[name].size(d + 3 * self.signature.tensors[name].leading)
            values = {x: as_expr(e) for x, e in found.items()}
            found[unknown] = as_expr((size - rest.evaluate(values)) // maximum(as_expr(factor.evaluate(values)), 1))
        return found

    def _pieces(self) -> dict[str, sympy.Expr]:
        """How many elements slices have."""
        return {s.name: size for g in self.graphs for s, size in g.trace.pieces.items()}

    def _with_parts(self, bare: Op) -> dict[str, Expr]:
        """The op's locals and, of split reductions, the numbers of parts: enough programs to fill the GPU a few times,
        each with enough to do. Of programs that walk, as many as are resident."""
        found = dict(bare.locals)
        context = Context(bare, {}, {})
        for p in (p for g in self.graphs for p in g.parts):
            cut, reduced, kept = (context.expr(e) for e in (p.cut, p.reduced, p.kept))
            if p.interleaved:
                found |= _interleaved(p, cut, kept)
                continue
            if p.are_rows:
                wanted = minimum(4 * device.sm_count // maximum(kept, 1), ceil_div(reduced, 8192))
                # As strides have it they are columns, in blocks of 32; more parts take longer to be put together.
                columns = minimum(4 * device.sm_count // maximum(ceil_div(kept, 32), 1), ceil_div(reduced, 1024))
                wanted = maximum(wanted, minimum(columns, 64))
            else:
                most = ceil_div(reduced, 64 if p.kept != 1 else 8192)
                wanted = minimum(4 * device.sm_count // maximum(ceil_div(kept, 64), 1), most)
            count = maximum(minimum(cut, wanted), 1)
            found |= {p.name: count, p.chunk.name: _of_part(p, cut, reduced, count)}
        for w in (g.walk for g in self.graphs if g.walk):
            found[w.name] = maximum(minimum(context.expr(w.rows), 4 * device.sm_count), 1)
        return found

    def _params(self) -> tuple[Param, ...]:
        found = []
        for name, spec in self.signature.params.items():
            if isinstance(spec, TensorSpec):
                kind = "tensors" if spec.is_list else "tensor"
                in_order = spec.leading and self._counts_leading()
                found.append(Param(name, kind, spec.leading, len(spec.sizes), name in self.first.mutated, in_order))
            else:
                found.append(Param(name, spec.kind, default=spec.default))
        return tuple(found)

    def _counts_leading(self) -> bool:
        """Random numbers go by the place in the result, so its dimensions may not be seen in another order."""
        return any(v.op == "random" for g in self.graphs for k in g.kernels for v in k.values)

    def _outputs(self, context: Context) -> tuple[Output, ...]:
        leading = next((i for i, s in enumerate(self.signature.tensors.values()) if s.leading), None)
        found = []
        for i, node in enumerate(self.first.new):
            shape = tuple(self.first.size(s) for s in node.meta["val"].shape)
            dtypes = [DTYPES[IR_DTYPES[g.trace.new[i].meta["val"].dtype]] for g in self.graphs]
            has_leading = _has_leading(shape)
            declared = shape[1:] if has_leading else shape
            if len(declared) > (most := MAX_RANK_BESIDE if has_leading else MAX_RANK):
                raise TraceError(f"{self.name}: result {i} has {len(shape)} dimensions, it may have {most}")
            found.append(
                Output(
                    by_graph(context.op, dtypes),
                    tuple(context.expr(_of_empty(s)) for s in declared),
                    tuple(context.expr(ix.product(declared[d + 1 :])) for d in range(len(declared))),
                    leading if has_leading else None,
                )
            )
        return tuple(found)

    def _checks(self, context: Context, by_name: Mapping[str, Tensor]) -> tuple[Constraint, ...]:
        found: list[Constraint] = []
        owner: dict[str, str] = {}
        for name, spec in self.signature.tensors.items():
            t = by_name[name]
            found.append(dtype_check(self.signature, name, owner, by_name))
            for d, size in enumerate(spec.sizes):
                at = t.size(d + 3 * spec.leading)
                where = f"dimension {d - len(spec.sizes)} of {name}"
                if isinstance(size, int):
                    found.append(require(at == size, f"{where} must have size {size}"))
                elif not isinstance(size, str):
                    found.append(require(at == context.expr(_as_sympy(size)), f"{where} must have size {size}"))
                elif size in owner:
                    found.append(
                        require(at == context.op.local(size), f"{where} must be as large as {owner[size]} ({size})")
                    )
                else:
                    owner[size] = where
        for piece, size in self._pieces().items():
            if piece in owner:
                holds = context.op.local(piece) == context.expr(size)
                found.append(require(holds, f"{owner[piece]} must have size {size}"))
        zeros = {str(c.zero): c for g in self.graphs for c in g.trace.checks}
        for check in sorted(zeros.values(), key=lambda c: sympy.count_ops(c.zero)):
            found.append(require(context.expr(check.zero) == 0, check.message))
        for i, node in enumerate(self.first.new):
            for size in (sympy.sympify(self.first.size(s)) for s in node.meta["val"].shape):
                if not size.is_Symbol and not size.is_nonnegative:  # as of a piece that is what others leave
                    holds = context.expr(sympy.Max(0, -size)) == 0
                    found.append(require(holds, f"result {i} would have a size of {size}"))
        return tuple(c for c in found if c.holds.value is None)

    def _meta(self) -> str:
        traces = [g.trace for g in self.graphs]
        backward = self._backward_meta()
        along = [sharded(self.signature, g.trace, g.kernels) for g in self.graphs]
        return meta_text(self.doc, self.signature, traces, along, backward=backward, differentiable=self.differentiable)

    def _backward_meta(self) -> dict[str, Any] | None:
        """The backward takes the gradients of the floating-point results, the saved results and inputs, then all
        numbers."""
        if self.backward is None:
            return None
        params = list(self.signature.params)
        of = self.backward.signature.params
        grads = [n for n, s in self.signature.tensors.items() if _is_float(s, self.first.dtypes)]
        outputs = [i for i in range(len(self.first.new)) if saved.name(i) in of]
        # Where one of several results has no gradient, those of the others are worked out of all arguments.
        has_several = sum(n.meta["val"].is_floating_point() for n in self.first.new) > 1
        reads_all = bool(outputs) and has_several
        return dict(
            op=self.backward.name,
            saved_inputs=[params.index(n) for n in self.signature.tensors if n in of or reads_all],
            saved_outputs=outputs,
            extra_outputs=0,
            grads=[params.index(n) for n in grads],
        )


def _interleaved(p: Parts, cut: Expr, kept: Expr) -> dict[str, Expr]:
    """A multiple of 16 parts, whose columns together are whole vectors whatever a row has. As many as give the GPU four
    programs a multiprocessor in blocks of 32 columns, each of which has a few blocks of rows; and no more than the last
    launch, of few programs where there are few columns, puts together in a few blocks."""
    wanted = minimum(minimum(128 * device.sm_count // maximum(kept, 1), cut // 128), 2048)
    count = maximum(wanted // VECTOR, 1) * VECTOR
    return {p.name: count, p.chunk.name: ceil_div(cut, count)}


def _of_part(p: Parts, cut: Expr, reduced: Expr, count: Expr) -> Expr:
    """How much of what is cut each part has. Of everything as many elements as blocks have, or else vectors, where a
    part has as many: then all parts begin at addresses of vectors, and the last alone has a block that is not whole.
    Before the first element there may be up to a vector's less one, which its 16 bytes hold."""
    if p.kept != 1:
        return ceil_div(cut, count)
    before = ceil_div(VECTOR - 1, maximum(reduced // maximum(cut, 1), 1))
    least = ceil_div(cut + before, count)
    unit = select(least < VECTOR, 1, select(least < BLOCK, VECTOR, BLOCK))
    return ceil_div(least, unit) * unit


def _of_empty(size: sympy.Expr) -> sympy.Expr:
    """A letter counts as positive, so that N - 1 is no negative size; of 0 columns there are 0 others."""
    may_be_less = size.is_Add and any(term.could_extract_minus_sign() for term in size.args)
    return sympy.Max(0, size, evaluate=False) if may_be_less else size


def _as_sympy(size: Any) -> sympy.Expr:
    return size.evaluate({x: letter(x) for x in size.letters}, FloorDiv) if isinstance(size, Size) else size


def meta_text(doc: str, signature: Signature, traces: Sequence[Trace], along: Sequence[Any], **more: Any) -> str:
    """What Python reads of a pack about an op: its declaration, its recorded graphs, and along which dimensions each of
    them may be sharded."""
    graphs = [dict(dtypes=dict(t.dtypes), flags=dict(t.flags), nodes=t.recorded, sharded=a)
              for t, a in zip(traces, along, strict=True)]  # fmt: skip
    declared = {name: str(spec) for name, spec in signature.params.items()}
    variables = {name: list(dtypes) for name, dtypes in signature.variables.items()}
    found = dict(doc=doc, signature=declared, variables=variables, returns=traces[0].structure, graphs=graphs, **more)
    return json.dumps(found, sort_keys=True)


def dtype_check(signature: Signature, name: str, owner: dict[str, str], by_name: Mapping[str, Tensor]) -> Constraint:
    """The check of a tensor's dtype. owner: by the variable of dtypes its first tensor, which this may become."""
    t, dtype = by_name[name], signature.tensors[name].dtype
    if dtype in owner:
        return require(t.dtype == by_name[owner[dtype]].dtype, f"{name} must have the dtype of {owner[dtype]}")
    allowed = signature.variables.get(dtype, (dtype,))
    if dtype in signature.variables:
        owner[dtype] = name
    holds = as_expr(0)
    for one in allowed:
        holds = holds | (t.dtype == dtype_number(one))
    names = " or ".join(str(TORCH_DTYPES[d]).removeprefix("torch.") for d in allowed)
    return require(holds, f"{name} must be of dtype {names}")


def by_graph(op: Op, values: Sequence[int]) -> Expr:
    result = as_expr(values[0])
    if len(set(values)) == 1:
        return result
    for n, value in enumerate(values[1:], 1):
        result = select(op.local("graph") == n, value, result)
    return result


def _has_leading(shape: Sequence[sympy.Expr]) -> bool:
    return bool(shape) and shape[0] == ir.LEADING


def _is_float(spec: TensorSpec, dtypes: Mapping[str, str]) -> bool:
    return TORCH_DTYPES[dtypes.get(spec.dtype, spec.dtype)].is_floating_point
