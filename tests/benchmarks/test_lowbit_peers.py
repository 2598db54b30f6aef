"""The low-bit bench and its peers, as far as they run without a GPU: what fails is said, and the next one goes on."""

from __future__ import annotations

import time

import pytest
import torch

from benchmarks import lowbit_peers


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
