"""``import tk`` in processes of its own: what it loads, what it needs, what it says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import tk


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def output(code: str, **environment: str) -> str:
    done = run(code, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_neither_triton_nor_torch_compile_nor_cuda() -> None:
    code = """
import sys, torch, tk
later = "triton", "torch._dynamo", "torch._inductor", "sympy", "numpy.testing", "tk.generated.register"
print([m for m in later if m in sys.modules])
print(torch.cuda.is_initialized())
"""
    assert output(code).splitlines() == ["[]", "False"]


def test_a_first_call_imports_nothing_of_it_either() -> None:
    code = """
import sys, torch, tk
tk.mm(torch.randn(2, 3), torch.randn(3, 2), activation="gelu")
print("triton" in sys.modules, "torch._dynamo" in sys.modules)
"""
    assert output(code) == "False False"


def test_import_time() -> None:
    code = """
import time, torch
begin = time.perf_counter()
import tk
print(time.perf_counter() - begin)
"""
    assert min(float(output(code)) for _ in range(3)) < 0.25  # the goal is 0.06, on a machine that does nothing else


def test_without_the_library() -> None:
    code = """
import tk
print(tk.__version__, hasattr(tk, "mm"), issubclass(tk.PackError, tk.Error))
"""
    assert output(code, TK_NO_LIBRARY="1", TK_LIBRARY_DIR="/nowhere").endswith("False True")


def test_a_missing_library_says_what_to_do() -> None:
    done = run("import tk", TK_LIBRARY_DIR="/nowhere", TK_NO_LIBRARY="")
    assert done.returncode != 0
    assert "/nowhere/libtk_ops.so" in done.stderr and "TK_LIBRARY_DIR" in done.stderr


def test_what_is_in_packs_needs_no_torch() -> None:
    """Neither does what is built without the library."""
    code = """
import sys
sys.modules["torch"] = None
from tk import _library, _packs, errors
try:
    _packs.verify("/no/such.tkpack")
except errors.PackError as error:
    print(error, len(_packs.coverage()))
"""
    assert "No such file" in output(code, TK_NO_LIBRARY="1")


def test_a_bad_pack_in_the_path_is_reported_and_not_fatal(tmp_path) -> None:  # type: ignore[no-untyped-def]
    bad = tmp_path / "bad.tkpack"
    bad.write_bytes(b"no pack")
    done = run("import tk; print('imported')", TK_PACK_PATH=f"{tmp_path}/absent.tkpack:{bad}:")
    assert done.returncode == 0 and done.stdout.strip() == "imported"
    assert "TK_PACK_PATH" in done.stderr and "absent.tkpack" in done.stderr and "bad.tkpack" in done.stderr


@pytest.mark.parametrize(("level", "shown"), (("debug", True), ("info", True), ("warning", False), ("", False)))
def test_tk_log(level: str, shown: bool) -> None:
    done = run("import logging, tk; logging.getLogger('tk').info('a line')", TK_LOG=level)
    assert ("a line" in done.stderr) == shown


def test_a_wrong_log_level_is_reported() -> None:
    assert "TK_LOG=loud is no level" in run("import tk", TK_LOG="loud").stderr


def test_a_child_process_after_import() -> None:
    code = """
import os, torch, tk
child = os.fork()
if child == 0:
    os._exit(0 if tk.mm(torch.ones(2, 3), torch.ones(3, 2)).sum().item() == 12 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert output(code) == "0"


def test_every_public_name_exists() -> None:
    assert output("import tk; print([n for n in tk.__all__ if not hasattr(tk, n)])") == "[]"


def test_an_op_of_torch_has_the_docstring_of_its_wrapper() -> None:
    for name in ("mm", "mm_plus_mm", "int4_mm", "conv2d", "b2b_gemm"):
        assert getattr(torch.ops.tk, name).__doc__ == getattr(tk, name).__doc__
