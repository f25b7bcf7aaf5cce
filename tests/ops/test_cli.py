"""The ``tk`` command, in this process."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import _tk_command
import tk
from tk import cli
from tk.cli import COMMANDS, _calls, _verified, _verified_attention, bench, bench_ops, demo, demo_ops, main, verify
from tk.cli._judge import error_ratio
from tk.generated.inputs import Example

from . import tiny_pack


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)


def test_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "tk", "--version"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.strip() == f"tk {tk.__version__}"


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["-h"], [], ["nonsense"], ["--nonsense", "info"]])
def test_what_needs_no_torch_imports_none(arguments: list[str], tmp_path: Path) -> None:
    """It answers where the import of torch fails, as the whole program does, and at once."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')")
    code = "import sys, _tk_command; sys.exit(_tk_command.main())"
    places = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command = [sys.executable, "-c", code, *arguments]
    took = []
    for _ in range(3):
        begin = time.perf_counter()
        short = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": places})
        took.append(time.perf_counter() - begin)
    full = subprocess.run([sys.executable, "-m", "tk", *arguments], capture_output=True, text=True)
    assert (short.returncode, short.stdout, short.stderr) == (full.returncode, full.stdout, full.stderr)
    assert min(took) < 0.3


@pytest.mark.parametrize("arguments", (["nonsense"], ["info", "--nonsense"]))
def test_wrong_command_lines(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(arguments)
    assert done.value.code == 2
    assert "usage: tk" in capsys.readouterr().err


def test_a_mistyped_command_is_told_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    for given, meant in (("inof", "; did you mean info?"), ("bulid", "; did you mean build?"), ("zzz", "'demo')")):
        with pytest.raises(SystemExit):
            main([given])
        assert capsys.readouterr().err.rstrip().endswith(meant)


def test_a_number_is_told_to_go_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    said = "'-1' is no shape: write 512x4096; a number goes by its name, as dim=-1\n"
    assert main_error(["explain", "softmax", "4x8", "-1", "--arch", "90"], capsys).endswith(said)


# (the command line, what it says). Each exits with status 2.
WRONG_ARGUMENTS = [
    ("explain softmax 4x8 dmi=-1",
     "tk explain: softmax has no argument 'dmi' (dmi=-1); did you mean dim?\nit takes input, dim, dtype, config\n"
     "write: tk explain softmax 4x8 dim=-1"),
    ("explain bias_gelu 4x8 tanh=0 bais=8",
     "tk explain: bias_gelu has no argument 'bais' (bais=8); did you mean bias?\nit takes x, bias, tanh, config\n"
     "write: tk explain bias_gelu 4x8 tanh=0 bias=8"),
    ("explain softmax 4x8 dim=-1 --activation gelu --arch 90",
     "tk explain: softmax has no argument 'activation' (--activation gelu)\nit takes input, dim, dtype, config\n"
     "write: tk explain softmax 4x8 dim=-1 --arch 90"),
    ("explain softmax 4x8 dim=-1 dim=0",
     "tk explain: softmax: dim is given twice\nwrite: tk explain softmax 4x8 dim=-1"),
    ("explain linear 4x8 8x8 --activation gelu activation=silu",
     "tk explain: linear: activation is given twice\nwrite: tk explain linear 4x8 8x8 --activation gelu"),
    ("explain softmax",
     "tk explain: softmax: input is missing\nit takes input, dim, dtype, config\nwrite: tk explain softmax SHAPE"),
    ("explain mm 64x64 --arch 90",
     "tk explain: mm: b is missing\nit takes a, b, bias, activation, out_dtype, precision, config, out\n"
     "write: tk explain mm 64x64 SHAPE --arch 90"),
    ("explain bias_gelu 4x8",
     "tk explain: bias_gelu: bias and tanh are missing\nit takes x, bias, tanh, config\n"
     "write: tk explain bias_gelu 4x8 bias=SHAPE tanh=VALUE"),
    ("explain softmax 4x8 4x8 4x8 dim=-1",
     "tk explain: softmax: 4x8 is one shape too many\nit takes input, dim, dtype, config\n"
     "write: tk explain softmax 4x8 dim=-1"),
    ("explain mm 4x8 8x8 8 8",
     "tk explain: mm: 8 is one shape too many\nit takes a, b, bias, activation, out_dtype, precision, config, out\n"
     "write: tk explain mm 4x8 8x8 8"),
    ("explain topk 4x8 2",
     "tk explain: topk: 2 stands where k is taken, which is no tensor and goes by its name\n"
     "write: tk explain topk 4x8 k=2"),
    ("explain gather 4x8 int:4x8 dim=0",
     "tk explain: gather: int:4x8 stands where dim is taken, which is given by its name\n"
     "write: tk explain gather 4x8 index=int:4x8 dim=0"),
    ("explain rand shape=4x8",
     "tk explain: rand: shape=4x8: shape is no tensor\nwrite: tk explain rand 'shape=(4,8)'"),
    ("explain softmax [4,8] dim=-1", "tk explain: '[4,8]' is no shape: write 4x8"),
    ("explain softmax 4*8 dim=-1", "tk explain: '4*8' is no shape: write 4x8"),
    ("explain softmax 4xa dim=-1",
     "tk explain: '4xa' is no argument: write the shape of a tensor, as 512x4096 (512x4096t: stored transposed; "
     "int:512: of indices), or NAME=VALUE, as dim=-1"),
    ("explain softmax 4x8 -dim=-1",
     "tk explain: '-dim=-1' is no argument: an argument that is no tensor is written NAME=VALUE, as dim=-1"),
    ("explain softmax 99999999999x99999999999 dim=-1 --arch 90",
     "tk explain: 99999999999x99999999999: torch has no tensor of this size: Storage size calculation overflowed with "
     "sizes=[99999999999, 99999999999]"),
    ("explain 4x8 softmax",
     "tk explain: '4x8' is no op; the op comes first, as in tk explain linear 512x4096 14336x4096 --activation silu"),
    ("explain softmax 4x8 dim=-1 --device gpu",
     "tk explain: --device gpu: it is cpu, cuda, or a GPU by its number, as cuda:1"),
    ("bench softmax 4x8 dmi=-1 --device cpu",
     "tk bench: softmax has no argument 'dmi' (dmi=-1); did you mean dim?\nit takes input, dim, dtype, config\n"
     "write: tk bench softmax 4x8 dim=-1 --device cpu"),
    ("bench linear 4x8 --device cpu",
     "tk bench: linear: weight is missing\nit takes x, weight, bias, activation, out_dtype, precision, config, out\n"
     "write: tk bench linear 4x8 SHAPE --device cpu"),
    ("bench linear mm 4x8 --device cpu",
     "tk bench: 4x8 would be arguments of linear and mm; name one function: tk bench linear 4x8"),
    ("bench linear linaer --device cpu", "tk bench: there is no function 'linaer'; did you mean linear?"),
    ("bench linear 4x8 8x8 --device gpu",
     "tk bench: --device gpu: it is cpu, cuda, or a GPU by its number, as cuda:1"),
    ("bench 4x8 softmax",
     "tk bench: '4x8' is no function or op; that comes first, as in tk bench linear 512x4096 14336x4096"),
    ("bench softmax 4xa --device cpu", "tk bench: '4xa' is no shape: write 32768x4096"),
    ("bench bias_gelu 4x8 tanh=1 --device cpu",
     "tk bench: tanh=1: only shapes are given to an op; write tk bench bias_gelu 32768x4096"),
    ("bench softmax 4x8 --plot nowhere/a.svg",
     "tk bench: --plot nowhere/a.svg: there is no folder nowhere; make it first: mkdir -p nowhere"),
    ("demo --device mps", "tk demo: --device mps: it is cpu, cuda, or a GPU by its number, as cuda:1"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "said"), WRONG_ARGUMENTS, ids=[line for line, _ in WRONG_ARGUMENTS])
def test_wrong_arguments(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_error(line.split(), capsys) == f"{said}\n"


@pytest.mark.parametrize(("line", "said"), [(w, s) for w, s in WRONG_ARGUMENTS if "write: " in s and "SHAPE" not in s])
def test_the_line_that_is_told_is_one_that_works(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*shlex.split(said.rpartition("write: tk ")[2])]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("explain softmax 4x8 --dim -1", "--dim: an argument of softmax goes by its name, without dashes: dim=VALUE"),
        ("explain linear 4x8 8x8 --actvation silu", "arguments: --actvation silu; did you mean --activation?"),
        ("bench softmax 4x8 --confgs", "unrecognized arguments: --confgs; did you mean --configs?"),
        ("list softmax", "unrecognized arguments: softmax; the options are --help, --op, --arch, --json"),
        ("info --jsn", "unrecognized arguments: --jsn; did you mean --json?"),
        ("build a.py --dyr-run", "unrecognized arguments: --dyr-run; did you mean --dry-run?"),
        ("demo --rwos 3", "unrecognized arguments: --rwos 3; did you mean --rows?"),
        ("demo --rows 0", "argument --rows: '0' is no positive number"),
    ],
)
def test_wrong_options(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(line.split())
    assert done.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith(f"usage: tk {line.split()[0]} ") and text.endswith(f"{said}\n")


def test_options_may_stand_between_the_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "linear", "4x8", "--dtype", "fp16", "8x8", "--device", "cpu", "activation=silu"]) == 0
    assert main(["bench", "linear", "4x8", "--device", "cpu", "8x8", "activation=silu"]) == 0
    assert "4x8 8x8" in capsys.readouterr().out


