"""CUDA C++ compiled on first use with the NVRTC library that torch brings along: no toolkit, no headers.

    kernel = compile_kernel(cuda_source("lowbit/few_rows"), "name", {"BITS": 4})  # kept in memory, on disk
    kernel.launch(grid, block, shared_bytes, args, cluster=2)     # on torch's current stream; capturable in a graph

Compiled code is kept under $SHOESTRING_CACHE (else $XDG_CACHE_HOME/shoestring, else ~/.cache/shoestring), by a hash of
source, options, architecture and compiler version, and checked before it is used (compiled_cache.py). A kernel that is
launched for the first time inside a graph capture would have to load its code there, which CUDA refuses: run once
before capturing.

Not torch.cuda._compile_kernel: it is private, keeps nothing on disk and cannot launch clusters or dependent grids.
Left out on purpose: C++ templates with mangled names (macros do), includes (sources are joined), linking.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoestring.errors import UserError
from shoestring.kernels.runtime.compile_ahead import rehearsed
from shoestring.kernels.runtime.compiled_cache import cached_code

NUM_REGISTERS, MAX_DYNAMIC_SHARED, SHARED_CARVEOUT = 4, 8, 9  # CU_FUNC_ATTRIBUTE_*
COOPERATIVE, CLUSTER_DIMENSION, DEPENDENT_LAUNCH = 2, 4, 6  # CU_LAUNCH_ATTRIBUTE_*
INVALID_CONTEXT = 201


class NvrtcError(UserError):
    """NVRTC or the driver is missing or refuses; the message says what was asked and what came back."""


class _AttributeValue(ctypes.Union):
    _fields_ = [("dims", ctypes.c_uint * 3), ("flag", ctypes.c_int), ("pad", ctypes.c_char * 64)]


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", _AttributeValue)]


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


# -- libraries -----------------------------------------------------------------------------------------------
@functools.cache
def nvrtc_library() -> ctypes.CDLL:
    """The NVRTC of torch's CUDA major version; NvrtcError when there is none."""
    major = (torch.version.cuda or "13").split(".")[0]
    for folder in _library_folders(major):
        # The builtins are opened by name from inside NVRTC: they must be loaded already when no search path
        # leads to them.
        for name in (*sorted(folder.glob(f"libnvrtc-builtins.so.{major}*")), folder / f"libnvrtc.so.{major}"):
            try:
                library = ctypes.CDLL(str(name), mode=ctypes.RTLD_GLOBAL)
            except OSError:
                break
            if not name.name.startswith("libnvrtc-builtins"):
                return library
    for soname in (f"libnvrtc.so.{major}", "libnvrtc.so"):
        try:
            return ctypes.CDLL(soname)
        except OSError:
            continue
    raise NvrtcError(
        f"NVRTC (libnvrtc.so.{major}) was not found: install nvidia-cuda-nvrtc, or set LD_LIBRARY_PATH to the "
        "folder that holds it."
    )


def _library_folders(major: str) -> list[Path]:
    folders = [Path(p) for p in os.environ.get("SHOESTRING_NVRTC", "").split(":") if p]
    for root in map(Path, sys.path):
        folders += [root / "nvidia" / f"cu{major}" / "lib", root / "nvidia" / "cuda_nvrtc" / "lib"]
    return [f for f in folders if f.is_dir()]


@functools.cache
def driver_library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NvrtcError(f"The CUDA driver was not found: {error}") from error


def _check(code: int, doing: str) -> None:
    if code:
        text = ctypes.c_char_p()
        driver_library().cuGetErrorString(code, ctypes.byref(text))
        raise NvrtcError(f"CUDA error {code} while {doing}: {(text.value or b'unknown').decode()}")


# -- compiling -----------------------------------------------------------------------------------------------
SOURCES = Path(__file__).parents[1]  # kernels/: sources stand beside the Python that launches them


@functools.cache
def cuda_source(*parts: str, folder: Path = SOURCES) -> str:
    """Sources of `folder`, kernels/ or a method's ("lowbit/few_rows"), one behind the other, behind the instructions
    that all of them use."""
    files = (SOURCES / "runtime" / "instructions.cu", *(folder / f"{part}.cu" for part in parts))
    return "".join(file.read_text() for file in files)


def options_for(arch: str, defines: Mapping[str, int]) -> list[str]:
    return [
        f"--gpu-architecture={arch}",
        "--std=c++17",
        "-default-device",
        *(f"-D{k}={int(v)}" for k, v in sorted(defines.items())),
    ]


def compile_cubin(source: str, options: Sequence[str]) -> bytes:
    """Machine code for `source`; NvrtcError with the compiler's log when it does not compile."""
    lib = nvrtc_library()
    program = ctypes.c_void_p()
    _nvrtc(lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None))
    try:
        array = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        failed = lib.nvrtcCompileProgram(program, len(options), array)
        if failed:
            log = _nvrtc_text(lib.nvrtcGetProgramLogSize, lib.nvrtcGetProgramLog, program)
            raise NvrtcError(f"NVRTC could not compile a kernel ({' '.join(options)}): {log.decode().strip()}")
        return _nvrtc_text(lib.nvrtcGetCUBINSize, lib.nvrtcGetCUBIN, program)
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _nvrtc(code: int) -> None:
    if code:
        raise NvrtcError(f"NVRTC failed with code {code}")


