"""Trace: a declared function -> its graphs (:mod:`tk.codegen.tracing.trace`)."""
