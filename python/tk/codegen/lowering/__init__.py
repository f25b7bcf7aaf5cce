"""Lower: a core graph -> the kernels of one plan (:mod:`tk.codegen.lowering.lower`)."""
