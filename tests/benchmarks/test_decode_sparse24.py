"""benchmarks/decode_sparse24: its tables come from the newest lines, and every plan that it may try fits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import decode_sparse24, results
from benchmarks.decode_sparse24 import candidates, layout_of, models, note_time, of_equal_blocks, table
from shoestring.kernels.runtime import nvrtc
from shoestring.model import ModelSpec


def test_tables_show_the_newest_ratio_by_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert table() == models() == "Not measured yet."
    for rows, took in ((1, 20.0), (16, 25.0), (1, 10.0)):
        note_time("2:4", [took] * 3, [30.0], (4096, 4096, rows), 0.002, "plan")
    note_time("int4:g128", [15.0], [30.0], (4096, 4096, 1), 0.002, "")
    assert table().splitlines()[:4] == [
        "| weight | shape | 1 | 16 |",
        "| --- | --- | --- | --- |",
        "| 2:4 | 4096x4096 | 3.00 | 1.20 |",
        "| int4:g128 | 4096x4096 | 2.00 |  |",
    ]
    for case, rate in (("bf16", 200.0), ("2:4", 300.0)):
        results.record(
            bench="decode_sparse24", case=case, metric="decode_tokens_per_s", unit="tokens/s", samples=[rate],
            ratio=rate / 200, config={"batch": 1},
        )  # fmt: skip
    assert "| 2:4 | 300 (1.50x) |" in models() and "| 2:4 | 4096x4096 | 3.00 | 1.20 |" in table()


def test_every_candidate_fits_and_errors_are_caught() -> None:
    for label in ("sparse24", "sparse24+int4:g64"):
        for out, width in decode_sparse24.SHAPES:
            for rows in (8, 16, 32, 64):
                layout = layout_of(label, width)
                found = candidates(layout, rows, out, width, 10)
                assert found and all(p.fits(layout, rows) for p in found)
    dense = torch.randn(16, 32)
    weight = decode_sparse24.Weight(decode_sparse24.parse_format("sparse24"), [], dense)
    x = torch.randn(3, 32).bfloat16()
    assert decode_sparse24.check(weight, "right", x, lambda x: (x.float() @ dense.t()).bfloat16()) < 0.01
    with pytest.raises(AssertionError, match="wrong with 3 rows"):
        decode_sparse24.check(weight, "wrong", x, lambda x: (x.float() @ dense.t() * 1.1).bfloat16())


def test_what_a_search_will_time_is_compiled_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same source and options as those of the kernels that are launched later."""
    compiled: list[tuple[str, tuple[str, ...]]] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(nvrtc, "cached_cubin", lambda source, options: compiled.append((source, options)))
    layout = layout_of("sparse24", 4096)
    jobs = [(layout, 8, plan) for plan in candidates(layout, 8, 4096, 4096, 2)]
    decode_sparse24.compile_all([*jobs, *jobs])
    assert {source for source, _ in compiled} == {decode_sparse24.sparse24_linear.source()}
    assert len(compiled) == len(set(compiled)) == len(jobs) > 1
    assert all(options[0].endswith("=sm_90a") for _, options in compiled)


def test_equal_blocks_are_equal_but_not_the_same() -> None:
    spec = ModelSpec(
        vocab_size=32, d_model=64, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=32, d_ff=128, max_positions=16
    )  # fmt: skip
    model = of_equal_blocks(spec, "sparse24", device="cpu")
    assert model.spec == spec and [getattr(block.attn, "layer", None) for block in model.blocks] == [0, 1, 2]
    first, last = (dict(model.blocks[i].named_buffers()) for i in (0, 2))
    assert first.keys() == last.keys() and any("values" in name for name in first)
    for name, part in first.items():
        assert torch.equal(part, last[name]) and part.data_ptr() != last[name].data_ptr()
    assert model(torch.tensor([[1, 2, 3]])).isfinite().all()
