"""The package's own generated ops: plain torch functions, compiled by tk.codegen."""
