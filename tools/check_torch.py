"""Whether this Python's torch is one that tk runs with."""

import sys

try:
    import torch
except ImportError:
    sys.exit(f"TORCH=system, but {sys.executable} sees no torch. Choose a PYTHON that has one, or leave TORCH alone.")

major, minor = (int(part) for part in torch.__version__.split(".")[:2])
if (major, minor) < (2, 11):
    sys.exit(f"tk needs torch 2.11 or newer; this is {torch.__version__}.")
print(f"torch {torch.__version__} of {torch.__path__[0]}")
