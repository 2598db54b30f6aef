from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import decode_peers
from benchmarks.decode import LLAMA_8B, PEERS

TINY = dataclasses.replace(
    LLAMA_8B, d_model=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, d_ff=48, vocab_size=99,
    max_positions=64,
)  # fmt: skip


@pytest.mark.parametrize(("kind", "num"), [("eager", 2), ("static", 1), ("assisted", 1), ("batching", 3)])
@pytest.mark.lab
def test_every_peer_runs_to_its_line(kind: str, num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    for name, value in {"PROMPT": 6, "NEW": 8, "FIRST": 2, "FEWEST": 3, "DEVICE": "cpu"}.items():
        monkeypatch.setattr(decode_peers, name, value)
    monkeypatch.setitem(decode_peers.MODELS, "tiny", TINY)
    monkeypatch.setattr(decode_peers, "SMOLLM2_135M", TINY)
    noted: list[Any] = []
    monkeypatch.setattr(decode_peers, "note", lambda *line: noted.append(line))
    clock = itertools.count(1)  # a rate is of the difference between two runs, which noise could turn around here

    def timed(work: Callable[[], object]) -> float:
        work()
        return float(next(clock))

    monkeypatch.setattr(decode_peers, "timed", timed)
    decode_peers.run_peer(kind, "tiny", num, 2, 600.0)  # seconds that no run takes
    ((case, rates, bound, config),) = noted
    assert case == PEERS[kind].case and len(rates) == 2 and min(rates) > 0 and bound is None
    assert kind == "batching" or rates == [num * (config["tokens"] - 1)] * 2
    assert config["tokens"] == (4 if kind == "static" else 8) and config["batch"] == num
