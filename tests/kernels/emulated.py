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
from shoestring.kernels.runtime.compiled_cache import cached_code

HERE = Path(__file__).parent


def library(folder: Path, header: str, *parts: str, macros: Mapping[str, int]) -> ctypes.CDLL:
    """Sources of kernels/ behind `header`, which calls the kernel. Compiled once: kept by the hash of all that it is
    made from, beside what else the package compiles. A method gives whole paths of its own header and sources."""
    source = "".join((nvrtc.SOURCES / f"{part}.cu").read_text() for part in parts)
    assert not re.search(r"\basm\b", re.sub(r"//.*", "", source)), "assembly that the emulation does not know"
    command = ["g++", "-O1", "-w", "-shared", "-fPIC", "-std=c++17", "-ffp-contract=off"]
    command += [f"-D{k}={v}" for k, v in sorted(macros.items())]
    headers = [path.read_text() for path in (*sorted(HERE.glob("*_on_cpu.h")), HERE / header)]
    name = hashlib.sha256(repr((Path(header).name, headers, source, command)).encode()).hexdigest()[:32]
    compiled = folder / f"{name}.so"  # a name of its own: what is loaded stays

    def compile() -> bytes:
        (folder / "kernel.inc").write_text(source)
        fresh = folder / "fresh.so"
        subprocess.run(
            [*command, f"-I{folder}", f"-I{HERE}", "-x", "c++", str(HERE / header), "-o", str(fresh)], check=True
        )
        return fresh.read_bytes()

    if not compiled.exists():
        compiled.write_bytes(cached_code(f"emulated-{name}", ".so", compile))
    return ctypes.CDLL(str(compiled))
