"""Packed weights in the kernels' order, through a saved folder, the decoder and the engine's fused forward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_serve import naive, tiny_decoder

import shoestring.formats.serving as serving
from shoestring.formats import convert, pack, parse_format, serve
from shoestring.model import load_model, save_model
from shoestring.serve import Engine, Sampling
from shoestring.serve.fused import join

SIZES = {"d_model": 64, "d_ff": 96, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}


@pytest.mark.parametrize("format", ["int4:g32", "nf3:s2:g32", "int2:g32"])
def test_a_served_folder_writes_the_text_of_the_packed_one(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_decoder(**SIZES).float()
    model.compute_dtype = torch.float32
    convert(model, [("blocks.*", parse_format(format))])
    pack(model)
    save_model(tmp_path / "packed", model)
    sampling = Sampling(max_tokens=8)
    want = naive(model, [1, 2, 3], sampling)

    monkeypatch.setattr(serving, "chunks_usable", lambda t: True)
    served = load_model(tmp_path / "packed").model
    names = serve(served)
    assert len(names) == 2 * 7 and all(
        "weight_chunks" in dict(served.get_submodule(n).named_buffers()) for n in names
    )
    assert naive(served, [1, 2, 3], sampling) == want
    attn = served.blocks[0].attn
    linear = join([attn.q, attn.k, attn.v], torch.float32)
    assert linear.parts is not None and "chunks" in linear.parts and not linear.apart
    assert Engine(served, graphs=True).generate([[1, 2, 3]], sampling)[0].token_ids == want

    save_model(tmp_path / "again", served)
    again = load_model(tmp_path / "again").model.state_dict()
    for name, t in model.state_dict().items():
        assert torch.equal(again[name], t), name
