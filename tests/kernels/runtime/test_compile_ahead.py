"""Kernels that a rehearsal meets: noted once, not launched, compiled by threads, and launched afterwards."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shoestring.formats import convert, pack, parse_format, use_kernels
from shoestring.kernels.runtime import compile_ahead, nvrtc
from shoestring.kernels.runtime.compile_ahead import rehearsal, rehearsed
from shoestring.serve import DraftModel, Engine, Sampling
from tiny import near_copy, tiny_decoder


def test_triton_kernels_are_noted_once_and_compiled_elsewhere() -> None:
    triton = pytest.importorskip("triton")
    compiled: list[tuple[str, bool]] = []

    def preload(given: str) -> SimpleNamespace:
        compiled.append((given, threading.current_thread() is threading.main_thread()))
        if given == "b":
            raise RuntimeError("does not compile")
        return SimpleNamespace(run="launcher")

    kernel = SimpleNamespace(module="m", name="k", jit_function=SimpleNamespace(preload=preload))
    before = triton.knobs.runtime.jit_cache_hook
    with rehearsal() as missing:
        hook = triton.knobs.runtime.jit_cache_hook
        for key in ("a", "a", "b"):  # every layer launches it
            assert hook(key=key, fn=kernel, compile={"specialization_data": key}, repr="", already_compiled=False)
    assert triton.knobs.runtime.jit_cache_hook is before and rehearsed() is None
    assert not hook(key="c", fn=kernel, compile={"specialization_data": "c"})  # launches are launches again
    assert len(missing) == 2 and compiled == []
    missing.compile()  # a failure is told where the kernel is launched
    assert sorted(compiled) == [("a", False), ("b", False)]


def test_a_cuda_kernel_is_launched_after_its_rehearsal_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[str] = []

    class Driver:
        def __getattr__(self, name: str) -> object:
            return lambda *args: did.append(name) or 0  # type: ignore[func-returns-value]

    def compile_cubin(source: str, options: list[str]) -> bytes:
        did.append("compiled")
        return b"code"

    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path))
    monkeypatch.setattr(nvrtc, "compile_cubin", compile_cubin)
    monkeypatch.setattr(nvrtc, "driver_library", Driver)
    monkeypatch.setattr(nvrtc, "nvrtc_library", lambda: SimpleNamespace(nvrtcVersion=lambda *args: 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda index: compile_ahead.rehearsal())  # any context
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    with rehearsal() as missing:
        kernel = nvrtc.compile_kernel("a source of this test", "name", {}, device=0)
        kernel.launch((1, 1, 1), 32, 0, ())
        assert kernel.registers and did == []
    missing.compile()
    assert did[:2] == ["compiled", "cuModuleLoadData"]
    nvrtc.compile_kernel("a source of this test", "name", {}, device=0).launch((1, 1, 1), 32, 0, ())
    assert did.count("compiled") == 1 and did[-1] == "cuLaunchKernelEx"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("format", ["dense", "int4:g32"])
def test_texts_do_not_depend_on_a_rehearsal(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path))
    monkeypatch.setenv("SHOESTRING_COMPILE_AHEAD", "1")
    model = tiny_decoder(d_model=96, d_ff=192, num_heads=3, num_kv_heads=3, head_dim=32)
    other = near_copy(model, 0.02)
    dtype = torch.float32 if format == "dense" else torch.bfloat16
    if format != "dense":
        convert(model.float(), [("*", parse_format(format))])
        pack(model)
    for decoder in (model, other):
        decoder.to("cuda", dtype).compute_dtype = dtype
    use_kernels(model)
    # In bf16 rounding differs with the rows of a pass, which a controller chooses by the clock.
    drafters = [None, DraftModel(other)] if format == "dense" else [None]
    noted: list[int] = []
    plain = compile_ahead.Missing.compile

    def compile(missing: compile_ahead.Missing) -> bool:
        noted.append(len(missing))
        return plain(missing)

    monkeypatch.setattr(compile_ahead.Missing, "compile", compile)
    prompts, sampling = [[1, 2, 3, 4, 5, 6], [7, 8]], Sampling(max_tokens=12, ignore_eos=True)

    def texts(drafter: DraftModel | None) -> list[list[int]]:
        engine = Engine(model, max_requests=2, max_context=64, drafter=drafter)
        return [list(c.token_ids) for c in engine.generate(prompts, sampling)]

    first = [texts(drafter) for drafter in drafters]
    assert len(noted) == len(drafters) and noted[0] > 0
    assert [texts(drafter) for drafter in drafters] == first
    assert len(noted) == len(drafters)  # a mark on the disk says that they were compiled
