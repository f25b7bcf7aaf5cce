"""The structs that Python reads by ctypes, against tk.h."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from tk import _packs, capi
from tk.generated import records

TK_H = (Path(__file__).resolve().parents[2] / "csrc/core/include/tk/tk.h").read_text()
STRUCTS = {
    "tk_tensor": capi._Tensor,
    "tk_call": capi._Call,
    "tk_choice": capi._Choice,
    "tk_candidate": capi._Candidate,
    "tk_pack_info": _packs.PackInfo,
    "tk_op_info": _packs.OpInfo,
    "tk_config_info": _packs.ConfigInfo,
    "tk_variant_info": _packs.VariantInfo,
    "tk_launch_info": _packs.LaunchInfo,
    "tk_code": records._Code,
    "tk_param": records._Param,
    "tk_check": records._Check,
    "tk_result": records._Result,
    "tk_generated_op": records._GeneratedOp,
}
TYPES = {"uint32_t": ctypes.c_uint32, "int32_t": ctypes.c_int32, "uint64_t": ctypes.c_uint64, "int64_t": ctypes.c_int64,
         "tk_op": ctypes.c_uint32, "const char*": ctypes.c_char_p, "void*": ctypes.c_void_p,
         "const tk_pack*": ctypes.c_void_p, "const tk_tensor*": ctypes.POINTER(capi._Tensor),
         "const int64_t*": ctypes.POINTER(ctypes.c_int64),
         "const double*": ctypes.POINTER(ctypes.c_double), "size_t": ctypes.c_size_t, "tk_param_kind": ctypes.c_int,
         "tk_code": records._Code, "const tk_code*": ctypes.POINTER(records._Code),
         "const tk_param*": ctypes.POINTER(records._Param), "const tk_check*": ctypes.POINTER(records._Check),
         "const tk_result*": ctypes.POINTER(records._Result)}  # fmt: skip


def declared(struct: str) -> list[tuple[str, object]]:
    text = re.sub(r"/\*.*?\*/", "", TK_H, flags=re.DOTALL)
    body = re.search(rf"typedef struct {struct} {{(.*?)}} {struct};", text, re.DOTALL)
    assert body, struct
    fields = []
    for kind, name, length in re.findall(r"([\w ]+?\*?)\s+(\w+)(?:\[(\w+)\])?;", body[1]):
        found = TYPES[kind.strip()]
        fields.append((name, found * capi.MAX_DIMS if length == "TK_MAX_DIMS" else found))
    return fields


@pytest.mark.parametrize("struct", STRUCTS)
def test_fields(struct: str) -> None:
    assert declared(struct) == list(STRUCTS[struct]._fields_)
