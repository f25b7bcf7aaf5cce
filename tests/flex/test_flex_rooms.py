"""What may import what in tk.flex, and that one list of fields describes a call."""

from __future__ import annotations

import subprocess
import sys

import torch

from tk.ops.flex import LISTS, OPTIONAL, Request

AT_RUN_TIME = """
import sys, torch, tk, tk.b2b
from tk.flex import create_block_mask, mods
q = torch.randn(1, 1, 4, 8)
tk.flex_attention(q, q, q, mods.soft_cap(2.0), create_block_mask(mods.causal, 1, 1, 4, 4, "cpu"))
of_build = ("triton", "sympy", "tk.aot", "tk.build", "tk.codegen", "tk.kernels", "tk.flex.codegen", "tk.b2b.family")
print([name for name in sys.modules if name in of_build or name.startswith(tuple(f"{n}." for n in of_build))])
"""


def test_nothing_at_run_time_imports_what_a_build_needs() -> None:
    done = subprocess.run([sys.executable, "-c", AT_RUN_TIME], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_request_is_the_arguments_of_both_ops() -> None:
    forward, backward = (
        [a.name for a in op.default._schema.arguments]
        for op in (torch.ops.tk.flex_attention, torch.ops.tk.flex_attention_backward)
    )
    assert forward == [*Request._fields]
    shared = [name for name in Request._fields if name not in ("max_scores", "tile")]
    assert backward == ["grad_out", "grad_lse", "out", "lse", *shared, "of_captures"]


def test_a_request_without_its_tensors_takes_them_back() -> None:
    values = {name: name for name in Request._fields} | {"tensors": ["first", "second"]}
    request = Request(**values)  # type: ignore[arg-type]
    assert request.operands == ("query", "key", "value")
    assert request.optional == OPTIONAL == (*LISTS, "kv_lengths", "page_table", "sinks")
    kept = request.without_tensors()
    assert kept.all_tensors == (None,) * (3 + len(OPTIONAL)) and kept.scale == "scale"
    assert kept.with_tensors(request.all_tensors) == request
