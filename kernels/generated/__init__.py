"""The package's own generated ops: plain torch functions, compiled by tk.codegen."""

FLOATS = ("bf16", "fp16", "fp32")
WIDE = (*FLOATS, "fp64")
