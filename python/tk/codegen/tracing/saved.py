"""Results that a backward reads, in place of what they would be worked out from again.

Autograd keeps the result of an exp or a softmax, of which the gradient is a short formula. A backward's graph has it as
a part of the forward, which it runs again; here it becomes an argument, ``result_0`` for the first result. So the
gradient of a softmax has one reduction where it would have three.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import fx

from tk.codegen.tracing.core import is_tensor, outputs_of

Standing = dict[fx.Node, fx.Node]  # a result -> the argument that stands for it

aten = torch.ops.aten
_COMPARISONS = (aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge)
_WIDE = 4  # bytes of dtypes that a result is not rounded to


def name(i: int) -> str:
    """The name of the argument that is the i-th result."""
    return f"result_{i}"


def split_results(graph: fx.GraphModule, n_gradients: int) -> list[fx.Node]:
    """Leaves a graph that returns gradients and then the function's results the gradients alone. Returns the others."""
    (output,) = (n for n in graph.graph.nodes if n.op == "output")
    nodes, _ = outputs_of(graph)
    output.args = (nodes[:n_gradients],)
    return nodes[n_gradients:]


def read_results(graph: fx.GraphModule, results: Sequence[fx.Node], behind: int) -> list[torch.Tensor]:
    """Gives the graph of the gradients an argument for every result, behind the first few, and has it read those that
    spare it something. Returns what the arguments are like."""
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    with graph.graph.inserting_before(placeholders[behind]):
        made = [graph.graph.placeholder(name(i)) for i in range(len(results))]
    for new, result in zip(made, results, strict=True):
        new.meta["val"] = result.meta["val"]
    known: Standing = {}
    for new, result in zip(made, results, strict=True):
        tried = {**known, result: new}
        if result.op != "placeholder" and result not in known and _spares(graph, known, tried, result):
            known = tried
    for result, new in known.items():
        for node in _aliases(result):
            node.replace_all_uses_with(new)
    graph.recompile()
    return [n.meta["val"] for n in made]


def _spares(graph: fx.GraphModule, known: Standing, tried: Standing, result: fx.Node) -> bool:
    """Whether less is worked out with this result, and no more tensors are read. One that was rounded takes the place
    of all that it was made of: beside that, as in ``exp(x - logsumexp(x))``, its rounding would not cancel. Nor is one
    read that is compared, as a maximum with what it is of: worked out again that may differ in its last bit."""
    before, after = (set(_needed(graph, stands)) for stands in (known, tried))
    if tried[result] not in after or _n_read(after) > _n_read(before):
        return False
    compared = [n for n in after if getattr(n.target, "overloadpacket", None) in _COMPARISONS]
    if tried[result] in _ancestors(compared, _standing(tried)):
        return False
    sources = {n for n in _ancestors([result], {}) if n.op == "placeholder" and is_tensor(n)}
    return result.meta["val"].dtype.itemsize >= _WIDE or not sources & after


def _n_read(nodes: Collection[fx.Node]) -> int:
    """Tensors of the most dimensions: the others are small beside them."""
    dims = [n.meta["val"].dim() for n in nodes if n.op == "placeholder" and is_tensor(n)]
    return dims.count(max(dims, default=0))


def _needed(graph: fx.GraphModule, stands: Standing) -> Iterator[fx.Node]:
    """The nodes that the gradients need, where arguments stand for results."""
    return _ancestors(outputs_of(graph)[0], _standing(stands))


def _ancestors(roots: Sequence[fx.Node], stands: Standing) -> Iterator[fx.Node]:
    pending, seen = list(roots), set[fx.Node]()
    while pending:
        node = pending.pop()
        node = stands.get(node, node)
        if node not in seen:
            seen.add(node)
            yield node
            if node.op != "placeholder":
                pending += node.all_input_nodes


def _standing(known: Standing) -> Standing:
    """What stands for what, for the results' aliases as well."""
    return {alias: new for result, new in known.items() for alias in _aliases(result)}


def _aliases(result: fx.Node) -> list[fx.Node]:
    """Itself, and what autograd keeps of it."""
    found = [result]
    for node in found:
        found += [user for user in node.users if user.target is aten.detach.default]
    return found
