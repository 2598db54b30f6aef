"""CUDA kernels compiled for a CPU: what instructions.cu has, and what CUDA C++ brings along, is defined by
cuda_on_cpu.h and a header for each kernel. Only bf16 activations are emulated; everything else of the kernel (decoding,
indexing, rings, panels, sums) is the source that NVRTC compiles.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from shoestring.kernels.runtime import nvrtc

HERE = Path(__file__).parent


def library(folder: Path, header: str, *parts: str, macros: Mapping[str, int]) -> ctypes.CDLL:
    """Sources of kernels/ behind `header`, which calls the kernel; compiled into `folder`."""
    source = "".join((nvrtc.SOURCES / f"{part}.cu").read_text() for part in parts)
    assert not re.search(r"\basm\b", re.sub(r"//.*", "", source)), "assembly that the emulation does not know"
    name = hashlib.sha256(repr((header, source, sorted(macros.items()))).encode()).hexdigest()[:16]
    compiled = folder / f"{name}.so"  # a name of its own: what is loaded stays
    (folder / "kernel.inc").write_text(source)
    command = ["g++", "-O1", "-w", "-shared", "-fPIC", "-std=c++17", "-ffp-contract=off", f"-I{folder}"]
    command += [f"-D{k}={v}" for k, v in macros.items()]
    if not compiled.exists():
        subprocess.run([*command, "-x", "c++", str(HERE / header), "-o", str(compiled)], check=True)
    return ctypes.CDLL(str(compiled))
