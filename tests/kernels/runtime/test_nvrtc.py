"""Compiling through NVRTC: the cache, and what a user reads when something is missing."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch

from shoestring.kernels.runtime import nvrtc

SOURCE = 'extern "C" __global__ void add(float* x, float by, int n) { int i = threadIdx.x; if (i < n) x[i] += by; }'


def test_a_missing_library_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("not there")

    nvrtc.nvrtc_library.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with pytest.raises(nvrtc.NvrtcError, match="nvidia-cuda-nvrtc"):
        nvrtc.nvrtc_library()
    nvrtc.nvrtc_library.cache_clear()


def test_compiled_code_is_kept_by_source_and_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Version:
        @staticmethod
        def nvrtcVersion(major: object, minor: object) -> int:
            return 0

    compiled: list[str] = []

    def compile_cubin(source: str, options: list[str]) -> bytes:
        compiled.append(source)
        return source.encode() + b" compiled"

    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc, "nvrtc_library", Version)
    monkeypatch.setattr(nvrtc, "compile_cubin", compile_cubin)
    options = nvrtc.options_for("sm_90a", {"B": 2, "A": True})
    assert options[-2:] == ["-DA=1", "-DB=2"]
    for _ in range(2):
        assert nvrtc.cached_cubin("a", options) == b"a compiled"
    nvrtc.cached_cubin("a", nvrtc.options_for("sm_100", {"B": 2, "A": 1}))
    nvrtc.cached_cubin("b", options)
    assert compiled == ["a", "a", "b"]
    files = list((tmp_path / "cache" / "kernels").iterdir())
    assert all(f.suffix == ".cubin" for f in files)
    for file in files:
        file.write_bytes(file.read_bytes()[:-1])  # cut short by a full disk
    for _ in range(2):
        assert nvrtc.cached_cubin("b", options) == b"b compiled"
    assert compiled == ["a", "a", "b", "b"]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path / "file"))
    assert nvrtc.cached_cubin("c", options) == b"c compiled"  # nowhere to write: compiled every time


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_kernel_runs_on_the_current_stream_and_in_a_graph() -> None:
    kernel = nvrtc.compile_kernel(SOURCE, "add", {})
    x = torch.zeros(8, device="cuda")

    def run() -> None:
        args = (ctypes.c_void_p(x.data_ptr()), ctypes.c_float(2.0), ctypes.c_int(6))
        kernel.launch((1, 1, 1), 32, 0, args)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    assert x.tolist() == [4.0] * 6 + [0.0] * 2
    with pytest.raises(nvrtc.NvrtcError, match="nonsense"):
        nvrtc.compile_kernel("nonsense", "add", {})


def test_assembly_is_in_one_file_that_stands_in_front_of_every_kernel() -> None:
    instructions = (nvrtc.SOURCES / "runtime" / "instructions.cu").read_text()
    assert nvrtc.cuda_source("lowbit/few_rows").startswith(instructions) and "asm" in instructions
    for path in nvrtc.SOURCES.parent.rglob("*.cu"):
        code = re.sub(r"//.*", "", path.read_text())
        assert path.name == "instructions.cu" or not re.search(r"\basm\b", code), path.name
