"""Build Horovod for the installed torch, and cache the wheel.

check the tools -> fetch the source package with pip -> apply `fixes` -> build one wheel -> install -> test
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import platformdirs

from raytrain_plus.errors import InputError, RunError
from raytrain_plus.install.build_log import error_lines
from raytrain_plus.install.edit import apply_all, digest
from raytrain_plus.install.fixes import EDITS, HOROVOD_VERSION, WITHOUT_CUDA
from raytrain_plus.install.horovod_usable import fixed_version
from raytrain_plus.install.prove import prove

BUILD_S = 3600.0
"""Maximum seconds for the build."""
FETCH_S = 600.0
"""Maximum seconds for a download."""

BUILD_PACKAGES = ("setuptools", "wheel", "packaging", "cffi")


def install_horovod(say: Callable[[str], None]) -> Path:
    """Install a working Horovod, from the cache or newly built; return the path of its wheel in the cache.

    `say` receives a line for each stage. Raises `InputError` if a build tool is missing, `RunError` if a stage fails.
    """
    torch = _torch_version()
    kept = wheel_folder(torch)
    wheel = next(iter(sorted(kept.glob(f"horovod-{fixed_version(torch)}-*.whl"))), None)
    if wheel is None:
        for problem in missing_tools():
            raise problem
        say(
            f"building Horovod {HOROVOD_VERSION} for Python {platform.python_version()}, torch {torch}; about 2 minutes"
        )
        start = time.monotonic()
        wheel = _build(kept, torch, say)
        say(f"built in {time.monotonic() - start:.0f} s; cached in {wheel}")
    else:
        say(f"using {wheel}")
    _pip(["install", "--no-deps", "--force-reinstall", str(wheel)], FETCH_S, "installing the wheel")
    # The packages that Horovod imports; the wheel is installed without its wider, outdated requirements.
    _pip(["install", "cloudpickle", "psutil", "pyyaml", "packaging", "cffi"], FETCH_S, "installing its dependencies")
    try:
        prove()
    except RunError:
        # Otherwise the cached wheel would be installed again each time, and `collective: auto` would use it.
        wheel.unlink(missing_ok=True)
        say("the test failed: uninstalling Horovod and removing the cached wheel; the next call builds it again")
        _pip(["uninstall", "--yes", "horovod"], FETCH_S, "removing the wheel")
        raise
    say("Horovod works: two processes summed a tensor through it")
    return wheel


def wheel_folder(torch: str) -> Path:
    """Return the cache folder of the wheel for this Python, machine, torch and set of fixes."""
    tag = f"{sys.implementation.cache_tag}-{platform.machine()}-torch{torch}-{digest(EDITS)}"
    return platformdirs.user_cache_path("raytrain_plus") / "horovod" / tag


def missing_tools() -> list[InputError]:
    """Return an error for each tool that the build needs and this machine lacks, with the package to install."""
    compilers = [os.environ.get("CXX", ""), "g++", "c++", "clang++"]
    missing = []
    if not any(name and shutil.which(name) for name in compilers):
        missing.append(InputError("no C++ compiler found", remedy="apt-get install g++ (Fedora: dnf install gcc-c++)"))
    if not shutil.which("cmake"):
        missing.append(InputError("cmake not found", remedy="apt-get install cmake (Fedora: dnf install cmake)"))
    if not shutil.which("make"):
        missing.append(InputError("make not found", remedy="apt-get install make"))
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        missing.append(InputError("Python's headers are missing", remedy="apt-get install python3-dev"))
    for name in BUILD_PACKAGES:
        try:
            version(name)
        except PackageNotFoundError:
            missing.append(
                InputError(f"the Python package {name} is not installed", remedy="pip install 'raytrain-plus[horovod]'")
            )
    return missing


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        raise InputError("torch is not installed; Horovod is built against it", remedy="pip install torch") from None


def _build(kept: Path, torch: str, say: Callable[[str], None]) -> Path:
    with tempfile.TemporaryDirectory(prefix="raytrain-horovod-") as name:
        work = Path(name)
        say("fetching its source")
        _pip(
            [
                "download",
                "--no-deps",
                "--no-binary",
                ":all:",
                "--no-build-isolation",
                "-d",
                name,
                f"horovod=={HOROVOD_VERSION}",
            ],
            FETCH_S,
            "fetching Horovod's source",
        )
        archive = next(work.glob("horovod-*.tar.gz"))
        with tarfile.open(archive) as tar:
            if sys.version_info >= (3, 12):
                tar.extractall(work, filter="data")
            else:
                tar.extractall(work)
        source = work / archive.name.removesuffix(".tar.gz")
        apply_all(source, (*EDITS, WITHOUT_CUDA))
        package = source / "horovod" / "__init__.py"
        package.write_text(package.read_text().replace(f"'{HOROVOD_VERSION}'", f"'{fixed_version(torch)}'"))
        say(f"applied {len(EDITS)} fixes; compiling")
        _pip(
            ["wheel", "--no-deps", "--no-build-isolation", "-w", str(work / "wheel"), str(source)],
            BUILD_S,
            "building Horovod",
            _build_environment(),
        )
        made = next((work / "wheel").glob("horovod-*.whl"))
        kept.mkdir(parents=True, exist_ok=True)
        # Renamed into place, so that a build that is killed here leaves no partial wheel in the cache.
        part = kept / f".{made.name}.{os.getpid()}"
        shutil.copyfile(made, part)
        return part.rename(kept / made.name)


def _build_environment() -> dict[str, str]:
    return {
        **os.environ,
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITHOUT_MPI": "1",
        # It never gets a tensor of a GPU: see `collective.staged`.
        "HOROVOD_WITHOUT_GPU": "1",
        "MAKEFLAGS": f"-j{os.cpu_count() or 1}",
        # Newer compilers no longer include cstdint implicitly, and cmake 4 requires a minimum policy version.
        "CXXFLAGS": f"{os.environ.get('CXXFLAGS', '')} -include cstdint".strip(),
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }


def _pip(arguments: Sequence[str], timeout_s: float, what: str, environment: dict[str, str] | None = None) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s, env=environment
        )
    except subprocess.TimeoutExpired as error:
        # Python reports it as bytes, although `text` is set.
        said = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        raise RunError(f"{what} took more than {timeout_s:g} s; its output is in {_keep_log(said)}") from error
    if done.returncode:
        shown = "\n".join(error_lines(done.stdout))
        raise RunError(
            f"{what} failed (pip exited with {done.returncode}):\n{shown}\nits whole output is in "
            f"{_keep_log(done.stdout)}"
        )


def _keep_log(output: str) -> Path:
    """Write the output of what failed beside the cached wheels, in place of an earlier one; return the file."""
    path = platformdirs.user_cache_path("raytrain_plus") / "horovod" / "failed.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(output)
    return path
