"""fp16 activations and other groups in lowbit_gemm, and the cells that its results lack; timed by a stand-in."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks import lowbit_gemm, lowbit_peers, results
from benchmarks.lowbit_gemm import Lines

SHAPE = (32, 256)


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[dict[str, Any]]]:
    """What was recorded, on a CPU where F.linear takes 10 us and all else 5."""

    def times(calls: Sequence[Any], replays: int = 15) -> list[float]:
        calls[0]()
        return [10.0 if calls[0].func is F.linear else 5.0]

    monkeypatch.setattr(results, "RESULTS", tmp_path)
    for module in (lowbit_gemm, lowbit_peers):
        monkeypatch.setattr(module, "DEVICE", "cpu")
        monkeypatch.setattr(module, "graph_times", times)
    monkeypatch.setattr(lowbit_gemm, "BASELINES", {})
    monkeypatch.setattr(lowbit_gemm, "way", lambda *given: "a plan")
    return lambda: [json.loads(text) for text in (tmp_path / "lowbit_gemm.jsonl").read_text().splitlines()]


def test_both_kinds_are_checked_and_recorded_against_f_linear_of_their_dtype(
    lines: Callable[[], list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    part = [
        Lines(label, [SHAPE], (1, 16), dtype) for label in ("int3:g64", "nf4:s2:g128") for dtype in ("bf16", "fp16")
    ]
    lowbit_gemm.run_variants(part, 60)
    assert "not measured" not in capsys.readouterr().out
    found = lines()
    assert [n["case"] for n in found[::2]] == [
        "shoestring int3:g64", "shoestring int3:g64, fp16", "shoestring nf4:s2:g128", "shoestring nf4:s2:g128, fp16",
    ]  # fmt: skip
    for n in found:
        fp16 = n["case"].endswith("fp16")
        assert n["config"].get("dtype") == ("fp16" if fp16 else None)
        assert n["baseline"] == ("fp16 F.linear" if fp16 else "bf16 F.linear") and n["ratio"] == 2.0
        # The last bit of the result: 8 and 11 bits of mantissa.
        assert (n["quality"]["relative_error"] < 5e-4) == fp16
    assert set(lowbit_gemm.BASELINES) == {f"{kind} 32x256 {rows}" for kind in ("bf16", "fp16") for rows in (1, 16)}


def test_a_product_in_the_wrong_dtype_is_not_recorded(
    lines: Callable[[], list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = lowbit_gemm.Weight.call
    monkeypatch.setattr(lowbit_gemm.Weight, "call", lambda self, x, *rest: plain(self, x.bfloat16(), *rest).to(x.dtype))
    lowbit_gemm.measure([Lines("int4:g128", [SHAPE], (1,), kind) for kind in ("bf16", "fp16")], 1e18)
    assert [n["case"] for n in lines()] == ["shoestring int4:g128"]
    assert "shoestring int4:g128, fp16 32x256: not measured" in capsys.readouterr().out