def test_the_name_of_a_config_may_look_like_a_shape(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "mm", "64x64", "64x64", "config=64x64", "--arch", "90"]) == 1
    assert "there is no config '64x64'" in capsys.readouterr().err


def test_a_warning_has_no_place_in_a_library(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "softmax", "4x8", "--device", "cpu"]) == 0
    said = capsys.readouterr().err
    assert said.startswith("UserWarning: tk.softmax: name dim") and ".py" not in said


def test_a_warning_has_its_place_in_a_file_of_the_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "warns.py"
    file.write_text("import warnings\nwarnings.warn('odd')\n")
    main(["build", str(file), "--dry-run"])
    assert f"{file}:2: UserWarning: odd" in capsys.readouterr().err


def test_an_op_that_fails_on_the_cpu_costs_no_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = bench_ops._cpu_row

    def failing(example: Example) -> tuple[object, ...]:
        if example.op.name == "gelu":
            raise ValueError("no such shape")
        return row(example)

    monkeypatch.setattr(bench_ops, "_cpu_row", failing)
    assert main(["bench", "silu", "gelu", "softmax", "4x8", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "FAILED gelu" in out and "ValueError: no such shape" in out
    assert {"silu", "softmax"} <= {line.split()[0] for line in out.splitlines() if line}


def test_no_command_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(name in main_error([], capsys) for name in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["explain", "softmx", "4x8"], "tk explain: there is no op 'softmx'; did you mean softmax"),
        (["explain", "softmax", "4x8", "--arch", "91"], "tk explain: no GPU is described of arch '91'"),
        (["bench", "sofmax", "4x8"], "tk bench: there is no function, op or family of benchmarks 'sofmax'; did you"),
        (["bench", "atention"], "did you mean attention"),
        (["bench", "--hlep"], "tk bench: --hlep: a function, an op or a family comes first\ntk bench FUNCTION"),
        (["bench"], ""),
        (["explain", "first_gelu", "4x8"], "TK_PACK_PATH=my.tkpack tk"),
        (["bench", "first_gelu", "4x8"], "TK_PACK_PATH=my.tkpack tk"),
        (["list", "--op", "first_gelu"], "TK_PACK_PATH=my.tkpack tk"),
        (["bench", "gelu", "4x8", "--device", "cpu", "--configs"], "tk bench: --configs, --write and --plot are of"),
    ],
)  # fmt: skip
def test_arguments_that_choose_nothing(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    if not torch.cuda.is_available():
        assert main(["explain", "mm", "4x8", "8x8", "--device", "cuda"]) == 1
        assert "torch sees no CUDA device; --arch 90 asks as on an H100" in capsys.readouterr().err
        assert main(["demo", "--device", "cuda"]) == 1
        assert "tk demo --device cuda: torch sees no CUDA device; leave it out, or write cpu" in capsys.readouterr().err


def test_info_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) < 300
    assert main(["info", "--all"]) == 0
    assert "bias_gelu_backward" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", (["info"], ["list"], ["explain", "softmax", "4x8", "dim=-1", "--arch", "90"]))
