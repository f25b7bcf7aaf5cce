"""Print: a kernel and its tile -> Triton source (:mod:`tk.codegen.printing.printer.printer`)."""
