"""What the libraries ask of the machine: the oldest torch's C symbols, the C++ runtime, and no CUDA."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elf import Library
from environment import ROOT

# manylinux_2_28, which torch's own wheels need: RHEL 8, Debian 10, Ubuntu 20.04 and what is newer.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
RUNTIME = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "libstdc++.so.6", "libgcc_s.so.1"}
RUNTIME |= {"ld-linux-x86-64.so.2"}


@pytest.fixture
def core(unpacked: Path) -> Library:
    return Library(unpacked / "tk/lib/libtk_core.so")


@pytest.fixture
def ops(unpacked: Path) -> Library:
    return Library(unpacked / "tk/lib/libtk_ops.so")


def test_the_ops_use_nothing_of_torch_that_torch_2_11_lacks(ops: Library, core: Library):
    exported = set((ROOT / "tests/exports/torch-2.11.txt").read_text().split())
    # What has a version (GLIBC_, GLIBCXX_, …) is the C and C++ runtime's. No other symbol is let through, so torch's
    # C++ names, which change from version to version, cannot slip in.
    others = {name for name, version in ops.undefined.items() if not version} - core.defined
    assert others, "the ops library takes nothing from torch?"
    assert others - exported == set()


def test_no_library_needs_cuda_python_or_more_of_torch(core: Library, ops: Library):
    assert core.needed <= RUNTIME
    assert ops.needed - RUNTIME == {"libtk_core.so", "libtorch_cpu.so"}


def test_they_find_each_other_by_where_they_lie(core: Library, ops: Library):
    assert core.run_path in ([], ["$ORIGIN"])
    assert ops.run_path == ["$ORIGIN"]


def test_the_folder_it_was_built_in_leaves_no_trace(core: Library, ops: Library):
    """One commit gives the same bytes in every folder. A run path that the installation shortens leaves zeros as long
    as what it took out; else one zero ends each string."""
    for library in (core, ops):
        names = library.section(".dynstr")
        assert names.startswith(b"\0") and names.endswith(b"\0") and b"\0\0" not in names


def test_what_is_linked_in_stays_hidden(core: Library, ops: Library):
    """Another zstd or OpenSSL in the process must neither use ours nor be used by ours. _Z: C++, where std's templates
    are always visible."""
    for library in (core, ops):
        plain = {name for name in library.defined if not name.startswith(("tk_", "_Z"))}
        assert plain <= {"_end", "_edata", "__bss_start"}  # the linker's own


def test_they_run_on_the_oldest_systems_promised(core: Library, ops: Library):
    for library in (core, ops):
        needed = {name: library.newest(name) for name in NEWEST}
        print(library.path.name, needed)
        assert all(needed[name] <= newest for name, newest in NEWEST.items())
        assert needed["GLIBC"] > (2, 0) and needed["GLIBCXX"] > (3, 0)  # it was read


def test_the_wheels_tag_is_what_its_libraries_need(wheel: Path, core: Library, ops: Library):
    """As another tool reads them."""
    command = [sys.executable, ROOT / "tools/platform_tag.py", core.path, ops.path]
    platform = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0]
    assert platform == "manylinux_2_28_x86_64"
    assert wheel.name.endswith(f"-py3-none-{platform}.whl")
