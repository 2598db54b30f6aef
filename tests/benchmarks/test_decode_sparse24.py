"""benchmarks/decode_sparse24: its tables come from the newest lines, and every plan that it may try fits."""

from __future__ import annotations

import pytest
import torch

from benchmarks import decode_sparse24
from benchmarks.decode_sparse24 import candidates, layout_of, of_equal_blocks
from shoestring.model import ModelSpec


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
