from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from shoestring.bench import decode_peers
from shoestring.bench.decode import LLAMA_8B

TINY = dataclasses.replace(
    LLAMA_8B, d_model=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, d_ff=48, vocab_size=99,
    max_positions=64,
)  # fmt: skip


@pytest.mark.parametrize(("each", "new"), [(1e-6, 256), (0.05, 100), (9.0, 16)])
def test_a_slow_peer_writes_fewer_tokens(each: float, new: int) -> None:
    assert decode_peers.tokens_within(10.0, each, 2) == new


@pytest.mark.parametrize(("kind", "num"), [("eager", 2), ("static", 1), ("assisted", 1), ("batching", 3)])
def test_every_peer_runs_to_its_line(kind: str, num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    for name, value in {"PROMPT": 6, "NEW": 8, "FIRST": 2, "FEWEST": 3, "DEVICE": "cpu"}.items():
        monkeypatch.setattr(decode_peers, name, value)
    monkeypatch.setitem(decode_peers.MODELS, "tiny", TINY)
    monkeypatch.setattr(decode_peers, "SMOLLM2_135M", TINY)
    noted: list[Any] = []
    monkeypatch.setattr(decode_peers, "note", lambda *line: noted.append(line))
    decode_peers.run_peer(kind, "tiny", num, 2, 0.001)
    ((case, rates, bound, config),) = noted
    assert case == decode_peers.KINDS[kind] and len(rates) == 2 and min(rates) > 0 and bound is None
    assert config["tokens"] == (4 if kind == "static" else 3) and config["batch"] == num
