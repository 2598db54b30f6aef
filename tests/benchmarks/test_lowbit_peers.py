"""The low-bit bench and its peers, as far as they run without a GPU: what fails is said, and the next one goes on."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

from benchmarks import lowbit_gemm, lowbit_peers


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowbit_peers, "DEVICE", "cpu")


def said(capsys: pytest.CaptureFixture[str], make: lowbit_peers.Peer) -> str:
    lowbit_peers.measure_case("peer", 4, make, (1, 3), (32, 64), time.monotonic() + 60, timed=False)
    return capsys.readouterr().out


def test_a_peer_that_fails_or_computes_something_else_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    dense = torch.randn(32, 64)

    def right(out: int, width: int, count: int):  # type: ignore[no-untyped-def]
        assert (out, width) == (32, 64)
        return [lambda x: x @ dense.bfloat16().t()] * count, dense

    def wrong(out: int, width: int, count: int):  # type: ignore[no-untyped-def]
        return [lambda x: x @ dense.bfloat16().t() * 1.1] * count, dense

    def nan(out: int, width: int, count: int):  # type: ignore[no-untyped-def]
        return [lambda x: x @ dense.bfloat16().t() / 0] * count, dense

    def missing(out: int, width: int, count: int):  # type: ignore[no-untyped-def]
        import no_such_library

        return no_such_library

    text = said(capsys, right)
    assert "peer 32x64" in text and "wrong" not in text and "not measured" not in text
    for make in (wrong, nan):
        text = said(capsys, make)
        assert "1: wrong" in text and "3: wrong" in text
    assert "not measured (ModuleNotFoundError: No module named 'no_such_library')" in said(capsys, missing)


def test_the_weight_that_a_function_multiplies_with_is_found_and_compared() -> None:
    weight = torch.randn(32, 80).bfloat16()
    coarse = (weight.float() * 4).round() / 4
    found = lowbit_peers.seen_weight(lambda x: x @ coarse.bfloat16().t(), weight, 4, rows=16)
    assert torch.equal(found, coarse.bfloat16().float())
    with pytest.raises(AssertionError, match="another weight"):
        lowbit_peers.seen_weight(lambda x: x @ coarse.bfloat16().t(), weight.flip(0), 4, rows=16)


def test_random_codes_mean_what_decode_codes_says() -> None:
    torch.manual_seed(0)
    codes, scale, zero = lowbit_peers.random_codes(8, 256)
    dense = lowbit_peers.decode_codes(codes, scale, zero)
    assert dense[3, 200] == (float(codes[3, 200]) - zero[3, 1].float()) * scale[3, 1].float()


def test_a_process_that_ends_badly_or_never_is_told_and_left(capsys: pytest.CaptureFixture[str]) -> None:
    def start(code: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", code], start_new_session=True)

    bad = start("raise SystemExit(3)")
    lowbit_gemm.finish(bad, "bad", time.monotonic() + 30)
    slow = start("import time; time.sleep(60)")
    lowbit_gemm.finish(slow, "slow", time.monotonic())
    assert slow.poll() is not None
    assert capsys.readouterr().out == "bad: ended with 3\nslow: stopped, out of time\n"


def test_every_format_and_peer_is_measured_at_the_rows_of_the_table() -> None:
    assert set(lowbit_gemm.PEERS) == set(lowbit_peers.PEERS)
    for rows in lowbit_gemm.FORMATS.values():
        assert set(lowbit_gemm.ROWS) <= set(rows)
    for cases in lowbit_peers.PEERS.values():
        for _, _, _, rows in cases:
            assert set(rows) <= set(lowbit_gemm.ROWS)


def test_the_table_against_peers_has_the_least_and_the_most_over_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    def line(case: str, n: int, rows: int, value: float) -> dict[str, object]:
        return {"case": case, "metric": "time", "value": value, "config": {"n": n, "k": 64, "rows": rows}}

    lines = [
        line("shoestring int4:g128", 16, 1, 10.0),
        line("shoestring int4:g128", 32, 1, 20.0),
        line("shoestring int3:g128", 16, 1, 4.0),
        line("peer int4, plain", 16, 1, 15.0),
        line("peer int4, plain", 32, 1, 25.0),
        line("peer int4, plain", 32, 2, 25.0),  # ours was not measured there
        line("peer int3", 16, 1, 8.0),
    ]
    monkeypatch.setattr(lowbit_peers, "newest", lambda bench: lines)
    rows = lowbit_peers.against().splitlines()[2:]
    assert [[c.strip() for c in row.split("|")[1:4]] for row in rows] == [
        ["peer int4, plain", "1.25 to 1.50", ""],
        ["peer int3", "2.00 to 2.00", ""],
    ]


def test_a_shape_that_was_measured_later_stands_with_its_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def line(case: str, n: int) -> dict[str, object]:
        place = {"n": n, "k": 64, "rows": 1}
        return {"case": case, "metric": "time", "ratio": 2.0, "config": place} | said_where

    said_where = {"device": "GPU", "versions": {}, "commit": "c", "date": "d"}
    lines = [line("peer", 16), line("other", 16), line("other", 8), line("peer", 32)]
    monkeypatch.setattr(lowbit_gemm, "newest", lambda bench: lines)
    rows = [row.split(" | ")[:2] for row in lowbit_gemm.table().splitlines()[2:6]]
    assert rows == [["| peer", "16x64"], ["| peer", "32x64"], ["| other", "16x64"], ["| other", "8x64"]]


def test_targets_are_met_by_the_number_measured_and_not_by_the_one_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def line(label: str, shape: tuple[int, int], rows: int, ratio: float, value: float) -> dict[str, object]:
        config = {"n": shape[0], "k": shape[1], "rows": rows}
        return {"case": f"shoestring {label}", "metric": "time", "ratio": ratio, "value": value, "config": config}

    tall, broad, square, small = lowbit_gemm.SHAPES
    lines = [
        line("int4:g128", tall, 1, 3.3, 10.0),
        line("int4:g128", broad, 1, 3.2999, 10.0),
        line("int4:g128", square, 1, 4.0, 10.0),
        line("int4:g128", small, 1, 1.0, 10.0),  # asked of large shapes only
        line("int4:g128", tall, 8, 2.0, 10.0),  # nothing was asked there
        line("nf4:s2:g128", tall, 1, 2.0, 11.5),
        line("nf4:s2:g128", broad, 1, 2.0, 11.501),
    ]
    monkeypatch.setattr(lowbit_gemm, "newest", lambda bench: lines)
    rows = [[c.strip() for c in row.split("|")[1:-1]] for row in lowbit_gemm.targets().splitlines()[2:]]
    shown = {row[0]: row[1:] for row in rows}
    assert shown["int4:g128, times faster than bf16"][0] == "3.30 to 4.00 (3.3: 2 of 3)"
    assert shown["nf4:s2:g128, time over int4:g128"][0] == "1.15 to 1.15 (1.15: 1 of 2)"
    assert not any(shown["int4:g128, times faster than bf16"][1:])
