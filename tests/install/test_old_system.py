"""The libraries under an older system's C and C++ runtime: Debian 11's, of glibc 2.31, with its own loader."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

RELEASE = "bullseye"
GLIBC = "glibc 2.31"
# Its C and C++ runtime, and a Python to load libraries with.
PACKAGES = ["libc6", "libgcc-s1", "libstdc++6", "libgomp1", "libcrypt1", "zlib1g", "libexpat1", "libffi7"]
PACKAGES += ["python3.9-minimal", "libpython3.9-minimal", "libpython3.9-stdlib"]

Run = Callable[..., str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs code in the older system's Python, unpacked into a folder. Nothing is installed, and root rights are not
    needed."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        pytest.skip(f"Debian's {RELEASE} is unpacked by apt-get and dpkg-deb, which are not here")
    folder = tmp_path_factory.mktemp(RELEASE)
    for sub in ("lists/partial", "cache/archives/partial", "root"):
        (folder / sub).mkdir(parents=True)
    keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
    sources = folder / "sources.list"
    sources.write_text(f"deb [signed-by={keys}] {mirror()} {RELEASE} main\n")
    options = {
        "Dir::Etc::SourceList": sources,
        "Dir::Etc::SourceParts": "-",
        "Dir::State::Lists": folder / "lists",
        "Dir::State::Status": "/dev/null",
        "Dir::Cache": folder / "cache",
        "APT::Sandbox::User": "",
        "Acquire::Retries": "1",
        "Acquire::http::Timeout": "20",
    }
    apt = ["apt-get", "-qq", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
    for command in ([*apt, "update"], [*apt, "download", *PACKAGES]):
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
        except subprocess.TimeoutExpired:
            pytest.skip(f"Debian's {RELEASE} is not to be had within two minutes")
        if done.returncode or "E: " in done.stderr or "W: Failed" in done.stderr:
            pytest.skip(f"Debian's {RELEASE} is not to be had: {done.stderr.strip()[-300:]}")
    root = folder / "root"
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, root], check=True)
    libraries = [root / "lib/x86_64-linux-gnu", root / "usr/lib/x86_64-linux-gnu"]
    loader = libraries[0] / "ld-linux-x86-64.so.2"
    python = [loader, "--library-path", ":".join(map(str, libraries)), root / "usr/bin/python3.9"]

    def call(code: str, *arguments: Path) -> str:
        variables = {"PYTHONHOME": str(root / "usr"), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [*python, "-c", code, *arguments], env=variables, cwd=folder, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return call


def mirror() -> str:
    """From where this system takes Debian's packages."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
    found = set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    of_debian = sorted(uri for uri in found if uri.rstrip("/").endswith("/debian"))
    if not of_debian:
        pytest.skip("apt-get takes no packages from Debian here")
    return of_debian[0]


BEGIN = """
import ctypes, os, sys
print(os.confstr("CS_GNU_LIBC_VERSION"))
mapped = lambda name: {line.split()[-1] for line in open("/proc/self/maps") if name in line}
"""

CORE = """
core = ctypes.CDLL(sys.argv[1])
core.tk_last_error.restype = ctypes.c_char_p
images = ctypes.c_uint32()
for pack in sys.argv[2:]:
    status = core.tk_verify_pack(os.fsencode(pack), ctypes.byref(images))
    assert status == 0, core.tk_last_error()
    print(images.value)
assert core.tk_verify_pack(b"missing.tkpack", ctypes.byref(images)) != 0
assert b"missing.tkpack" in core.tk_last_error()
assert all("bullseye" in path for path in mapped("libc") if "libcore" not in path), mapped("libc")
"""


def test_packs_are_verified(run: Run, unpacked: Path):
    """By decompressing and hashing all of their images, so also by what is linked into the core library."""
    packs = sorted((unpacked / "tk/packs").iterdir())
    assert packs
    system, *images = run(BEGIN + CORE, unpacked / "tk/lib/libtk_core.so", *packs).split("\n")[:-1]
    assert system == GLIBC
    assert len(images) == len(packs) and any(int(count) > 100 for count in images)


OPS = """
torch = ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
ops = ctypes.CDLL(sys.argv[2])
ops.tk_ops_load_pack
"""


def test_the_ops_register_with_torch(run: Run, unpacked: Path):
    torchs = Path(torch.__file__).parent / "lib/libtorch_cpu.so"
    assert run(BEGIN + OPS, torchs, unpacked / "tk/lib/libtk_ops.so").strip() == GLIBC
