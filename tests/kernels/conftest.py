"""The Triton kernels themselves, run by Triton's interpreter on CPU tensors.

The interpreter must be switched on before Triton is first imported, so it gets a process of its own, which
test_interpreter.py starts. To work on a kernel, run it yourself: ``TRITON_INTERPRET=1 python -m pytest tests/kernels``.
"""

import os

collect_ignore_glob = ["test_interpreter.py"] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted/*"]
