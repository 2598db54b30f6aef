"""`shoestring env`: what the machine has, what will be used and why not; nothing that a report should not show."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoestring import __version__
from shoestring.cli import environment
from shoestring.cli.app import run_cli
from shoestring.kernels.runtime import cpp


def test_a_report_has_versions_devices_kernels_and_the_cache(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SHOESTRING_API_KEY", "open sesame")
    assert run_cli(["env"]) == 0
    out = capsys.readouterr().out
    for title in ("Software", "Hardware", "Kernels", "Cache", "Settings"):
        assert title in out
    assert __version__ in out and torch.__version__ in out
    assert "SHOESTRING_API_KEY" in out and "sesame" not in out


def test_the_cache_is_counted_by_kind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOESTRING_CACHE", str(tmp_path))
    assert environment.cached() == [[f"all, in {environment.shown(tmp_path)}", 0, 0.0]]
    for name, size in {
        "kernels/a.so": 3,
        "kernels/b.cubin": 1,
        "corpus-1/train.bin": 4,
        "few_rows-H200.json": 1,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(size * 1_000_000))
    (tmp_path / "corpus-1.lock").touch()
    rows = {str(what): (number, size) for what, number, size in environment.cached()}
    assert rows.pop(f"all, in {environment.shown(tmp_path)}") == (4, 9.0)
    assert rows == {"compiled kernels": (2, 4.0), "corpora": (1, 4.0), "measured plans": (1, 1.0)}


def test_a_kernel_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert cpp.find_compiler() is None
    used = {what: (answer, why) for what, answer, _, why in environment.kernels()}
    answer, why = used["8-bit activations (--int8-activations), single tokens"]
    assert answer == "no" and "C++ compiler" in why
    if not torch.cuda.is_available():
        assert all(used[what] == ("no", "no GPU") for what, _, _ in environment.gpu_kernels())
        assert "2:4 products in training" in used  # a row that a method gives


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_is_named_with_its_kernels() -> None:
    assert any(torch.cuda.get_device_name() in found for _, found in environment.gpus())
    assert all((answer == "yes") == (not why) for _, answer, _, why in environment.kernels())


def test_paths_do_not_name_their_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert environment.shown("/home/somebody/.cache/shoestring") == "~/.cache/shoestring"
    assert environment.shown("/data/cache") == "/data/cache"
