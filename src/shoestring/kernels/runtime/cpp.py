"""C++ compiled on first use with the machine's own compiler, for this very processor; called through ctypes.

    library = load_library(source)      # None where there is no compiler, or it fails (a warning says why)

The compiler is $CXX, else c++, g++ or clang++. Compiled code is kept where kernels.nvrtc keeps its own, by a hash of
source, options, compiler version and processor. Calls through ctypes release the interpreter's lock.

Not torch.utils.cpp_extension: it includes torch's headers (a minute of compiling) and needs ninja.
Left out on purpose: Windows; OpenMP, whose runtime would be a second one beside torch's.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

from shoestring.paths import cache_folder

# What lets loops over floats become vector code, one by one: -ffast-math would forget nan, and change how the
# whole process rounds small numbers.
OPTIONS = (
    *("-O3", "-std=c++20", "-shared", "-fPIC", "-pthread"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"),
)


@functools.cache
def load_library(source: str) -> ctypes.CDLL | None:
    compiler = find_compiler()
    if compiler is None:
        return None
    try:
        return ctypes.CDLL(str(_compiled(source, compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        warnings.warn(f"{compiler} could not compile a kernel, which costs speed only: {said}", stacklevel=2)
        return None


def find_compiler() -> str | None:
    """Its path; None where the machine has none."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else ("c++", "g++", "clang++")
    return next((path for name in names if (path := shutil.which(name))), None)


def _compiled(source: str, compiler: str) -> Path:
    options = [*OPTIONS, "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"]
    version = _output([compiler, "--version"])
    key = "\0".join((source, *options, version, _processor()))
    path = cache_folder() / "kernels" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.so"
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = path.parent
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:  # kept for this process only
        folder = Path(tempfile.mkdtemp(prefix="shoestring-"))
        path = folder / path.name
    handle, temporary = tempfile.mkstemp(dir=folder, suffix=".so")
    os.close(handle)
    try:
        _output([compiler, *options, "-x", "c++", "-", "-o", temporary], source)
        Path(temporary).replace(path)  # whole or not at all, also with several processes
    finally:
        Path(temporary).unlink(missing_ok=True)
    return path


def _output(command: list[str], given: str = "") -> str:
    return subprocess.run(command, input=given, capture_output=True, text=True, check=True, timeout=120).stdout


def _processor() -> str:
    """What the instructions of this processor depend on: a home folder may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    kept = ("model name", "flags", "CPU part", "CPU implementer", "Features")
    return "\n".join(sorted({line for line in lines if line.startswith(kept)}))