def _nvrtc_text(size_of: Any, read: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _nvrtc(size_of(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _nvrtc(read(program, buffer))
    return buffer.raw.rstrip(b"\0") if read.__name__ == "nvrtcGetProgramLog" else buffer.raw


def cached_cubin(source: str, options: Sequence[str]) -> bytes:
    """As compile_cubin, from the disk when it was compiled before."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc(nvrtc_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    key = "\0".join((source, *options, f"{major.value}.{minor.value}"))
    return cached_code(key, ".cubin", lambda: compile_cubin(source, options))


# -- launching -----------------------------------------------------------------------------------------------
class Kernel:
    """One compiled function on one device. One that a rehearsal met (compile_ahead.py) is loaded when first used."""

    def __init__(self, cubin: Callable[[], bytes], name: str, device: int) -> None:
        self._cubin, self.name, self.device = cubin, name, device
        self._shared = 48 * 1024

    @functools.cached_property
    def _driver(self) -> ctypes.CDLL:
        return driver_library()

    @functools.cached_property
    def _function(self) -> ctypes.c_void_p:
        cubin, module, function = self._cubin(), ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(self.device):
            self._with_context(
                lambda: self._driver.cuModuleLoadData(ctypes.byref(module), cubin), f"loading {self.name}"
            )
            _check(
                self._driver.cuModuleGetFunction(ctypes.byref(function), module, self.name.encode()),
                f"finding {self.name}",
            )
            # As much shared memory as there is: blocks of kernels that ask for different parts of the cache cannot run
            # on one multiprocessor at once.
            self._driver.cuFuncSetAttribute(function, SHARED_CARVEOUT, 100)
        return function

    def load(self) -> Kernel:
        assert self._function is not None
        return self

    def _with_context(self, call: Any, doing: str) -> None:
        code = call()
        if code == INVALID_CONTEXT:  # a thread that has not used CUDA yet
            context = ctypes.c_void_p()
            _check(self._driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), self.device), doing)
            _check(self._driver.cuCtxSetCurrent(context), doing)
            code = call()
        _check(code, doing)

    @property
    def registers(self) -> int:
        """Of a thread; in a rehearsal any number."""
        return 128 if rehearsed() is not None else self._registers

    @functools.cached_property
    def _registers(self) -> int:
        count = ctypes.c_int()
        code = self._driver.cuFuncGetAttribute(ctypes.byref(count), NUM_REGISTERS, self._function)
        _check(code, f"asking for the registers of {self.name}")
        return count.value

    def launch(
        self,
        grid: tuple[int, int, int],
        block: int,
        shared_bytes: int,
        args: Sequence[Any],
        *,
        cluster: int = 1,
        dependent: bool = True,
        cooperative: bool = False,
    ) -> None:
        """Run on the current stream; `args` are ctypes values; `dependent` may start while its predecessor drains;
        the blocks of a `cooperative` grid run all at once, or not yet. Nothing in a rehearsal."""
        if rehearsed() is not None:
            return
        if shared_bytes > self._shared:
            _check(
                self._driver.cuFuncSetAttribute(self._function, MAX_DYNAMIC_SHARED, shared_bytes),
                f"asking for {shared_bytes} bytes of shared memory",
            )
            self._shared = shared_bytes
        pointers = (ctypes.c_void_p * len(args))(*(ctypes.addressof(a) for a in args))
        attributes = (_Attribute * 3)()
        count = 0
        if cluster > 1:
            attributes[count].id = CLUSTER_DIMENSION
            attributes[count].value.dims = (ctypes.c_uint * 3)(cluster, 1, 1)
            count += 1
        if dependent:
            attributes[count].id = DEPENDENT_LAUNCH
            attributes[count].value.flag = 1
            count += 1
        if cooperative:
            attributes[count].id = COOPERATIVE
            attributes[count].value.flag = 1
            count += 1
        config = _LaunchConfig(
            (ctypes.c_uint * 3)(*grid),
            (ctypes.c_uint * 3)(block, 1, 1),
            shared_bytes,
            torch._C._cuda_getCurrentRawStream(self.device),
            attributes,
            count,
        )
        self._with_context(
            lambda: self._driver.cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None),
            f"launching {self.name}",
        )


def pointer(t: Tensor | None) -> ctypes.c_void_p:
    """A tensor as an argument of `launch`; null for None."""
    return ctypes.c_void_p(0 if t is None else t.data_ptr())


_KERNELS: dict[tuple[Any, ...], Kernel] = {}


def compile_kernel(source: str, name: str, defines: Mapping[str, int], device: int | None = None) -> Kernel:
    """The function `name` of `source` for `device` (the current one), compiled at most once."""
    device = torch.cuda.current_device() if device is None else device
    key = (source, name, tuple(sorted(defines.items())), device)
    if key not in _KERNELS:
        major, minor = torch.cuda.get_device_capability(device)
        suffix = "a" if major == 9 else ""
        options = options_for(f"sm_{major}{minor}{suffix}", defines)
        compiled = functools.cache(lambda: cached_cubin(source, options))
        missing, kernel = rehearsed(), Kernel(compiled, name, device)
        if missing is None:
            kernel.load()
        else:
            missing.note(key, kernel.load)
        _KERNELS[key] = kernel
    return _KERNELS[key]
