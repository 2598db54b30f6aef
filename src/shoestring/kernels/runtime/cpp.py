"""C++ compiled on first use with the machine's own compiler, for this very processor; called through ctypes.

    begin_compiling(source, other)      # at once, in threads; optional
    library = load_library(source)      # None where there is no compiler, or it fails (a warning says why)

The compiler is $CXX, else c++, g++ or clang++. Compiled code is kept by a hash of source, options, compiler version and
processor, and checked before it is loaded (compiled_cache.py). Calls through ctypes release the interpreter's lock.

Not torch.utils.cpp_extension: it includes torch's headers (a minute of compiling) and needs ninja.
Left out on purpose: Windows; OpenMP, whose runtime would be a second one beside torch's.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import warnings
from pathlib import Path

from shoestring.kernels.runtime.compiled_cache import cached_code, has_code

# What lets loops over floats become vector code, one by one: -ffast-math would forget nan, and change how the
# whole process rounds small numbers.
OPTIONS = (
    *("-O3", "-std=c++20", "-shared", "-fPIC", "-pthread"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"),
)


SUFFIX = ".so"
_one_at_a_time: dict[str, threading.Lock] = {}  # by source: one thread compiles it, others wait


def begin_compiling(*sources: str) -> bool:
    """Load them in threads, so that they are compiled side by side and while the caller does something else. Whether
    there is anything to compile."""
    compiler = find_compiler()
    try:
        missing = [source for source in sources if compiler and not has_code(_key(source, compiler), SUFFIX)]
    except (OSError, subprocess.SubprocessError):  # told by load_library
        return False
    for source in missing:
        threading.Thread(target=load_library, args=(source,), name="compile", daemon=True).start()
    return bool(missing)


def load_library(source: str) -> ctypes.CDLL | None:
    with _one_at_a_time.setdefault(source, threading.Lock()):
        return loaded_library(source)


@functools.cache
def loaded_library(source: str) -> ctypes.CDLL | None:
    compiler = find_compiler()
    if compiler is None:
        return None
    try:
        return _load(_compiled(source, compiler))
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        warnings.warn(f"{compiler} could not compile a kernel, which costs speed only: {said}", stacklevel=2)
        return None


def find_compiler() -> str | None:
    """Its path; None where the machine has none."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else ("c++", "g++", "clang++")
    return next((path for name in names if (path := shutil.which(name))), None)


def _compiled(source: str, compiler: str) -> bytes:
    def compile() -> bytes:
        with tempfile.TemporaryDirectory(prefix="shoestring-") as folder:
            made = Path(folder) / "kernel.so"
            _output([compiler, *_options(), "-x", "c++", "-", "-o", str(made)], source)
            return made.read_bytes()

    return cached_code(_key(source, compiler), SUFFIX, compile)


def _options() -> list[str]:
    return [*OPTIONS, "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"]


def _key(source: str, compiler: str) -> str:
    return "\0".join((source, *_options(), _output([compiler, "--version"]), _processor()))


def _load(code: bytes) -> ctypes.CDLL:
    """A library of these very bytes: from memory where the system can, else from a file that nobody else can reach."""
    try:
        # Never closed: the loader knows a library by its path, and a number that is used again would be this one.
        handle = os.memfd_create("shoestring-kernel")
        with os.fdopen(os.dup(handle), "wb") as file:
            file.write(code)
        return ctypes.CDLL(f"/proc/self/fd/{handle}")
    except (AttributeError, OSError):  # not Linux, or it does not run code from memory
        with tempfile.TemporaryDirectory(prefix="shoestring-") as folder:
            made = Path(folder) / "kernel.so"
            made.write_bytes(code)
            return ctypes.CDLL(str(made))


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
