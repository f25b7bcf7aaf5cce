"""What must be seen in a process of its own: first use, capture before preload, forks."""

import subprocess
import sys
import textwrap

import pytest

from .device import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA GPU")

SETUP = """
import os, sys, threading
import torch, tk

def check(a, b, out):
    expected = a.float() @ b.float()
    difference = ((out.float() - expected).norm() / expected.norm()).item()
    assert difference < 1e-2, difference

def operands(m=64, k=512, n=256):
    return (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((m, k), (k, n)))
"""


def run(code: str) -> str:
    """What the code prints. An exit status other than 0 fails the test, a signal too."""
    program = SETUP + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr[-3000:]}"
    return done.stdout


def test_import_leaves_cuda_and_triton_alone() -> None:
    run("""
        assert not torch.cuda.is_initialized()
        assert not any(name.split(".")[0] == "triton" for name in sys.modules)
    """)


def test_capture_before_preload_names_preload() -> None:
    run("""
        a, b = operands()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph):
                tk.mm(a, b)
        except tk.UnsupportedError as e:
            assert "preload" in str(e), e
        else:
            sys.exit("capturing with nothing loaded did not fail")
        check(a, b, tk.mm(a, b))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = tk.mm(a, b)
        graph.replay()
        torch.cuda.synchronize()
        check(a, b, out)
    """)


def test_capture_after_preload() -> None:
    run("""
        a, b = operands(m=4, k=8192)
        modules = tk.preload("mm")
        assert modules > 0
        assert tk.preload("mm") == modules
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = tk.mm(a, b)
        graph.replay()
        torch.cuda.synchronize()
        check(a, b, out)
    """)


def test_first_use_from_sixteen_threads() -> None:
    run("""
        a, b = operands()
        torch.cuda.synchronize()
        start, results = threading.Barrier(16), [None] * 16
        def first(i):
            start.wait()
            results[i] = tk.mm(a, b)
        threads = [threading.Thread(target=first, args=(i,)) for i in range(16)]
        for t in threads: t.start()
        for t in threads: t.join()
        torch.cuda.synchronize()
        check(a, b, results[0])
        assert all(torch.equal(r, results[0]) for r in results)
    """)


def test_a_thread_without_a_context() -> None:
    """As autograd's: a thread that never called the driver."""
    run("""
        a, b = operands()
        found = []
        t = threading.Thread(target=lambda: found.append(tk.mm(a, b)))
        t.start(); t.join()
        torch.cuda.synchronize()
        check(a, b, found[0])
    """)


def test_fork_before_first_use() -> None:
    run("""
        child = os.fork()
        a, b = operands()
        check(a, b, tk.mm(a, b))
        torch.cuda.synchronize()
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    """)


def test_fork_after_first_use_is_an_error() -> None:
    """CUDA does not survive a fork: the child gets an error, not a crash, and the parent goes on."""
    run("""
        from tk import capi
        from tk.heuristics.problem import describe
        a, b = operands()
        check(a, b, tk.mm(a, b))
        call = capi.prepare(describe(torch.ops.tk.mm, a, b).problem)
        child = os.fork()
        if child == 0:
            try:
                capi.launch(call, 0)
            except tk.UnsupportedError as e:
                os._exit(0 if "fork" in str(e) else 2)
            os._exit(3)
        assert os.waitpid(child, 0)[1] == 0
        check(a, b, tk.mm(a, b))
    """)
