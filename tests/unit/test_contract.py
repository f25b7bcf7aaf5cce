"""The tables of the build side against the C headers they mirror."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tk import expr
from tk.aot import assemble, pack

ROOT = Path(__file__).resolve().parents[2]
FORMAT_H = (ROOT / "csrc/core/pack_format.h").read_text()
EXPR_H = (ROOT / "csrc/core/expr.h").read_text()
TK_H = (ROOT / "csrc/core/include/tk/tk.h").read_text()

TYPES = {"uint32_t": "I", "uint64_t": "Q", "int64_t": "q", "Range": "R", "Expr": "R", "BufferKind": "I", "ArgKind": "I",
         "ImageKind": "I", "ParamKind": "I"}  # fmt: skip
STRUCTS = {
    "Op": "ops", "Config": "configs", "Bucket": "buckets", "Variant": "variants", "Constraint": "constraints",
    "Buffer": "buffers", "Launch": "launches", "Arg": "args", "TensorMap": "tensor_maps", "Image": "images",
    "Output": "outputs", "Pin": "pins", "Param": "params", "Frame": "frames",
}  # fmt: skip


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def enumerators(text: str, name: str) -> list[str]:
    body = re.search(rf"enum class {name}\b[^{{]*\{{(.*?)\}}", without_comments(text), re.DOTALL)[1]
    return [e for e in (e.strip() for e in body.split(",")) if e and e != "Count"]


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def struct_fields(name: str) -> list[tuple[str, int, str]]:
    body = re.search(rf"struct {name} \{{(.*?)\n\}};", without_comments(FORMAT_H), re.DOTALL)[1]
    found = []
    for type_, declared in re.findall(r"(\w+) ([^;]+);", body):
        for field, count in re.findall(r"(\w+)(?:\[(\d+)\])?", declared):
            if (type_, count) == ("uint8_t", "32"):
                found.append((field, 1, "H"))
            else:
                found.append((field, int(count or 1), TYPES[type_]))
    return found


@pytest.mark.parametrize(("struct_name", "section"), STRUCTS.items())
def test_records_have_the_fields_of_their_struct(struct_name, section):
    assert pack.RECORDS[section].fields == struct_fields(struct_name)


def test_record_sizes():
    sizes = dict(re.findall(r"sizeof\((\w+)\) == (\d+)", FORMAT_H))
    assert int(sizes.pop("Header")) + 16 * len(pack.SECTIONS) == pack.HEADER.size
    assert {s: pack.RECORDS[STRUCTS[s]].struct.size for s in sizes} == {s: int(n) for s, n in sizes.items()}
    assert set(sizes) == set(STRUCTS)


def test_sections_and_kinds():
    assert [snake(e) for e in enumerators(FORMAT_H, "Section")] == list(pack.SECTIONS)
    kinds = [f"ARG_{snake(e).upper()}" for e in enumerators(FORMAT_H, "ArgKind")]
    assert [getattr(pack, k) for k in kinds] == list(range(len(kinds)))
    assert [snake(e) for e in enumerators(FORMAT_H, "ParamKind")] == list(pack.PARAM_KINDS)
    assert f"kLeadingDims = {pack.LEADING_DIMS};" in (ROOT / "csrc/ops/canonical.h").read_text()
    for enum in ("BufferKind", "ImageKind"):
        prefix = enum.removesuffix("Kind").upper()
        for number, e in enumerate(enumerators(FORMAT_H, enum)):
            assert getattr(pack, f"{prefix}_{e.upper()}") == number


def test_constants():
    values = dict(re.findall(r"constexpr uint\w+ (k\w+) = ([^;]+);", FORMAT_H + EXPR_H))
    assert values == {
        "kVersion": str(pack.VERSION),
        "kPtx": str(pack.FLAG_PTX),
        "kFamily": str(pack.FLAG_FAMILY),
        "kPageSize": str(pack.PAGE_SIZE),
        "kGeneral": str(pack.VARIANT_GENERAL),
        "kNonDeterministic": str(pack.VARIANT_NONDETERMINISTIC),
        "kCooperative": str(pack.LAUNCH_COOPERATIVE),
        "kLeading": str(pack.PARAM_LEADING),
        "kMutated": str(pack.PARAM_MUTATED),
        "kInOrder": str(pack.PARAM_IN_ORDER),
        "kLeadingDims": str(pack.LEADING_DIMS),
        "kMaxFrameSize": f"{pack.MAX_FRAME_SIZE >> 20}u << 20",
        "kMaxStack": str(expr.MAX_STACK),
        "kMaxLocals": str(assemble.MAX_LOCALS),
    }


def test_opcodes_and_device_fields():
    assert [snake(e).replace("_", "") for e in enumerators(EXPR_H, "Opcode")] == list(expr.OPCODES)
    assert [snake(e) for e in enumerators(EXPR_H, "DeviceField")] == list(expr.DEVICE_FIELDS)


def test_mode_bits_and_limits():
    bits = {name.lower(): int(value) for name, value in re.findall(r"TK_MODE_(\w+) = (\d+)", TK_H)}
    assert bits == expr.MODE_BITS
    limits = dict(re.findall(r"#define TK_MAX_(\w+) (\d+)", TK_H))
    assert (limits["TENSORS"], limits["INTS"], limits["FLOATS"]) == (
        str(assemble.MAX_TENSORS),
        str(assemble.MAX_INTS),
        str(assemble.MAX_FLOATS),
    )
