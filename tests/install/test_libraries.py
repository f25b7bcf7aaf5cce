"""What the libraries ask of the machine: the oldest torch's C symbols, the C++ runtime, and no CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest

from elf import Library
from environment import ROOT

# glibc 2.34 took libdl and libpthread in; 2.35 and GLIBCXX 3.4.30 are what Ubuntu 22.04 and Debian 12 have.
NEWEST_GLIBC, NEWEST_GLIBCXX = (2, 35), (3, 4, 30)
RUNTIME = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"}


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


def test_what_is_linked_in_stays_hidden(core: Library, ops: Library):
    """Another zstd or OpenSSL in the process must neither use ours nor be used by ours. _Z: C++, where std's templates
    are always visible."""
    for library in (core, ops):
        plain = {name for name in library.defined if not name.startswith(("tk_", "_Z"))}
        assert plain <= {"_end", "_edata", "__bss_start"}  # the linker's own


def test_they_run_on_the_oldest_systems_promised(core: Library, ops: Library):
    for library in (core, ops):
        glibc, glibcxx = library.newest("GLIBC"), library.newest("GLIBCXX")
        print(f"{library.path.name}: glibc {'.'.join(map(str, glibc))}, GLIBCXX {'.'.join(map(str, glibcxx))}")
        assert glibc <= NEWEST_GLIBC
        assert glibcxx <= NEWEST_GLIBCXX
