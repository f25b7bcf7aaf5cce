"""b2b_gemm: out = f(a @ b) @ c, in one kernel.

    op.py      the ops of the core: `b2b_fused` for f by name, `b2b_<fingerprint>` for a user's function
    fused.py   the kernel; a @ b stays on the chip
    family.py  FAMILY: of f by name

a @ f(b @ c) is the same of transposed operands, so there is one form here; tk.b2b turns the other into it.
"""
