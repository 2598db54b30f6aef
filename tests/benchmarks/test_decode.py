from __future__ import annotations

import pytest
import torch

from benchmarks import decode
from shoestring.model import Decoder, ModelSpec


@pytest.mark.parametrize("tied", [True, False])
def test_what_a_step_must_read(tied: bool) -> None:
    spec = ModelSpec(
        vocab_size=50, d_model=16, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4, d_ff=24,
        max_positions=64, tied=tied,
    )  # fmt: skip
    model = Decoder(spec).to(torch.bfloat16)
    weights = 2 * (spec.num_params(with_embeddings=False) + 50 * 16)  # the head once, tied or not
    # 5 requests of 7 tokens: keys and values of 3 layers, 2 heads of 4, 2 bytes each
    assert decode.step_bytes(model, 5, 7) == weights + 5 * 7 * 2 * 3 * 2 * 4 * 2


def test_table_shows_the_peers_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def line(case: str, value: float, batch: int, **more: object) -> dict[str, object]:
        config = {"model": "M", "batch": batch, "blocks": "bf16", "head": "bf16", "context": 128}
        return {
            "case": case, "metric": "decode_tokens_per_s", "value": value, "config": config, "device": "D",
            "versions": {"torch": "2"}, "commit": "c", "date": "d", **more,
        }  # fmt: skip

    ours = {"baseline_value": 100.0, "ratio": 0.8, "quality": {"bits_per_weight": 16.0}}
    lines = [line("shoestring", 80.0, 1, **ours), line("shoestring", 70.0, 64, **ours)]
    lines.append(line("transformers, eager", 30.0, 1))
    again = line("transformers, eager", 40.0, 1, commit="older")
    again["config"] = {**again["config"], "tokens": 9}  # type: ignore[dict-item]
    lines.insert(2, again)  # an older run, that wrote another number of tokens
    monkeypatch.setattr(decode, "newest", lambda bench: lines)
    monkeypatch.setattr(decode, "recorded", lambda bench: lines)
    header, _, one, many = decode.table().splitlines()[:4]
    assert "HF eager" in header and "HF static" not in header
    assert "older" not in decode.table(), "it says where the numbers come from that are shown"
    assert one.endswith("| 80 | 100 | 80% | c | 30 |") and many.endswith("| 70 | 100 | 80% | c |  |")


def test_a_peer_that_gives_nothing_is_said_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not decode.run_peer("static", "Llama 8B shape", 1, 1, limit=0.01)
    assert "compiled, Llama 8B shape, batch 1: not measured: it did not end within" in capsys.readouterr().out
    monkeypatch.setattr(decode.sys, "executable", "false")
    assert not decode.run_peer("batching", "Llama 8B shape", 64, 1)
    assert "batch 64: not measured: no message" in capsys.readouterr().out


def test_every_peer_stands_beside_a_case_and_has_an_end() -> None:
    beside = {(shape, num) for shape, blocks, _, num in decode.CASES.values() if blocks == "bf16"}
    assert all((shape, num) in beside for _, shape, num in decode.PEER_RUNS)
    assert {kind for kind, _, _ in decode.PEER_RUNS} == set(decode.PEERS)
    assert all(0 < peer.limit <= 150 for peer in decode.PEERS.values())


def test_the_step_rounds_no_worse_than_the_plain_forward() -> None:
    error, plain = decode.check_rounding("int4:g128", "cpu", 4, 2)
    assert error > 0 and 0 < plain < 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("blocks", ["bf16", "int4:g128", "int3:g128", "int2:g64", "nf4:s2:g64"])
def test_the_step_rounds_no_worse_on_the_gpu(blocks: str) -> None:
    decode.check_rounding(blocks)
