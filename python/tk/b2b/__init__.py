"""``tk.b2b_gemm`` of a function of one's own: :func:`register` announces it to ``tk build``."""

from tk.b2b.function import register, registered

__all__ = ["register", "registered"]
