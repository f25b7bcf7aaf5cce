"""Generated ops at run time: how they are declared. What compiles them is ``tk.codegen``, at build time."""

from tk.generated.declare import Declared, op

__all__ = ["Declared", "op"]
