"""fp16 activations and other groups in lowbit_gemm, and the cells that its results lack; timed by a stand-in."""

from __future__ import annotations

import json
import sys
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


def write(folder: Path, *given: dict[str, Any]) -> None:
    (folder / "lowbit_gemm.jsonl").write_text("".join(json.dumps(n) + "\n" for n in given))


def line(case: str, shape: tuple[int, int], rows: int, ratio: float, **config: Any) -> dict[str, Any]:
    place = {"n": shape[0], "k": shape[1], "rows": rows, **config}
    about = {"device": results.device_name(), "versions": {}, "commit": "c", "date": "2026-01-01"}
    return {"case": case, "metric": "time", "ratio": ratio, "value": 10 / ratio, "config": place, **about}


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


def test_variants_have_a_table_of_their_own_and_leave_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    tall, broad, *_ = lowbit_gemm.SHAPES
    own = [
        line("shoestring int4:g128", tall, 1, 3.4, format="int4:g128"),
        line("shoestring int4:g64", tall, 1, 3.1, format="int4:g64"),
        line("shoestring int4:g64", broad, 1, 3.2, format="int4:g64"),
        line("shoestring int4:g64", tall, 8, 2.2, format="int4:g64"),
        line("humming int4, symmetric", tall, 1, 2.0, bits=4, group=128),
    ]
    tables = lowbit_gemm.table, lowbit_gemm.targets, lowbit_peers.against
    write(tmp_path, *own)
    before = [make() for make in tables]
    fp16 = line("shoestring int4:g128, fp16", tall, 1, 3.5, format="int4:g128", dtype="fp16")
    write(tmp_path, *own, fp16, line("shoestring int2:g64", tall, 4, 4.1, format="int2:g64"))
    assert [make() for make in tables] == before
    assert lowbit_gemm.variants().splitlines()[:5] == [
        "| kernel | weight | 1 | 4 |",
        "| --- | --- | --- | --- |",
        "| shoestring int4:g64 | 14336x4096 | 3.10 |  |",
        "| shoestring int2:g64 | 14336x4096 |  | 4.10 |",
        "| shoestring int4:g128, fp16 | 14336x4096 | 3.50 |  |",
    ]
    write(tmp_path)
    assert lowbit_gemm.variants() == "Not measured yet."


def test_a_part_without_the_formats_asked_for_says_which_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lowbit_gemm", "--formats", "int2:g64"])
    with pytest.raises(SystemExit):
        lowbit_gemm.main()
    assert "--part table has none of these formats; it has int4:g128, nf4:s2:g128," in capsys.readouterr().err


def test_only_missing_cells_of_a_peer_are_compiled_and_timed(
    lines: Callable[[], list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (32, 64), (48, 64)
    dense = torch.randn(first)
    made: list[tuple[int, int]] = []

    def peer(out: int, width: int, count: int):  # type: ignore[no-untyped-def]
        made.append((out, width))
        return [lambda x: F.linear(x, dense.bfloat16())] * count, dense

    started: list[tuple[str, ...]] = []
    monkeypatch.setattr(lowbit_peers, "PEERS", {"humming": [("peer int3", 3, peer, (1, 2, 4))]})
    monkeypatch.setattr(lowbit_peers, "run_module", lambda *given: started.append(given))
    monkeypatch.setattr(lowbit_peers, "finish", lambda *given: None)
    monkeypatch.setattr(lowbit_peers, "SHAPES", [first, second])
    monkeypatch.setattr(sys, "path", [*sys.path])
    elsewhere = line("peer int3", first, 4, 1.0) | {"device": "another"}
    known = [line("peer int3", second, rows, 1.0) for rows in (1, 2, 4)]
    write(tmp_path, *known, elsewhere, line("peer int3", first, 1, 1.0))
    monkeypatch.setattr(sys, "argv", ["lowbit_peers", "humming", "--missing"])
    with torch.enable_grad():  # which it turns off
        lowbit_peers.main()
    assert made == [first]
    assert [(*given[:4], "--prepare" in given, "--missing" in given) for given in started] == [
        ("lowbit_peers", "humming", "--shapes", "32x64", True, True)
    ]
    new = lines()[5:]
    assert [(n["config"]["n"], n["config"]["rows"]) for n in new] == [(first[0], 2), (first[0], 4)]
