"""Hands over to CMake, which builds the libraries and the packs and installs them into the package.

The package's metadata is in pyproject.toml. From the environment: CMAKE_ARGS (options of CMakeLists.txt, such as
``-DTK_ARCHS=90``), TK_BUILD_DIR (CMake's build tree, kept between builds; default build/wheel), and what CMake itself
reads (CMAKE_BUILD_PARALLEL_LEVEL, CXX, CXXFLAGS).
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

import long_description  # noqa: E402


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
    """For one platform, and for every Python: the libraries do not depend on its version."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    long_description=long_description.of_project(),
    long_description_content_type="text/markdown",
    py_modules=["_tk_command"],
    packages=[*find_packages("python"), *(f"tk.kernels.{p}" for p in find_packages("kernels"))],
    distclass=PlatformDistribution,
    options={"global": {"quiet": "1"}},  # what CMake says is worth seeing, the copying of files is not
    cmdclass={"build_py": CleanBuildPy, "build_ext": CMakeBuild, "bdist_wheel": AnyPythonWheel},
)
