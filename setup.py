"""Hands over to CMake, which builds the libraries and the packs and installs them into the package.

The package's metadata is in pyproject.toml. From the environment: CMAKE_ARGS (options of CMakeLists.txt, such as
``-DTK_ARCHS=90``), TK_BUILD_DIR (CMake's build tree, kept between builds; default build/wheel), SOURCE_DATE_EPOCH (the
time of all files in what is built: with the same one, the same sources give the same bytes), and what CMake itself
reads (CMAKE_BUILD_PARALLEL_LEVEL, CXX, CXXFLAGS).
"""

import gzip
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

import long_description  # noqa: E402
import platform_tag  # noqa: E402


class PlatformDistribution(Distribution):
    """What CMake builds is no extension module that setuptools would know, but belongs to a platform like one."""

    def has_ext_modules(self):
        return True


class CleanBuildPy(build_py):
    """What an earlier build copied and is gone from the sources must not reach the wheel."""

    def run(self):
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class CMakeBuild(build_ext):
    def run(self):
        package = ROOT / "python" / "tk" if self.inplace or self.editable_mode else Path(self.build_lib, "tk")
        build = Path(os.environ.get("TK_BUILD_DIR", ROOT / "build" / "wheel")).resolve()
        options = [f"-DPython_EXECUTABLE={sys.executable}", *shlex.split(os.environ.get("CMAKE_ARGS", ""))]
        for command in (
            ["cmake", "-S", ROOT, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", *options],
            ["cmake", "--build", build],
            ["cmake", "--install", build, "--prefix", package.resolve(), "--strip"],
        ):
            if subprocess.run(command).returncode != 0:
                sys.exit(f"{' '.join(map(str, command))} failed; its messages are above")


class AnyPythonWheel(bdist_wheel):
    """A wheel for every Python, since the libraries do not depend on its version, and for all systems that they run
    on."""

    def get_tag(self):
        libraries = sorted(Path(self.bdist_dir, "tk", "lib").glob("*.so"))  # none before there is a wheel
        return "py3", "none", platform_tag.needs(libraries).platform() if libraries else super().get_tag()[2]


class SameBytes(sdist):
    """An archive that tells nothing of when, by whom and in which order it was made, where SOURCE_DATE_EPOCH is set."""

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, owner=None, group=None):
        epoch = os.environ.get("SOURCE_DATE_EPOCH")
        if format != "gztar" or epoch is None or root_dir is not None:
            return super().make_archive(base_name, format, root_dir, base_dir, owner, group)

        def plain(member):
            member.mtime, member.uid, member.gid, member.uname, member.gname = int(epoch), 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            return member

        path = f"{base_name}.tar.gz"
        with (
            open(path, "wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=int(epoch)) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            archive.add(base_dir, filter=plain)  # in the order of the names
        return path


setup(
    long_description=long_description.of_project(),
    long_description_content_type="text/markdown",
    py_modules=["_tk_command"],
    packages=[*find_packages("python"), *(f"tk.kernels.{p}" for p in find_packages("kernels"))],
    distclass=PlatformDistribution,
    options={"global": {"quiet": "1"}},  # what CMake says is worth seeing, the copying of files is not
    cmdclass={"build_py": CleanBuildPy, "build_ext": CMakeBuild, "bdist_wheel": AnyPythonWheel, "sdist": SameBytes},
)