def test_json(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    if arguments[0] == "explain":
        assert (found["op"], found["runs"], found["choice"]["kernel_name"]) == ("softmax", True, "softmax")
        assert found["candidates"][0]["cost"] == found["choice"]["cost"] > 0
    elif arguments[0] == "list":
        assert {"arch", "op", "kernel", "config", "variants", "size"} <= found[0].keys()
    else:
        assert found["tk"].startswith(tk.__version__) and found["packs"][0]["ops"]


def test_the_benchmarks_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    source = (Path(__file__).parents[2] / "benchmarks" / "runner.py").read_text()
    named = [
        x.value for x in ast.parse(source).body if isinstance(x, ast.Assign) and "FAMILIES" in ast.unparse(x.targets)
    ]
    assert [ast.literal_eval(value) for value in named] == [bench.FAMILIES]
    assert main(["bench", "--help"]) == 0
    assert "tk bench FUNCTION" in capsys.readouterr().out


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert tk.__version__ in text and torch.__version__ in text


def test_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tk.load_pack(tiny_pack.write(tmp_path / "listed.tkpack", "listed"))
    assert main(["list", "--op", "listed", "--arch", "90"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert len(main_error(["list", "--op", "listed", "--arch", "80"], capsys).splitlines()) == 1


def main_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command line that chooses nothing says."""
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert not said.out
    return said.err


def test_a_list_of_nothing_says_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tk.load_pack(tiny_pack.write(tmp_path / "told.tkpack", "told"))
    assert "was compiled for sm_90, not for 80" in main_error(["list", "--op", "told", "--arch", "80"], capsys)
    assert "did you mean told" in main_error(["list", "--op", "tolt"], capsys)
    assert "there is no kernel of an op '?'; there are " in main_error(["list", "--op", "?"], capsys)
    assert "there is no pack for '?'; there are sm_" in main_error(["list", "--arch", "?"], capsys)


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "linear", "4x8", "16x8", "--dtype", "fp32", "--device", "cpu"]) == 0
    assert "ATen" in capsys.readouterr().out
    assert main(["explain", "mm", "4x8", "8x16t", "--device", "cpu"]) == 0
    assert main(["explain", "mm", "4x8", "16x8", "--device", "cpu"]) == 1
    assert "inner sizes differ" in capsys.readouterr().err


def test_explain_computes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """ATen would compute for minutes, and take 240 GB."""
    assert main(["explain", "mm", "200000x200000", "200000x200000", "--device", "cpu"]) == 0
    assert "tk.mm: " in capsys.readouterr().out
    if not torch.cuda.is_available():
        assert main(["explain", "softmax", "4x8", "dim=-1"]) == 0
        assert capsys.readouterr().out.endswith("asks as on an H100, --arch 80 as on an A100.\n")


def test_explain_takes_the_functions_own_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "topk", "4x8", "k=2", "dim=-1", "--device", "cpu"]) == 0
    assert (
        main(["explain", "cross_entropy", "4x8", "int:4", "reduction=sum", "--dtype", "fp32", "--device", "cpu"]) == 0
    )
    assert main(["explain", "layer_norm", "4x8", "normalized_shape=(8,)", "--device", "cpu"]) == 0
    assert "tk.layer_norm: no kernel is launched" in capsys.readouterr().out
    assert main(["explain", "softmax", "4x8", "dim=7", "--device", "cpu"]) == 1
    assert "dim is 7" in capsys.readouterr().err


@pytest.mark.parametrize("spelled", ["float16", "torch.float16"])
def test_a_dtype_has_torch_s_names_too(spelled: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for dtype in ("fp16", spelled, "fp32"):
        shapes = ["mm", "64x64", "64x64", f"out_dtype={dtype}"]
        assert main(["explain", *shapes, "--dtype", dtype, "--arch", "90"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2]


@pytest.mark.parametrize("command", ["explain mm 64x64", "bench mm 64x64", "bench gelu 64x64", "tune 64x64x64"])
def test_a_wrong_dtype_says_what_there_is(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command.split(), "--dtype", "half"])
    said = capsys.readouterr().err
    assert caught.value.code == 2 and "'half' is no dtype; there are bf16, fp16, " in said
    assert said.strip().endswith("Here half is 'fp16'")


def test_verify_finds_a_flipped_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_pack.write(tmp_path / "whole.tkpack", "verified")
    assert main(["verify", str(path), "--no-gpu"]) == 0
    assert "1 images and the index have their hashes" in capsys.readouterr().out
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    assert main(["verify", str(path), "--no-gpu"]) == 1
    assert main(["verify", str(tmp_path / "absent.tkpack"), "--no-gpu"]) == 1
    assert "absent.tkpack" in capsys.readouterr().out
    assert main(["verify", str(tmp_path), "--no-gpu"]) == 1
    assert f"pack {tmp_path} is a folder; name a pack" in capsys.readouterr().out


def test_verify_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is said on the way goes to stderr."""
    good, absent = tiny_pack.write(tmp_path / "whole.tkpack", "verified"), tmp_path / "absent.tkpack"
    assert main(["verify", str(good), str(absent), "--no-gpu", "--json"]) == 1
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["is_good"] is False and found["configs"] == []
    assert found["packs"][0] == {"path": str(good), "images": 1, "problem": ""}
    assert "absent.tkpack" in found["packs"][1]["problem"] and "No kernel was run." in said.err


def test_a_report_of_verify_as_json() -> None:
    report = verify.Report()
    report.add(_verified.Checked("mm_tma", "64x64", error=0.5))
    report.add(_verified.Checked("mm_tma", "wide", problem=f"{_verified.NOT_RUN}N % 8 == 0"))
    found = report.plain()
    assert found["is_good"] and found["configs"] == [
        {"kernel": "mm_tma", "config": "64x64", "runs": 1, "mean": 0.0, "max": 0.5, "is_good": True}
    ]
    assert found["left_out"] == [{"kernel": "mm_tma", "config": "wide", "reasons": ["N % 8 == 0"]}]


def test_packs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["packs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["arch", "ops", "variants", "MB", "compiler", "path"]
    assert all(any(pack.path in line for line in lines) for pack in tk.packs())
    assert main(["packs", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [p["path"] for p in found] == [p.path for p in tk.packs()] and "mm" in found[0]["ops"]


def test_demo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = {name: (k // 64, n // 64) for name, (k, n) in demo.PROJECTIONS.items()}
    monkeypatch.setattr(demo, "PROJECTIONS", small)
    assert main(["demo", "--rows", "2", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    for row in (
        "q",
        "k",
        "v",
        "o",
        "gate",
        "up",
        "down",
        "rms_norm",
        "add_rms_norm",
        "softmax",
        "swiglu",
        "gelu",
        "sum",
    ):
        assert any(line.split()[0] == row and line.endswith("ok") for line in text.splitlines() if line), row


def test_a_wrong_generated_op_shows_in_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes, ours, torchs = demo_ops.OPS["softmax"]
    monkeypatch.setattr(demo, "PROJECTIONS", {})
    monkeypatch.setattr(demo_ops, "OPS", {"softmax": (shapes, lambda x: ours(x) * 1.1, torchs)})
    assert main(["demo", "--rows", "2", "--device", "cpu"]) == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["linear", "conv2d", "sdpa", "int4_mm", "grouped_mm", "rand", "scaled_mm", "b2b_gemm"])
def test_bench_has_every_family(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", name, "--device", "cpu", "--dtype", "fp32"]) == 0
    assert any(line.startswith(name) for line in capsys.readouterr().out.splitlines())


def test_bench_takes_the_functions_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "linear", "4x8", "16x8", "activation=gelu", "--device", "cpu"]) == 0
    assert "4x8 16x8" in capsys.readouterr().out


def test_verify_holds_every_op_against_float64() -> None:
    checked = [*_verified.functions("cpu"), *itertools.islice(_verified.generated_ops("cpu"), 20)]
    checked += itertools.islice(_verified_attention.mods("cpu"), 1, 40)  # two pairs, forward and backward
    checked += _verified.convolutions("cpu", _verified.GEOMETRIES[4:6])
    assert len(checked) > 300 and not [c for c in checked if c.was_run and not c.is_good]
    names = {c.kernel for c in checked}
    assert {"tk.conv_input_grad", "tk.conv_weight_grad"} <= names and any(n.endswith("_backward") for n in names)


def test_verify_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = tk.linear, [call for call in _calls.calls() if call.name in ("linear", "mm")]
    monkeypatch.setattr(_calls, "calls", lambda *_: calls)
    monkeypatch.setattr(tk, "linear", lambda *args, **kwargs: right(*args, **kwargs) * 1.1)
    wrong = [c for c in _verified.functions("cpu") if not c.is_good]
    assert len(wrong) == 2 * len(_verified.DTYPES)  # ragged and whole tiles


def test_tf32_is_judged_by_operands_that_were_cut() -> None:
    """Not by torch, which does not round to tf32 for one row."""
    a, b = torch.randn(1, 1024), torch.randn(1024, 64) / 32
    call = verify.Call(a, b, None, "none", None, "tf32")
    exact = verify._reference(call, torch.float64)
    rounded = a.double().to(torch.float32).view(torch.int32).add(0x1000).bitwise_and(~0x1FFF).view(torch.float32)
    ours = (rounded.double() @ verify._cut(b).double()).float()
    assert error_ratio(ours, verify._peer(call).float(), exact).is_good()
    assert not error_ratio(ours, verify._reference(call, torch.float32), exact).is_good()


def test_bench_outside_a_source_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tk, "__file__", str(tmp_path / "a" / "b" / "c.py"))
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "--quick"]) == 2
    assert "checkout" in capsys.readouterr().err


@pytest.mark.parametrize("activation", ["none", "gelu", "relu"])
def test_sums_one_by_one_are_good_before_any_activation(activation: str) -> None:
    """Against torch's, which are split; and not with a term too few."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(16, 8192, generator=generator), torch.randn(8192, 512, generator=generator) / 8192**0.5
    one_by_one = torch.zeros(16, 512)
    for i in range(a.shape[1]):
        one_by_one = torch.addcmul(one_by_one, a[:, i : i + 1], b[i : i + 1])
    call = verify.Call(a, b, None, activation, None, "ieee")
    sums = verify._reference(replace(call, activation="none"), torch.float64)
    exact, torchs = verify._reference(call, torch.float64), verify._reference(call, torch.float32)
    for x, is_good in ((one_by_one, True), (one_by_one - a[:, -1:] * b[-1:], False)):
        ours = x if activation == "none" else getattr(F, activation)(x)
        assert error_ratio(ours, torchs, exact, terms=8192, sums=sums).is_good() == is_good


def test_error_ratio() -> None:
    exact = torch.linspace(1, 2, 1000, dtype=torch.float64)
    good, bad = exact.bfloat16(), exact.bfloat16() * 1.01
    assert error_ratio(good, good, exact).mean == pytest.approx(1, rel=1e-2)
    assert error_ratio(good, good, exact).is_good() and not error_ratio(bad, good, exact).is_good()
    assert not error_ratio(good * torch.nan, good, exact).is_good()


def test_a_terminal_without_our_letters_gets_the_rest() -> None:
    command = [sys.executable, "-m", "tk", "bench"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "tk bench FUNCTION [SHAPE|NAME=VALUE \\u2026]" in done.stdout


def test_a_library_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    code = "import sys, _tk_command; sys.exit(_tk_command.main(['info']))"  # the console script
    environment = os.environ | {"TK_LIBRARY_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"tk: tk's native library is not at {tmp_path}/libtk_ops.so. ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("when", ["torch", "the command"])
def test_an_interruption_is_a_sentence(when: str, tmp_path: Path) -> None:
    """Also while torch is imported, which takes the first second of every command."""
    code = "import sys, _tk_command; sys.exit(_tk_command.main(['info']))"
    if when == "torch":
        (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    else:
        code = "import tk.cli.info\ndef stop(all): raise KeyboardInterrupt\ntk.cli.info._rows = stop\n" + code
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "\ntk: interrupted\n")


@pytest.mark.parametrize(
    ("arch", "said"),
    [
        ("86", "it runs the kernels for sm_80: write 80"),
        ("sm_89", "it runs the kernels for sm_80: write 80"),
        ("90a", "write 90"),
        ("8.6", "it runs the kernels for sm_80: write 80"),
        ("75", "tk needs sm_80 or newer"),
        ("120", "where no pack is for it, it runs PTX for sm_80"),
        ("", "'';"),
        ("x", "'x';"),
    ],
)
def test_an_architecture_without_a_pack_is_told_what_it_runs(
    arch: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (80, 90):
        pack = tiny_pack.write(tmp_path / f"{number}.tkpack", f"served_{number}", number)
        tk.load_pack(pack)
    for command, there in (
        (["explain", "mm", "64x64", "64x64"], "GPUs are described of 80 (A100), 90 (H100)"),
        (["list"], "there are"),
    ):
        text = main_error([*command, "--arch", arch], capsys)
        assert said in text and there in text and "did you mean" not in text


def test_python_names_the_nearest_of_a_mistyped_name() -> None:
    code = "import tk; tk.sofmax"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "module 'tk' has no attribute 'sofmax'. Did you mean: 'softmax'?" in done.stderr


_ADVISED = re.compile(r"\btk ([a-z]+)((?: [^\s\"'`;:,)]+)*)")


def test_commands_that_messages_advise_have_the_options_that_they_name() -> None:
    root, found = Path(__file__).parents[2], 0
    for path in (*root.glob("python/tk/**/*.py"), *root.glob("csrc/**/*.cpp")):
        for command, rest in _ADVISED.findall(path.read_text()):
            options = re.findall(r"(?<= )--?[a-z][a-z-]*", rest)
            if not options or command == "bench":  # which hands them on
                continue
            found += 1
            parser = _tk_command.parser([command], cli._add_command)
            known = parser._subparsers._group_actions[0].choices[command]._option_string_actions  # type: ignore
            assert known.keys() >= {*options}, f"{path}: tk {command}{rest}"
    assert found > 10, "there are some"
