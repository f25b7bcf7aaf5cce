"""The generator, and what it prints under Triton's interpreter.

The interpreter must be switched on before Triton is first imported, so interpreted/ gets a process of its own, which
test_interpreter.py starts. To work on it: ``TRITON_INTERPRET=1 python -m pytest tests/codegen``.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for ops, host and golden_ops, which tests import by those names

collect_ignore_glob = ["test_*.py"] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted/*"]
