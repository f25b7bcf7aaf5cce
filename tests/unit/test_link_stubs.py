"""Libraries for older systems: linked against stubs they ask for nothing newer. A wheel's tag says what they ask."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stubs")
    subprocess.run([sys.executable, ROOT / "tools/link_stubs.py", folder, "--glibc", "2.28"], check=True)
    return folder


def linked(source: str, path: Path, *options: str | Path) -> subprocess.CompletedProcess[str]:
    """A shared library of C++ code."""
    command = [
        "c++",
        "-std=c++20",
        "-shared",
        "-fPIC",
        "-O1",
        "-x",
        "c++",
        "-",
        "-x",
        "none",
        "-o",
        path,
        "-Wl,--no-undefined",
    ]
    return subprocess.run([*command, *options], input=source, capture_output=True, text=True)


def tag(*paths: Path) -> list[str]:
    command = [sys.executable, ROOT / "tools/platform_tag.py", *paths]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


OLD = """
#include <dlfcn.h>
#include <pthread.h>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <sstream>
#include <stdexcept>
#include <string>
pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;
extern "C" void* f(const char* path) { pthread_rwlock_rdlock(&lock); return dlopen(path, RTLD_NOW); }
extern "C" double g(double x) { return std::pow(x, 1.5) + std::exp(x); }
extern "C" int h(const char* x) {
  std::ostringstream out;
  out << x;
  try { return std::stoi(std::move(out).str()); }
  catch (const std::exception& e) { return -int(std::strlen(e.what())); }
}
extern "C" bool i(const char* x) { return std::filesystem::exists(std::filesystem::path(x)); }
"""


def test_what_is_newer_here_is_linked_in_its_older_version(stubs: Path, tmp_path: Path) -> None:
    path, here = tmp_path / "old.so", tmp_path / "here.so"
    compat = ["-x", "c", ROOT / "csrc/compat/glibc.c", "-x", "none"]
    done = linked(OLD, path, *compat, f"-L{stubs}", "-Wl,--exclude-libs,ALL")
    assert done.returncode == 0, done.stderr
    found = tag(path)
    assert found[0] == "manylinux_2_28_x86_64"
    assert {"libdl.so.2", "libpthread.so.0"} <= set(found)
    assert linked(OLD, here).returncode == 0
    assert tag(here)[0] != "manylinux_2_28_x86_64"  # which the stubs are for
    # And it works on this system, which is newer. Exceptions cross, and files are looked for.
    code = """
import ctypes, sys
x = ctypes.CDLL(sys.argv[1])
x.g.restype, x.g.argtypes, x.i.restype = ctypes.c_double, [ctypes.c_double], ctypes.c_bool
print(round(x.g(4.0), 3), x.h(b'12'), x.h(b'no') < 0, x.i(b'/'), x.i(b'/none'))
"""
    shown = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert shown.stdout.split() == ["62.598", "12", "True", "True", "False"], shown.stderr


@pytest.mark.parametrize(
    ("declaration", "call"),
    [
        ("#include <cstdlib>", "arc4random()"),  # glibc 2.36
        ("#include <dlfcn.h>", "_dl_find_object(nullptr, nullptr)"),  # 2.35
        ("#include <pthread.h>", "pthread_cond_clockwait(nullptr, nullptr, 0, nullptr)"),  # 2.30
        ("#include <sys/stat.h>", "mknod(nullptr, 0, 0)"),  # 2.33
    ],
)
def test_what_the_old_system_lacks_does_not_link(declaration: str, call: str, stubs: Path, tmp_path: Path) -> None:
    source = f'{declaration}\nextern "C" long f() {{ return (long){call}; }}'
    assert linked(source, tmp_path / "here.so").returncode == 0
    assert tag(tmp_path / "here.so")[0] != "manylinux_2_28_x86_64"
    done = linked(source, tmp_path / "old.so", f"-L{stubs}")
    assert done.returncode != 0 and "undefined reference" in done.stderr


def test_a_library_that_systems_lack_leaves_no_tag(stubs: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other, path = tmp_path / "other/libother.so", tmp_path / "own.so"
    assert linked('extern "C" int f() { return 1; }', other, f"-L{stubs}", "-Wl,-soname,libother.so").returncode == 0
    source = 'extern "C" int f(); extern "C" int g() { return f(); }'
    assert linked(source, path, f"-L{stubs}", other).returncode == 0
    assert tag(path)[0] == "linux_x86_64"
    assert tag(path, other)[0] == "manylinux_2_28_x86_64"  # where it comes along
