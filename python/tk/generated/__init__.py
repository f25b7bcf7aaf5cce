"""Generated ops at run time: how they are declared, and how what their packs say of them becomes fakes, CPU kernels,
gradients and batching rules. What compiles them is ``tk.codegen``, at build time."""

from tk.generated.declare import Declared, op

__all__ = ["Declared", "op"]
